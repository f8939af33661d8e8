//! A relay that stands still past its lease, and wakes when another has done its work.

use postrider_conformance::process::{Counted, Point, history, in_flight_when_it_ended};

use crate::Bed;

/// Everything the database says of the messages.
const STATES: &str = "
select count(*) from (
  select id from outbox_queue union all select id from outbox_waiting union all select id from outbox_dead) left_over";

async fn paused_at(point: Point, refused: impl Fn(&Counted) -> bool) {
    let bed = Bed::on_nats().await;
    let mut first = bed.relay("first", Some(point)).await;
    let second = bed.relay("second", None).await;
    let producers = bed.produce();
    first.held().await;
    first.pause(&bed.db).await;
    let receipts = bed.receipts_of(first.relay).await;
    let in_flight = in_flight_when_it_ended(&bed.db, first.relay, &first.journal).await;
    assert!(!in_flight.is_empty());

    producers.await.expect("producers");
    history::taken_over(&bed.db, first.relay).await;
    bed.business.drained().await;
    let (all, left) = (bed.db.count("select count(*) from receipt").await, bed.db.count(STATES).await);

    first.wake();
    first.release().await;
    let counted = first.counters_until(|c| refused(c) && c.shards > 0).await;
    assert_eq!(
        bed.receipts_of(first.relay).await,
        receipts,
        "the woken relay has recorded something: {counted:?}"
    );
    assert_eq!((bed.db.count("select count(*) from receipt").await, bed.db.count(STATES).await), (all, left));
    let (first_journal, second_journal) = (first.journal.clone(), second.journal.clone());
    assert_eq!(first.stop().await.undecided, 0);
    assert_eq!(second.stop().await.undecided, 0);
    assert!(
        bed.judge_with(&in_flight, &[&first_journal, &second_journal]).await > 0,
        "what was acknowledged before the pause came again"
    );
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_after_the_acknowledgement_a_relay_settles_nothing_when_it_wakes() {
    // Its publish deadline has passed as well: whether it first sees the late acknowledgement or the deadline is open,
    // and the same comes of it.
    paused_at(Point::AfterAck, |c| c.fenced + c.unknown > 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_before_it_settles_a_relay_is_refused_when_it_wakes() {
    paused_at(Point::BeforeSettle, |c| c.fenced > 0).await;
}
