//! A relay that has nothing to do, and one with a message now and then.

use std::fmt;
use std::time::{Duration, Instant};

use postrider_relay::core::settings::Settings;
use postrider_relay::engine::RunningRelay;

use super::{DRAIN, bulk, source, start, until, until_sent};
use crate::testbed::costs::{Costs, Phase, ratio};
use crate::testbed::{Bulk, MemorySink, TestDatabase};

/// What little work costs.
#[derive(Debug)]
pub struct Idle {
    /// Some seconds without any message.
    pub idle: Phase,
    /// Some seconds with messages one by one.
    pub trickle: Phase,
    /// How many messages these were.
    pub trickled: u64,
    /// From the commit of a single message to its arrival, found by polling: median and longest.
    pub polled: (Duration, Duration),
    /// The same with the hint that an application in this process gives.
    pub hinted: (Duration, Duration),
    /// From the commit to the committed receipt, with the hint.
    pub settled: (Duration, Duration),
}

impl fmt::Display for Idle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "idle: {:.1} statements per second", per_second(&self.idle))?;
        writeln!(f, "{}", self.idle.table())?;
        writeln!(
            f,
            "{} messages, one at a time: {:.1} statements per message, {:.1} per second",
            self.trickled,
            ratio(self.trickle.total().calls as f64, self.trickled),
            per_second(&self.trickle)
        )?;
        writeln!(f, "{}", self.trickle.table())?;
        for (name, (median, longest)) in [
            ("commit to arrival, found by polling", self.polled),
            ("commit to arrival, with a hint", self.hinted),
            ("commit to receipt, with a hint", self.settled),
        ] {
            let ms = |d: Duration| d.as_secs_f64() * 1e3;
            writeln!(f, "{name:<40} median {:>7.1} ms, longest {:>7.1} ms", ms(median), ms(longest))?;
        }
        Ok(())
    }
}

/// Statements in each second.
#[must_use]
pub fn per_second(phase: &Phase) -> f64 {
    phase.total().calls as f64 / phase.took.as_secs_f64()
}

/// Watches a relay with default settings for `watch`, then with a message each `every` for as long, then single messages.
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn idle(watch: Duration, every: Duration) -> Idle {
    let db = TestDatabase::new().await;
    let costs = Costs::new(&db).await;
    let settings = Settings::default();
    let sink = MemorySink::default();
    let relay = start(source(&db, &settings).await, sink.clone(), settings);
    let mut single = Single { db: &db, relay: &relay, sink: &sink, written: 0 };
    single.one(true).await;
    // The window behind that message has to close, and what starts once has to be over.
    tokio::time::sleep(Duration::from_secs(2)).await;

    let mark = costs.mark().await;
    tokio::time::sleep(watch).await;
    let idle = costs.since(&mark).await;

    let (mark, since, before) = (costs.mark().await, Instant::now(), single.written);
    while since.elapsed() < watch {
        single.write().await;
        tokio::time::sleep(every).await;
    }
    until_sent(&relay, single.written).await;
    let trickle = costs.since(&mark).await;
    let trickled = single.written - before;

    let mut polled = Vec::new();
    let (mut hinted, mut settled) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        polled.push(single.one(false).await.0);
        let (arrived, recorded) = single.one(true).await;
        hinted.push(arrived);
        settled.push(recorded);
    }
    relay.stop(DRAIN).await;
    Idle {
        idle,
        trickle,
        trickled,
        polled: summary(polled),
        hinted: summary(hinted),
        settled: summary(settled),
    }
}

fn summary(mut times: Vec<Duration>) -> (Duration, Duration) {
    times.sort_unstable();
    (times[times.len() / 2], times[times.len() - 1])
}

struct Single<'a> {
    db: &'a TestDatabase,
    relay: &'a RunningRelay,
    sink: &'a MemorySink,
    written: u64,
}

impl Single<'_> {
    async fn write(&mut self) {
        self.written += 1;
        let all = bulk("one", "orders", 1, 100);
        self.db.write(&Bulk { first: self.written.cast_signed(), ..all }).await;
    }

    /// Commits one message when the relay has come to rest; returns when it had arrived and when that was recorded.
    async fn one(&mut self, hint: bool) -> (Duration, Duration) {
        // At rest polls come every 200 ms; not always the same moment between two of them.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(450..650))).await;
        self.write().await;
        let since = Instant::now();
        if hint {
            self.relay.handle().hint();
        }
        let offered = self.written;
        until("the arrival of one message", || self.sink.offered() >= offered).await;
        let arrived = since.elapsed();
        until_sent(self.relay, offered).await;
        (arrived, since.elapsed())
    }
}
