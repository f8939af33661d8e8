//! SIGTERM under load.

use postrider_conformance::process::history;

use crate::Bed;

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_is_asked_to_stop_under_load_repeats_nothing_and_leaves_nothing_open() {
    let bed = Bed::on_nats().await;
    let first = bed.relay("first", None).await;
    let second = bed.relay("second", None).await;
    for relay in [&first, &second] {
        history::owns(&bed.db, relay.relay, 32).await;
    }
    let producers = bed.produce();
    let receipts =
        format!("select coalesce(sum(n), 0)::bigint from outbox_sent where relay = {}", first.relay);
    bed.db.until(&receipts, |n| n >= 50).await;
    let (relay, counted) = (first.relay, first.stop().await);
    assert_eq!((counted.undecided, counted.fenced), (0, 0));
    assert_eq!(history::owned_by(&bed.db, relay).await, 0);
    assert_eq!(bed.db.count(&format!("select count(*) from outbox_relay where relay = {relay}")).await, 0);

    producers.await.expect("producers");
    bed.business.drained().await;
    assert_eq!(history::unclean_shards(&bed.db).await, 0);
    assert_eq!(second.stop().await.undecided, 0);
    let (verdict, _) = bed.judge().await;
    assert!(verdict.duplicates.is_empty(), "{:?}", verdict.duplicates);
    bed.remove().await;
}
