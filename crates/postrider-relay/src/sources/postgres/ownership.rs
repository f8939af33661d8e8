//! Shards and leases.
//!
//! A takeover is a transaction that locks what it relies on and then looks again, because its first look is from an
//! older snapshot: another relay may have taken the shard, or the owner may have renewed. It waits for nobody (`skip
//! locked`): a shard or relay row that is being written right now is not taken this time.

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::postgres::PgConnection;
use sqlx::{Connection, Row};

use super::poll::{shards, tokens};
use super::{Server, micros, statements};
use crate::message::{Lane, Position, Shard};
use crate::source::{Acquired, Held, Identity, Owned, Ownership, RelayState, Renewed, SourceError};
use crate::sources::{even_share, random_token, storable};

#[derive(Debug)]
pub(super) struct PostgresOwnership {
    pub(super) server: Arc<Server>,
    pub(super) identity: Identity,
}

/// Longest state a relay may report.
const STATE_CHARACTERS: usize = 16_384;

/// $1 relay, $2 instance, $3 version, $4 lease, $5 state or null = as it was. Removes rows that expired over a day ago.
const ENROL: &str = "
with old as (
  delete from outbox_relay r
  where r.relay in (select o.relay from outbox_relay o
                    where o.expires_at < clock_timestamp() - interval '1 day' and o.relay <> $1
                    for update skip locked))
insert into outbox_relay as r (relay, instance, version, expires_at, state)
values ($1, $2, $3, clock_timestamp() + $4 * interval '1 microsecond', coalesce($5, '{}'))
on conflict (relay) do update
set heartbeat_at = clock_timestamp(), expires_at = excluded.expires_at, state = coalesce($5, r.state)";

/// $1 relay, $2 the tokens it knows. How many shards there are, how many look free, how many it owns without knowing, and
/// how many each of the other live relays owns.
const LOOK: &str = "
select (select count(*) from outbox_shard) as shards,
       (select count(*) from outbox_shard s where s.owner = $1 and s.token <> all($2)) as stranded,
       (select count(*) from outbox_shard s
        where s.owner is null
           or not exists (select from outbox_relay r where r.relay = s.owner and r.expires_at > clock_timestamp())) as free,
       array(select (select count(*) from outbox_shard s where s.owner = r.relay)
             from outbox_relay r where r.relay <> $1 and r.expires_at > clock_timestamp()) as others";

/// $1 relay, $2 the tokens it knows. The answer to an earlier acquisition was lost: nobody works on these shards, and as
/// long as this relay lives nobody else could take them.
const FREE_STRANDED: &str = "
with stranded as materialized (
  select s.shard from outbox_shard s where s.owner = $1 and s.token <> all($2) order by s.shard for update of s)
update outbox_shard s
set owner = null, token = null, acquired_at = null
where s.shard = any(array(select m.shard from stranded m))";

/// $1 limit. The shards that look free, locked in their order.
const LOCK_SHARDS: &str = "
select s.shard, s.owner
from outbox_shard s
where s.owner is null
   or not exists (select from outbox_relay r where r.relay = s.owner and r.expires_at > clock_timestamp())
order by s.shard
limit $1
for update of s skip locked";

/// $1 relays. Which of them have a row, and the lock on those that have expired, so that they cannot renew meanwhile.
const LOCK_OWNERS: &str = "
with expired as materialized (
  select r.relay from outbox_relay r
  where r.relay = any($1) and r.expires_at < clock_timestamp()
  for share of r skip locked)
select array(select r.relay from outbox_relay r where r.relay = any($1)) as present,
       array(select e.relay from expired e) as expired";

/// $1 shards, $2 their new tokens, $3 relay. Only of rows this transaction has locked.
const TAKE: &str = "
update outbox_shard s
set owner = $3, token = t.token, acquired_at = clock_timestamp(),
    unclean_ends = s.unclean_ends + case when s.owner is null then 0 else 1 end
from unnest($1::smallint[], $2::bigint[]) t (shard, token)
where s.shard = t.shard and s.shard = any($1)
returning s.shard, s.token";

/// $1 shards. The owners of locked rows as they are now.
const OWNERS: &str = "select s.shard, s.owner from outbox_shard s where s.shard = any($1) order by s.shard";

/// $1 tokens. For a relay that renews too late: waits for a takeover that is open, and then sees it.
const STILL_MINE: &str =
    "select s.shard from outbox_shard s where s.token = any($1) order by s.shard for share of s";

/// Relays alive by the database's clock.
const LIVE: &str = "select count(*) from outbox_relay r where r.expires_at > clock_timestamp()";

/// $1 tokens.
const RELEASE: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.token = any($1) order by s.shard for update of s)
update outbox_shard s
set owner = null, token = null, acquired_at = null, unclean_ends = 0, suspect = null
where s.shard = any(array(select m.shard from mine m))";

/// $1 relay.
const RELEASE_ALL: &str = "
with mine as materialized (
  select s.shard from outbox_shard s where s.owner = $1 order by s.shard for update of s)
update outbox_shard s
set owner = null, token = null, acquired_at = null, unclean_ends = 0, suspect = null
where s.shard = any(array(select m.shard from mine m))";

/// $1 relay.
const LEAVE: &str = "delete from outbox_relay r where r.relay = $1";

#[async_trait]
impl Ownership for PostgresOwnership {
    async fn acquire(&self, have: &[Owned]) -> Result<Acquired, SourceError> {
        // The renewals keep the row alive; it is written here only where they have not begun, or a shard is to be taken.
        if have.is_empty() {
            self.enrol(None).await?;
        }
        let look = sqlx::query(LOOK).bind(self.identity.relay).bind(tokens(have));
        let (all, free, stranded, others) = self
            .server
            .run("look for free shards", |c| {
                Box::pin(async move {
                    let row = look.fetch_one(c).await?;
                    let (all, free): (i64, i64) = (row.try_get("shards")?, row.try_get("free")?);
                    let stranded: i64 = row.try_get("stranded")?;
                    Ok((all, free, stranded, row.try_get::<Vec<i64>, _>("others")?))
                })
            })
            .await?;
        let shards = u32::try_from(all).unwrap_or(0);
        let others: Vec<u32> = others.into_iter().map(|count| u32::try_from(count).unwrap_or(0)).collect();
        let live_relays = u32::try_from(others.len()).unwrap_or(u32::MAX).saturating_add(1);
        let have_count = u32::try_from(have.len()).unwrap_or(u32::MAX);
        let wanted = even_share(shards, &others).saturating_sub(have_count);
        let mut acquired = Acquired { live_relays, shards, ..Acquired::default() };
        if stranded > 0 {
            self.free_stranded(have).await?;
        }
        if wanted > 0 && free + stranded > 0 {
            self.enrol(None).await?;
            (acquired.owned, acquired.unclean) = self.take(wanted).await?;
        }
        Ok(acquired)
    }

    async fn held(
        &self,
        owned: &[Owned],
        after: Option<(Shard, Position)>,
        limit: u32,
    ) -> Result<Vec<Held>, SourceError> {
        let Some((first, last)) = span(owned) else { return Ok(Vec::new()) };
        let (shard, id) = after.map_or((first, i64::MIN), |(shard, position)| (shard.0, position.0));
        let query = sqlx::query(statements::HELD)
            .bind(tokens(owned))
            .bind(shard)
            .bind(id)
            .bind(last)
            .bind(i64::from(limit));
        self.server
            .run("read which keys are held", |c| {
                Box::pin(async move {
                    let rows = query.fetch_all(c).await?;
                    rows.iter()
                        .map(|row| {
                            Ok(Held {
                                shard: Shard(row.try_get(0)?),
                                position: Position(row.try_get(1)?),
                                lane: Lane::Hash(row.try_get(2)?),
                                dead: row.try_get(3)?,
                            })
                        })
                        .collect()
                })
            })
            .await
    }

    async fn renew(&self, owned: &[Owned], state: &RelayState) -> Result<Renewed, SourceError> {
        let state = storable(&state.json, STATE_CHARACTERS);
        let query = sqlx::query(statements::RENEW)
            .bind(self.identity.relay)
            .bind(micros(self.identity.lease))
            .bind(state.clone())
            .bind(tokens(owned));
        let (in_time, mine, live) = self
            .server
            .run("renew the lease", |c| {
                Box::pin(async move {
                    let row = query.fetch_one(c).await?;
                    let mine: Vec<i16> = row.try_get("mine")?;
                    Ok((row.try_get::<bool, _>("in_time")?, mine, row.try_get::<i64, _>("live")?))
                })
            })
            .await?;
        if in_time {
            return Ok(Renewed { mine: shards(mine), live_relays: u32::try_from(live).unwrap_or(0) });
        }
        self.renew_late(owned, state).await
    }

    async fn release(&self, owned: &[Owned]) -> Result<(), SourceError> {
        if owned.is_empty() {
            return Ok(());
        }
        let query = sqlx::query(RELEASE).bind(tokens(owned));
        self.server
            .run("give shards back", |c| Box::pin(async move { query.execute(c).await.map(drop) }))
            .await
    }

    async fn leave(&self) -> Result<(), SourceError> {
        let relay = self.identity.relay;
        self.server
            .run("sign this relay off", |c| {
                Box::pin(async move {
                    sqlx::query(RELEASE_ALL).bind(relay).execute(&mut *c).await?;
                    sqlx::query(LEAVE).bind(relay).execute(c).await.map(drop)
                })
            })
            .await
    }
}

/// Lowest and highest shard.
fn span(owned: &[Owned]) -> Option<(i16, i16)> {
    let numbers = owned.iter().map(|owned| owned.shard.0);
    numbers.clone().min().zip(numbers.max())
}

impl PostgresOwnership {
    async fn enrol(&self, state: Option<String>) -> Result<(), SourceError> {
        let query = sqlx::query(ENROL)
            .bind(self.identity.relay)
            .bind(storable(&self.identity.instance, 200))
            .bind(storable(&self.identity.version, 100))
            .bind(micros(self.identity.lease))
            .bind(state);
        self.server
            .run("enter this relay", |c| Box::pin(async move { query.execute(c).await.map(drop) }))
            .await
    }

    /// After the row expired: enters it again first, so that nobody takes more, then asks under lock what is left.
    async fn renew_late(&self, owned: &[Owned], state: String) -> Result<Renewed, SourceError> {
        self.enrol(Some(state)).await?;
        let still = sqlx::query_scalar::<_, i16>(STILL_MINE).bind(tokens(owned));
        let (mine, live) = self
            .server
            .run("renew the lease", |c| {
                Box::pin(async move {
                    let mine = still.fetch_all(&mut *c).await?;
                    Ok((mine, sqlx::query_scalar::<_, i64>(LIVE).fetch_one(c).await?))
                })
            })
            .await?;
        Ok(Renewed { mine: shards(mine), live_relays: u32::try_from(live).unwrap_or(0) })
    }

    async fn free_stranded(&self, have: &[Owned]) -> Result<(), SourceError> {
        let query = sqlx::query(FREE_STRANDED).bind(self.identity.relay).bind(tokens(have));
        self.server
            .run("give stranded shards back", |c| Box::pin(async move { query.execute(c).await.map(drop) }))
            .await
    }

    async fn take(&self, wanted: u32) -> Result<(Vec<Owned>, Vec<Shard>), SourceError> {
        let drawn = (0..wanted).map(|_| random_token()).collect::<Result<Vec<i64>, SourceError>>()?;
        let relay = self.identity.relay;
        self.server.run("take free shards", |c| Box::pin(takeover(c, relay, drawn))).await
    }
}

/// One transaction; as many shards at most as there are tokens in `drawn`.
async fn takeover(
    connection: &mut PgConnection,
    relay: i64,
    drawn: Vec<i64>,
) -> Result<(Vec<Owned>, Vec<Shard>), sqlx::Error> {
    // A connection whose work is cancelled here is thrown away by the pool, so this begin() cannot poison the next user.
    let mut transaction = connection.begin().await?;
    let limit = i64::try_from(drawn.len()).unwrap_or(i64::MAX);
    let locked: Vec<i16> = sqlx::query(LOCK_SHARDS)
        .bind(limit)
        .fetch_all(&mut *transaction)
        .await?
        .iter()
        .map(|row| row.try_get(0))
        .collect::<Result<_, _>>()?;

    // The rows cannot change any more: look again.
    let owners: Vec<(i16, Option<i64>)> = sqlx::query(OWNERS)
        .bind(locked)
        .fetch_all(&mut *transaction)
        .await?
        .iter()
        .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
        .collect::<Result<_, sqlx::Error>>()?;
    let owned_by: Vec<i64> = owners.iter().filter_map(|(_, owner)| *owner).collect();
    let row = sqlx::query(LOCK_OWNERS).bind(owned_by).fetch_one(&mut *transaction).await?;
    let (present, expired): (Vec<i64>, Vec<i64>) = (row.try_get("present")?, row.try_get("expired")?);
    let free =
        |owner: Option<i64>| owner.is_none_or(|owner| expired.contains(&owner) || !present.contains(&owner));

    let taken: Vec<(i16, Option<i64>)> = owners.into_iter().filter(|(_, owner)| free(*owner)).collect();
    let numbers: Vec<i16> = taken.iter().map(|(shard, _)| *shard).collect();
    let owned: Vec<Owned> = sqlx::query(TAKE)
        .bind(numbers)
        .bind(drawn.into_iter().take(taken.len()).collect::<Vec<i64>>())
        .bind(relay)
        .fetch_all(&mut *transaction)
        .await?
        .iter()
        .map(|row| Ok(Owned { shard: Shard(row.try_get(0)?), token: row.try_get(1)? }))
        .collect::<Result<_, sqlx::Error>>()?;
    transaction.commit().await?;
    let unclean =
        taken.into_iter().filter(|(_, owner)| owner.is_some()).map(|(shard, _)| Shard(shard)).collect();
    Ok((owned, unclean))
}
