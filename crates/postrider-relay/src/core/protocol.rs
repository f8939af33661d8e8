//! The words between the core and whoever drives it.

use std::sync::Arc;
use std::time::Duration;

use crate::message::{Lane, Message, Position, Shard};
use crate::sink::Outcome;
use crate::source::{
    Acquired, DeadReason, DueCursor, Heads, Held, Messages, Owned, Range, Renewed, SettleReport, Settled,
    SourceError,
};

/// Monotonic time in microseconds since the driver started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mono(pub u64);

impl Mono {
    /// This time plus `d`.
    #[must_use]
    pub fn plus(self, d: Duration) -> Self {
        Self(self.0.saturating_add(micros(d)))
    }

    /// Time since `earlier`, zero if that lies ahead.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

/// Number of a call to the source; rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CallId(pub u64);

/// Number of one publish of one message; rises, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Which of the relay's sinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SinkId(pub usize);

/// What the core knows of a sink.
#[derive(Clone, Debug)]
pub struct SinkSpec {
    /// Its name; receipts carry it.
    pub name: Arc<str>,
}

/// Where a topic goes.
pub trait Route: Send {
    /// The sink of `topic`, and the destination within it that a breaker is kept for. The same topic always gives the same.
    fn route(&self, topic: &str) -> (SinkId, Arc<str>);
}

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// There may be work: something was committed.
    Hint,
    /// A call has ended.
    Answered {
        /// Which.
        call: CallId,
        /// With what.
        result: Result<Answer, SourceError>,
    },
    /// A publish has ended. `None` = it was certainly not handed to the sink.
    Outcome {
        /// Which.
        ticket: Ticket,
        /// With what.
        outcome: Option<Outcome>,
    },
    /// Stop in good order within `drain`.
    Stop {
        /// How long to wait for messages in flight.
        drain: Duration,
    },
}

/// What the driver shall do.
#[derive(Debug)]
pub enum Action {
    /// Call the source and answer with [`Event::Answered`].
    Call {
        /// Number of the call.
        call: CallId,
        /// What to call.
        request: Request,
    },
    /// Hand the batch to the sink and answer with one [`Event::Outcome`] per flight.
    Publish {
        /// Which sink.
        sink: SinkId,
        /// The messages, in order.
        batch: Vec<Flight>,
        /// Not to be handed over after this time: the right to send has ended then.
        not_after: Mono,
        /// Outcomes that are missing at this time are `Unknown`.
        deadline: Mono,
    },
    /// Something worth a log line or a metric.
    Notice(Notice),
    /// The stop has ended; nothing follows.
    Stopped {
        /// Messages whose outcome was still open. Their shards were not released; the lease runs out by itself.
        undecided: usize,
    },
}

/// One message on its way to a sink.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Number of this publish.
    pub ticket: Ticket,
    /// The message.
    pub message: Arc<Message>,
    /// The n-th try.
    pub try_number: u32,
}

/// A call to the source; one per method of its traits.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the arguments of the trait's methods, by name")]
pub enum Request {
    Acquire { have: Vec<Owned> },
    Held { owned: Vec<Owned>, after: Option<(Shard, Position)>, limit: u32 },
    Renew { owned: Vec<Owned> },
    Release { owned: Vec<Owned> },
    Leave,
    Heads { owned: Vec<Owned>, range: Range },
    Due { owned: Vec<Owned>, after: DueCursor, limit: u32 },
    Lane { owned: Owned, lane: Lane, range: Range },
    Messages { owned: Vec<Owned>, positions: Vec<Position> },
    Settle { owned: Vec<Owned>, settled: Vec<Settled> },
}

impl Request {
    /// The word for logs and metrics.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Acquire { .. } => "acquire",
            Self::Held { .. } => "held",
            Self::Renew { .. } => "renew",
            Self::Release { .. } => "release",
            Self::Leave => "leave",
            Self::Heads { .. } => "heads",
            Self::Due { .. } => "due",
            Self::Lane { .. } => "lane",
            Self::Messages { .. } => "messages",
            Self::Settle { .. } => "settle",
        }
    }
}

/// The answer to a [`Request`].
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the answers of the trait's methods, by name")]
pub enum Answer {
    Acquired(Acquired),
    Held(Vec<Held>),
    Renewed(Renewed),
    Done,
    Heads(Heads),
    Messages(Messages),
    Settled(SettleReport),
}

/// Something worth a log line or a metric. Texts are free of secrets and payloads.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each variant says it")]
pub enum Notice {
    /// Shards are ours; `unclean` of them were taken from an owner that ended without releasing them.
    Acquired { shards: usize, unclean: usize },
    /// Shards went back in good order.
    Released { shards: usize },
    /// A shard has passed on to another relay; what we knew of it is dropped.
    Lost { shard: Shard },
    /// Results that came too late: their shard had passed on. Dropped, never recorded.
    Fenced { count: usize },
    /// A breaker opened or stays open after a probe.
    BreakerOpened { sink: Arc<str>, destination: Option<Arc<str>>, operator: bool, reason: String },
    /// A breaker closed.
    BreakerClosed { sink: Arc<str>, destination: Option<Arc<str>> },
    /// The sink has acknowledged messages and the receipt is committed.
    Sent { sink: Arc<str>, count: usize },
    /// A counted attempt failed and that is recorded.
    Retried { position: Position, attempts: u32, backoff: Duration, error: String },
    /// A message is dead and that is recorded.
    Dead { position: Position, reason: DeadReason, error: String },
    /// No verdict about a publish; it is repeated first for its key.
    Unknown { position: Position, why: String },
    /// An outcome found no row although the shard is ours: somebody else removed the row. Never counted as sent.
    Vanished { position: Position },
    /// A row of a small table has no message in the outbox.
    Missing { position: Position },
    /// The sweep found messages that no window could know (ids handed out long before their insert).
    SweepFound { count: usize },
    /// A call to the source failed; it is repeated with backoff.
    CallFailed { kind: &'static str, operator: bool, error: String },
    /// The right to send has run out without a renewal; nothing is sent until one succeeds.
    LeaseExpired,
}
