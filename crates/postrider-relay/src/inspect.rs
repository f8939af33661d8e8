//! What operators see and do: lists, one message with all that is known of it, redrive and cancel.
//!
//! Nothing here is on the path of a message. The actions touch dead messages only, so they cannot clash with a relay,
//! which touches ready and waiting ones; each is one transaction and leaves a line per message in the audit table.

use async_trait::async_trait;

use crate::message::{Payload, Position};
use crate::source::{DeadReason, Inspect, SourceError};

/// Looks and acts for an operator. Times are microseconds since 1970 UTC by the database's clock.
#[async_trait]
pub trait Admin: Inspect {
    /// The relays known to the database, live ones first, then by name.
    async fn relays(&self) -> Result<Vec<RelayRow>, SourceError>;

    /// The shards, by number.
    async fn shards(&self) -> Result<Vec<ShardRow>, SourceError>;

    /// Messages of one state, a page at a time, by position.
    ///
    /// Sent ones are found through their receipts; such a page may hold fewer rows than asked for, even none, and still
    /// have a `next`: a filter that matches little is worked through in bounded steps.
    async fn list(&self, filter: &Filter, page: Page) -> Result<Listing, SourceError>;

    /// One message with all that is known of it; `None` = no such row: the business transaction did not commit, or it was pruned.
    ///
    /// The payload is read only when `payload` asks for it.
    async fn show(&self, which: &Which, payload: bool) -> Result<Option<Shown>, SourceError>;

    /// Puts dead messages back: due now, attempts zero, tries and the hold on their key kept. Returns how many.
    ///
    /// What is not dead (any more) is left alone, so doing it twice changes nothing.
    async fn redrive(&self, selection: &Selection, actor: &str) -> Result<u64, SourceError>;

    /// Discards dead messages. Returns how many. What is not dead (any more) is left alone.
    async fn cancel(
        &self,
        selection: &Selection,
        actor: &str,
        reason: Option<&str>,
    ) -> Result<u64, SourceError>;
}

/// A relay process as the database knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayRow {
    /// Its random number.
    pub relay: i64,
    /// The name people see.
    pub instance: String,
    /// Version of its program.
    pub version: String,
    /// When it started.
    pub started_at_us: i64,
    /// When it last renewed.
    pub heartbeat_at_us: i64,
    /// Time until its lease ends; negative = ended that long ago.
    pub expires_in_us: i64,
    /// Shards it owns.
    pub shards: u32,
    /// What it reported of itself, a JSON object.
    pub state: String,
}

impl RelayRow {
    /// True while its lease lasts.
    #[must_use]
    pub const fn is_live(&self) -> bool {
        self.expires_in_us > 0
    }
}

/// A shard as the database knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRow {
    /// Its number.
    pub shard: i16,
    /// The relay that owns it, by its random number.
    pub owner: Option<i64>,
    /// The owner's name, while its row exists.
    pub instance: Option<String>,
    /// When it was acquired.
    pub acquired_at_us: Option<i64>,
    /// Owners in a row that ended without releasing it.
    pub unclean_ends: u32,
    /// The message that was being worked on alone when they did.
    pub suspect: Option<Position>,
}

/// What messages can be listed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListState {
    /// Ready and waiting together.
    Pending,
    /// In the ready queue.
    Ready,
    /// Delayed, or to be tried again.
    Waiting,
    /// Given up.
    Dead,
    /// Discarded by an operator.
    Cancelled,
    /// Acknowledged by the sink.
    Sent,
}

/// Which messages to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Their state.
    pub state: ListState,
    /// Only of this topic.
    pub topic: Option<String>,
    /// Only of this key: the message's own, or `aggregate_type:aggregate_id`.
    pub key: Option<String>,
}

/// One page of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Direction.
    pub order: Order,
    /// Where the last page ended: [`Listing::next`]. `None` = from the beginning.
    pub after: Option<Position>,
    /// Most rows, at least 1, at most [`Page::MOST`].
    pub limit: u32,
}

impl Page {
    /// Most rows of one page; more are cut to this.
    pub const MOST: u32 = 1_000;

    pub(crate) fn rows(self) -> i64 {
        i64::from(self.limit.clamp(1, Self::MOST))
    }
}

/// Direction of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Highest position first.
    Newest,
    /// Lowest position first.
    Oldest,
}

/// One page of messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// The rows.
    pub rows: Vec<Status>,
    /// Where the next page goes on; `None` = this was the last.
    pub next: Option<Position>,
}

/// One row of the view `outbox_status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Its id in the outbox.
    pub position: Position,
    /// The business's id.
    pub message_id: String,
    /// Where it goes.
    pub topic: String,
    /// What it is kept in order by: its own key, else `aggregate_type:aggregate_id`.
    pub key: Option<String>,
    /// Kind of the aggregate.
    pub aggregate_type: Option<String>,
    /// Id of the aggregate.
    pub aggregate_id: Option<String>,
    /// Kind of the event.
    pub event_type: Option<String>,
    /// PENDING, SENT, DEAD, CANCELLED, or UNACCOUNTED for a message that no table knows.
    pub state: String,
    /// When it was written.
    pub created_at_us: i64,
    /// Tries that counted against its budget.
    pub attempts: u32,
    /// Publishes that may have reached the sink, where it is known.
    pub tries: Option<u32>,
    /// When it is due, for a waiting one.
    pub due_at_us: Option<i64>,
    /// Why the last try failed.
    pub last_error: Option<String>,
    /// When the sink acknowledged it.
    pub sent_at_us: Option<i64>,
    /// Which sink did.
    pub sink: Option<String>,
    /// What the sink answered.
    pub evidence: Option<String>,
    /// When it was given up.
    pub dead_at_us: Option<i64>,
    /// Why it was given up: permanent, attempts, quarantined.
    pub dead_reason: Option<String>,
    /// When it was discarded.
    pub cancelled_at_us: Option<i64>,
    /// Who discarded it.
    pub cancelled_by: Option<String>,
    /// Why it was discarded.
    pub cancel_reason: Option<String>,
}

/// How a message is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// By the business's id.
    MessageId(String),
    /// By its id in the outbox.
    Position(Position),
}

/// Everything that is known of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Its state and times.
    pub status: Status,
    /// Free label next to the topic.
    pub tag: Option<String>,
    /// Version of the payload's schema.
    pub schema_version: Option<i32>,
    /// Metadata, in the producer's order.
    pub headers: Vec<(String, String)>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Size of the payload; `None` = no payload.
    pub payload_bytes: Option<u64>,
    /// The payload, when it was asked for.
    pub payload: Option<Payload>,
    /// Its own limit of attempts.
    pub max_attempts: Option<u32>,
    /// W3C traceparent.
    pub trace: Option<String>,
    /// W3C tracestate.
    pub trace_state: Option<String>,
    /// The lane and shard, as the database computed them; `None` once it is in no small table.
    pub lane: Option<String>,
    /// The messages of its key wait for it.
    pub holds_key: bool,
    /// Every receipt it is in, oldest first. More than one: it was sent again after a check-back.
    pub receipts: Vec<Receipt>,
    /// What operators did with it, oldest first.
    pub audit: Vec<AuditEntry>,
}

/// One acknowledgement of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// When it was recorded.
    pub sent_at_us: i64,
    /// The sink.
    pub sink: String,
    /// The relay that recorded it, by its random number.
    pub relay: i64,
    /// What the sink answered.
    pub evidence: Option<String>,
}

/// One action of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEntry {
    /// When.
    pub at_us: i64,
    /// Who.
    pub actor: String,
    /// What: redrive or cancel.
    pub action: String,
    /// Why, and what it was before.
    pub detail: Option<String>,
}

/// Which dead messages an action is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// These, by position.
    Positions(Vec<Position>),
    /// These, by the business's id.
    MessageIds(Vec<String>),
    /// All dead ones that match, lowest positions first, at most `limit` in one transaction.
    Dead {
        /// Only of this topic.
        topic: Option<String>,
        /// Only of this key.
        key: Option<String>,
        /// Only those given up for this reason.
        reason: Option<DeadReason>,
        /// Most of them.
        limit: u32,
    },
}
