//! Pages per read on tables with a long life behind them, by what the planner knows, and while somebody's transaction
//! stays open.

use std::fmt;
use std::time::Duration;

use postrider_relay::core::settings::{Backoff, Settings};
use postrider_relay::engine::RunningRelay;
use postrider_relay::sink::{Retry, Scope};
use sqlx::PgConnection;

use super::{DRAIN, bulk, sent, source, start, until, until_sent};
use crate::testbed::costs::{Costs, Phase};
use crate::testbed::{Behaviour, Bulk, Look, Looks, MemorySink, Meter, Purpose, Statistics, TestDatabase};

/// Pages that a read may take without returning anything.
pub const FREE_PAGES: u64 = 12;
/// Pages that a read may take on top for each row it returns.
pub const PAGES_PER_ROW: f64 = 5.0;

/// A stretch of a relay's life.
#[derive(Debug)]
pub struct Stage {
    /// What was special about it.
    pub name: String,
    /// Messages that flowed through in it.
    pub flowed: u64,
    /// Its reads, one by one.
    pub looks: Looks,
    /// The server's counters.
    pub phase: Phase,
}

impl Stage {
    /// Share of the time that the server spent on sweeps of the queue, of the waiting table, and on second readings for
    /// lanes that were held.
    #[must_use]
    pub fn sweep_shares(&self) -> [f64; 3] {
        [Purpose::Sweep, Purpose::DueSweep, Purpose::Rescan]
            .map(|p| self.looks.took(p).as_secs_f64() / self.phase.took.as_secs_f64())
    }

    /// The windows, narrowest first.
    #[must_use]
    pub fn windows(&self) -> Vec<Look> {
        let mut all: Vec<Look> = self.looks.of(Purpose::Window).copied().collect();
        all.sort_by_key(|l| l.ids);
        all
    }
}

/// The head line of a table of stages.
pub const COLUMNS: &str = concat!(
    "                                            head poll       due poll        window       sweep, due sweep, rescan\n",
    "stage                           messages  idle  per row   idle  per row     pages      ids  pages  pages      % of time"
);

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let l = &self.looks;
        let most = |p: Purpose| l.of(p).map(|l| l.pages).max().unwrap_or(0);
        let ids = l.of(Purpose::Window).map(|l| l.ids).max().unwrap_or(0);
        let [sweep, due_sweep, rescan] = self.sweep_shares().map(|s| s * 100.0);
        write!(
            f,
            "{:<31} {:>8} {:>5} {:>8.2} {:>6} {:>8.2} {:>9} {:>8} {:>5} {:>6} {:>5.2} {:>5.2} {:>5.2}",
            self.name,
            self.flowed,
            l.most_idle(Purpose::Head),
            l.most_per_row(Purpose::Head, FREE_PAGES),
            l.most_idle(Purpose::Due),
            l.most_per_row(Purpose::Due, FREE_PAGES),
            most(Purpose::Window),
            ids,
            most(Purpose::Sweep),
            most(Purpose::DueSweep),
            sweep,
            due_sweep,
            rescan,
        )
    }
}

/// One database with a long life behind it, and the relay on it.
#[derive(Debug)]
pub struct Pages<'a> {
    db: &'a TestDatabase,
    costs: Costs,
    meter: Meter,
    written: i64,
    run: String,
    stages: Vec<Stage>,
}

impl<'a> Pages<'a> {
    /// Measures on `db`, whose tables are filled already.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn new(db: &'a TestDatabase) -> Self {
        let costs = Costs::new(db).await;
        let meter = Meter::new(&costs);
        let run = format!("run{:08x}-", fastrand::u32(..));
        Self { db, costs, meter, written: 0, run, stages: Vec::new() }
    }

    /// The stages so far.
    #[must_use]
    pub fn stages(&self) -> &[Stage] {
        &self.stages
    }

    /// Default settings, but retries that come back within the measurement.
    fn settings() -> Settings {
        let backoff = Backoff { first: Duration::from_millis(100), ..Backoff::default() };
        Settings { backoff, max_attempts: 100, ..Settings::default() }
    }

    /// A relay that has read what there was, under `statistics`. One message in twenty fails once.
    async fn relay(&self, statistics: Statistics) -> RunningRelay {
        self.db.statistics(statistics).await;
        let sink = MemorySink::scripted(|m| match (m.try_number, m.message.position.0 % 20) {
            (1, 0) => Behaviour::Refuse(Scope::Message, Retry::Backoff),
            _ => Behaviour::Accept,
        });
        let settings = Self::settings();
        let metered = self.meter.on(source(self.db, &settings).await);
        start(metered, sink, settings)
    }

    /// Lets one message through, so that the positions have left zero, and lets go of the reads so far: those from zero,
    /// after a start, are neither idle nor loaded.
    async fn settle_down(&mut self, relay: &RunningRelay) {
        self.flow(relay, sent(relay), 1).await;
        let seen = |p, n| move |m: &Meter| m.seen(p) >= n;
        for done in [seen(Purpose::Head, 5), seen(Purpose::Due, 5)] {
            until("the first polls", || done(&self.meter)).await;
        }
        self.at_rest().await;
        drop(self.meter.take());
    }

    /// Waits until idle polls follow each other and no window is open.
    async fn at_rest(&self) {
        loop {
            let windows = self.meter.seen(Purpose::Window);
            let heads = self.meter.seen(Purpose::Head);
            // Enough of them to outlast the rest of a wide window.
            until("polls", || self.meter.seen(Purpose::Head) >= heads + 15).await;
            if self.meter.seen(Purpose::Window) == windows {
                return;
            }
        }
    }

    /// Idle, loaded with `flow` messages, and idle again, for each state of the statistics.
    ///
    /// # Panics
    /// If the server refuses or nothing moves.
    pub async fn statistics(&mut self, flow: i64) {
        for statistics in [Statistics::None, Statistics::Stale, Statistics::Fresh] {
            let relay = self.relay(statistics).await;
            self.settle_down(&relay).await;
            self.stage(&relay, format!("statistics {}: idle", statistics.name()), 0, false).await;
            self.db.statistics(statistics).await;
            self.stage(&relay, format!("statistics {}: loaded", statistics.name()), flow, false).await;
            relay.stop(DRAIN).await;
        }
    }

    /// `flow` messages while an old read-only snapshot holds vacuum back, idle behind it, and idle after a restart, when
    /// nothing is known of where to begin.
    ///
    /// # Panics
    /// If the server refuses or nothing moves.
    pub async fn old_snapshot(&mut self, flow: i64) {
        let relay = self.relay(Statistics::Fresh).await;
        self.settle_down(&relay).await;
        let mut reader = self.db.connect().await;
        run(&mut reader, "begin isolation level repeatable read read only").await;
        run(&mut reader, "select count(*) from outbox_shard").await;
        self.stage(&relay, "old snapshot: loaded".to_owned(), flow, false).await;
        self.stage(&relay, "old snapshot: idle".to_owned(), 0, false).await;
        relay.stop(DRAIN).await;
        let relay = self.relay(Statistics::Fresh).await;
        self.settle_down(&relay).await;
        self.stage(&relay, "old snapshot: idle, restarted".to_owned(), 0, false).await;
        run(&mut reader, "commit").await;
        relay.stop(DRAIN).await;
    }

    /// `flow` messages while one writer stays open, idle behind it, and idle after it has committed.
    ///
    /// # Panics
    /// If the server refuses or nothing moves, or if the writer's message was overtaken for good.
    pub async fn open_writer(&mut self, flow: i64) {
        let relay = self.relay(Statistics::Fresh).await;
        self.settle_down(&relay).await;
        let mut writer = self.db.connect().await;
        run(&mut writer, "begin").await;
        let id = fastrand::u64(..);
        run(
            &mut writer,
            &format!(
                "insert into outbox (message_id, topic, message_key) values ('late-{id:x}', 't', 'late')"
            ),
        )
        .await;
        self.stage(&relay, "open writer: loaded".to_owned(), flow, true).await;
        self.stage(&relay, "open writer: idle".to_owned(), 0, true).await;
        let before = sent(&relay);
        run(&mut writer, "commit").await;
        until_sent(&relay, before + 1).await;
        self.at_rest().await;
        self.stage(&relay, "after the writer's commit".to_owned(), 0, false).await;
        relay.stop(DRAIN).await;
    }

    /// Lets `flow` messages through, or watches for two sweeps when it is 0.
    async fn stage(&mut self, relay: &RunningRelay, name: String, flow: i64, window_stays: bool) {
        drop(self.meter.take());
        let mark = self.costs.mark().await;
        let before = sent(relay);
        if flow == 0 {
            until("polls and sweeps", || {
                [Purpose::Head, Purpose::Due].iter().all(|p| self.meter.seen(*p) >= 10)
                    && (self.meter.seen(Purpose::Sweep) >= 2 || window_stays)
            })
            .await;
        }
        self.flow(relay, before, flow).await;
        let looks = self.meter.take();
        let phase = self.costs.since(&mark).await;
        if flow > 0 && !window_stays {
            self.at_rest().await;
        }
        self.stages.push(Stage { name, flowed: flow.unsigned_abs(), looks, phase });
    }

    /// Writes in transactions of 1 to 200 messages, never far ahead of the relay; every tenth transaction also lets ten
    /// waiting messages fall due.
    async fn flow(&mut self, relay: &RunningRelay, before: u64, messages: i64) {
        let (mut written, mut due) = (0, 0);
        while written < messages {
            let n = fastrand::i64(1..=200).min(messages - written);
            let prefix = self.run.clone();
            let all = bulk(&prefix, "flow", n, 1_000);
            self.db.write(&Bulk { first: self.written + 1, payload: 100, ..all }).await;
            self.written += n;
            written += n;
            if fastrand::u8(0..10) == 0 {
                due += self.fall_due(10).await;
            }
            let wanted = before + (written - 5_000).max(0).unsigned_abs();
            until_sent(relay, wanted).await;
        }
        until_sent(relay, before + written.unsigned_abs() + due).await;
    }

    async fn fall_due(&self, count: u32) -> u64 {
        let done = sqlx::query(
            "update outbox_waiting set due_at = clock_timestamp() where id = any(array(
               select id from outbox_waiting where due_at > clock_timestamp() + interval '1 hour' order by due_at limit $1))",
        )
        .bind(i64::from(count))
        .execute(&self.db.pool)
        .await;
        done.expect("let messages fall due").rows_affected()
    }
}

async fn run(connection: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()))
        .execute(connection)
        .await
        .expect("a statement of another session");
}
