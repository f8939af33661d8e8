//! Counts, for people, metrics and the conservation sweep.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Row;

use super::Server;
use crate::message::Position;
use crate::source::{Conservation, Inspect, SourceError, Summary};

#[derive(Debug)]
pub(super) struct PostgresInspect(pub(super) Arc<Server>);

/// $1 first id, $2 first id beyond. By bucket: how many messages there are, and how many of them nothing accounts for.
/// One statement is one snapshot, so a message that moves between the tables does no harm. A row of a small table counts only
/// with its message: one whose message was deleted by hand stays, and would hide another message that is unaccounted for.
const COUNTS: &str = "
select c.bucket, sum(c.there)::bigint as there, sum(c.there - c.accounted)::bigint as off
from (select o.id >> 12 as bucket, count(*) as there, 0 as accounted
      from outbox o where o.id >= $1 and o.id < $2 group by 1
      union all
      select q.id >> 12, 0, count(*) from outbox_queue q join outbox o using (id)
      where q.id >= $1 and q.id < $2 group by 1
      union all
      select w.id >> 12, 0, count(*) from outbox_waiting w join outbox o using (id)
      where w.id >= $1 and w.id < $2 group by 1
      union all
      select d.id >> 12, 0, count(*) from outbox_dead d join outbox o using (id)
      where d.id >= $1 and d.id < $2 group by 1
      union all
      select x.id >> 12, 0, count(*) from outbox_cancelled x join outbox o using (id)
      where x.id >= $1 and x.id < $2 group by 1
      union all
      select r.bucket, 0, sum(r.n) from outbox_sent r where r.bucket >= $1 >> 12 and r.bucket < $2 >> 12 group by 1) c
group by c.bucket
order by c.bucket";

/// $1 first id, $2 first id beyond, both borders of one bucket, $3 limit.
const SETS: &str = "
select u.id
from (select o.id from outbox o where o.id >= $1 and o.id < $2
      except
      (select q.id from outbox_queue q where q.id >= $1 and q.id < $2
       union all
       select w.id from outbox_waiting w where w.id >= $1 and w.id < $2
       union all
       select d.id from outbox_dead d where d.id >= $1 and d.id < $2
       union all
       select x.id from outbox_cancelled x where x.id >= $1 and x.id < $2
       union all
       select unnest(r.ids) from outbox_sent r where r.bucket = $1 >> 12)) u
order by u.id
limit $3";

const LAST: &str = "select coalesce(max(o.id), 0) from outbox o";

/// $1 cap.
const SUMMARY: &str = "
select (select count(*) from (select from outbox_queue limit $1) q) as ready,
       (select count(*) from (select from outbox_waiting limit $1) w) as waiting,
       (select count(*) from (select from outbox_dead limit $1) d) as dead,
       (extract(epoch from clock_timestamp() - least(
          (select o.created_at from outbox o where o.id = (select min(q.id) from outbox_queue q)),
          (select min(w.due_at) from outbox_waiting w where w.due_at <= statement_timestamp()))) * 1000000)::bigint as lag,
       (select coalesce(sum(r.n), 0)::bigint from outbox_sent r
        where r.sent_at > statement_timestamp() - interval '5 minutes') as sent_5m";

#[async_trait]
impl Inspect for PostgresInspect {
    async fn unaccounted(
        &self,
        from_bucket: i64,
        buckets: u32,
        limit: u32,
    ) -> Result<Conservation, SourceError> {
        let beyond = from_bucket.saturating_add(i64::from(buckets));
        let (last, counts) = self.counts(from_bucket << 12, beyond << 12).await?;
        let mut found = Conservation {
            next_bucket: if beyond <= last >> 12 { beyond } else { 0 },
            ..Conservation::default()
        };
        for (bucket, there, off) in counts {
            if off != 0 {
                let room = (limit.max(1) as usize).saturating_sub(found.unaccounted.len());
                if room == 0 {
                    found.next_bucket = bucket;
                    break;
                }
                found.unaccounted.extend(self.set(bucket, room).await?);
            }
            found.looked_at += u64::try_from(there).unwrap_or(0);
        }
        Ok(found)
    }

    async fn summary(&self, cap: u64) -> Result<Summary, SourceError> {
        let query = sqlx::query(SUMMARY).bind(i64::try_from(cap).unwrap_or(i64::MAX));
        self.0
            .run("count messages", |c| {
                Box::pin(async move {
                    let row = query.fetch_one(c).await?;
                    let count = |name: &str| {
                        row.try_get::<i64, _>(name).map(|count| u64::try_from(count).unwrap_or(0))
                    };
                    let lag: Option<i64> = row.try_get("lag")?;
                    Ok(Summary {
                        ready: count("ready")?,
                        waiting: count("waiting")?,
                        dead: count("dead")?,
                        lag: lag.map(|lag| Duration::from_micros(u64::try_from(lag).unwrap_or(0))),
                        sent_5m: count("sent_5m")?,
                    })
                })
            })
            .await
    }
}

impl PostgresInspect {
    /// The highest id, and (bucket, messages, messages that nothing accounts for) of the ids in between.
    async fn counts(&self, first: i64, beyond: i64) -> Result<(i64, Vec<(i64, i64, i64)>), SourceError> {
        let query = sqlx::query(COUNTS).bind(first).bind(beyond);
        self.0
            .run("count what is accounted for", |c| {
                Box::pin(async move {
                    let last = sqlx::query_scalar::<_, i64>(LAST).fetch_one(&mut *c).await?;
                    let rows = query.fetch_all(c).await?;
                    let counts =
                        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?)));
                    Ok((last, counts.collect::<Result<_, sqlx::Error>>()?))
                })
            })
            .await
    }

    async fn set(&self, bucket: i64, room: usize) -> Result<Vec<Position>, SourceError> {
        let query = sqlx::query_scalar::<_, i64>(SETS)
            .bind(bucket << 12)
            .bind((bucket + 1) << 12)
            .bind(i64::try_from(room).unwrap_or(i64::MAX));
        let ids = self.0.run("list what nothing accounts for", |c| Box::pin(query.fetch_all(c))).await?;
        Ok(ids.into_iter().map(Position).collect())
    }
}
