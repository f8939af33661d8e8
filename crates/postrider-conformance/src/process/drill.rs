//! The drill: three relays, producers at work, one relay killed, another paused past its lease and woken.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use sqlx::PgConnection;
use tokio_util::task::AbortOnDropHandle;

use super::{Counted, RelayProcess, Start, TestStream, history, in_flight_when_it_ended};
use crate::ledger::{Arrival, Verdict};
use crate::testbed::{Business, Load, TestDatabase};

/// Sizes of a drill.
#[derive(Clone, Debug)]
pub struct Drill {
    /// The program `drill-relay`.
    pub program: PathBuf,
    /// Address of a NATS server with JetStream.
    pub nats: String,
    /// Messages to commit, about.
    pub messages: u64,
    /// Keys.
    pub keys: u64,
    /// Producers at a time.
    pub writers: usize,
    /// Most messages each relay may have published and undecided.
    pub in_flight: u32,
    /// The relays' lease.
    pub lease: Duration,
    /// Drives everything random on our side.
    pub seed: u64,
}

/// How a relay ended, or was paused.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its name.
    pub instance: String,
    /// Its id.
    pub relay: i64,
    /// The messages it had published without a receipt of its own.
    pub in_flight: BTreeSet<i64>,
    /// The shards it owned.
    pub shards: i64,
    /// From the expiry of its lease to the takeover of its last shard, by the database's clock.
    pub takeover: Duration,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Report {
    /// Messages committed.
    pub committed: usize,
    /// Everything in the stream, by sequence.
    pub arrivals: Vec<Arrival>,
    /// The ledger check.
    pub verdict: Verdict,
    /// The relay that was killed.
    pub killed: Ended,
    /// The relay that was paused and woken.
    pub paused: Ended,
    /// Receipts that the woken relay wrote after it woke, under tokens it drew after it woke.
    pub settled_after_waking: i64,
    /// Receipts that it wrote after it woke under a token from before. None may exist.
    pub settled_under_old_tokens: i64,
    /// What the woken relay counted in the end.
    pub woken: Counted,
    /// What the relay that nothing happened to counted.
    pub spared: Counted,
    /// Each relay's limit of messages published and undecided.
    pub in_flight_limit: u32,
    /// Sessions seen idle in a transaction, apart from those that only take shards.
    pub idle_in_transaction: BTreeSet<String>,
    /// How often was looked for them.
    pub looks: u64,
    /// From the first transaction to the last receipt.
    pub took: Duration,
}

impl Drill {
    /// Runs it on a database and a stream of its own.
    ///
    /// # Panics
    /// If servers do not answer, or nothing moves for a minute.
    pub async fn run(&self) -> Report {
        let folder = tempfile::tempdir().expect("a folder");
        let db = TestDatabase::new().await;
        let business = Business::create(&db).await;
        history::record(&db).await;
        let stream = TestStream::create(&self.nats).await;
        let start = Start {
            program: self.program.clone(),
            folder: folder.path().to_owned(),
            sink: stream.sink(),
            lease: self.lease,
            in_flight: self.in_flight,
            hold: None,
        };
        let (spared, mut killed, paused) = tokio::join!(
            RelayProcess::start(&db, "spared", &start),
            RelayProcess::start(&db, "killed", &start),
            RelayProcess::start(&db, "paused", &start),
        );
        for relay in [&spared, &killed, &paused] {
            history::owns(&db, relay.relay, 20).await;
        }
        let watch = Watch::start(&db).await;
        let began = Instant::now();
        let writing = tokio::spawn({
            let (business, load) = (business.clone(), self.load(self.seed, self.messages * 4 / 10));
            async move { business.run(load).await }
        });
        // Backlogs keep the relays busy when the faults come; the producers go on meanwhile.
        business.burst(&format!("first-{}", self.seed), self.messages / 4, self.keys).await;
        db.sent(self.messages / 20).await;
        at_work(&db, &killed, self.in_flight).await;
        killed.kill().await;
        let killed_end = ended(&db, &killed).await;

        business.burst(&format!("second-{}", self.seed), self.messages / 4, self.keys).await;
        at_work(&db, &paused, self.in_flight).await;
        paused.pause(&db).await;
        let paused_end = ended(&db, &paused).await;
        let woken_at: String =
            sqlx::query_scalar("select clock_timestamp()::text").fetch_one(&db.pool).await.expect("time");
        paused.wake();
        history::owns(&db, paused.relay, 1).await;
        // Something for the woken one to do under its new tokens.
        business.run(self.load(self.seed + 1, self.messages / 10)).await;
        writing.await.expect("producers");
        business.drained().await;
        let took = began.elapsed();
        let (looks, idle_in_transaction) = watch.stop().await;

        let (woken, spared) = (paused.stop().await, spared.stop().await);
        history::assert_receipts_by_owners(&db).await;
        business.assert_receipts().await;
        let (settled_after_waking, settled_under_old_tokens) =
            settled_since(&db, paused_end.relay, &woken_at).await;
        let arrivals = stream.arrivals().await;
        stream.remove().await;
        Report {
            committed: business.committed().await.len(),
            verdict: business.verdict(&arrivals).await,
            arrivals,
            killed: killed_end,
            paused: paused_end,
            settled_after_waking,
            settled_under_old_tokens,
            woken,
            spared,
            in_flight_limit: self.in_flight,
            idle_in_transaction,
            looks,
            took,
        }
    }

    /// About `messages` committed messages.
    fn load(&self, seed: u64, messages: u64) -> Load {
        Load {
            transactions: messages * 10 / 9 + 1,
            writers: self.writers,
            keys: self.keys,
            rollback_every: 10,
            seed,
            ..Load::default()
        }
    }
}

/// Waits until the relay has published messages that have no receipt yet, a tenth of its limit if it comes to that: a
/// fault at another moment shows little.
async fn at_work(db: &TestDatabase, relay: &RelayProcess, limit: u32) {
    let until = Instant::now() + Duration::from_secs(60);
    for look in 0.. {
        let in_flight = in_flight_when_it_ended(db, relay.relay, &relay.journal).await.len();
        if in_flight > if look < 300 { limit as usize / 10 } else { 0 } {
            return;
        }
        assert!(Instant::now() < until, "{} has had nothing in flight for a minute", relay.instance);
    }
}

/// What a relay that has been killed or stands still leaves behind. Returns when others own its shards.
async fn ended(db: &TestDatabase, relay: &RelayProcess) -> Ended {
    relay.quiet(db).await;
    let in_flight = in_flight_when_it_ended(db, relay.relay, &relay.journal).await;
    let shards = history::owned_by(db, relay.relay).await;
    history::taken_over(db, relay.relay).await;
    let seconds: f64 = sqlx::query_scalar(
        "with h as (select owner, lead(at) over (partition by shard order by at) as until from shard_history)
         select coalesce(max(extract(epoch from h.until - r.expires_at)), 0)::float8
         from h join outbox_relay r on r.relay = h.owner
         where h.owner = $1 and h.until > r.expires_at",
    )
    .bind(relay.relay)
    .fetch_one(&db.pool)
    .await
    .expect("takeover");
    Ended {
        instance: relay.instance.clone(),
        relay: relay.relay,
        in_flight,
        shards,
        takeover: Duration::from_secs_f64(seconds),
    }
}

/// Receipts of `relay` since then: under tokens acquired since then, and under older ones.
async fn settled_since(db: &TestDatabase, relay: i64, since: &str) -> (i64, i64) {
    sqlx::query_as(
        "select count(*) filter (where fresh), count(*) filter (where not fresh)
         from (select exists (select from shard_history h
                              where h.shard = r.shard and h.owner = r.relay
                                and h.at > $2::timestamptz and h.at < r.sent_at) as fresh
               from receipt r where r.relay = $1 and r.sent_at > $2::timestamptz) r",
    )
    .bind(relay)
    .bind(since)
    .fetch_one(&db.pool)
    .await
    .expect("receipts")
}

/// Looks for sessions that are idle in a transaction, all the time.
struct Watch {
    stop: tokio::sync::watch::Sender<bool>,
    task: AbortOnDropHandle<(u64, BTreeSet<String>)>,
}

impl Watch {
    async fn start(db: &TestDatabase) -> Self {
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let connection = db.connect().await;
        Self { stop, task: AbortOnDropHandle::new(tokio::spawn(look(connection, stopped))) }
    }

    async fn stop(self) -> (u64, BTreeSet<String>) {
        self.stop.send_replace(true);
        self.task.await.expect("it looks")
    }
}

async fn look(
    mut connection: PgConnection,
    stopped: tokio::sync::watch::Receiver<bool>,
) -> (u64, BTreeSet<String>) {
    let (mut looks, mut seen) = (0, BTreeSet::new());
    while !*stopped.borrow() {
        // The sessions named "… lease" take shards in a transaction of several statements, and do nothing else.
        let found: Vec<String> = sqlx::query_scalar(
            "select application_name || ': ' || state || ' after ' || query from pg_stat_activity
             where datname = current_database() and state like 'idle in transaction%'
               and application_name like 'postrider %' and application_name not like '% lease'",
        )
        .fetch_all(&mut connection)
        .await
        .expect("activity");
        looks += 1;
        seen.extend(found);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    (looks, seen)
}

impl Report {
    /// The copies beyond the first that nobody may have made: of messages that neither the killed nor the paused relay
    /// had published without a receipt, or more copies than such relays.
    #[must_use]
    pub fn unexplained(&self) -> Vec<String> {
        let witnesses = |position: i64| {
            [&self.killed, &self.paused].iter().filter(|e| e.in_flight.contains(&position)).count()
        };
        let position = |id: &str| self.arrivals.iter().find(|a| a.message_id == id).map(|a| a.position);
        self.verdict
            .duplicates
            .iter()
            .filter(|(id, copies)| **copies > position(id).map_or(0, witnesses))
            .map(|(id, copies)| format!("{id} ({copies} copies too many)"))
            .collect()
    }

    /// Copies beyond the first.
    #[must_use]
    pub fn duplicates(&self) -> usize {
        self.verdict.duplicates.values().sum()
    }

    /// Panics unless every promise was kept.
    ///
    /// # Panics
    /// If one was broken; the text says which.
    pub fn assert_kept(&self) {
        self.verdict.assert_kept();
        let limit = self.in_flight_limit as usize;
        assert!(self.unexplained().is_empty(), "duplicates without a witness: {:?}", self.unexplained());
        for ended in [&self.killed, &self.paused] {
            assert!(
                ended.in_flight.len() <= limit,
                "{} had {} in flight, its limit is {limit}",
                ended.instance,
                ended.in_flight.len()
            );
            assert!(ended.shards > 0, "{} owned nothing: the drill has shown nothing", ended.instance);
        }
        assert!(self.duplicates() <= 2 * limit, "{} duplicates, two limits of {limit}", self.duplicates());
        assert_eq!(
            self.settled_under_old_tokens, 0,
            "the woken relay settled under tokens from before its pause"
        );
        assert!(self.settled_after_waking > 0, "the woken relay has done nothing since");
        assert_eq!((self.woken.undecided, self.spared.undecided), (0, 0));
        assert!(self.looks > 0 && self.idle_in_transaction.is_empty(), "{:?}", self.idle_in_transaction);
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = &self.verdict;
        let rate = self.committed as f64 / self.took.as_secs_f64();
        writeln!(f, "committed            {}", self.committed)?;
        writeln!(
            f,
            "arrived              {} ({} copies beyond the first)",
            self.arrivals.len(),
            self.duplicates()
        )?;
        writeln!(f, "lost                 {}", v.lost.len())?;
        writeln!(f, "invented             {}", v.invented.len())?;
        writeln!(f, "out of order         {}", v.reordered.len())?;
        writeln!(f, "took                 {:.1} s, {rate:.0} messages per second", self.took.as_secs_f64())?;
        for (what, ended) in [("killed", &self.killed), ("paused", &self.paused)] {
            let repeated =
                self.arrivals.iter().filter(|a| v.duplicates.contains_key(&a.message_id)).map(|a| a.position);
            let repeated: BTreeSet<i64> = repeated.filter(|p| ended.in_flight.contains(p)).collect();
            writeln!(
                f,
                "{what:20} {} shards, taken over {:.2} s after expiry by the database's clock",
                ended.shards,
                ended.takeover.as_secs_f64()
            )?;
            writeln!(
                f,
                "{:20} {} published without a receipt (limit {}), {} of them arrived again",
                "",
                ended.in_flight.len(),
                self.in_flight_limit,
                repeated.len()
            )?;
        }
        writeln!(f, "without a witness    {}", self.unexplained().len())?;
        writeln!(
            f,
            "the woken relay      {} receipts under old tokens, {} under new ones; {} results fenced, {} without verdict",
            self.settled_under_old_tokens, self.settled_after_waking, self.woken.fenced, self.woken.unknown
        )?;
        write!(f, "idle in transaction  {} sessions in {} looks", self.idle_in_transaction.len(), self.looks)
    }
}
