//! Who owned which shard when, written by a trigger of the test, and what the receipts must agree with.

use crate::testbed::TestDatabase;

/// Begins to write the history. Before the first relay starts.
///
/// # Panics
/// If the database refuses.
pub async fn record(db: &TestDatabase) {
    db.run(
        "create table shard_history (shard smallint, owner bigint, token bigint, at timestamptz not null);
         create index on shard_history (shard, at);
         insert into shard_history select shard, owner, token, clock_timestamp() from outbox_shard;
         create function shard_history() returns trigger language plpgsql as $$
         begin
           insert into shard_history values (new.shard, new.owner, new.token, clock_timestamp());
           return null;
         end $$;
         create trigger shard_history after update of owner, token on outbox_shard
         for each row when (old.token is distinct from new.token) execute function shard_history();
         create view receipt as
         select r.relay, r.sent_at, o.id, o.message_id,
                (('x' || substr(md5(o.message_key), 1, 16))::bit(64)::bigint & 63)::smallint as shard
         from (select relay, sent_at, unnest(ids) as id from outbox_sent) r join outbox o on o.id = r.id;",
    )
    .await;
}

/// Every receipt was written by the relay that owned the message's shard at that moment.
///
/// The history is exact: a receipt is dated after its statement has locked the shard's row for share, a change of owner
/// is dated while the row is locked for update, and neither lock is given to one while the other is held. So the last
/// change before a receipt names the owner whose token the statement has seen.
///
/// # Panics
/// If there is a receipt that somebody else wrote.
pub async fn assert_receipts_by_owners(db: &TestDatabase) {
    let strangers: Vec<(String, i64, Option<i64>)> = sqlx::query_as(
        "select r.message_id, r.relay, h.owner
         from receipt r
         left join lateral (select h.owner from shard_history h where h.shard = r.shard and h.at < r.sent_at
                            order by h.at desc limit 1) h on true
         where h.owner is distinct from r.relay",
    )
    .fetch_all(&db.pool)
    .await
    .expect("history");
    assert!(
        strangers.is_empty(),
        "{} receipts were written by a relay that did not own the shard, e.g. (message, relay, owner) {:?}",
        strangers.len(),
        strangers.first()
    );
}

/// Shards whose last owner before this one ended without giving them back.
///
/// # Panics
/// If the database refuses.
pub async fn unclean_shards(db: &TestDatabase) -> i64 {
    db.count("select count(*) from outbox_shard where unclean_ends > 0").await
}

/// Shards a relay owns.
///
/// # Panics
/// If the database refuses.
pub async fn owned_by(db: &TestDatabase, relay: i64) -> i64 {
    db.count(&format!("select count(*) from outbox_shard where owner = {relay}")).await
}

/// Waits until a relay owns so many shards.
///
/// # Panics
/// If it does not come to that.
pub async fn owns(db: &TestDatabase, relay: i64, shards: i64) {
    db.until(&format!("select count(*) from outbox_shard where owner = {relay}"), |n| n >= shards).await;
}

/// Waits until everything that `relay` owned belongs to others.
///
/// # Panics
/// If nobody takes over.
pub async fn taken_over(db: &TestDatabase, relay: i64) {
    let left = format!("select count(*) from outbox_shard where owner = {relay} or owner is null");
    db.until(&left, |n| n == 0).await;
}
