//! SQLite: writing messages.

use std::borrow::Cow;

use super::{Bind, Insert, text};
use crate::message::{Due, Message, Payload};

const COLUMNS: usize = 18;

/// SQLite takes 32,766 values per statement.
pub(super) const BATCH: usize = 32_766 / COLUMNS;

const HEAD: &str = "\
insert into outbox (message_id, topic, tag, message_key, aggregate_type, aggregate_id, event_type, schema_version, \
headers, content_type, payload, payload_bytes, max_attempts, due_at, trace, trace_state, content_hash) values ";

const TAIL: &str = " on conflict (message_id) do nothing returning message_id";

/// Reads what decides about a repeat: the hash and, where plain SQL wrote no hash, what it is made from.
#[cfg(feature = "sqlite")]
pub(super) const STORED: &str = "\
select content_hash, topic, message_key, aggregate_type, aggregate_id, headers, content_type, \
cast(payload as blob), payload_bytes from outbox where message_id = ?1";

#[cfg(feature = "sqlite")]
pub(super) const INBOX_BEGIN: &str = "\
insert into inbox (consumer, message_id, content_hash, position) values (?1, ?2, ?3, ?4) \
on conflict (consumer, message_id) do nothing";

#[cfg(feature = "sqlite")]
pub(super) const INBOX_STORED: &str =
    "select content_hash from inbox where consumer = ?1 and message_id = ?2";

#[cfg(feature = "sqlite")]
pub(super) const INBOX_BURY: &str = "\
insert into inbox_dead (consumer, message_id, topic, body, headers, attempts, last_error) \
values (?1, ?2, ?3, ?4, ?5, ?6, ?7) \
on conflict (consumer, message_id) do update set attempts = excluded.attempts, last_error = excluded.last_error, \
dead_at = cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000";

pub(super) fn insert(message: &Message) -> Insert<'_> {
    insert_many(&[message])
}

pub(super) fn insert_many<'m>(messages: &[&'m Message]) -> Insert<'m> {
    let mut sql = String::with_capacity(HEAD.len() + TAIL.len() + messages.len() * 200);
    let mut binds = Vec::with_capacity(messages.len() * COLUMNS);
    sql.push_str(HEAD);
    for (at, message) in messages.iter().enumerate() {
        if at > 0 {
            sql.push_str(", ");
        }
        row(&mut sql, at * COLUMNS);
        values(&mut binds, message);
    }
    sql.push_str(TAIL);
    Insert { sql: Cow::Owned(sql), binds }
}

/// The placeholders of one row, which start after number `before`. SQLite's clock gives milliseconds.
fn row(sql: &mut String, before: usize) {
    let p = |n: usize| format!("?{}", before + n);
    let plain = |from: usize, to: usize| (from..=to).map(p).collect::<Vec<_>>().join(", ");
    sql.push_str(&format!(
        "({}, coalesce(cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 + {}, {}), {})",
        plain(1, 13),
        p(14),
        p(15),
        plain(16, 18)
    ));
}

fn values<'m>(binds: &mut Vec<Bind<'m>>, m: &'m Message) {
    let (delay_us, due_at_us) = match m.due {
        Due::AtOnce => (None, None),
        Due::AfterUs(us) => (Some(us), None),
        Due::AtUs(us) => (None, Some(us)),
    };
    let bytes = match &m.payload {
        Payload::Bytes(bytes) => Some(bytes.as_slice()),
        _ => None,
    };
    binds.extend([
        text(Some(&m.message_id)),
        text(Some(&m.topic)),
        text(m.tag.as_deref()),
        text(m.key.as_deref()),
        text(m.aggregate_type.as_deref()),
        text(m.aggregate_id.as_deref()),
        text(m.event_type.as_deref()),
        Bind::Int(m.schema_version.map(i64::from)),
        Bind::Text(m.headers_json().map(Cow::Owned)),
        text(m.effective_content_type()),
        text(m.payload.as_text()),
        Bind::Bytes(bytes),
        Bind::Int(m.max_attempts.map(i64::from)),
        Bind::Int(delay_us),
        Bind::Int(due_at_us),
        text(m.trace.as_deref()),
        text(m.trace_state.as_deref()),
        Bind::Int(Some(m.content_hash().0)),
    ]);
}
