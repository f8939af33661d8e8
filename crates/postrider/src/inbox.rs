//! The consumer's side: a message takes effect once per consumer, however often it arrives.

use std::fmt;

use sqlx::Transaction;

use crate::content::ContentHash;
use crate::db::client::{Buried, Database, Handled};
use crate::errors::{Class, classify};
use crate::limits::{self, MessageError};
use crate::message::headers_json;

/// Longest error text that is kept, in characters.
const ERROR_CHARS: usize = 1_000;

/// What [`Inbox::begin`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only after `First` may the effect happen"]
pub enum Begin {
    /// Never handled: make the effect in this transaction, commit, then acknowledge.
    First,
    /// Handled before: make no effect, acknowledge.
    Repeat,
    /// Handled before under this id, with other content: an alarm, not a repeat. Make no effect; [`Inbox::bury`] it or stop.
    Mismatch {
        /// The hash of what was handled.
        stored: ContentHash,
        /// The hash of what came now.
        received: ContentHash,
    },
}

/// Why the inbox could not answer. Make no effect. Texts never hold a payload.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum InboxError {
    /// The consumer's name or the message id cannot be kept. Nothing was sent to the database.
    #[error("inbox: {0}")]
    Name(#[from] MessageError),
    /// Deadlock, serialization failure or a lock that was not given in time: roll back, then the message again.
    #[error("the database asks for the whole transaction again: {0}")]
    Retryable(#[source] sqlx::Error),
    /// The tables are not there, or not in the search_path.
    #[error(
        "the inbox table is missing (or not in the search_path): run `postrider init` on this database: {0}"
    )]
    SchemaMissing(#[source] sqlx::Error),
    /// The role may not do this.
    #[error(
        "the database role may not use the inbox: apply the grants script (migrations/postgres/grants.sql) and make the \
         role a member of postrider_consumer: {0}"
    )]
    Denied(#[source] sqlx::Error),
    /// Anything else. On PostgreSQL the transaction can only be rolled back.
    #[error("the database refused the inbox row: {0}")]
    Database(#[source] sqlx::Error),
}

impl fmt::Debug for InboxError {
    /// The text: the debug output of a database error can hold the whole row.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InboxError({self})")
    }
}

impl From<sqlx::Error> for InboxError {
    fn from(error: sqlx::Error) -> Self {
        match classify(&error) {
            Class::Retryable => Self::Retryable(error),
            Class::SchemaMissing => Self::SchemaMissing(error),
            Class::Denied => Self::Denied(error),
            Class::Other => Self::Database(error),
        }
    }
}

/// A message that a consumer gives up on.
#[derive(Clone, Copy, Default)]
pub struct Dead<'a> {
    /// Its id.
    pub message_id: &'a str,
    /// Its topic.
    pub topic: &'a str,
    /// What was received.
    pub body: Option<&'a [u8]>,
    /// Its headers.
    pub headers: &'a [(String, String)],
    /// How often it was tried.
    pub attempts: u32,
    /// Why it failed the last time. Kept up to 1,000 characters.
    pub error: &'a str,
}

impl fmt::Debug for Dead<'_> {
    /// Without body and headers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dead")
            .field("message_id", &self.message_id)
            .field("topic", &self.topic)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}

/// The message ids that one consumer has handled, in the database of its effects.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn handle(pool: &sqlx::PgPool, received: &postrider::consumer::Received) -> Result<(), Box<dyn std::error::Error>> {
/// use postrider::{Begin, Inbox};
///
/// let inbox = Inbox::new("billing")?;
/// let mut tx = pool.begin().await?;
/// match inbox.begin(&mut tx, &received.message_id, Some(received.content_hash()), received.position).await? {
///     Begin::First => {
///         sqlx::query("update account set balance = balance + 1").execute(&mut *tx).await?;
///         tx.commit().await?;
///     }
///     Begin::Repeat => tx.rollback().await?,
///     Begin::Mismatch { .. } => return Err("two messages share an id".into()),
/// }
/// // acknowledge to the broker here
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inbox {
    consumer: String,
}

impl Inbox {
    /// The inbox of the consumer of this name: 1 to 255 bytes without control characters.
    ///
    /// # Errors
    /// The name is outside the limits.
    pub fn new(consumer: impl Into<String>) -> Result<Self, MessageError> {
        let consumer = consumer.into();
        limits::name("consumer", &consumer)?;
        Ok(Self { consumer })
    }

    /// Says whether this consumer has handled the message, and writes down that it does, in the transaction of the effect.
    ///
    /// The row is inserted first, so of concurrent copies one is `First`; the others wait until that transaction ends and
    /// are `Repeat` if it commits, or one of them `First` if it rolls back. A repeat is recognised as long as the row is
    /// kept. Without `content`, or where none was stored, nothing is compared. `position` is kept for people.
    ///
    /// On SQLite begin the transaction with `begin_with("BEGIN IMMEDIATE")`.
    ///
    /// # Errors
    /// See [`InboxError`]. After `Name` the transaction is usable.
    pub async fn begin<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        message_id: &str,
        content: Option<ContentHash>,
        position: Option<i64>,
    ) -> Result<Begin, InboxError> {
        limits::name("message_id", message_id)?;
        let row = Handled {
            consumer: &self.consumer,
            message_id,
            content_hash: content.map(|hash| hash.0),
            position,
        };
        // More than once only if the row is pruned between the two statements.
        for _ in 0..3 {
            if DB::inbox_insert(&mut **tx, row).await? {
                return Ok(Begin::First);
            }
            if let Some(stored) = DB::inbox_stored(&mut **tx, row).await? {
                return Ok(compare(stored.map(ContentHash), content));
            }
        }
        let hidden = "the inbox row exists but cannot be read: is row-level security on for the inbox?";
        Err(InboxError::Database(sqlx::Error::Protocol(hidden.to_owned())))
    }

    /// Keeps a message that this consumer gives up on in `inbox_dead`, for a human. Again for the same id: attempts, error
    /// and time are renewed, topic, body and headers stay.
    ///
    /// Use it in a transaction of its own, after the failed one was rolled back; [`begin`](Self::begin) in the same
    /// transaction if later copies are to count as handled.
    ///
    /// # Errors
    /// See [`InboxError`]. After `Name` the transaction is usable.
    pub async fn bury<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        dead: &Dead<'_>,
    ) -> Result<(), InboxError> {
        limits::name("message_id", dead.message_id)?;
        let headers = headers_json(dead.headers).map(|json| storable(&json, usize::MAX));
        let row = Buried {
            consumer: &self.consumer,
            message_id: dead.message_id,
            topic: &storable(dead.topic, ERROR_CHARS),
            body: dead.body,
            headers: headers.as_deref(),
            attempts: i64::from(dead.attempts.min(i32::MAX.unsigned_abs())),
            last_error: &storable(dead.error, ERROR_CHARS),
        };
        Ok(DB::bury(&mut **tx, row).await?)
    }
}

fn compare(stored: Option<ContentHash>, received: Option<ContentHash>) -> Begin {
    match (stored, received) {
        (Some(stored), Some(received)) if stored != received => Begin::Mismatch { stored, received },
        _ => Begin::Repeat,
    }
}

/// What a text column can hold: no NUL, at most `chars` characters.
fn storable(text: &str, chars: usize) -> String {
    text.chars().take(chars).map(|c| if c == '\0' { '\u{fffd}' } else { c }).collect()
}
