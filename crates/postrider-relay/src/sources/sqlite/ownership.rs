//! The one shard and its lease. Each call is one write transaction, so nothing can happen in between.

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use super::settle::OURS;
use super::{File, SHARD, begin, commit, micros, token, unsigned};
use crate::message::{Lane, Position, Shard};
use crate::source::{Acquired, Held, Identity, Owned, Ownership, RelayState, Renewed, SourceError};
use crate::sources::{even_share, random_token, storable};

#[derive(Debug)]
pub(super) struct SqliteOwnership {
    pub(super) file: Arc<File>,
    pub(super) identity: Identity,
}

/// Longest state a relay may report.
const STATE_CHARACTERS: usize = 16_384;

/// ?1 relay, ?2 instance, ?3 version, ?4 lease, ?5 state or null = as it was.
const ENROL: &str = "
insert into outbox_relay (relay, instance, version, started_at, heartbeat_at, expires_at, state)
select ?1, ?2, ?3, c.now, c.now, c.now + ?4, coalesce(?5, '{}')
from (select cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 as now) c
where true
on conflict (relay) do update
set heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at, state = coalesce(?5, state)";

/// ?1 relay. Rows that expired over a day ago.
const TIDY: &str = "
delete from outbox_relay
where relay <> ?1 and expires_at < cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 - 86400000000";

/// ?1 relay. How many shards each of the other live relays owns.
const OTHERS: &str = "
select (select count(*) from outbox_shard s where s.owner = r.relay)
from outbox_relay r
where r.relay <> ?1 and r.expires_at > cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000";

/// Its owner, when the shard is free: null, or one whose row is missing or has expired.
const FREE: &str = "
select s.owner
from outbox_shard s
where s.shard = 0 and (s.owner is null or not exists (
  select 1 from outbox_relay r
  where r.relay = s.owner and r.expires_at > cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000))";

/// ?1 relay, ?2 the token it knows, or null. The answer to an earlier acquisition was lost: nobody works on the shard.
const FREE_STRANDED: &str = "
update outbox_shard set owner = null, token = null, acquired_at = null
where owner = ?1 and (?2 is null or token <> ?2)";

/// ?1 relay, ?2 token.
const TAKE: &str = "
update outbox_shard
set unclean_ends = unclean_ends + (owner is not null), owner = ?1, token = ?2,
    acquired_at = cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000
where shard = 0";

const LIVE: &str = "
select count(*) from outbox_relay
where expires_at > cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000";

/// ?1 token.
const RELEASE: &str = "
update outbox_shard
set owner = null, token = null, acquired_at = null, unclean_ends = 0, suspect = null
where shard = 0 and token = ?1";

/// ?1 relay.
const RELEASE_ALL: &str = "
update outbox_shard
set owner = null, token = null, acquired_at = null, unclean_ends = 0, suspect = null
where owner = ?1";

/// ?1 relay.
const LEAVE: &str = "delete from outbox_relay where relay = ?1";

/// ?1 token, ?2 id to go on after, ?3 limit.
const HELD: &str = "
select h.id, h.lane, h.dead
from (select * from (select w.id, w.lane, 0 as dead from outbox_waiting w
                     where w.holds_key and w.id > ?2 order by w.id limit ?3)
      union all
      select * from (select d.id, d.lane, 1 from outbox_dead d
                     where d.holds_key and d.id > ?2 order by d.id limit ?3)) h
where exists (select 1 from outbox_shard s where s.shard = 0 and s.token = ?1)
order by h.id
limit ?3";

#[async_trait]
impl Ownership for SqliteOwnership {
    async fn acquire(&self, have: &[Owned]) -> Result<Acquired, SourceError> {
        let known = token(have);
        let fresh = Owned { shard: SHARD, token: random_token()? };
        let (who, patience) = (self.identity.clone(), self.file.patience);
        self.file
            .write("take the shard", |c| {
                Box::pin(async move {
                    begin(c, patience).await?;
                    enrol(c, &who, None).await?;
                    sqlx::query(TIDY).bind(who.relay).execute(&mut *c).await?;
                    sqlx::query(FREE_STRANDED).bind(who.relay).bind(known).execute(&mut *c).await?;
                    let others: Vec<i64> =
                        sqlx::query_scalar(OTHERS).bind(who.relay).fetch_all(&mut *c).await?;
                    let others: Vec<u32> = others.into_iter().map(unsigned).collect();
                    let live_relays = u32::try_from(others.len()).unwrap_or(u32::MAX).saturating_add(1);
                    let mut acquired = Acquired { live_relays, shards: 1, ..Acquired::default() };
                    let free: Option<Option<i64>> = sqlx::query_scalar(FREE).fetch_optional(&mut *c).await?;
                    if let Some(owner) = free.filter(|_| known.is_none() && even_share(1, &others) > 0) {
                        sqlx::query(TAKE).bind(who.relay).bind(fresh.token).execute(&mut *c).await?;
                        acquired.owned.push(fresh);
                        acquired.unclean.extend(owner.map(|_| SHARD));
                    }
                    commit(c).await?;
                    Ok(acquired)
                })
            })
            .await
    }

    async fn held(
        &self,
        owned: &[Owned],
        after: Option<(Shard, Position)>,
        limit: u32,
    ) -> Result<Vec<Held>, SourceError> {
        let Some(token) = token(owned) else { return Ok(Vec::new()) };
        let query = sqlx::query(HELD)
            .bind(token)
            .bind(after.map_or(i64::MIN, |(_, position)| position.0))
            .bind(i64::from(limit));
        self.file
            .read("read which keys are held", |c| {
                Box::pin(async move {
                    let rows = query.fetch_all(c).await?;
                    rows.iter()
                        .map(|row| {
                            let lane: String = row.try_get(1)?;
                            Ok(Held {
                                shard: SHARD,
                                position: Position(row.try_get(0)?),
                                lane: Lane::Key(lane.into()),
                                dead: row.try_get::<i64, _>(2)? == 1,
                            })
                        })
                        .collect()
                })
            })
            .await
    }

    async fn renew(&self, owned: &[Owned], state: &RelayState) -> Result<Renewed, SourceError> {
        let (who, patience) = (self.identity.clone(), self.file.patience);
        let (state, token) = (storable(&state.json, STATE_CHARACTERS), token(owned));
        self.file
            .write("renew the lease", |c| {
                Box::pin(async move {
                    begin(c, patience).await?;
                    enrol(c, &who, Some(state)).await?;
                    let mut renewed = Renewed::default();
                    if let Some(token) = token
                        && sqlx::query_scalar::<_, i64>(OURS).bind(token).fetch_one(&mut *c).await? == 1
                    {
                        renewed.mine.push(SHARD);
                    }
                    renewed.live_relays = unsigned(sqlx::query_scalar(LIVE).fetch_one(&mut *c).await?);
                    commit(c).await?;
                    Ok(renewed)
                })
            })
            .await
    }

    async fn release(&self, owned: &[Owned]) -> Result<(), SourceError> {
        let Some(token) = token(owned) else { return Ok(()) };
        let patience = self.file.patience;
        self.file
            .write("give the shard back", |c| {
                Box::pin(async move {
                    begin(c, patience).await?;
                    sqlx::query(RELEASE).bind(token).execute(&mut *c).await?;
                    commit(c).await
                })
            })
            .await
    }

    async fn leave(&self) -> Result<(), SourceError> {
        let (relay, patience) = (self.identity.relay, self.file.patience);
        self.file
            .write("sign this relay off", |c| {
                Box::pin(async move {
                    begin(c, patience).await?;
                    sqlx::query(RELEASE_ALL).bind(relay).execute(&mut *c).await?;
                    sqlx::query(LEAVE).bind(relay).execute(&mut *c).await?;
                    commit(c).await
                })
            })
            .await
    }
}

async fn enrol(c: &mut SqliteConnection, who: &Identity, state: Option<String>) -> Result<(), sqlx::Error> {
    sqlx::query(ENROL)
        .bind(who.relay)
        .bind(storable(&who.instance, 200))
        .bind(storable(&who.version, 100))
        .bind(micros(who.lease))
        .bind(state)
        .execute(c)
        .await
        .map(drop)
}
