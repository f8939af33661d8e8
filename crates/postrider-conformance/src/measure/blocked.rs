//! What messages that cannot go cost those that can: behind one failing key, and for a sink that is down.

use std::fmt;

use postrider_relay::core::settings::Settings;
use postrider_relay::engine::{Relay, RunningRelay};
use postrider_relay::sink::{Retry, Scope};

use super::{DRAIN, bulk, named, source, start, until, until_sent};
use crate::testbed::costs::{Costs, Mark, Phase, ratio};
use crate::testbed::{Behaviour, Bulk, MemorySink, TestDatabase};

/// Cost of the messages that can go, each.
#[derive(Clone, Debug)]
pub struct PerMessage {
    /// Shared buffers hit and read, by all statements of the relay.
    pub pages: f64,
    /// Statements.
    pub statements: f64,
    /// All of it.
    pub phase: Phase,
}

/// The same messages without and with something in their way.
#[derive(Debug)]
pub struct Compared {
    /// Without.
    pub alone: PerMessage,
    /// With, from the first look at what cannot go.
    pub first: PerMessage,
    /// With, when it is known. For a failing key: the same as `first`.
    pub beside: PerMessage,
    /// Messages that can go.
    pub others: u64,
    /// Messages in the way.
    pub in_the_way: u64,
}

impl Compared {
    /// Pages with and without.
    #[must_use]
    pub fn pages(&self) -> f64 {
        self.beside.pages / self.alone.pages
    }

    /// Statements with and without.
    #[must_use]
    pub fn statements(&self) -> f64 {
        self.beside.statements / self.alone.statements
    }

    /// Pages that each message in the way cost once, when it was met.
    #[must_use]
    pub fn pages_once(&self) -> f64 {
        (self.first.pages - self.alone.pages) * self.others as f64 / self.in_the_way as f64
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} messages, {} in the way", self.others, self.in_the_way)?;
        writeln!(f, "{:<24} {:>12} {:>20}", "", "pages/message", "statements/message")?;
        for (name, c) in [("alone", &self.alone), ("first meeting", &self.first), ("beside", &self.beside)] {
            writeln!(f, "{name:<24} {:>12.2} {:>20.4}", c.pages, c.statements)?;
        }
        writeln!(f, "{:<24} {:>11.2}x {:>19.2}x", "beside / alone", self.pages(), self.statements())?;
        writeln!(f, "pages per message in the way, once: {:.2}", self.pages_once())
    }
}

async fn per_message(costs: &Costs, mark: &Mark, messages: u64) -> PerMessage {
    let phase = costs.since(mark).await;
    let total = phase.total();
    PerMessage {
        pages: ratio(total.pages as f64, messages),
        statements: ratio(total.calls as f64, messages),
        phase,
    }
}

/// Pieces in which messages of two kinds are written in turn, so that their ids mix.
const PIECES: i64 = 20;

async fn write_mixed(db: &TestDatabase, others: &Bulk<'_>, in_the_way: &Bulk<'_>) {
    for piece in 0..PIECES {
        for b in [in_the_way, others] {
            let messages = b.messages / PIECES;
            db.write(&Bulk { first: b.first + piece * messages, messages, ..b.clone() }).await;
        }
    }
}

fn rounded(count: u64) -> i64 {
    (count.cast_signed() / PIECES).max(1) * PIECES
}

/// `others` messages over 500 keys, without and with `behind` messages of one key whose first one fails again and again.
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn failing_key(others: u64, behind: u64, settings: Settings) -> Compared {
    let (others, behind) = (rounded(others), rounded(behind));
    let mut runs = Vec::new();
    for behind in [0, behind] {
        let db = TestDatabase::new().await;
        let costs = Costs::new(&db).await;
        write_mixed(&db, &bulk("m", "orders", others, 500), &bulk("hot", "hot", behind, 1)).await;
        let sink = MemorySink::scripted(|m| match m.message.topic.as_str() {
            "hot" => Behaviour::Refuse(Scope::Message, Retry::Backoff),
            _ => Behaviour::Accept,
        });
        let patient = Settings { max_attempts: u32::MAX, ..settings.clone() };
        let source = source(&db, &patient).await;
        let mark = costs.mark().await;
        let relay = start(source, sink.clone(), patient);
        until_sent(&relay, others.unsigned_abs()).await;
        runs.push(per_message(&costs, &mark, others.unsigned_abs()).await);
        relay.stop(DRAIN).await;
        let left = "select (select count(*) from outbox_queue) + (select count(*) from outbox_waiting)";
        assert_eq!(db.count(left).await, behind, "all behind the failing one wait, nothing else");
    }
    let (beside, alone) = (runs.pop().expect("two runs"), runs.pop().expect("two runs"));
    Compared {
        alone,
        first: beside.clone(),
        beside,
        others: others.unsigned_abs(),
        in_the_way: behind.unsigned_abs(),
    }
}

/// `others` messages over 500 keys for one sink, without and with `down` messages over as many keys for another sink that
/// is down. Measured twice: while the relay meets the `down` messages, and then with as many `others` again.
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn sink_down(others: u64, down: u64, settings: Settings) -> Compared {
    let (others, down) = (rounded(others), rounded(down));
    let n = others.unsigned_abs();
    let mut runs = Vec::new();
    for down in [0, down] {
        let db = TestDatabase::new().await;
        let costs = Costs::new(&db).await;
        let mixed = bulk("m", "up", others, 500);
        write_mixed(&db, &mixed, &bulk("d", "down", down, down.max(1))).await;
        let broken = MemorySink::scripted(|_| Behaviour::Refuse(Scope::Sink, Retry::Backoff));
        let source = source(&db, &settings).await;
        let mark = costs.mark().await;
        let relay = two_sinks(source, MemorySink::default(), broken, settings.clone());
        until_sent(&relay, n).await;
        let held = usize::try_from(down).unwrap_or(usize::MAX);
        until("meeting every message of the sink that is down", || {
            relay.handle().snapshot().held_keys >= held
        })
        .await;
        let first = per_message(&costs, &mark, n).await;
        let mark = costs.mark().await;
        db.write(&Bulk { first: others + 1, ..mixed }).await;
        until_sent(&relay, 2 * n).await;
        runs.push((first, per_message(&costs, &mark, n).await));
        relay.stop(DRAIN).await;
        assert_eq!(db.count("select count(*) from outbox_waiting").await, 0, "an outage counts no attempt");
    }
    let (first, beside) = runs.pop().expect("two runs");
    let (_, alone) = runs.pop().expect("two runs");
    Compared { alone, first, beside, others: n, in_the_way: down.unsigned_abs() }
}

fn two_sinks(
    source: postrider_relay::source::Source,
    up: MemorySink,
    down: MemorySink,
    settings: Settings,
) -> RunningRelay {
    Relay::builder(source)
        .sink(named("up", up))
        .sink(named("down", down))
        .route("down", "down")
        .settings(settings)
        .start()
        .expect("start")
}
