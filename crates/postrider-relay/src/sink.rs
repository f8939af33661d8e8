//! The trait of a broker, and what its answers mean. Nothing here knows any one broker.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::message::Outgoing;

/// Where messages go: one broker, one protocol.
#[async_trait]
pub trait Sink: Send + Sync {
    /// Publishes `batch` in its order and reports one [`Outcome`] per message as soon as it is known, each exactly once.
    ///
    /// `Accepted` means that the broker has confirmed that very message, not that it was sent. A slow message does not
    /// hold back the outcomes of its neighbours. A message without an outcome when this returns (or panics, or is
    /// dropped) counts as [`Outcome::Unknown`]. An empty batch does nothing.
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes);

    /// Says whether the broker would take messages now, and at which durability tier. Publishes nothing.
    async fn check(&self) -> Result<DurabilityTier, SinkError>;

    /// What tests and the core may rely on.
    fn capabilities(&self) -> Capabilities;

    /// The destination within the sink that a breaker is kept for: topic, subject, file. Computed without I/O.
    fn destination(&self, topic: &str) -> String {
        topic.to_owned()
    }

    /// Lets go of connections and locks after the last publish. Publishing afterwards gives `Unknown` or a refusal.
    async fn close(&self) {}
}

/// What differs between sinks, as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// A batch is accepted in its order or not at all from the first refusal on: a key may pipeline.
    pub ordered: bool,
    /// The sink drops repeats of a message id for a while.
    pub deduplicates: bool,
    /// Largest payload in bytes, where the sink has a limit of its own.
    pub max_bytes: Option<u64>,
}

/// Reports outcomes of one batch, by index into it.
#[derive(Clone, Debug)]
pub struct Outcomes {
    sender: mpsc::UnboundedSender<(u32, Outcome)>,
}

impl Outcomes {
    /// A reporter, and the end where the outcomes arrive as (index into the batch, outcome).
    #[must_use]
    pub fn channel() -> (Self, mpsc::UnboundedReceiver<(u32, Outcome)>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self { sender }, receiver)
    }

    /// Reports the outcome of the message at `index`. Once the receiver has gone, reports are dropped: the result counts as unknown.
    pub fn report(&self, index: usize, outcome: Outcome) {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        if self.sender.send((index, outcome)).is_err() {
            tracing::debug!(index, "outcome reported after nobody waited for it");
        }
    }
}

/// What became of one publish: may it have happened, whose fault is it, will trying again help?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The sink has it.
    Accepted {
        /// Offset, sequence, line: what the sink answered.
        evidence: Option<String>,
    },
    /// Sent, no verdict: it may or may not be in the sink. Published again first for its key, same id, not counted.
    Unknown {
        /// Why, for people.
        why: String,
    },
    /// Certainly not taken.
    Refused(Refusal),
}

/// A refusal by the sink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Whose fault it is.
    pub scope: Scope,
    /// When to try again.
    pub retry: Retry,
    /// The sink's code, short ("10054", "max_payload").
    pub code: String,
    /// Its text, free of secrets and payload.
    pub text: String,
}

/// Whose fault a refusal is, and what stops for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// This message: counted against its attempts, or dead.
    Message,
    /// Its destination (topic, subject): nothing is counted, the destination's breaker opens.
    Destination,
    /// The whole sink: nothing is counted, the sink's breaker opens.
    Sink,
    /// Credentials or rights on one destination: as `Destination`, and an operator is needed.
    DestinationAuth,
    /// Credentials or rights on the whole sink: as `Sink`, and an operator is needed.
    SinkAuth,
}

/// When a refused message may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Never like this. For scope `Message`: one confirming retry, then dead.
    Never,
    /// Not before this much time has passed (the sink said so).
    After(Duration),
    /// After the relay's own backoff.
    Backoff,
}

/// How durably a sink holds what it has accepted (sink documentation says what each means there).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DurabilityTier {
    /// The other side says so.
    PeerSaysSo,
    /// In the memory of one machine.
    LocalMemory,
    /// On the disk of one machine.
    LocalFsync,
    /// In the memory of several machines.
    ReplicatedMemory,
    /// On the disks of several machines.
    ReplicatedFsync,
}

/// Why a sink cannot be opened or would not take messages. Texts carry no secrets.
#[derive(Debug, thiserror::Error)]
pub enum SinkError {
    /// The address or an option of it is wrong; the text names it.
    #[error("{0}")]
    Config(String),
    /// It does not answer now; later it may.
    #[error("{0}")]
    Unavailable(String),
    /// It refuses us: credentials, rights, a missing stream, a lock that another process holds.
    #[error("{0}")]
    Operator(String),
}

/// A sink with its name in the configuration.
#[derive(Clone)]
pub struct NamedSink {
    /// The name; receipts carry it.
    pub name: Arc<str>,
    /// The sink.
    pub sink: Arc<dyn Sink>,
}

impl std::fmt::Debug for NamedSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NamedSink").field("name", &self.name).finish_non_exhaustive()
    }
}
