//! Reading, fenced: every statement compares the token in its own snapshot.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Row;
use sqlx::sqlite::SqliteRow;

use super::{File, SHARD, json, token, unsigned};
use crate::message::{Head, Lane, Message, Origin, Payload, Position};
use crate::source::{DueCursor, Heads, Messages, Owned, Range, Reader, Snapshot, SourceError};
use crate::sources::headers;

#[derive(Debug)]
pub(super) struct SqliteReader(pub(super) Arc<File>);

/// ?1 token, ?2 after (exclusive), ?3 up to (inclusive), ?4 limit. No row = not ours; a row of nulls = nothing there.
const HEADS: &str = "
select q.id, q.lane, q.bytes
from outbox_shard s
left join (select id, lane, bytes from outbox_queue where id > ?2 and id <= ?3 order by id limit ?4) q on true
where s.shard = 0 and s.token = ?1
order by q.id";

/// As [`HEADS`], for one lane: ?5.
const LANE: &str = "
select q.id, q.lane, q.bytes
from outbox_shard s
left join (select id, lane, bytes from outbox_queue where id > ?2 and id <= ?3 and lane = ?5 order by id limit ?4) q
  on true
where s.shard = 0 and s.token = ?1
order by q.id";

/// ?1 token, ?2 and ?3 the cursor, ?4 limit.
const DUE: &str = "
select w.id, w.lane, w.bytes, w.attempts, w.tries, w.due_at
from outbox_shard s
left join (select id, lane, bytes, attempts, tries, due_at
           from outbox_waiting
           where (due_at, id) > (?2, ?3)
             and due_at <= cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000
           order by due_at, id limit ?4) w on true
where s.shard = 0 and s.token = ?1
order by w.due_at, w.id";

/// ?1 token, ?2 ids as a JSON array. The first row says that the shard is ours, the others are a message each.
const MESSAGES: &str = "
select 1, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null
from outbox_shard s where s.shard = 0 and s.token = ?1
union all
select 0, o.id, o.message_id, o.topic, o.tag, coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id),
       o.aggregate_type, o.aggregate_id, o.event_type, o.schema_version, o.headers, o.content_type,
       o.payload, o.payload_bytes, o.max_attempts, o.trace, o.trace_state, o.created_at
from json_each(?2) j cross join outbox o on o.id = j.value";

#[async_trait]
impl Reader for SqliteReader {
    async fn heads(&self, owned: &[Owned], range: Range) -> Result<Heads, SourceError> {
        let Some(token) = token(owned) else { return Ok(nothing()) };
        let query = sqlx::query(HEADS)
            .bind(token)
            .bind(range.after.0)
            .bind(range.up_to.map_or(i64::MAX, |position| position.0))
            .bind(i64::from(range.limit));
        let rows = self.0.read("read the ready queue", |c| Box::pin(query.fetch_all(c))).await?;
        self.decoded(narrow(&rows, false))
    }

    async fn due(&self, owned: &[Owned], after: DueCursor, limit: u32) -> Result<Heads, SourceError> {
        let Some(token) = token(owned) else { return Ok(nothing()) };
        let query =
            sqlx::query(DUE).bind(token).bind(after.due_at_us).bind(after.position.0).bind(i64::from(limit));
        let rows = self.0.read("read the waiting messages", |c| Box::pin(query.fetch_all(c))).await?;
        self.decoded(narrow(&rows, true))
    }

    async fn lane(&self, owned: Owned, lane: &Lane, range: Range) -> Result<Heads, SourceError> {
        let Lane::Key(key) = lane else {
            return Err(SourceError::Operator(format!("lane {lane:?} does not belong to {}", self.0.place)));
        };
        let Some(token) = token(&[owned]) else { return Ok(nothing()) };
        let query = sqlx::query(LANE)
            .bind(token)
            .bind(range.after.0)
            .bind(range.up_to.map_or(i64::MAX, |position| position.0))
            .bind(i64::from(range.limit))
            .bind(key.to_string());
        let rows = self.0.read("read one lane of the ready queue", |c| Box::pin(query.fetch_all(c))).await?;
        self.decoded(narrow(&rows, false))
    }

    async fn messages(&self, owned: &[Owned], positions: &[Position]) -> Result<Messages, SourceError> {
        let Some(token) = token(owned) else { return Ok(Messages { found: Vec::new(), mine: Vec::new() }) };
        let ids: Vec<i64> = positions.iter().map(|position| position.0).collect();
        let query = sqlx::query(MESSAGES).bind(token).bind(json(&ids));
        let rows = self.0.read("read messages", |c| Box::pin(query.fetch_all(c))).await?;
        self.decoded(wide(&rows))
    }
}

impl SqliteReader {
    /// An answer that cannot be decoded comes from other tables than ours.
    fn decoded<T>(&self, answer: Result<T, sqlx::Error>) -> Result<T, SourceError> {
        answer.map_err(|error| super::errors::explain(&self.0.place, "understand an answer", error.into()))
    }
}

fn nothing() -> Heads {
    Heads { rows: Vec::new(), mine: Vec::new(), snapshot: Snapshot::ORDERED, next: None }
}

fn narrow(rows: &[SqliteRow], waiting: bool) -> Result<Heads, sqlx::Error> {
    let mut heads = nothing();
    if !rows.is_empty() {
        heads.mine.push(SHARD);
    }
    for row in rows {
        let Some(id) = row.try_get::<Option<i64>, _>(0)? else { continue };
        let position = Position(id);
        let origin = if waiting {
            heads.next = Some(DueCursor { due_at_us: row.try_get(5)?, position });
            Origin::Waiting { attempts: unsigned(row.try_get(3)?), tries: unsigned(row.try_get(4)?) }
        } else {
            Origin::Queue
        };
        let lane: String = row.try_get(1)?;
        heads.rows.push(Head {
            position,
            lane: Lane::Key(lane.into()),
            shard: SHARD,
            bytes: unsigned(row.try_get(2)?),
            origin,
        });
    }
    Ok(heads)
}

fn wide(rows: &[SqliteRow]) -> Result<Messages, sqlx::Error> {
    let mut messages = Messages { found: Vec::with_capacity(rows.len()), mine: Vec::new() };
    for row in rows {
        if row.try_get::<i64, _>(0)? == 1 {
            messages.mine.push(SHARD);
        } else {
            messages.found.push(message(row)?);
        }
    }
    Ok(messages)
}

fn message(row: &SqliteRow) -> Result<Message, sqlx::Error> {
    let id: i64 = row.try_get(1)?;
    let headers: Option<String> = row.try_get(10)?;
    Ok(Message {
        position: Position(id),
        message_id: row.try_get(2)?,
        topic: row.try_get(3)?,
        tag: row.try_get(4)?,
        key: row.try_get(5)?,
        aggregate_type: row.try_get(6)?,
        aggregate_id: row.try_get(7)?,
        event_type: row.try_get(8)?,
        schema_version: row
            .try_get::<Option<i64>, _>(9)?
            .map(|version| i32::try_from(version).unwrap_or(i32::MAX)),
        headers: headers::read(id, headers.as_deref()),
        content_type: row.try_get(11)?,
        payload: payload(row.try_get(12)?, row.try_get(13)?),
        max_attempts: row.try_get::<Option<i64>, _>(14)?.map(unsigned),
        trace: row.try_get(15)?,
        trace_state: row.try_get(16)?,
        created_at_us: row.try_get(17)?,
    })
}

/// The two payload columns as one value.
pub(super) fn payload(text: Option<String>, bytes: Option<Vec<u8>>) -> Payload {
    match (text, bytes) {
        (Some(text), _) => Payload::Text(Bytes::from(text)),
        (None, Some(bytes)) => Payload::Binary(Bytes::from(bytes)),
        (None, None) => Payload::Absent,
    }
}
