//! The traits of a database that holds an outbox, and their errors. Nothing here knows any one database.
//!
//! All three working traits take `&self`: reading, settling and renewing overlap, each on a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::message::{Head, Lane, Message, Origin, Position, Shard};

/// The right to work on one shard, proven by a token drawn at random at this acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Owned {
    /// The shard.
    pub shard: Shard,
    /// Its token. Never reused; compared inside every statement.
    pub token: i64,
}

/// The transactions a read could and could not see.
///
/// Everything that a transaction older than `xmin` wrote is visible; no transaction from `xmax` on had begun to write.
/// (PostgreSQL's own `pg_snapshot_xmax` is less than that: one above the highest transaction that has *ended*, so that
/// running ones may lie above it.) A database in which ids commit in order answers [`Snapshot::ORDERED`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Oldest transaction that was still running.
    pub xmin: u64,
    /// First transaction that had not begun to write.
    pub xmax: u64,
}

impl Snapshot {
    /// Ids commit in order here: nothing can appear below what was read.
    pub const ORDERED: Self = Self { xmin: u64::MAX, xmax: 0 };
}

/// The answer to a read of narrow rows.
#[derive(Clone, Debug)]
pub struct Heads {
    /// The rows, by rising position (by due time for [`Reader::due`]). Rows of shards that are not ours are not in it.
    pub rows: Vec<Head>,
    /// The shards among those asked for that were ours in the snapshot of this very read.
    pub mine: Vec<Shard>,
    /// What this read could see.
    pub snapshot: Snapshot,
    /// For [`Reader::due`]: where the next read may go on; what appears before it later is left to the sweep from the
    /// start. `None` = where this one did.
    pub next: Option<DueCursor>,
}

/// A part of the ready queue: positions above `after`, up to and including `up_to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Exclusive lower bound.
    pub after: Position,
    /// Inclusive upper bound; `None` = no bound.
    pub up_to: Option<Position>,
    /// Most rows to return, the lowest positions first.
    pub limit: u32,
}

/// Where a read of due rows goes on: after this due time and position. `default()` = from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct DueCursor {
    /// Microseconds since 1970 UTC by the database's clock.
    pub due_at_us: i64,
    /// Tie breaker.
    pub position: Position,
}

/// Reads committed messages of owned shards from an outbox table that is polled.
///
/// Every read compares the tokens in its own snapshot and says which shards were ours in it.
#[async_trait]
pub trait Reader: Send + Sync {
    /// The ready rows in `range`, by rising position.
    async fn heads(&self, owned: &[Owned], range: Range) -> Result<Heads, SourceError>;

    /// The waiting rows that are due by the database's clock, by (due time, position), after `after`.
    async fn due(&self, owned: &[Owned], after: DueCursor, limit: u32) -> Result<Heads, SourceError>;

    /// The ready rows of one lane in `range`, by rising position.
    async fn lane(&self, owned: Owned, lane: &Lane, range: Range) -> Result<Heads, SourceError>;

    /// The whole messages at `positions`, in any order.
    ///
    /// A message is missing from the answer if it is gone from the outbox; `mine` says which shards were ours,
    /// and the caller drops the messages of the others.
    async fn messages(&self, owned: &[Owned], positions: &[Position]) -> Result<Messages, SourceError>;
}

/// The answer to [`Reader::messages`].
#[derive(Clone, Debug)]
pub struct Messages {
    /// Those that exist.
    pub found: Vec<Message>,
    /// The shards among those asked for that were ours in the snapshot of this read.
    pub mine: Vec<Shard>,
}

/// What became of one claimed message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// The message.
    pub position: Position,
    /// Its shard.
    pub shard: Shard,
    /// Where it was read from. For waiting rows `tries` is compared, so that a repeated settle changes nothing.
    pub origin: Origin,
    /// The verdict.
    pub verdict: Verdict,
}

/// The outcome to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The sink has acknowledged it: a receipt.
    Sent {
        /// Name of the sink.
        sink: Arc<str>,
        /// What the sink answered (offset, sequence), where it gives something.
        evidence: Option<String>,
    },
    /// A failed attempt: it waits, due at the database's now + `backoff`.
    Retry {
        /// Time until the next attempt.
        backoff: Duration,
        /// New number of attempts.
        attempts: u32,
        /// New number of tries.
        tries: u32,
        /// Reason, already free of secrets and of payload, at most 1,000 characters.
        error: String,
        /// The messages of its key wait for it. True for keyed messages.
        holds_key: bool,
    },
    /// Given up.
    Dead {
        /// Why.
        reason: DeadReason,
        /// Number of attempts.
        attempts: u32,
        /// Number of tries.
        tries: u32,
        /// Last error.
        error: String,
        /// `on_dead = block`: the messages of its key wait for an operator.
        holds_key: bool,
    },
}

/// Why a message is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadReason {
    /// The sink refuses it for good.
    Permanent,
    /// Its attempts are used up.
    Attempts,
    /// It kills what touches it.
    Quarantined,
}

impl DeadReason {
    /// The word in the table.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Permanent => "permanent",
            Self::Attempts => "attempts",
            Self::Quarantined => "quarantined",
        }
    }
}

/// The answer to a settle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettleReport {
    /// The messages whose row was found and whose outcome is now recorded, committed.
    pub settled: Vec<Position>,
    /// The shards among those that occur whose token was still ours. Results of the others were left alone: fenced.
    pub mine: Vec<Shard>,
}

/// Records what became of claimed messages, while reading goes on.
#[async_trait]
pub trait Settler: Send + Sync {
    /// Records `settled` and returns when it is committed.
    ///
    /// Settling twice changes nothing. What belongs to a shard whose token in `owned` is no longer current is left alone.
    /// After an error, part of it may have been recorded: settle the same again.
    async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Result<SettleReport, SourceError>;
}

/// What a relay reports of itself with every renewal; `postrider status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayState {
    /// A JSON object: open breakers, last error, in flight.
    pub json: String,
}

/// The answer to [`Ownership::acquire`].
#[derive(Clone, Debug, Default)]
pub struct Acquired {
    /// Newly owned shards.
    pub owned: Vec<Owned>,
    /// Those of them whose last owner ended without releasing them (lease expired).
    pub unclean: Vec<Shard>,
    /// Relays alive by the database's clock, this one included.
    pub live_relays: u32,
    /// Shards there are.
    pub shards: u32,
}

/// The answer to [`Ownership::renew`].
#[derive(Clone, Debug, Default)]
pub struct Renewed {
    /// Those of the shards asked for that are still ours.
    pub mine: Vec<Shard>,
    /// Relays alive by the database's clock, this one included.
    pub live_relays: u32,
}

/// A message that holds back the others of its lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The message.
    pub position: Position,
    /// Its lane.
    pub lane: Lane,
    /// Its shard.
    pub shard: Shard,
    /// It is dead and blocks its key; otherwise it waits for its next attempt.
    pub dead: bool,
}

/// The right to work on shards, proven by tokens; liveness by the database's clock.
#[async_trait]
pub trait Ownership: Send + Sync {
    /// Writes this relay's row, then takes free shards until this relay has its even share (rounded up) of all.
    ///
    /// A shard is free when it has no owner or its owner's row has expired. `have` is what this relay knows that it owns.
    /// A shard that this relay owns under a token that is not in `have` is taken again in any case, with a new token and
    /// even above the share: the answer to its acquisition was lost, and nobody else could ever take it. It must not be
    /// set free instead: `have` may be old by the time the call takes effect.
    async fn acquire(&self, have: &[Owned]) -> Result<Acquired, SourceError>;

    /// The messages that hold back their lane in `owned`, in pages: after `after`, at most `limit`, by (shard, position).
    /// Shards that are no longer ours give nothing.
    async fn held(
        &self,
        owned: &[Owned],
        after: Option<(Shard, Position)>,
        limit: u32,
    ) -> Result<Vec<Held>, SourceError>;

    /// Prolongs this relay's row to the database's now + lease, reports its state, and returns which of `owned` are still ours.
    async fn renew(&self, owned: &[Owned], state: &RelayState) -> Result<Renewed, SourceError>;

    /// Gives shards back in good order (their count of unclean ends returns to zero). What is not ours any more is ignored.
    async fn release(&self, owned: &[Owned]) -> Result<(), SourceError>;

    /// Removes this relay's row; every shard it still owns is free at once. For the very end of a clean stop.
    async fn leave(&self) -> Result<(), SourceError>;
}

/// Counts and looks, for people, metrics and tests. Nothing here is on the path of a message.
#[async_trait]
pub trait Inspect: Send + Sync {
    /// Messages among the `buckets` × 4,096 ids from `from_bucket` on that are in no small table and in no receipt, at most `limit` of them.
    async fn unaccounted(
        &self,
        from_bucket: i64,
        buckets: u32,
        limit: u32,
    ) -> Result<Conservation, SourceError>;

    /// Numbers for `status` and the metrics. Counts stop at `cap`: "at least".
    async fn summary(&self, cap: u64) -> Result<Summary, SourceError>;
}

/// The answer to [`Inspect::unaccounted`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conservation {
    /// Messages that nothing accounts for.
    pub unaccounted: Vec<Position>,
    /// Messages looked at.
    pub looked_at: u64,
    /// The bucket to go on with; 0 when the end was reached.
    pub next_bucket: i64,
}

/// Numbers about one outbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Ready messages (at least, when it equals the cap).
    pub ready: u64,
    /// Waiting messages, delayed and retried (at least, when it equals the cap).
    pub waiting: u64,
    /// Dead messages (at least, when it equals the cap).
    pub dead: u64,
    /// Age of the oldest message that could be sent now, by the database's clock. `None` = nothing waits.
    pub lag: Option<Duration>,
    /// Messages sent in the last five minutes.
    pub sent_5m: u64,
}

/// The parts of one opened source.
#[derive(Clone)]
pub struct Source {
    /// Its name in the configuration.
    pub name: Arc<str>,
    /// Reads.
    pub reader: Arc<dyn Reader>,
    /// Records.
    pub settler: Arc<dyn Settler>,
    /// Owns.
    pub ownership: Arc<dyn Ownership>,
    /// Looks.
    pub inspect: Arc<dyn Inspect>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How this relay presents itself to the database.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Random, drawn at process start. Never a proof of ownership; the tokens are.
    pub relay: i64,
    /// The name people see.
    pub instance: String,
    /// Version of the program.
    pub version: String,
    /// How long the right to work lasts after each renewal.
    pub lease: Duration,
}

/// What went wrong with a source.
///
/// Texts carry no secrets: adapters strip credentials from addresses before they build one.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Connection lost, server restarting, deadlock, timeout: the same again may work. The statement may have been committed.
    #[error("{0}")]
    Temporary(String),
    /// The database refuses for a reason that an operator must mend: password, missing table, missing grant, read-only server.
    #[error("{0}")]
    Operator(String),
}
