//! Cases about shards and leases.

use std::collections::BTreeSet;
use std::time::Duration;

use postrider_relay::message::Position;
use postrider_relay::source::{Owned, RelayState};

use super::{DatabaseUnderTest, NewMessage, all, dead_holding, identity, retry};

fn shards(owned: &[Owned]) -> BTreeSet<i16> {
    owned.iter().map(|one| one.shard.0).collect()
}

/// Many relays ask at once: each shard goes to one of them, with a token of its own.
pub async fn two_relays_never_own_the_same_shard<D: DatabaseUnderTest>(db: &D) {
    let mut asking = tokio::task::JoinSet::new();
    for number in 1..=4 {
        let relay = db.relay(number).await;
        asking.spawn(async move {
            let mut owned = Vec::new();
            for _ in 0..5 {
                owned.extend(relay.source.ownership.acquire(&owned).await.expect("acquire").owned);
            }
            owned
        });
    }
    let owned: Vec<Owned> = asking.join_all().await.into_iter().flatten().collect();
    assert_eq!(shards(&owned).len(), owned.len(), "a shard was given to two relays");
    let tokens: BTreeSet<i64> = owned.iter().map(|one| one.token).collect();
    assert_eq!(tokens.len(), owned.len());
    let current =
        db.number("select count(*) from outbox_shard where token is not null and unclean_ends = 0").await;
    assert_eq!(current, i64::try_from(owned.len()).expect("few shards"));
    assert_eq!(owned.len(), db.shards() as usize, "a free shard was left to nobody");
}

/// Nobody else could ever take them while this relay lives; the tokens it never learnt are worth nothing any more.
pub async fn an_acquisition_whose_answer_was_lost_strands_nothing<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let lost = relay.acquire().await;
    let again = relay.source.ownership.acquire(&[]).await.expect("acquire");
    assert_eq!(shards(&again.owned), shards(&lost));
    assert!(again.unclean.is_empty(), "nobody has died");
    assert!(again.owned.iter().all(|now| lost.iter().all(|old| old.token != now.token)));
    let kept = relay.source.ownership.acquire(&again.owned).await.expect("acquire");
    assert!(kept.owned.is_empty(), "what is known is not taken again");
    let state = RelayState::default();
    assert_eq!(relay.source.ownership.renew(&lost, &state).await.expect("renew").mine, []);
    assert_eq!(
        relay.source.ownership.renew(&again.owned, &state).await.expect("renew").mine.len(),
        again.owned.len()
    );
}

/// By the database's clock; the token of the old owner is gone.
pub async fn an_expired_relay_is_taken_over_and_counted_unclean<D: DatabaseUnderTest>(db: &D) {
    let (old, new) = (db.relay(1).await, db.relay(2).await);
    let first = old.acquire().await;
    assert_eq!(first.len(), db.shards() as usize);
    assert_eq!(
        new.source.ownership.acquire(&[]).await.expect("acquire").owned,
        [],
        "a live relay keeps its shards"
    );
    db.expire(1).await;
    let taken = new.source.ownership.acquire(&[]).await.expect("acquire");
    assert_eq!((taken.live_relays, taken.shards), (1, db.shards()));
    assert_eq!(shards(&taken.owned), shards(&first));
    assert_eq!(taken.unclean.len(), first.len());
    assert_eq!(db.number("select min(unclean_ends) from outbox_shard").await, 1);
    let again = first.iter().any(|old| taken.owned.iter().any(|new| new.token == old.token));
    assert!(!again, "a token was used twice");

    // A row that is missing altogether counts like an expired one.
    db.execute("delete from outbox_relay").await;
    let third = db.relay(3).await.source.ownership.acquire(&[]).await.expect("acquire");
    assert_eq!(third.unclean.len(), first.len());
    assert_eq!(db.number("select min(unclean_ends) from outbox_shard").await, 2);
}

/// Released in good order: nothing is held against the shard.
pub async fn a_clean_release_resets_the_count<D: DatabaseUnderTest>(db: &D) {
    let (one, two) = (db.relay(1).await, db.relay(2).await);
    one.acquire().await;
    db.expire(1).await;
    let owned = two.acquire().await;
    assert_eq!(db.number("select min(unclean_ends) from outbox_shard").await, 1);
    two.source.ownership.release(&owned).await.expect("release");
    let clean =
        "select count(*) from outbox_shard where owner is null and token is null and unclean_ends = 0";
    assert_eq!(db.number(clean).await, i64::from(db.shards()));
    let next = db.relay(3).await.source.ownership.acquire(&[]).await.expect("acquire");
    assert_eq!(next.unclean, []);
}

/// The token decides, not the expiry.
pub async fn a_relay_that_renews_late_keeps_what_nobody_took<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.expire(1).await;
    let renewed = relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    assert_eq!((renewed.mine.len(), renewed.live_relays), (owned.len(), 1));
    assert_eq!(db.relay(2).await.acquire().await, [], "it is alive again");
    // Also when its row is gone.
    db.execute("delete from outbox_relay where relay = 1").await;
    let renewed = relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine.len(), owned.len());
    assert_eq!(db.number("select count(*) from outbox_relay where relay = 1").await, 1);
}

/// A paused relay wakes up and renews: it learns that it owns nothing, and takes nothing back.
pub async fn a_relay_that_renews_late_learns_what_was_taken<D: DatabaseUnderTest>(db: &D) {
    let (old, new) = (db.relay(1).await, db.relay(2).await);
    let before = old.acquire().await;
    db.expire(1).await;
    let after = new.acquire().await;
    let renewed = old.source.ownership.renew(&before, &RelayState::default()).await.expect("renew");
    assert_eq!((renewed.mine, renewed.live_relays), (vec![], 2));
    let renewed = new.source.ownership.renew(&after, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine.len(), after.len());
}

/// What is not ours any more is neither said to be ours nor given back.
pub async fn renew_and_release_are_fenced_by_the_token<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let stale: Vec<Owned> = owned.iter().map(|one| Owned { token: one.token ^ 1, ..*one }).collect();
    let renewed = relay.source.ownership.renew(&stale, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine, []);
    relay.source.ownership.release(&stale).await.expect("release");
    relay.source.ownership.release(&[]).await.expect("release");
    let renewed = relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine.len(), owned.len());
    relay.source.ownership.release(&owned).await.expect("release");
    relay.source.ownership.release(&owned).await.expect("release twice");
    let renewed = relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine, []);
}

/// `status` shows what a relay said of itself.
pub async fn renewing_reports_the_state_and_the_live_relays<D: DatabaseUnderTest>(db: &D) {
    let (one, two) = (db.relay(1).await, db.relay(2).await);
    let owned = one.acquire().await;
    let state = RelayState { json: r#"{"breakers":["nats"]}"#.to_owned() };
    assert_eq!(one.source.ownership.renew(&owned, &state).await.expect("renew").live_relays, 1);
    two.acquire().await;
    assert_eq!(one.source.ownership.renew(&owned, &state).await.expect("renew").live_relays, 2);
    let relays = db.admin().await.relays().await.expect("list");
    let row = relays.iter().find(|row| row.relay == 1).expect("enrolled");
    assert_eq!((row.state.as_str(), row.instance.as_str()), (state.json.as_str(), "relay-1"));
    assert!(row.is_live() && row.shards == db.shards());
    assert!(row.expires_in_us <= 15_000_000 && row.heartbeat_at_us >= row.started_at_us, "{row:?}");
    // Acquiring afterwards does not wipe it out.
    one.source.ownership.acquire(&owned).await.expect("acquire");
    let relays = db.admin().await.relays().await.expect("list");
    assert_eq!(relays.iter().find(|row| row.relay == 1).expect("enrolled").state, state.json);
}

/// The end of a clean stop: the next one need not wait for any expiry.
pub async fn a_relay_that_leaves_frees_everything<D: DatabaseUnderTest>(db: &D) {
    let (one, two) = (db.relay(1).await, db.relay(2).await);
    one.acquire().await;
    one.source.ownership.leave().await.expect("leave");
    one.source.ownership.leave().await.expect("leave twice");
    assert_eq!(db.number("select count(*) from outbox_relay where relay = 1").await, 0);
    let acquired = two.source.ownership.acquire(&[]).await.expect("acquire");
    assert_eq!((acquired.owned.len(), acquired.unclean.len()), (db.shards() as usize, 0));
}

/// Retried and blocking dead ones, each once, whatever the size of the page; delayed and skipped ones are not in it.
pub async fn held_keys_are_listed_in_pages<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    for n in 0..9 {
        db.insert(&NewMessage::of(&format!("m{n}"), Some(&format!("key {n}")))).await;
    }
    db.insert(&NewMessage {
        due_in: Some(Duration::from_secs(60)),
        ..NewMessage::of("later", Some("key 10"))
    })
    .await;
    let rows = relay.heads(&owned).await.rows;
    relay.settle(&owned, &all(&rows[..4], &retry(1, 1))).await;
    relay.settle(&owned, &all(&rows[4..7], &dead_holding(true))).await;
    relay.settle(&owned, &all(&rows[7..8], &dead_holding(false))).await;
    let mut held = Vec::new();
    let mut after = None;
    loop {
        let page = relay.source.ownership.held(&owned, after, 2).await.expect("read");
        assert!(page.len() <= 2);
        let Some(last) = page.last() else { break };
        after = Some((last.shard, last.position));
        held.extend(page);
    }
    assert!(held.is_sorted_by_key(|held| (held.shard, held.position)));
    held.sort_by_key(|held| held.position);
    let expected: Vec<(Position, bool)> = (0..7).map(|n| (rows[n].position, n >= 4)).collect();
    assert_eq!(held.iter().map(|held| (held.position, held.dead)).collect::<Vec<_>>(), expected);
    for (held, head) in held.iter().zip(&rows) {
        assert_eq!((&held.lane, held.shard), (&head.lane, head.shard));
    }
}

/// Rows of relays that died long ago go; yesterday's are kept for `status`.
pub async fn old_relay_rows_are_removed<D: DatabaseUnderTest>(db: &D) {
    for number in [1, 2] {
        db.relay(number).await.acquire().await;
        db.expire(number).await;
    }
    let day = if db.shards() == 1 { "expires_at - 90000000000" } else { "expires_at - interval '25 hours'" };
    db.execute(&format!("update outbox_relay set expires_at = {day} where relay = 1")).await;
    let relay = db.relay(3).await;
    relay.acquire().await;
    assert_eq!(relay.number, identity(3).relay);
    assert_eq!(db.number("select sum(relay) from outbox_relay").await, 2 + 3);
}
