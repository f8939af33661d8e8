//! A failing message holds back at most its own key, through retries and takeovers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postrider::Message;
use postrider_conformance::testbed::{Behaviour, Business, Load, MemorySink, TestDatabase};
use postrider_relay::core::settings::{Backoff, OnDead, Settings};
use postrider_relay::sink::{Retry, Scope};

use super::{DRAIN, late_commits::until, relay, settings};

fn quick_backoff() -> Backoff {
    Backoff { first: Duration::from_millis(20), factor: 1.5, cap: Duration::from_millis(200), jitter: 0.5 }
}

async fn enqueue(db: &TestDatabase, id: &str, key: &str) {
    let mut tx = db.pool.begin().await.expect("begin");
    postrider::enqueue(&mut tx, &Message::new("t", id).id(id).key(key)).await.expect("enqueue");
    tx.commit().await.expect("commit");
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_and_lost_answers_keep_order_and_lose_nothing() {
    let db = TestDatabase::new().await;
    let business = Business::create(&db).await;
    let mut rng = fastrand::Rng::with_seed(7);
    let sink = MemorySink::scripted(move |_| match rng.u32(0..100) {
        0..10 => Behaviour::Refuse(Scope::Message, Retry::Backoff),
        10..12 => Behaviour::AcceptSilently,
        12..13 => Behaviour::Refuse(Scope::Destination, Retry::Backoff),
        _ => Behaviour::Accept,
    });
    let settings = Settings { max_attempts: 100, backoff: quick_backoff(), ..settings() };
    let running = relay(&db, "one", &sink, settings).await;
    business.run(Load { transactions: 3_000, keys: 100, ..Load::default() }).await;
    business.drained().await;
    let counters = running.handle().snapshot().counters;
    assert!(counters.retried > 0 && counters.unknown > 0, "{counters:?}");
    running.stop(DRAIN).await;
    business.verdict(&sink.arrivals()).await.assert_kept();
    business.assert_receipts().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_permanent_refusal_is_confirmed_once_and_then_dead_and_its_key_goes_on() {
    let db = TestDatabase::new().await;
    let tries: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
    let seen = tries.clone();
    let sink = MemorySink::scripted(move |m| {
        *seen.lock().expect("lock").entry(m.message.message_id.clone()).or_default() += 1;
        if m.message.message_id == "bad" {
            Behaviour::Refuse(Scope::Message, Retry::Never)
        } else {
            Behaviour::Accept
        }
    });
    let running = relay(&db, "one", &sink, settings()).await;
    for id in ["bad", "next"] {
        enqueue(&db, id, "k").await;
    }
    enqueue(&db, "neighbour", "other").await;
    until(|| sink.arrivals().len() == 2).await;
    assert_eq!(tries.lock().expect("lock").get("bad"), Some(&2));
    let (reason, attempts, tries): (String, i32, i32) =
        sqlx::query_as("select reason, attempts, tries from outbox_dead")
            .fetch_one(&db.pool)
            .await
            .expect("dead");
    assert_eq!((reason.as_str(), attempts, tries), ("permanent", 0, 2));
    running.stop(DRAIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_block_the_key_waits_for_the_operator_and_goes_on_after_a_cancellation() {
    let db = TestDatabase::new().await;
    let sink = MemorySink::scripted(|m| {
        if m.message.message_id == "bad" {
            Behaviour::Refuse(Scope::Message, Retry::Backoff)
        } else {
            Behaviour::Accept
        }
    });
    let blocking = || Settings { max_attempts: 1, on_dead: OnDead::Block, ..settings() };
    let running = relay(&db, "one", &sink, blocking()).await;
    for id in ["bad", "next"] {
        enqueue(&db, id, "k").await;
    }
    enqueue(&db, "neighbour", "other").await;
    until(|| running.handle().snapshot().counters.dead == 1 && sink.arrivals().len() == 1).await;

    // The block survives a change of relay.
    running.stop(DRAIN).await;
    let running = relay(&db, "two", &sink, blocking()).await;
    enqueue(&db, "neighbour-2", "other").await;
    until(|| sink.arrivals().len() == 2).await;

    let admin = postrider_relay::sources::admin(&db.url).await.expect("admin");
    cancel_all_dead(&*admin).await;
    until(|| sink.arrivals().len() == 3).await;
    let ids: Vec<String> = sink.arrivals().into_iter().map(|a| a.message_id).collect();
    assert_eq!(ids, ["neighbour", "neighbour-2", "next"]);
    running.stop(DRAIN).await;
}

async fn cancel_all_dead(admin: &dyn postrider_relay::inspect::Admin) {
    use postrider_relay::inspect::Selection;
    let n = admin
        .cancel(&Selection::MessageIds(vec!["bad".to_owned()]), "test", Some("not needed"))
        .await
        .expect("cancel");
    assert_eq!(n, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_message_goes_when_it_is_due_and_holds_nobody() {
    let db = TestDatabase::new().await;
    let sink = MemorySink::default();
    let running = relay(&db, "one", &sink, settings()).await;
    let mut tx = db.pool.begin().await.expect("begin");
    let later = Message::new("t", "later").id("later").key("k").delay(Duration::from_millis(600));
    postrider::enqueue(&mut tx, &later).await.expect("enqueue");
    tx.commit().await.expect("commit");
    enqueue(&db, "now", "k").await;
    until(|| sink.arrivals().len() == 2).await;
    let ids: Vec<String> = sink.arrivals().into_iter().map(|a| a.message_id).collect();
    assert_eq!(ids, ["now", "later"]);
    let early: bool = sqlx::query_scalar(
        "select exists (select from outbox o join outbox_sent s on o.id = any(s.ids) where s.sent_at < o.due_at)",
    )
    .fetch_one(&db.pool)
    .await
    .expect("times");
    assert!(!early, "sent before it was due");
    running.stop(DRAIN).await;
}
