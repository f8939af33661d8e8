//! A takeover between a relay's read and its settle, and one that is open while the relay settles: each message gets one
//! outcome, and the late one is counted as fenced.

use std::sync::Arc;
use std::time::Duration;

use postrider::Message;
use postrider_conformance::process::{Gate, HoldSettler, Point};
use postrider_conformance::testbed::{Behaviour, MemorySink, TestDatabase};
use postrider_relay::core::settings::{Backoff, Settings};
use postrider_relay::engine::{Relay, RunningRelay};
use postrider_relay::sink::{Retry, Scope};

use super::{DRAIN, late_commits::until, named, settings};

/// What becomes of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Sent,
    Retried,
    Dead,
}

impl Outcome {
    /// The table that shows it.
    fn table(self) -> &'static str {
        match self {
            Self::Sent => "receipt",
            Self::Retried => "outbox_waiting",
            Self::Dead => "outbox_dead",
        }
    }
}

const MESSAGES: i64 = 10;

/// A relay that is held before it records what became of ten messages.
struct Held {
    db: TestDatabase,
    sink: MemorySink,
    gate: Arc<Gate>,
    running: RunningRelay,
}

async fn held(outcome: Outcome) -> Held {
    let db = TestDatabase::new().await;
    db.run("create view receipt as select unnest(ids) as id from outbox_sent").await;
    let sink = MemorySink::scripted(move |_| match outcome {
        Outcome::Sent => Behaviour::Accept,
        Outcome::Retried | Outcome::Dead => Behaviour::Refuse(Scope::Message, Retry::Backoff),
    });
    let settings = Settings {
        max_attempts: if outcome == Outcome::Dead { 1 } else { 10 },
        backoff: Backoff { first: Duration::from_secs(3_600), ..Backoff::default() },
        ..settings()
    };
    let gate = Gate::new(Some(Point::BeforeSettle), 0, |_, _| {});
    let mut source = db.source("held", settings.lease).await;
    source.settler = Arc::new(HoldSettler { settler: source.settler, gate: gate.clone() });
    let running =
        Relay::builder(source).sink(named("memory", &sink)).settings(settings).start().expect("start");
    let mut tx = db.pool.begin().await.expect("begin");
    for n in 0..MESSAGES {
        let message = Message::new("t", "x").id(format!("m{n}")).key(format!("k{n}"));
        postrider::enqueue(&mut tx, &message).await.expect("enqueue");
    }
    tx.commit().await.expect("commit");
    gate.held().await;
    until(|| sink.offered() == MESSAGES as u64).await;
    Held { db, sink, gate, running }
}

/// As a takeover does it: the rows locked, then the new tokens. A stranger that never works owns the shards then.
const TAKEOVER: &str = "
with locked as materialized (select shard from outbox_shard order by shard for update)
update outbox_shard s set owner = -1, token = -1 - s.shard, acquired_at = clock_timestamp()
from locked l where s.shard = l.shard";

/// The stranger is alive for as long as it is needed, so that nobody takes its shards meanwhile.
const STRANGER: &str = "
insert into outbox_relay (relay, instance, version, expires_at) values (-1, 'stranger', 'test', clock_timestamp() + interval '1 hour')";

impl Held {
    /// How many outcomes each message has: in which small tables and receipts it stands.
    async fn outcomes(&self) -> Vec<(i64, i64)> {
        sqlx::query_as(
            "select n, count(*) from (
               select o.id, count(x.id) as n from outbox o left join (
                 select id from outbox_queue union all select id from outbox_waiting union all
                 select id from outbox_dead union all select id from receipt) x on x.id = o.id group by o.id) y
             group by n",
        )
        .fetch_all(&self.db.pool)
        .await
        .expect("outcomes")
    }

    /// The shards are free; whoever looks first takes them, which is the relay itself.
    async fn stranger_leaves(&self) {
        self.db.run("delete from outbox_relay where relay = -1").await;
    }

    /// The first outcome came to nothing and was counted; then the relay gets the shards anew, and each message one.
    async fn assert_one_outcome_and_the_late_one_fenced(self, outcome: Outcome) {
        until(|| self.running.handle().snapshot().counters.fenced > 0).await;
        assert_eq!(
            self.db.count("select count(*) from outbox_queue").await,
            MESSAGES,
            "nothing was recorded"
        );
        assert_eq!(self.outcomes().await, [(1, MESSAGES)]);

        self.stranger_leaves().await;
        let count = format!("select count(*) from {}", outcome.table());
        self.db.until(&count, |n| n == MESSAGES).await;
        assert_eq!(self.outcomes().await, [(1, MESSAGES)]);
        let counters = self.running.handle().snapshot().counters;
        assert_eq!((counters.fenced, counters.vanished), (MESSAGES as u64, 0));
        assert!(self.sink.offered() >= 2 * MESSAGES as u64);
        self.running.stop(DRAIN).await;
    }
}

async fn taken_over_between_read_and_settle(outcome: Outcome) {
    let held = held(outcome).await;
    held.db.run(STRANGER).await;
    held.db.run(TAKEOVER).await;
    held.gate.release();
    held.assert_one_outcome_and_the_late_one_fenced(outcome).await;
}

async fn takeover_open_during_the_settle(outcome: Outcome, commits: bool) {
    let held = held(outcome).await;
    held.db.run(STRANGER).await;
    let mut takeover = held.db.pool.begin().await.expect("begin");
    sqlx::query(TAKEOVER).execute(&mut *takeover).await.expect("takeover");
    held.gate.release();
    // The settle is in the database now, and waits.
    let waits = "select count(*) from pg_stat_activity where datname = current_database()
                 and application_name = 'postrider held' and wait_event_type = 'Lock'";
    held.db.until(waits, |n| n > 0).await;
    if commits {
        takeover.commit().await.expect("commit");
        return held.assert_one_outcome_and_the_late_one_fenced(outcome).await;
    }
    takeover.rollback().await.expect("rollback");
    let count = format!("select count(*) from {}", outcome.table());
    held.db.until(&count, |n| n == MESSAGES).await;
    held.stranger_leaves().await;
    assert_eq!(held.outcomes().await, [(1, MESSAGES)]);
    assert_eq!(held.running.handle().snapshot().counters.fenced, 0, "nobody has taken anything over");
    assert_eq!(held.sink.offered(), MESSAGES as u64);
    held.running.stop(DRAIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_after_a_takeover_is_no_receipt() {
    taken_over_between_read_and_settle(Outcome::Sent).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_after_a_takeover_is_not_recorded() {
    taken_over_between_read_and_settle(Outcome::Retried).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verdict_of_death_after_a_takeover_is_not_recorded() {
    taken_over_between_read_and_settle(Outcome::Dead).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_waits_for_an_open_takeover_and_is_no_receipt() {
    takeover_open_during_the_settle(Outcome::Sent, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_waits_for_an_open_takeover_and_is_not_recorded() {
    takeover_open_during_the_settle(Outcome::Retried, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_verdict_of_death_waits_for_an_open_takeover_and_is_not_recorded() {
    takeover_open_during_the_settle(Outcome::Dead, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_is_recorded_after_a_takeover_that_was_rolled_back() {
    takeover_open_during_the_settle(Outcome::Sent, false).await;
}
