//! Reading, fenced: every statement compares the tokens in its own snapshot.

use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::{Server, statements, unsigned};
use crate::message::{Head, Lane, Message, Origin, Payload, Position, Shard};
use crate::source::{DueCursor, Heads, Messages, Owned, Range, Reader, Snapshot, SourceError};
use crate::sources::headers;

/// A read that has returned all that is due lets the next one begin this long before its own time, rows or no rows. Else a
/// relay that has seen none yet reads from the start each time, past all that was settled and not yet vacuumed. Rows that
/// become visible later than this after their due time are found by the sweep, within its pause.
const LATE_DUE_US: i64 = 1_000_000;

#[derive(Debug)]
pub(super) struct PostgresReader(pub(super) Arc<Server>);

#[async_trait]
impl Reader for PostgresReader {
    async fn heads(&self, owned: &[Owned], range: Range) -> Result<Heads, SourceError> {
        let query = sqlx::query(statements::HEADS)
            .bind(tokens(owned))
            .bind(range.after.0)
            .bind(range.up_to.map_or(i64::MAX, |position| position.0))
            .bind(i64::from(range.limit));
        let row = self.0.run("read the ready queue", |c| Box::pin(query.fetch_one(c)));
        Ok(decoded(&self.0, narrow(&row.await?, false))?)
    }

    async fn due(&self, owned: &[Owned], after: DueCursor, limit: u32) -> Result<Heads, SourceError> {
        let query = sqlx::query(statements::DUE)
            .bind(tokens(owned))
            .bind(after.due_at_us)
            .bind(after.position.0)
            .bind(i64::from(limit));
        let row = self.0.run("read the waiting messages", |c| Box::pin(query.fetch_one(c))).await?;
        let mut heads = decoded(&self.0, narrow(&row, true))?;
        if heads.rows.len() < limit as usize {
            let now: i64 = decoded(&self.0, row.try_get("now"))?;
            let passed = DueCursor { due_at_us: now - LATE_DUE_US, position: Position(i64::MAX) };
            heads.next = heads.next.max(Some(passed));
        }
        Ok(heads)
    }

    async fn lane(&self, owned: Owned, lane: &Lane, range: Range) -> Result<Heads, SourceError> {
        let Lane::Hash(hash) = lane else {
            return Err(SourceError::Operator(format!("lane {lane:?} does not belong to {}", self.0.place)));
        };
        let query = sqlx::query(statements::LANE)
            .bind(tokens(&[owned]))
            .bind(range.after.0)
            .bind(range.up_to.map_or(i64::MAX, |position| position.0))
            .bind(i64::from(range.limit))
            .bind(*hash);
        let row = self.0.run("read one lane of the ready queue", |c| Box::pin(query.fetch_one(c)));
        Ok(decoded(&self.0, narrow(&row.await?, false))?)
    }

    async fn messages(&self, owned: &[Owned], positions: &[Position]) -> Result<Messages, SourceError> {
        let ids: Vec<i64> = positions.iter().map(|position| position.0).collect();
        let query = sqlx::query(statements::MESSAGES).bind(tokens(owned)).bind(ids);
        let rows = self.0.run("read messages", |c| Box::pin(query.fetch_all(c))).await?;
        decoded(&self.0, wide(&rows))
    }
}

pub(super) fn tokens(owned: &[Owned]) -> Vec<i64> {
    owned.iter().map(|owned| owned.token).collect()
}

/// An answer that cannot be decoded comes from other tables than ours.
fn decoded<T>(server: &Server, answer: Result<T, sqlx::Error>) -> Result<T, SourceError> {
    answer.map_err(|error| super::errors::explain(&server.place, "understand an answer", error.into()))
}

pub(super) fn shards(numbers: Vec<i16>) -> Vec<Shard> {
    numbers.into_iter().map(Shard).collect()
}

fn narrow(row: &PgRow, waiting: bool) -> Result<Heads, sqlx::Error> {
    let mine = shards(row.try_get("mine")?);
    let xmin: i64 = row.try_get("xmin")?;
    let xmax = next_transaction(row.try_get("xmax")?, row.try_get("next_from_3")?);
    let ids: Vec<i64> = row.try_get("ids")?;
    let lanes: Vec<i64> = row.try_get("lanes")?;
    let sizes: Vec<i32> = row.try_get("sizes")?;
    let numbers: Vec<i16> = row.try_get("shards")?;
    let (attempts, tries, due) = if waiting {
        (row.try_get("attempts")?, row.try_get("tries")?, row.try_get("due")?)
    } else {
        (Vec::new(), Vec::new(), Vec::new())
    };
    let origin = |i: usize| match (attempts.get(i), tries.get(i)) {
        (Some(&attempts), Some(&tries)) => {
            Origin::Waiting { attempts: unsigned(attempts), tries: unsigned(tries) }
        }
        _ => Origin::Queue,
    };
    let columns = ids.iter().zip(lanes).zip(sizes).zip(numbers);
    let rows: Vec<Head> = columns
        .enumerate()
        .map(|(i, (((&id, lane), bytes), shard))| Head {
            position: Position(id),
            lane: Lane::Hash(lane),
            shard: Shard(shard),
            bytes: unsigned(bytes),
            origin: origin(i),
        })
        .collect();
    let next = due
        .last()
        .zip(ids.last())
        .map(|(&due_at_us, &id): (&i64, &i64)| DueCursor { due_at_us, position: Position(id) });
    Ok(Heads {
        rows,
        mine,
        snapshot: Snapshot { xmin: xmin.cast_unsigned(), xmax: xmax.cast_unsigned() },
        next,
    })
}

fn wide(rows: &[PgRow]) -> Result<Messages, sqlx::Error> {
    let mut mine = Vec::new();
    let mut found = Vec::with_capacity(rows.len());
    for row in rows {
        match row.try_get::<Option<Vec<i16>>, _>(0)? {
            Some(numbers) => mine = shards(numbers),
            None => found.push(message(row)?),
        }
    }
    Ok(Messages { found, mine })
}

fn message(row: &PgRow) -> Result<Message, sqlx::Error> {
    let id: i64 = row.try_get(1)?;
    Ok(Message {
        position: Position(id),
        message_id: row.try_get(2)?,
        topic: row.try_get(3)?,
        tag: row.try_get(4)?,
        key: row.try_get(5)?,
        aggregate_type: row.try_get(6)?,
        aggregate_id: row.try_get(7)?,
        event_type: row.try_get(8)?,
        schema_version: row.try_get(9)?,
        headers: headers::read(id, row.try_get(10)?),
        content_type: row.try_get(11)?,
        payload: payload(row.try_get(12)?, row.try_get(13)?),
        max_attempts: row.try_get::<Option<i32>, _>(14)?.map(unsigned),
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

/// The next transaction id to be given out, 64 bits wide: its lower 32 bits are three above the age of transaction 3, and
/// it is not below the snapshot's xmax.
fn next_transaction(xmax: i64, age_of_3: i64) -> i64 {
    xmax + ((age_of_3 + 3 - xmax) & 0xffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::next_transaction;

    #[test]
    fn the_next_transaction_is_found_across_epochs() {
        assert_eq!(next_transaction(750, 747), 750);
        assert_eq!(next_transaction(750, 752), 755);
        let epoch = 1 << 32;
        // Lower half beyond 2^31: the age is negative.
        assert_eq!(
            next_transaction(epoch + 0xf000_0000, i64::from(0xf000_0007_u32.wrapping_sub(3).cast_signed())),
            epoch + 0xf000_0007
        );
        // The lower half has just turned over.
        assert_eq!(next_transaction(epoch - 1, 2), epoch + 5);
    }
}
