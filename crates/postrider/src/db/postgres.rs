//! PostgreSQL: writing messages.

use std::borrow::Cow;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::{Bind, Insert, text};
use crate::message::{Due, Message, Payload};

// "epoch" plus an interval of microseconds depends on no time zone. A delay counts from the statement, not from the
// start of the transaction.
const INSERT: &str = "\
insert into outbox (message_id, topic, tag, message_key, aggregate_type, aggregate_id, event_type, schema_version, \
headers, content_type, payload, payload_bytes, max_attempts, due_at, trace, trace_state, content_hash) \
values ($1::text, $2::text, $3::text, $4::text, $5::text, $6::text, $7::text, $8::bigint::int, $9::text, $10::text, \
$11::text, $12::bytea, $13::bigint::int, \
coalesce(clock_timestamp() + $14::bigint * interval '1 microsecond', \
timestamptz 'epoch' + $15::bigint * interval '1 microsecond'), $16::text, $17::text, $18::bigint) \
on conflict (message_id) do nothing returning message_id";

// The sort stands below the insert, so that the identity column counts in the order given.
const INSERT_MANY: &str = "\
insert into outbox (message_id, topic, tag, message_key, aggregate_type, aggregate_id, event_type, schema_version, \
headers, content_type, payload, payload_bytes, max_attempts, due_at, trace, trace_state, content_hash) \
select message_id, topic, tag, message_key, aggregate_type, aggregate_id, event_type, schema_version::int, \
headers, content_type, payload, decode(payload_base64, 'base64'), max_attempts::int, \
coalesce(clock_timestamp() + delay_us::bigint * interval '1 microsecond', \
timestamptz 'epoch' + due_at_us::bigint * interval '1 microsecond'), trace, trace_state, content_hash::bigint \
from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], \
$9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[], $17::text[], \
$18::text[]) with ordinality m (message_id, topic, tag, message_key, aggregate_type, aggregate_id, event_type, \
schema_version, headers, content_type, payload, payload_base64, max_attempts, delay_us, due_at_us, trace, \
trace_state, content_hash, place) \
order by place \
on conflict (message_id) do nothing returning message_id";

/// Reads what decides about a repeat. Producers may read these three columns and no other.
#[cfg(feature = "postgres")]
pub(super) const STORED: &str = "select content_hash from outbox where message_id = $1::text";

/// Compares the content of a message that plain SQL wrote, without a right to read it.
#[cfg(feature = "postgres")]
pub(super) const SAME: &str =
    "select outbox_same_content($1::text, $2::text, $3::text, $4::text, $5::text, $6::bytea)";

#[cfg(feature = "postgres")]
pub(super) const INBOX_BEGIN: &str = "\
insert into inbox (consumer, message_id, content_hash, position) \
values ($1::text, $2::text, $3::bigint, $4::bigint) on conflict (consumer, message_id) do nothing";

#[cfg(feature = "postgres")]
pub(super) const INBOX_STORED: &str =
    "select content_hash from inbox where consumer = $1::text and message_id = $2::text";

#[cfg(feature = "postgres")]
pub(super) const INBOX_BURY: &str = "\
insert into inbox_dead as d (consumer, message_id, topic, body, headers, attempts, last_error) \
values ($1::text, $2::text, $3::text, $4::bytea, $5::text, $6::bigint::int, $7::text) \
on conflict (consumer, message_id) do update set attempts = excluded.attempts, last_error = excluded.last_error, \
dead_at = clock_timestamp()";

pub(super) fn insert(m: &Message) -> Insert<'_> {
    let (delay_us, due_at_us) = due(m);
    let binds = vec![
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
        Bind::Bytes(bytes(&m.payload)),
        Bind::Int(m.max_attempts.map(i64::from)),
        Bind::Int(delay_us),
        Bind::Int(due_at_us),
        text(m.trace.as_deref()),
        text(m.trace_state.as_deref()),
        Bind::Int(Some(m.content_hash().0)),
    ];
    Insert { sql: Cow::Borrowed(INSERT), binds }
}

pub(super) fn insert_many<'m>(messages: &[&'m Message]) -> Insert<'m> {
    let column = |value: &dyn Fn(&'m Message) -> Option<Cow<'m, str>>| {
        Bind::TextArray(messages.iter().map(|m| value(m)).collect())
    };
    let number = |n: Option<i64>| n.map(|n| Cow::Owned(n.to_string()));
    let binds = vec![
        column(&|m| Some(Cow::Borrowed(&m.message_id))),
        column(&|m| Some(Cow::Borrowed(&m.topic))),
        column(&|m| m.tag.as_deref().map(Cow::Borrowed)),
        column(&|m| m.key.as_deref().map(Cow::Borrowed)),
        column(&|m| m.aggregate_type.as_deref().map(Cow::Borrowed)),
        column(&|m| m.aggregate_id.as_deref().map(Cow::Borrowed)),
        column(&|m| m.event_type.as_deref().map(Cow::Borrowed)),
        column(&|m| number(m.schema_version.map(i64::from))),
        column(&|m| m.headers_json().map(Cow::Owned)),
        column(&|m| m.effective_content_type().map(Cow::Borrowed)),
        column(&|m| m.payload.as_text().map(Cow::Borrowed)),
        column(&|m| bytes(&m.payload).map(|b| Cow::Owned(BASE64.encode(b)))),
        column(&|m| number(m.max_attempts.map(i64::from))),
        column(&|m| number(due(m).0)),
        column(&|m| number(due(m).1)),
        column(&|m| m.trace.as_deref().map(Cow::Borrowed)),
        column(&|m| m.trace_state.as_deref().map(Cow::Borrowed)),
        column(&|m| number(Some(m.content_hash().0))),
    ];
    Insert { sql: Cow::Borrowed(INSERT_MANY), binds }
}

fn due(m: &Message) -> (Option<i64>, Option<i64>) {
    match m.due {
        Due::AtOnce => (None, None),
        Due::AfterUs(us) => (Some(us), None),
        Due::AtUs(us) => (None, Some(us)),
    }
}

fn bytes(payload: &Payload) -> Option<&[u8]> {
    match payload {
        Payload::Bytes(bytes) => Some(bytes),
        _ => None,
    }
}
