//! What operators see and do.

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::inspect::PostgresInspect;
use super::poll::payload;
use super::{Server, unsigned};
use crate::inspect::{
    Admin, AuditEntry, Filter, ListState, Listing, Order, Page, Receipt, RelayRow, Selection, ShardRow,
    Shown, Status, Which,
};
use crate::message::Position;
use crate::source::{Conservation, DeadReason, Inspect, SourceError, Summary};
use crate::sources::headers;

#[derive(Debug)]
pub(super) struct PostgresAdmin(pub(super) PostgresInspect);

const RELAYS: &str = "
select r.relay, r.instance, r.version,
       (extract(epoch from r.started_at) * 1000000)::bigint,
       (extract(epoch from r.heartbeat_at) * 1000000)::bigint,
       (extract(epoch from r.expires_at - clock_timestamp()) * 1000000)::bigint,
       (select count(*) from outbox_shard s where s.owner = r.relay)::int,
       r.state
from outbox_relay r
order by r.expires_at < clock_timestamp(), r.instance, r.relay";

const SHARDS: &str = "
select s.shard, s.owner, r.instance, (extract(epoch from s.acquired_at) * 1000000)::bigint, s.unclean_ends, s.suspect
from outbox_shard s left join outbox_relay r on r.relay = s.owner
order by s.shard";

/// $1 ready, $2 waiting, $3 dead, $4 cancelled: which tables; $5 after, $6 limit, $7 topic, $8 key.
const OLDEST: &str = "
(select q.id from outbox_queue q
 where $1 and q.id > $5 and ($8::text is null or q.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7::text is null and $8 is null) or exists (
     select from outbox o where o.id = q.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by q.id limit $6)
union all
(select w.id from outbox_waiting w
 where $2 and w.id > $5 and ($8 is null or w.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = w.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by w.id limit $6)
union all
(select d.id from outbox_dead d
 where $3 and d.id > $5 and ($8 is null or d.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = d.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by d.id limit $6)
union all
(select x.id from outbox_cancelled x
 where $4 and x.id > $5
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = x.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by x.id limit $6)
order by 1 limit $6";

/// As [`OLDEST`], downwards from $5.
const NEWEST: &str = "
(select q.id from outbox_queue q
 where $1 and q.id < $5 and ($8::text is null or q.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7::text is null and $8 is null) or exists (
     select from outbox o where o.id = q.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by q.id desc limit $6)
union all
(select w.id from outbox_waiting w
 where $2 and w.id < $5 and ($8 is null or w.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = w.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by w.id desc limit $6)
union all
(select d.id from outbox_dead d
 where $3 and d.id < $5 and ($8 is null or d.key_hash = ('x' || substr(md5($8), 1, 16))::bit(64)::bigint)
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = d.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by d.id desc limit $6)
union all
(select x.id from outbox_cancelled x
 where $4 and x.id < $5
   and (($7 is null and $8 is null) or exists (
     select from outbox o where o.id = x.id and ($7 is null or o.topic = $7)
       and ($8 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $8)))
 order by x.id desc limit $6)
order by 1 desc limit $6";

/// $1 bucket: the next one at or below it that has receipts.
const BUCKET_BELOW: &str = "select max(r.bucket) from outbox_sent r where r.bucket <= $1";

/// $1 bucket: the next one at or above it that has receipts.
const BUCKET_ABOVE: &str = "select min(r.bucket) from outbox_sent r where r.bucket >= $1";

/// $1 bucket, $2 above, $3 below (both exclusive), $4 topic, $5 key. The ids of one bucket's receipts, at most 4,096.
const SENT_IN_BUCKET: &str = "
select distinct u.id
from outbox_sent r cross join lateral unnest(r.ids) u (id)
where r.bucket = $1 and u.id > $2 and u.id < $3
  and (($4::text is null and $5::text is null) or exists (
    select from outbox o where o.id = u.id and ($4 is null or o.topic = $4)
      and ($5 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $5)))
order by u.id";

/// $1 ids.
const STATUS: &str = "
select v.id, v.message_id, v.topic, coalesce(v.message_key, v.aggregate_type || ':' || v.aggregate_id),
       v.aggregate_type, v.aggregate_id, v.event_type, v.state,
       (extract(epoch from v.created_at) * 1000000)::bigint, v.attempts, v.tries,
       case when isfinite(v.due_at) then (extract(epoch from v.due_at) * 1000000)::bigint
            when v.due_at is not null then 9223372036854775807 end,
       v.last_error, (extract(epoch from v.sent_at) * 1000000)::bigint, v.sink, v.evidence,
       (extract(epoch from v.dead_at) * 1000000)::bigint, v.dead_reason,
       (extract(epoch from v.cancelled_at) * 1000000)::bigint, v.cancelled_by, v.cancel_reason
from outbox_status v
where v.id = any($1)
order by v.id";

/// $1 message ids.
const POSITIONS: &str = "select o.id from outbox o where o.message_id = any($1) order by o.id";

/// $1 id.
const DETAIL: &str = "
select o.tag, o.schema_version, o.headers, o.content_type,
       coalesce(octet_length(o.payload), octet_length(o.payload_bytes)), o.max_attempts, o.trace, o.trace_state,
       coalesce(q.key_hash, w.key_hash, d.key_hash), coalesce(q.shard, w.shard, d.shard),
       coalesce(w.holds_key, d.holds_key, false)
from outbox o
left join outbox_queue q on q.id = o.id
left join outbox_waiting w on w.id = o.id
left join outbox_dead d on d.id = o.id
where o.id = $1";

/// $1 id.
const PAYLOAD: &str = "select o.payload, o.payload_bytes from outbox o where o.id = $1";

/// $1 id.
const RECEIPTS: &str = "
select (extract(epoch from r.sent_at) * 1000000)::bigint, r.sink, r.relay, r.evidence[array_position(r.ids, $1)]
from outbox_sent r
where r.bucket = $1 >> 12 and $1 = any(r.ids)
order by r.sent_at";

/// $1 id.
const AUDIT: &str = "
select (extract(epoch from a.at) * 1000000)::bigint, a.actor, a.action, a.detail
from outbox_audit a
where a.message = $1
order by a.id";

/// $1 topic, $2 key, $3 reason, $4 limit.
const CHOOSE: &str = "
select d.id
from outbox_dead d
where ($3::text is null or d.reason = $3)
  and ($2::text is null or d.key_hash = ('x' || substr(md5($2), 1, 16))::bit(64)::bigint)
  and (($1::text is null and $2 is null) or exists (
    select from outbox o where o.id = d.id and ($1 is null or o.topic = $1)
      and ($2 is null or coalesce(o.message_key, o.aggregate_type || ':' || o.aggregate_id) = $2)))
order by d.id
limit $4";

/// $1 ids, $2 actor. Rows are locked in the order of their ids, so that two operators never wait for each other, and
/// everything is written from what the delete returned. The hold on the key stays: with `on_dead = block` the messages
/// behind it must not pass while it is on its way.
const REDRIVE: &str = "
with chosen as materialized (
  select d.id from outbox_dead d where d.id = any($1) order by d.id for update of d),
gone as (
  delete from outbox_dead d where d.id = any(array(select c.id from chosen c)) returning d.*),
waits as (
  insert into outbox_waiting (id, key_hash, due_at, bytes, shard, attempts, tries, holds_key, last_error)
  select g.id, g.key_hash, clock_timestamp(), g.bytes, g.shard, 0, g.tries, g.holds_key, g.last_error from gone g),
noted as (
  insert into outbox_audit (actor, action, message, detail)
  select $2, 'redrive', g.id, 'was dead: ' || g.reason || ', attempts ' || g.attempts || ', tries ' || g.tries
  from gone g order by g.id)
select count(*) from gone";

/// $1 ids, $2 actor, $3 reason.
const CANCEL: &str = "
with chosen as materialized (
  select d.id from outbox_dead d where d.id = any($1) order by d.id for update of d),
gone as (
  delete from outbox_dead d where d.id = any(array(select c.id from chosen c)) returning d.*),
cancels as (
  insert into outbox_cancelled (id, cancelled_by, reason) select g.id, $2, $3 from gone g),
noted as (
  insert into outbox_audit (actor, action, message, detail)
  select $2, 'cancel', g.id,
         coalesce($3 || '; ', '') || 'was dead: ' || g.reason || ', attempts ' || g.attempts || ', tries ' || g.tries
  from gone g order by g.id)
select count(*) from gone";

/// Buckets of receipts that one page of sent messages walks through at most.
const BUCKETS_PER_PAGE: u32 = 32;

#[async_trait]
impl Inspect for PostgresAdmin {
    async fn unaccounted(
        &self,
        from_bucket: i64,
        buckets: u32,
        limit: u32,
    ) -> Result<Conservation, SourceError> {
        self.0.unaccounted(from_bucket, buckets, limit).await
    }

    async fn summary(&self, cap: u64) -> Result<Summary, SourceError> {
        self.0.summary(cap).await
    }
}

#[async_trait]
impl Admin for PostgresAdmin {
    async fn relays(&self) -> Result<Vec<RelayRow>, SourceError> {
        let query = sqlx::query(RELAYS);
        self.rows("list the relays", move |c| Box::pin(query.fetch_all(c)), relay).await
    }

    async fn shards(&self) -> Result<Vec<ShardRow>, SourceError> {
        let query = sqlx::query(SHARDS);
        self.rows("list the shards", move |c| Box::pin(query.fetch_all(c)), shard).await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Listing, SourceError> {
        let (ids, next) = match filter.state {
            ListState::Sent => self.sent(filter, page).await?,
            _ => self.small(filter, page).await?,
        };
        let mut rows = self.status(ids).await?;
        if filter.state == ListState::Sent {
            // Sent back to pending since: its receipt is history.
            rows.retain(|row| row.state == "SENT");
        }
        if page.order == Order::Newest {
            rows.reverse();
        }
        Ok(Listing { rows, next: next.map(Position) })
    }

    async fn show(&self, which: &Which, payload: bool) -> Result<Option<Shown>, SourceError> {
        let id = match which {
            Which::Position(position) => Some(position.0),
            Which::MessageId(id) => self.positions(vec![id.clone()]).await?.first().copied(),
        };
        let Some(id) = id else { return Ok(None) };
        let Some(status) = self.status(vec![id]).await?.pop() else { return Ok(None) };
        self.shown(id, status, payload).await
    }

    async fn redrive(&self, selection: &Selection, actor: &str) -> Result<u64, SourceError> {
        let ids = self.chosen(selection).await?;
        let query = sqlx::query_scalar::<_, i64>(REDRIVE).bind(ids).bind(actor.to_owned());
        let count = self.server().run("redrive dead messages", |c| Box::pin(query.fetch_one(c))).await?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    async fn cancel(
        &self,
        selection: &Selection,
        actor: &str,
        reason: Option<&str>,
    ) -> Result<u64, SourceError> {
        let ids = self.chosen(selection).await?;
        let query = sqlx::query_scalar::<_, i64>(CANCEL)
            .bind(ids)
            .bind(actor.to_owned())
            .bind(reason.map(str::to_owned));
        let count = self.server().run("cancel dead messages", |c| Box::pin(query.fetch_one(c))).await?;
        Ok(u64::try_from(count).unwrap_or(0))
    }
}

impl PostgresAdmin {
    fn server(&self) -> &Server {
        &self.0.0
    }

    async fn rows<T>(
        &self,
        doing: &str,
        query: impl for<'c> FnOnce(&'c mut sqlx::PgConnection) -> crate::sources::pool::Answer<'c, Vec<PgRow>>
        + Send,
        read: fn(&PgRow) -> Result<T, sqlx::Error>,
    ) -> Result<Vec<T>, SourceError> {
        let rows = self.server().run(doing, query).await?;
        rows.iter()
            .map(read)
            .collect::<Result<_, _>>()
            .map_err(|error| super::errors::explain(&self.server().place, doing, error.into()))
    }

    async fn status(&self, ids: Vec<i64>) -> Result<Vec<Status>, SourceError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let query = sqlx::query(STATUS).bind(ids);
        self.rows("read the state of messages", move |c| Box::pin(query.fetch_all(c)), status).await
    }

    async fn positions(&self, message_ids: Vec<String>) -> Result<Vec<i64>, SourceError> {
        let query = sqlx::query_scalar::<_, i64>(POSITIONS).bind(message_ids);
        self.server().run("look messages up", |c| Box::pin(query.fetch_all(c))).await
    }

    /// A page from the small tables.
    async fn small(&self, filter: &Filter, page: Page) -> Result<(Vec<i64>, Option<i64>), SourceError> {
        let (sql, start) = match page.order {
            Order::Oldest => (OLDEST, i64::MIN),
            Order::Newest => (NEWEST, i64::MAX),
        };
        let state = filter.state;
        let query = sqlx::query_scalar::<_, i64>(sql)
            .bind(matches!(state, ListState::Ready | ListState::Pending))
            .bind(matches!(state, ListState::Waiting | ListState::Pending))
            .bind(state == ListState::Dead)
            .bind(state == ListState::Cancelled)
            .bind(page.after.map_or(start, |position| position.0))
            .bind(page.rows())
            .bind(filter.topic.clone())
            .bind(filter.key.clone());
        let ids = self.server().run("list messages", |c| Box::pin(query.fetch_all(c))).await?;
        let full = i64::try_from(ids.len()).is_ok_and(|len| len == page.rows());
        let next = ids.last().copied().filter(|_| full);
        Ok((ids, next))
    }

    /// A page from the receipts, bucket by bucket, so that its cost does not grow with the history.
    async fn sent(&self, filter: &Filter, page: Page) -> Result<(Vec<i64>, Option<i64>), SourceError> {
        let newest = page.order == Order::Newest;
        let (mut above, mut below) = (i64::MIN, i64::MAX);
        if let Some(Position(after)) = page.after {
            if newest { below = after } else { above = after }
        }
        let limit = usize::try_from(page.rows()).unwrap_or(usize::MAX);
        let mut ids: Vec<i64> = Vec::new();
        for _ in 0..BUCKETS_PER_PAGE {
            let (sql, from) = if newest {
                (BUCKET_BELOW, below.saturating_sub(1) >> 12)
            } else {
                (BUCKET_ABOVE, above.saturating_add(1) >> 12)
            };
            let query = sqlx::query_scalar::<_, Option<i64>>(sql).bind(from);
            let Some(bucket) =
                self.server().run("list sent messages", |c| Box::pin(query.fetch_one(c))).await?
            else {
                return Ok((ids, None));
            };
            let query = sqlx::query_scalar::<_, i64>(SENT_IN_BUCKET)
                .bind(bucket)
                .bind(above)
                .bind(below)
                .bind(filter.topic.clone())
                .bind(filter.key.clone());
            let mut found = self.server().run("list sent messages", |c| Box::pin(query.fetch_all(c))).await?;
            if newest {
                found.reverse();
            }
            ids.extend(found);
            if ids.len() >= limit {
                ids.truncate(limit);
                let last = ids.last().copied();
                return Ok((ids, last));
            }
            if newest { below = bucket << 12 } else { above = ((bucket + 1) << 12) - 1 }
        }
        Ok((ids, Some(if newest { below } else { above })))
    }

    async fn shown(&self, id: i64, status: Status, with_payload: bool) -> Result<Option<Shown>, SourceError> {
        let query = sqlx::query(DETAIL).bind(id);
        let rows = self.server().run("read a message", |c| Box::pin(query.fetch_all(c))).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut shown = detail(id, status, row)
            .map_err(|error| super::errors::explain(&self.server().place, "read a message", error.into()))?;
        let query = sqlx::query(RECEIPTS).bind(id);
        shown.receipts = self.rows("read receipts", move |c| Box::pin(query.fetch_all(c)), receipt).await?;
        let query = sqlx::query(AUDIT).bind(id);
        shown.audit =
            self.rows("read what operators did", move |c| Box::pin(query.fetch_all(c)), audit).await?;
        if with_payload {
            let query = sqlx::query(PAYLOAD).bind(id);
            let payloads = self
                .rows(
                    "read a payload",
                    move |c| Box::pin(query.fetch_all(c)),
                    |row| Ok(payload(row.try_get(0)?, row.try_get(1)?)),
                )
                .await?;
            shown.payload = payloads.into_iter().next();
        }
        Ok(Some(shown))
    }

    async fn chosen(&self, selection: &Selection) -> Result<Vec<i64>, SourceError> {
        match selection {
            Selection::Positions(positions) => Ok(positions.iter().map(|position| position.0).collect()),
            Selection::MessageIds(ids) => self.positions(ids.clone()).await,
            Selection::Dead { topic, key, reason, limit } => {
                let query = sqlx::query_scalar::<_, i64>(CHOOSE)
                    .bind(topic.clone())
                    .bind(key.clone())
                    .bind(reason.map(DeadReason::as_str))
                    .bind(i64::from(*limit));
                self.server().run("list dead messages", |c| Box::pin(query.fetch_all(c))).await
            }
        }
    }
}

fn relay(row: &PgRow) -> Result<RelayRow, sqlx::Error> {
    Ok(RelayRow {
        relay: row.try_get(0)?,
        instance: row.try_get(1)?,
        version: row.try_get(2)?,
        started_at_us: row.try_get(3)?,
        heartbeat_at_us: row.try_get(4)?,
        expires_in_us: row.try_get(5)?,
        shards: unsigned(row.try_get(6)?),
        state: row.try_get(7)?,
    })
}

fn shard(row: &PgRow) -> Result<ShardRow, sqlx::Error> {
    Ok(ShardRow {
        shard: row.try_get(0)?,
        owner: row.try_get(1)?,
        instance: row.try_get(2)?,
        acquired_at_us: row.try_get(3)?,
        unclean_ends: unsigned(row.try_get(4)?),
        suspect: row.try_get::<Option<i64>, _>(5)?.map(Position),
    })
}

fn status(row: &PgRow) -> Result<Status, sqlx::Error> {
    Ok(Status {
        position: Position(row.try_get(0)?),
        message_id: row.try_get(1)?,
        topic: row.try_get(2)?,
        key: row.try_get(3)?,
        aggregate_type: row.try_get(4)?,
        aggregate_id: row.try_get(5)?,
        event_type: row.try_get(6)?,
        state: row.try_get(7)?,
        created_at_us: row.try_get(8)?,
        attempts: unsigned(row.try_get(9)?),
        tries: row.try_get::<Option<i32>, _>(10)?.map(unsigned),
        due_at_us: row.try_get(11)?,
        last_error: row.try_get(12)?,
        sent_at_us: row.try_get(13)?,
        sink: row.try_get(14)?,
        evidence: row.try_get(15)?,
        dead_at_us: row.try_get(16)?,
        dead_reason: row.try_get(17)?,
        cancelled_at_us: row.try_get(18)?,
        cancelled_by: row.try_get(19)?,
        cancel_reason: row.try_get(20)?,
    })
}

fn detail(id: i64, status: Status, row: &PgRow) -> Result<Shown, sqlx::Error> {
    let lane = row.try_get::<Option<i64>, _>(8)?.zip(row.try_get::<Option<i16>, _>(9)?);
    Ok(Shown {
        status,
        tag: row.try_get(0)?,
        schema_version: row.try_get(1)?,
        headers: headers::read(id, row.try_get(2)?),
        content_type: row.try_get(3)?,
        payload_bytes: row.try_get::<Option<i32>, _>(4)?.map(|bytes| u64::from(unsigned(bytes))),
        payload: None,
        max_attempts: row.try_get::<Option<i32>, _>(5)?.map(unsigned),
        trace: row.try_get(6)?,
        trace_state: row.try_get(7)?,
        lane: lane.map(|(hash, shard)| format!("{hash:016x} in shard {shard}")),
        holds_key: row.try_get(10)?,
        receipts: Vec::new(),
        audit: Vec::new(),
    })
}

fn receipt(row: &PgRow) -> Result<Receipt, sqlx::Error> {
    Ok(Receipt {
        sent_at_us: row.try_get(0)?,
        sink: row.try_get(1)?,
        relay: row.try_get(2)?,
        evidence: row.try_get(3)?,
    })
}

fn audit(row: &PgRow) -> Result<AuditEntry, sqlx::Error> {
    Ok(AuditEntry {
        at_us: row.try_get(0)?,
        actor: row.try_get(1)?,
        action: row.try_get(2)?,
        detail: row.try_get(3)?,
    })
}
