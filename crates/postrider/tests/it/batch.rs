//! Many messages in one statement.

use postrider::{Database, EnqueueError, Limits, Message, enqueue, enqueue_all, enqueue_all_within};

use crate::common::{Store, on_both};

on_both! {
    ids_rise_in_the_order_given
    an_empty_slice_does_nothing
    each_repeat_is_decided_for_itself
    the_same_id_twice_in_the_slice_is_one_message_or_an_error
    other_content_in_the_table_is_an_error_and_the_transaction_goes_on
    one_bad_message_refuses_the_whole_slice
    every_payload_and_delay_survives_a_batch
    more_messages_and_bytes_than_one_statement_takes
}

fn message(n: usize) -> Message {
    // Not in the order of the alphabet, so that sorting by anything but the place would show.
    Message::new("t", format!("{n}")).id(format!("{:04}", (n * 7919) % 10_000))
}

fn ids(messages: &[Message]) -> Vec<String> {
    messages.iter().map(|m| m.message_id().to_owned()).collect()
}

async fn commit_all<S: Store>(db: &S, messages: &[Message]) -> Vec<bool> {
    let mut tx = db.begin().await;
    let answers = enqueue_all(&mut tx, messages).await.expect("enqueue_all");
    tx.commit().await.expect("commit");
    assert_eq!(answers.iter().map(|a| a.message_id.clone()).collect::<Vec<_>>(), ids(messages));
    answers.iter().map(|a| a.already).collect()
}

async fn ids_rise_in_the_order_given<S: Store>(db: &S) {
    let messages: Vec<Message> = (0..3_000).map(message).collect();
    assert!(commit_all(db, &messages).await.iter().all(|already| !already));
    assert_eq!(db.ids().await, ids(&messages));
    assert_eq!(db.number("select count(*) from outbox_queue").await, 3_000);
}

async fn an_empty_slice_does_nothing<S: Store>(db: &S) {
    assert!(commit_all(db, &[]).await.is_empty());
}

async fn each_repeat_is_decided_for_itself<S: Store>(db: &S) {
    commit_all(db, &[message(1), message(3)]).await;
    db.exec("insert into outbox (message_id, topic, payload) values ('sql', 't', '1')")
        .await
        .expect("plain SQL");
    let slice =
        [message(0), message(1), message(2), message(3), Message::new("t", "1").id("sql"), message(4)];
    assert_eq!(commit_all(db, &slice).await, [false, true, false, true, true, false]);
    assert_eq!(db.number("select count(*) from outbox").await, 6);
}

async fn the_same_id_twice_in_the_slice_is_one_message_or_an_error<S: Store>(db: &S) {
    let slice = [message(1), message(2), message(1), message(1)];
    assert_eq!(commit_all(db, &slice).await, [false, false, true, true]);
    let mut tx = db.begin().await;
    let slice = [message(5), message(6), Message::new("t", "other").id(message(5).message_id())];
    different(&mut tx, &slice, message(5).message_id()).await;
    tx.commit().await.expect("commit");
    assert_eq!(db.number("select count(*) from outbox").await, 2, "found before anything was written");
}

async fn other_content_in_the_table_is_an_error_and_the_transaction_goes_on<S: Store>(db: &S) {
    commit_all(db, &[message(1)]).await;
    let mut tx = db.begin().await;
    let slice = [message(2), Message::new("t", "other").id(message(1).message_id()), message(3)];
    different(&mut tx, &slice, message(1).message_id()).await;
    enqueue(&mut tx, &message(4)).await.expect("the transaction is usable");
    tx.rollback().await.expect("rollback");
    assert_eq!(db.number("select count(*) from outbox").await, 1);
}

async fn different<DB: Database>(tx: &mut sqlx::Transaction<'_, DB>, slice: &[Message], expected: &str) {
    match enqueue_all(tx, slice).await {
        Err(EnqueueError::DifferentContent { message_id }) => assert_eq!(message_id, expected),
        answer => panic!("{answer:?}"),
    }
}

async fn one_bad_message_refuses_the_whole_slice<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    let answer = enqueue_all(&mut tx, &[message(1), Message::new("", ()), message(2)]).await;
    assert!(matches!(answer, Err(EnqueueError::Message(_))), "{answer:?}");
    tx.commit().await.expect("commit");
    assert_eq!(db.number("select count(*) from outbox").await, 0);
}

async fn every_payload_and_delay_survives_a_batch<S: Store>(db: &S) {
    let all: Vec<u8> = (0..=255).collect();
    let messages = [
        Message::new("t", ()).id("absent"),
        Message::new("t", "").id("empty"),
        Message::new("t", Vec::new()).id("no bytes"),
        Message::new("t", all).id("bytes").delay(std::time::Duration::from_secs(3_600)),
        Message::new("t", "{a,\"b\\c\",NULL}")
            .id("array syntax")
            .due_at_us(4_102_444_800_000_000)
            .max_attempts(3),
        Message::new("t", "NULL").id("null").header("a", "{}").schema_version(-1),
    ];
    commit_all(db, &messages).await;
    // A second time one by one: the same content, so the hash and the columns agree.
    let mut tx = db.begin().await;
    for message in &messages {
        assert!(enqueue(&mut tx, message).await.expect("the same").already, "{message:?}");
    }
    tx.commit().await.expect("commit");
    db.exec("update outbox set content_hash = null").await.expect("forget the hashes");
    assert_eq!(commit_all(db, &messages).await, [true; 6], "compared by the fields");
    assert_eq!(db.number("select count(*) from outbox_waiting").await, 2);
    assert_eq!(
        db.texts("select payload from outbox where message_id = 'array syntax'").await,
        ["{a,\"b\\c\",NULL}"]
    );
}

async fn more_messages_and_bytes_than_one_statement_takes<S: Store>(db: &S) {
    let mut messages: Vec<Message> = (0..4_000).map(message).collect();
    messages.extend((0..3).map(|n| Message::new("t", vec![n; 9 << 20]).id(format!("big {n}"))));
    let mut tx = db.begin().await;
    let limits = Limits::default().payload_bytes(10 << 20);
    enqueue_all_within(&mut tx, &messages, &limits).await.expect("enqueue_all_within");
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ids(&messages));
}
