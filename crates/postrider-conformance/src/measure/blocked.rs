//! What messages that cannot go cost those that can: behind one failing key, and for a sink that is down.

use std::fmt;

use postrider_relay::core::settings::Settings;
use postrider_relay::engine::{Relay, RunningRelay};
use postrider_relay::sink::{Retry, Scope};
use postrider_relay::source::Source;

use super::{DRAIN, bulk, named, source, until, until_sent};
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
    /// Without, from the start of the relay.
    pub alone_first: PerMessage,
    /// With, from the start of the relay: it meets what cannot go.
    pub first: PerMessage,
    /// With, when it is known, for as many messages again.
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
        (self.first.pages - self.alone_first.pages) * self.others as f64 / self.in_the_way as f64
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} messages, {} in the way", self.others, self.in_the_way)?;
        writeln!(f, "{:<24} {:>12} {:>20}", "", "pages/message", "statements/message")?;
        for (name, c) in [
            ("from the start, alone", &self.alone_first),
            ("from the start, beside", &self.first),
            ("then, alone", &self.alone),
            ("then, beside", &self.beside),
        ] {
            writeln!(f, "{name:<24} {:>12.2} {:>20.4}", c.pages, c.statements)?;
        }
        writeln!(f, "{:<24} {:>11.2}x {:>19.2}x", "then, beside / alone", self.pages(), self.statements())?;
        writeln!(f, "pages per message in the way, once: {:.2}", self.pages_once())?;
        writeln!(f, "\nfrom the start, beside:\n{}", self.first.phase.table())?;
        write!(f, "then, beside:\n{}", self.beside.phase.table())
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
/// Measured twice: from the start, when the relay meets them, and then with as many `others` again.
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn failing_key(others: u64, behind: u64, settings: Settings) -> Compared {
    let (others, behind) = (rounded(others), rounded(behind));
    let mut runs = Vec::new();
    for behind in [0, behind] {
        let sink = MemorySink::scripted(|m| match m.message.topic.as_str() {
            "hot" => Behaviour::Refuse(Scope::Message, Retry::Backoff),
            _ => Behaviour::Accept,
        });
        let patient = Settings { max_attempts: u32::MAX, ..settings.clone() };
        let start = |source| super::start(source, sink.clone(), patient.clone());
        let held = usize::from(behind > 0);
        runs.push(run(others, &bulk("hot", "hot", behind, 1), held, &patient, start).await);
    }
    compared(runs, others, behind)
}

/// `others` messages over 500 keys for one sink, without and with `down` messages over as many keys for another sink that
/// is down. Measured twice, as [`failing_key`].
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn sink_down(others: u64, down: u64, settings: Settings) -> Compared {
    let (others, down) = (rounded(others), rounded(down));
    let mut runs = Vec::new();
    for down in [0, down] {
        let broken = MemorySink::scripted(|_| Behaviour::Refuse(Scope::Sink, Retry::Backoff));
        let start = |source| two_sinks(source, MemorySink::default(), broken.clone(), settings.clone());
        let held = usize::try_from(down).unwrap_or(usize::MAX);
        runs.push(run(others, &bulk("d", "down", down, down.max(1)), held, &settings, start).await);
    }
    compared(runs, others, down)
}

/// Drains `others` mixed with what stays in the way, then as many `others` again; the cost of both.
async fn run(
    others: i64,
    in_the_way: &Bulk<'_>,
    held_keys: usize,
    settings: &Settings,
    start: impl FnOnce(Source) -> RunningRelay,
) -> (PerMessage, PerMessage) {
    let n = others.unsigned_abs();
    let db = TestDatabase::new().await;
    let costs = Costs::new(&db).await;
    let all = bulk("m", "orders", others, 500);
    write_mixed(&db, &all, in_the_way).await;
    let source = source(&db, settings).await;
    let mark = costs.mark().await;
    let relay = start(source);
    until_sent(&relay, n).await;
    until("meeting everything that is in the way", || relay.handle().snapshot().held_keys >= held_keys).await;
    let first = per_message(&costs, &mark, n).await;
    let mark = costs.mark().await;
    db.write(&Bulk { first: others + 1, ..all }).await;
    until_sent(&relay, 2 * n).await;
    let then = per_message(&costs, &mark, n).await;
    relay.stop(DRAIN).await;
    let left = "select (select count(*) from outbox_queue) + (select count(*) from outbox_waiting)";
    assert_eq!(db.count(left).await, in_the_way.messages, "what is in the way waits, and nothing else");
    (first, then)
}

fn compared(mut runs: Vec<(PerMessage, PerMessage)>, others: i64, in_the_way: i64) -> Compared {
    let (first, beside) = runs.pop().expect("two runs");
    let (alone_first, alone) = runs.pop().expect("two runs");
    Compared {
        alone,
        alone_first,
        first,
        beside,
        others: others.unsigned_abs(),
        in_the_way: in_the_way.unsigned_abs(),
    }
}

fn two_sinks(source: Source, up: MemorySink, down: MemorySink, settings: Settings) -> RunningRelay {
    Relay::builder(source)
        .sink(named("up", up))
        .sink(named("down", down))
        .route("down", "down")
        .settings(settings)
        .start()
        .expect("start")
}
