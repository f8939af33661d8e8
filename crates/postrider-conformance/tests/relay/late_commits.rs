//! Ids are given out before commit: a low id can appear late, and must neither be skipped nor overtaken.

use std::time::Duration;

use postrider::Message;
use postrider_conformance::testbed::{Business, Load, MemorySink, TestDatabase};

use super::{DRAIN, relay, settings};

#[tokio::test(flavor = "multi_thread")]
async fn a_low_id_that_commits_late_arrives_and_is_not_overtaken_by_its_key() {
    let db = TestDatabase::new().await;
    let sink = MemorySink::default();
    let running = relay(&db, "one", &sink, settings()).await;

    let mut slow = db.pool.begin().await.expect("begin");
    postrider::enqueue(&mut slow, &Message::new("t", "1").id("low").key("k")).await.expect("enqueue");
    let mut quick = db.pool.begin().await.expect("begin");
    postrider::enqueue(&mut quick, &Message::new("t", "2").id("high").key("other")).await.expect("enqueue");
    quick.commit().await.expect("commit");
    until(|| sink.arrivals().len() == 1).await;

    slow.commit().await.expect("commit");
    let mut next = db.pool.begin().await.expect("begin");
    postrider::enqueue(&mut next, &Message::new("t", "3").id("next").key("k")).await.expect("enqueue");
    next.commit().await.expect("commit");
    until(|| sink.arrivals().len() == 3).await;
    let ids: Vec<String> = sink.arrivals().into_iter().map(|a| a.message_id).collect();
    assert_eq!(ids, ["high", "low", "next"]);
    assert_eq!(running.handle().snapshot().counters.swept, 0, "the window finds it, not the sweep");
    running.stop(DRAIN).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_writers_with_random_delays_and_rollbacks_lose_and_reorder_nothing() {
    let db = TestDatabase::new().await;
    let business = Business::create(&db).await;
    let sink = MemorySink::default();
    let running = relay(&db, "one", &sink, settings()).await;
    let load = Load {
        transactions: 20_000,
        writers: 50,
        keys: 500,
        rollback_every: 10,
        commit_pause: Duration::from_millis(40),
        ..Load::default()
    };
    business.run(load).await;
    business.drained().await;
    running.stop(DRAIN).await;
    let verdict = business.verdict(&sink.arrivals()).await;
    verdict.assert_kept();
    assert!(
        verdict.duplicates.is_empty(),
        "no fault, no duplicates: {:?}",
        verdict.duplicates.first_key_value()
    );
    business.assert_receipts().await;
}

/// Waits for `done`. Fails after two minutes, which is longer than any of it takes.
pub(crate) async fn until(mut done: impl FnMut() -> bool) {
    let began = std::time::Instant::now();
    while !done() {
        assert!(began.elapsed() < Duration::from_secs(120), "what is waited for has not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
