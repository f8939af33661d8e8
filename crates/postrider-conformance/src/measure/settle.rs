//! Draining a backlog: statements, pages and log bytes per message.

use std::fmt;
use std::time::Duration;

use postrider_relay::core::settings::Settings;

use super::{DRAIN, bulk, source, start, until_sent};
use crate::testbed::costs::{Costs, Kind, Phase, ratio};
use crate::testbed::{MemorySink, TestDatabase};

/// What draining cost.
#[derive(Debug)]
pub struct Drained {
    /// How many messages.
    pub messages: u64,
    /// The server's counters.
    pub phase: Phase,
    /// From the start of the relay to the last receipt.
    pub took: Duration,
}

impl Drained {
    /// All statements, those of starting included.
    #[must_use]
    pub fn statements_per_message(&self) -> f64 {
        ratio(self.phase.total().calls as f64, self.messages)
    }

    /// Shared buffers hit and read, by all statements.
    #[must_use]
    pub fn pages_per_message(&self) -> f64 {
        ratio(self.phase.total().pages as f64, self.messages)
    }

    /// Log bytes of the settles, images apart.
    #[must_use]
    pub fn log_bytes_per_message(&self) -> f64 {
        ratio(self.phase.settle_bytes() as f64, self.messages)
    }

    /// How large the settles are.
    #[must_use]
    pub fn messages_per_settle(&self) -> f64 {
        ratio(self.messages as f64, self.phase.of(Kind::Sent).calls)
    }
}

impl fmt::Display for Drained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} messages of 1 kB", self.messages)?;
        writeln!(f, "  statements per message      {:>8.4}", self.statements_per_message())?;
        writeln!(f, "  pages per message           {:>8.2}", self.pages_per_message())?;
        writeln!(f, "  settle: log bytes/message   {:>8.1}", self.log_bytes_per_message())?;
        writeln!(f, "  settle: messages/statement  {:>8.0}", self.messages_per_settle())?;
        writeln!(f, "  images in the settles       {:>8}", self.phase.of(Kind::Sent).images)?;
        writeln!(f, "  rows left to vacuum         {:>8}", self.phase.dead_tuples)?;
        write!(f, "{}", self.phase.table())
    }
}

/// Fills an outbox with `messages` of 1 kB over `keys` keys and lets a relay drain it into memory.
///
/// # Panics
/// If the server refuses or nothing moves.
pub async fn drain(messages: u64, keys: u64, settings: Settings) -> Drained {
    let db = TestDatabase::new().await;
    let costs = Costs::new(&db).await;
    costs.checkpoint().await;
    db.write(&bulk("m", "orders", messages.cast_signed(), keys.cast_signed())).await;
    let source = source(&db, &settings).await;
    let mark = costs.mark_log(&db).await;
    let since = std::time::Instant::now();
    let relay = start(source, MemorySink::default(), settings);
    until_sent(&relay, messages).await;
    let took = since.elapsed();
    let phase = costs.since(&mark).await;
    relay.stop(DRAIN).await;
    Drained { messages, phase, took }
}
