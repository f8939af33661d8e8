//! Counts, for people, metrics and the conservation sweep.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Row;

use super::File;
use crate::message::Position;
use crate::source::{Conservation, Inspect, SourceError, Summary};

#[derive(Debug)]
pub(super) struct SqliteInspect(pub(super) Arc<File>);

/// ?1 first id, ?2 first id beyond. By bucket: how many messages there are, and how many of them nothing accounts for.
const COUNTS: &str = "
select c.bucket, sum(c.there), sum(c.there - c.accounted)
from (select id >> 12 as bucket, count(*) as there, 0 as accounted
      from outbox where id >= ?1 and id < ?2 group by 1
      union all
      select id >> 12, 0, count(*) from outbox_queue join outbox using (id) where id >= ?1 and id < ?2 group by 1
      union all
      select id >> 12, 0, count(*) from outbox_waiting join outbox using (id) where id >= ?1 and id < ?2 group by 1
      union all
      select id >> 12, 0, count(*) from outbox_dead join outbox using (id) where id >= ?1 and id < ?2 group by 1
      union all
      select id >> 12, 0, count(*) from outbox_cancelled join outbox using (id) where id >= ?1 and id < ?2 group by 1
      union all
      select bucket, 0, sum(n) from outbox_sent where bucket >= ?1 >> 12 and bucket < ?2 >> 12 group by 1) c
group by c.bucket
order by c.bucket";

/// ?1 first id, ?2 first id beyond, both borders of one bucket, ?3 limit.
const SETS: &str = "
select id from outbox where id >= ?1 and id < ?2
except
select id from (
  select id from outbox_queue where id >= ?1 and id < ?2
  union all
  select id from outbox_waiting where id >= ?1 and id < ?2
  union all
  select id from outbox_dead where id >= ?1 and id < ?2
  union all
  select id from outbox_cancelled where id >= ?1 and id < ?2
  union all
  select j.value from outbox_sent r cross join json_each(r.ids) j where r.bucket = ?1 >> 12)
order by 1
limit ?3";

const LAST: &str = "select coalesce(max(id), 0) from outbox";

/// ?1 cap.
const SUMMARY: &str = "
select (select count(*) from (select 1 from outbox_queue limit ?1)) as ready,
       (select count(*) from (select 1 from outbox_waiting limit ?1)) as waiting,
       (select count(*) from (select 1 from outbox_dead limit ?1)) as dead,
       c.now - (select min(t) from (
          select created_at as t from outbox where id = (select min(id) from outbox_queue)
          union all
          select min(due_at) from outbox_waiting where due_at <= c.now)) as lag,
       (select coalesce(sum(n), 0) from outbox_sent where sent_at > c.now - 300000000) as sent_5m
from (select cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 as now) c";

#[async_trait]
impl Inspect for SqliteInspect {
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
            .read("count messages", |c| {
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

impl SqliteInspect {
    /// The highest id, and (bucket, messages, messages that nothing accounts for) of the ids in between.
    async fn counts(&self, first: i64, beyond: i64) -> Result<(i64, Vec<(i64, i64, i64)>), SourceError> {
        let query = sqlx::query(COUNTS).bind(first).bind(beyond);
        self.0
            .read("count what is accounted for", |c| {
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
        let ids = self.0.read("list what nothing accounts for", |c| Box::pin(query.fetch_all(c))).await?;
        Ok(ids.into_iter().map(Position).collect())
    }
}
