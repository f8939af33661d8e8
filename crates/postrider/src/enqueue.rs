//! Writing messages inside the caller's transaction.

use std::collections::{HashMap, HashSet};
use std::fmt;

use sqlx::Transaction;

use crate::content::ContentHash;
use crate::db::Insert;
use crate::db::client::{Database, Stored};
use crate::errors::{Class, classify};
use crate::limits::{Limits, MessageError};
use crate::message::Message;
use crate::wake::Hint;

/// Most bytes of payload in one statement of a batch.
const BATCH_BYTES: usize = 16 << 20;

/// A message that stands in the transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Enqueued {
    /// Its id, for example the UUIDv7 that was made for it.
    pub message_id: String,
    /// It was there before, with the same content: nothing was written.
    pub already: bool,
    /// Fire it after the commit to wake a relay in this process.
    pub hint: Hint,
}

/// Why nothing was written. Texts never hold a payload.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// The message is outside the limits. Nothing was sent to the database; the transaction is usable.
    #[error("message refused: {0}")]
    Message(#[from] MessageError),
    /// The id exists with other content. The transaction is usable.
    #[error(
        "message_id {message_id:?} exists with other content: give another message another id, or repeat it unchanged"
    )]
    DifferentContent {
        /// The id.
        message_id: String,
    },
    /// Deadlock, serialization failure or a lock that was not given in time: roll back, then run the whole transaction again.
    #[error("the database asks for the whole transaction again: {0}")]
    Retryable(#[source] sqlx::Error),
    /// The tables are not there, or not in the search_path.
    #[error(
        "the outbox table is missing (or not in the search_path): run `postrider init` on this database: {0}"
    )]
    SchemaMissing(#[source] sqlx::Error),
    /// The role may not do this.
    #[error(
        "the database role may not write messages: apply the grants script (migrations/postgres/grants.sql) and make \
         the role a member of postrider_producer: {0}"
    )]
    Denied(#[source] sqlx::Error),
    /// Anything else. On PostgreSQL the transaction can only be rolled back.
    #[error("the database refused the message: {0}")]
    Database(#[source] sqlx::Error),
}

impl fmt::Debug for EnqueueError {
    /// The text: the debug output of a database error can hold the whole row.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnqueueError({self})")
    }
}

impl From<sqlx::Error> for EnqueueError {
    fn from(error: sqlx::Error) -> Self {
        match classify(&error) {
            Class::Retryable => Self::Retryable(error),
            Class::SchemaMissing => Self::SchemaMissing(error),
            Class::Denied => Self::Denied(error),
            Class::Other => Self::Database(error),
        }
    }
}

/// Writes `message` into the outbox, in the transaction of the business change: it exists if and only if that commits.
///
/// One INSERT and nothing else: no lock beyond the new row. If the id exists with the same content, nothing is written and
/// [`Enqueued::already`] is true; one more read, on conflict only, decides that. Works inside savepoints.
///
/// On SQLite begin the transaction with `begin_with("BEGIN IMMEDIATE")`: one that has read before it writes fails at once
/// when another writer was faster.
///
/// # Errors
/// See [`EnqueueError`]. After `Message` and `DifferentContent` the transaction is usable.
pub async fn enqueue<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    message: &Message,
) -> Result<Enqueued, EnqueueError> {
    enqueue_within(tx, message, &Limits::default()).await
}

/// [`enqueue`] with other limits.
///
/// # Errors
/// As [`enqueue`].
pub async fn enqueue_within<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    message: &Message,
    limits: &Limits,
) -> Result<Enqueued, EnqueueError> {
    let insert = Insert::new(DB::DIALECT, message, limits)?;
    if !DB::insert(&mut **tx, insert).await?.is_empty() {
        return Ok(enqueued(message, false));
    }
    repeated(tx, message).await
}

/// Writes many messages, with one statement for up to 10,000 of them (1,820 on SQLite) and 16 MiB of payload. Their ids
/// rise in the order given. An empty slice does nothing.
///
/// The answers stand in the order of `messages`. An id that exists, or occurs earlier in the slice, with the same content
/// is [`Enqueued::already`].
///
/// # Errors
/// See [`EnqueueError`]. After `Message` nothing was written. An id that occurs twice in the slice with different content
/// is found before anything is written. When an id stands in the *table* with other content, `DifferentContent` names the
/// first such message and the other messages of the slice stand in the transaction, which is usable: roll it back, or open
/// a savepoint before the call and roll back that.
pub async fn enqueue_all<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    messages: &[Message],
) -> Result<Vec<Enqueued>, EnqueueError> {
    enqueue_all_within(tx, messages, &Limits::default()).await
}

/// [`enqueue_all`] with other limits.
///
/// # Errors
/// As [`enqueue_all`].
pub async fn enqueue_all_within<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    messages: &[Message],
    limits: &Limits,
) -> Result<Vec<Enqueued>, EnqueueError> {
    let distinct = distinct(messages, limits)?;
    let mut written = HashSet::with_capacity(distinct.len());
    for batch in batches(&distinct, DB::DIALECT.batch()) {
        written.extend(DB::insert(&mut **tx, Insert::batch(DB::DIALECT, batch)).await?);
    }
    for message in &distinct {
        if !written.contains(&message.message_id) && !repeated(tx, message).await?.already {
            written.insert(message.message_id.clone());
        }
    }
    // The first message of an id that was written is new; every other one is a repeat.
    Ok(messages.iter().map(|message| enqueued(message, !written.remove(&message.message_id))).collect())
}

/// Checks all; drops repeats within the slice.
fn distinct<'m>(messages: &'m [Message], limits: &Limits) -> Result<Vec<&'m Message>, EnqueueError> {
    let mut hashes: HashMap<&str, ContentHash> = HashMap::with_capacity(messages.len());
    let mut distinct = Vec::with_capacity(messages.len());
    for message in messages {
        message.check(limits)?;
        let hash = message.content_hash();
        match hashes.insert(&message.message_id, hash) {
            None => distinct.push(message),
            Some(earlier) if earlier == hash => {}
            Some(_) => return Err(EnqueueError::DifferentContent { message_id: message.message_id.clone() }),
        }
    }
    Ok(distinct)
}

/// Cuts into runs of at most `rows` messages and [`BATCH_BYTES`] of payload, at least one message each.
fn batches<'a, 'm>(messages: &'a [&'m Message], rows: usize) -> Vec<&'a [&'m Message]> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, message) in messages.iter().enumerate() {
        if at > start && (at - start == rows || bytes + message.payload.len() > BATCH_BYTES) {
            batches.push(&messages[start..at]);
            (start, bytes) = (at, 0);
        }
        bytes += message.payload.len();
    }
    if start < messages.len() {
        batches.push(&messages[start..]);
    }
    batches
}

/// Decides about a message whose id was there. If that row has gone in between (pruned), writes the message after all.
async fn repeated<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    message: &Message,
) -> Result<Enqueued, EnqueueError> {
    // Pruned between two statements, and written again by somebody else, three times in a row: then it is something else.
    for _ in 0..3 {
        match DB::stored(&mut **tx, message).await? {
            Stored::Same => return Ok(enqueued(message, true)),
            Stored::Different => {
                return Err(EnqueueError::DifferentContent { message_id: message.message_id.clone() });
            }
            Stored::Nothing => {
                if !DB::insert(&mut **tx, Insert::one(DB::DIALECT, message)).await?.is_empty() {
                    return Ok(enqueued(message, false));
                }
            }
        }
    }
    let hidden =
        "its message_id is taken by a row that cannot be read: is row-level security on for the outbox?";
    Err(EnqueueError::Database(sqlx::Error::Protocol(hidden.to_owned())))
}

fn enqueued(message: &Message, already: bool) -> Enqueued {
    Enqueued { message_id: message.message_id.clone(), already, hint: Hint::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_bounded_in_rows_and_bytes_and_keep_the_order() {
        let big = vec![0_u8; BATCH_BYTES / 2 + 1];
        let messages: Vec<Message> = [&big[..], &big[..], b"", b"", b"", &big[..]]
            .into_iter()
            .enumerate()
            .map(|(n, payload)| Message::new("t", payload).id(n.to_string()))
            .collect();
        let all: Vec<&Message> = messages.iter().collect();
        let ids = |batch: &[&Message]| batch.iter().map(|m| m.message_id().to_owned()).collect::<String>();
        let cut: Vec<String> = batches(&all, 3).into_iter().map(ids).collect();
        assert_eq!(cut, ["0", "123", "45"]);
        assert!(batches(&[], 3).is_empty());
    }
}
