//! Several relays on one table: shares, handovers, takeovers from the dead and from the living.

use std::time::Duration;

use postrider::Message;
use postrider_conformance::testbed::{Behaviour, Business, Load, MemorySink, TestDatabase};
use postrider_relay::core::settings::{Backoff, Settings};
use postrider_relay::sink::{Retry, Scope};

use super::{DRAIN, late_commits::until, relay, settings};

#[tokio::test(flavor = "multi_thread")]
async fn relays_share_evenly_and_hand_over_without_a_duplicate() {
    let db = TestDatabase::new().await;
    let business = Business::create(&db).await;
    let sink = MemorySink::default();
    let a = relay(&db, "a", &sink, settings()).await;
    let writing = tokio::spawn({
        let business = business.clone();
        async move { business.run(Load { transactions: 4_000, keys: 300, ..Load::default() }).await }
    });
    until(|| a.handle().snapshot().shards == 64).await;
    let b = relay(&db, "b", &sink, settings()).await;
    let c = relay(&db, "c", &sink, settings()).await;
    let shards = || [&a, &b, &c].map(|r| r.handle().snapshot().shards);
    until(|| shards().iter().all(|n| (20..=22).contains(n)) && shards().iter().sum::<usize>() == 64).await;
    assert_eq!(b.stop(DRAIN).await.undecided, 0);
    until(|| a.handle().snapshot().shards + c.handle().snapshot().shards == 64).await;
    writing.await.expect("writers");
    business.drained().await;
    a.stop(DRAIN).await;
    c.stop(DRAIN).await;
    let verdict = business.verdict(&sink.arrivals()).await;
    verdict.assert_kept();
    assert!(verdict.duplicates.is_empty(), "handing over duplicates nothing: {:?}", verdict.duplicates);
    business.assert_receipts().await;
    assert_eq!(db.count("select count(*) from outbox_relay").await, 0, "each relay has removed its row");
}

#[tokio::test(flavor = "multi_thread")]
async fn m2_is_not_sent_before_m1_is_decided_although_the_relay_that_retries_m1_dies() {
    let db = TestDatabase::new().await;
    let sink = MemorySink::scripted(|m| match m.message.message_id.as_str() {
        "m1" => Behaviour::Refuse(Scope::Message, Retry::Backoff),
        _ => Behaviour::Accept,
    });
    let patient = || Settings {
        backoff: Backoff { first: Duration::from_secs(3), jitter: 0.0, ..Backoff::default() },
        ..settings()
    };
    let first = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let (url, s) = (db.url.clone(), sink.clone());
    let source = db.source("first", patient().lease).await;
    let running = first.spawn(async move {
        postrider_relay::engine::Relay::builder(source)
            .sink(super::named("memory", &s))
            .settings(patient())
            .start()
    });
    let running = running.await.expect("spawn").expect("start");
    for id in ["m1", "m2"] {
        let mut tx = db.pool.begin().await.expect("begin");
        postrider::enqueue(&mut tx, &Message::new("t", id).id(id).key("k")).await.expect("enqueue");
        tx.commit().await.expect("commit");
    }
    until(|| running.handle().snapshot().counters.retried == 1).await;
    // As abrupt as it gets inside one process: every task of the first relay is gone at once.
    first.shutdown_background();
    drop(url);

    let second = relay(&db, "second", &sink, patient()).await;
    until(|| second.handle().snapshot().shards == 64).await;
    assert_eq!(db.count("select count(*) from outbox_shard where unclean_ends = 1").await, 64);
    sink.behave(|_| Behaviour::Accept);
    until(|| sink.arrivals().len() == 2).await;
    let ids: Vec<String> = sink.arrivals().into_iter().map(|a| a.message_id).collect();
    assert_eq!(ids, ["m1", "m2"]);
    second.stop(DRAIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shards_stolen_from_live_owners_break_no_order_and_each_message_has_one_receipt() {
    let db = TestDatabase::new().await;
    let business = Business::create(&db).await;
    let mut rng = fastrand::Rng::with_seed(3);
    let sink = MemorySink::scripted(move |_| match rng.u32(0..100) {
        0..10 => Behaviour::Refuse(Scope::Message, Retry::Backoff),
        10..40 => Behaviour::AcceptAfter(Duration::from_millis(rng.u64(0..30))),
        _ => Behaviour::Accept,
    });
    let eager = || Settings {
        max_attempts: 1_000,
        backoff: Backoff {
            first: Duration::from_millis(20),
            cap: Duration::from_millis(100),
            ..Backoff::default()
        },
        renew_every: Duration::from_millis(100),
        ..settings()
    };
    let mut relays = Vec::new();
    for name in ["a", "b", "c"] {
        relays.push(relay(&db, name, &sink, eager()).await);
    }
    let writing = tokio::spawn({
        let business = business.clone();
        async move { business.run(Load { transactions: 8_000, keys: 300, writers: 16, ..Load::default() }).await }
    });
    let mut rng = fastrand::Rng::with_seed(5);
    let mut thefts = 0;
    while !writing.is_finished() || db.count("select count(*) from outbox_queue").await > 0 {
        // Freed behind the owner's back: whoever looks first takes them, while the owner still works on.
        let from = rng.i32(0..60);
        db.run(&format!(
            "update outbox_shard set owner = null, token = null where shard between {from} and {}",
            from + 7
        ))
        .await;
        thefts += 1;
        if rng.u32(0..10) == 0 {
            // Amnesia: an owner loses all it knows, without giving anything back.
            let forgetful = relays.remove(0);
            drop_abruptly(&forgetful);
            relays.push(relay(&db, "again", &sink, eager()).await);
        }
        tokio::time::sleep(Duration::from_millis(rng.u64(20..200))).await;
    }
    writing.await.expect("writers");
    business.drained().await;
    assert!(thefts > 10, "{thefts} thefts");
    let fenced: u64 = relays.iter().map(|r| r.handle().snapshot().counters.fenced).sum();
    assert!(fenced > 0, "no result came late: the test has shown nothing");
    for r in relays {
        r.stop(DRAIN).await;
    }
    business.verdict(&sink.arrivals()).await.assert_kept();
    business.assert_receipts().await;
}

/// Leaves a relay to itself: it is asked to stop at once, with everything undecided.
fn drop_abruptly(running: &postrider_relay::engine::RunningRelay) {
    running.handle().stop(Duration::ZERO);
}
