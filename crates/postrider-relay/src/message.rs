//! What the relay carries: narrow heads while it decides, whole messages while it publishes.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

/// The id of a message in its outbox: its place in the order of its key. Rises within a key, with gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub i64);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A share of the keys with one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shard(pub i16);

/// What is kept in order: the messages of one key. Opaque to the relay.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// 64 bits computed by the database (PostgreSQL). Two keys that share a hash share a lane, which is slower, never wrong.
    Hash(i64),
    /// The text itself (SQLite).
    Key(Arc<str>),
}

/// What the reader knows of a message before its payload is touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Its id.
    pub position: Position,
    /// Its lane.
    pub lane: Lane,
    /// Its shard.
    pub shard: Shard,
    /// Size of the payload in bytes.
    pub bytes: u32,
    /// Which small table it stands in, and what has happened to it there.
    pub origin: Origin,
}

/// Which small table a message was read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The ready queue: no failed attempt yet.
    Queue,
    /// The waiting table: delayed, or failed before.
    Waiting {
        /// Tries that count against the budget.
        attempts: u32,
        /// Publishes that may have reached the sink.
        tries: u32,
    },
}

impl Origin {
    /// Attempts so far.
    #[must_use]
    pub fn attempts(self) -> u32 {
        match self {
            Self::Queue => 0,
            Self::Waiting { attempts, .. } => attempts,
        }
    }

    /// Tries so far.
    #[must_use]
    pub fn tries(self) -> u32 {
        match self {
            Self::Queue => 0,
            Self::Waiting { tries, .. } => tries,
        }
    }
}

/// The payload exactly as the producer wrote it. Text and bytes differ, empty and absent differ.
#[derive(Clone, PartialEq, Eq)]
pub enum Payload {
    /// No payload at all.
    Absent,
    /// JSON or other text.
    Text(Bytes),
    /// Anything else.
    Binary(Bytes),
}

impl Payload {
    /// The bytes that are sent; empty when absent.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::Absent => Bytes::new(),
            Self::Text(b) | Self::Binary(b) => b.clone(),
        }
    }
}

impl fmt::Debug for Payload {
    /// The size only: payloads never reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("Absent"),
            Self::Text(b) => write!(f, "Text({} bytes)", b.len()),
            Self::Binary(b) => write!(f, "Binary({} bytes)", b.len()),
        }
    }
}

/// A whole message as it stands in the outbox, immutable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its id in the outbox.
    pub position: Position,
    /// The business's id; the consumer recognises repeats by it.
    pub message_id: String,
    /// Where it goes.
    pub topic: String,
    /// Free label next to the topic.
    pub tag: Option<String>,
    /// What it is kept in order by: `message_key`, else `aggregate_type:aggregate_id`; `None` = unordered.
    pub key: Option<String>,
    /// Kind of the aggregate it belongs to.
    pub aggregate_type: Option<String>,
    /// Id of the aggregate it belongs to.
    pub aggregate_id: Option<String>,
    /// Kind of the event.
    pub event_type: Option<String>,
    /// Version of the payload's schema.
    pub schema_version: Option<i32>,
    /// Metadata that travels with it, in the order of the producer's JSON object, names unique.
    pub headers: Vec<(String, String)>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// The payload.
    pub payload: Payload,
    /// Its own limit of attempts; `None` = the relay's policy.
    pub max_attempts: Option<u32>,
    /// W3C traceparent.
    pub trace: Option<String>,
    /// W3C tracestate.
    pub trace_state: Option<String>,
    /// When it was written, microseconds since 1970 UTC by the database's clock.
    pub created_at_us: i64,
}

/// A message on its way to a sink, with the number of this try.
#[derive(Clone, Debug)]
pub struct Outgoing {
    /// The message.
    pub message: Arc<Message>,
    /// This is the n-th publish of it that may reach the sink, from 1, as far as this relay knows.
    pub try_number: u32,
}
