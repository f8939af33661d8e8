//! `kill -9` at each point, with a file and with NATS, and a successor that starts afterwards or is there already.

use postrider_conformance::process::{Point, history, in_flight_when_it_ended};

use crate::Bed;

enum Successor {
    StartsAfterwards,
    IsThere,
}

async fn killed_at(point: Point, bed: Bed, successor: Successor) {
    let mut first = bed.relay("first", Some(point)).await;
    let second = match successor {
        Successor::IsThere => Some(bed.relay("second", None).await),
        Successor::StartsAfterwards => None,
    };
    let producers = bed.produce();
    first.held().await;
    assert_eq!(bed.idle_in_transaction("first").await, 0, "a transaction is open while the relay waits");
    first.kill().await;
    first.quiet(&bed.db).await;
    let in_flight = in_flight_when_it_ended(&bed.db, first.relay, &first.journal).await;
    let shards = history::owned_by(&bed.db, first.relay).await;
    assert!(shards > 0);

    let second = match second {
        Some(second) => second,
        None => bed.relay("second", None).await,
    };
    producers.await.expect("producers");
    history::taken_over(&bed.db, first.relay).await;
    bed.business.drained().await;
    assert_eq!(history::unclean_shards(&bed.db).await, shards, "shards whose owner ended uncleanly");
    let journals = [first.journal.clone(), second.journal.clone()];
    let counted = second.stop().await;
    assert_eq!((counted.undecided, counted.fenced, counted.vanished), (0, 0, 0));
    assert_eq!(history::unclean_shards(&bed.db).await, 0, "a clean end starts the count anew");

    let duplicates = bed.judge_with(&in_flight, &[&journals[0], &journals[1]]).await;
    match point {
        Point::AfterAck | Point::BeforeSettle => assert!(duplicates > 0, "what was acknowledged came again"),
        Point::BeforeSend | Point::InSettle => {}
    }
    bed.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_a_batch_goes_to_a_file() {
    killed_at(Point::BeforeSend, Bed::on_file().await, Successor::StartsAfterwards).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_file_has_the_message() {
    killed_at(Point::AfterAck, Bed::on_file().await, Successor::StartsAfterwards).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_what_a_file_has_is_recorded() {
    killed_at(Point::BeforeSettle, Bed::on_file().await, Successor::StartsAfterwards).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_the_answer_that_what_a_file_has_is_recorded() {
    killed_at(Point::InSettle, Bed::on_file().await, Successor::StartsAfterwards).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_a_batch_goes_to_nats() {
    killed_at(Point::BeforeSend, Bed::on_nats().await, Successor::IsThere).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_nats_has_acknowledged() {
    killed_at(Point::AfterAck, Bed::on_nats().await, Successor::IsThere).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_what_nats_acknowledged_is_recorded() {
    killed_at(Point::BeforeSettle, Bed::on_nats().await, Successor::StartsAfterwards).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn before_the_answer_that_what_nats_acknowledged_is_recorded() {
    killed_at(Point::InSettle, Bed::on_nats().await, Successor::IsThere).await;
}
