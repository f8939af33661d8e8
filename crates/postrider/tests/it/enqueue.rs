//! One message: rollback, savepoint, commit, repeats, errors.

use postrider::{EnqueueError, Message, enqueue};
use serde_json::json;
use sqlx::Connection;

use crate::common::{Postgres, Sqlite, Store, on_both};

on_both! {
    a_message_exists_if_and_only_if_its_transaction_committed
    a_rolled_back_savepoint_takes_its_messages_along
    the_same_again_is_recognised_within_and_across_transactions
    the_same_id_with_other_content_is_an_error_and_the_transaction_goes_on
    a_repeat_of_a_message_written_by_plain_sql_is_compared_by_its_fields
    every_field_is_stored
    a_refused_message_leaves_the_transaction_usable
    a_missing_table_says_which_command_is_needed
}

fn order(n: u32) -> Message {
    Message::new("orders", json!({"order": n})).id(format!("order:{n}"))
}

async fn a_message_exists_if_and_only_if_its_transaction_committed<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(1)).await.expect("enqueue");
    tx.rollback().await.expect("rollback");
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(2)).await.expect("enqueue");
    drop(tx);
    let mut tx = db.begin().await;
    let enqueued = enqueue(&mut tx, &order(3)).await.expect("enqueue");
    assert_eq!((enqueued.message_id.as_str(), enqueued.already), ("order:3", false));
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ["order:3"]);
    assert_eq!(db.number("select count(*) from outbox_queue").await, 1);
}

async fn a_rolled_back_savepoint_takes_its_messages_along<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(1)).await.expect("enqueue");
    let mut inner = tx.begin().await.expect("savepoint");
    enqueue(&mut inner, &order(2)).await.expect("enqueue");
    inner.rollback().await.expect("roll back the savepoint");
    let mut inner = tx.begin().await.expect("savepoint");
    enqueue(&mut inner, &order(3)).await.expect("enqueue");
    inner.commit().await.expect("release the savepoint");
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ["order:1", "order:3"]);
    assert_eq!(db.number("select count(*) from outbox_queue").await, 2);
}

async fn the_same_again_is_recognised_within_and_across_transactions<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    assert!(!enqueue(&mut tx, &order(1)).await.expect("first").already);
    assert!(enqueue(&mut tx, &order(1)).await.expect("again").already);
    tx.commit().await.expect("commit");
    let mut tx = db.begin().await;
    let repeat = order(1).event_type("not part of the content");
    assert!(enqueue(&mut tx, &repeat).await.expect("across transactions").already);
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ["order:1"]);
    assert_eq!(db.number("select count(*) from outbox_queue").await, 1);
}

async fn the_same_id_with_other_content_is_an_error_and_the_transaction_goes_on<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(1)).await.expect("first");
    let others = [
        Message::new("orders", json!({"order": 2})),
        Message::new("order", json!({"order": 1})),
        Message::new("orders", json!({"order": 1})).key("k"),
        Message::new("orders", json!({"order": 1})).header("a", "1"),
        Message::new("orders", json!({"order": 1})).content_type("text/plain"),
        Message::new("orders", ()),
        Message::new("orders", ""),
    ];
    for other in others {
        match enqueue(&mut tx, &other.id("order:1")).await {
            Err(EnqueueError::DifferentContent { message_id }) => assert_eq!(message_id, "order:1"),
            answer => panic!("{answer:?}"),
        }
    }
    enqueue(&mut tx, &order(2)).await.expect("the transaction is usable");
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ["order:1", "order:2"]);
}

async fn a_repeat_of_a_message_written_by_plain_sql_is_compared_by_its_fields<S: Store>(db: &S) {
    db.exec(
        "insert into outbox (message_id, topic, aggregate_type, aggregate_id, headers, content_type, payload)
         values ('a', 't', 'order', '7', '{\"B\":\"2\", \"a\":\"1\"}', 'application/json', '{\"n\":1}');
         insert into outbox (message_id, topic) values ('absent', 't');
         insert into outbox (message_id, topic, payload) values ('empty', 't', '');",
    )
    .await
    .expect("plain SQL");
    let same = Message::new("t", json!({"n": 1})).id("a").key("order:7").header("A", "1").header("b", "2");
    let mut tx = db.begin().await;
    assert!(enqueue(&mut tx, &same).await.expect("the same").already);
    assert!(enqueue(&mut tx, &Message::new("t", ()).id("absent")).await.expect("absent").already);
    assert!(enqueue(&mut tx, &Message::new("t", "").id("empty")).await.expect("empty").already);
    let different = [
        Message::new("t", json!({"n": 2})).id("a").key("order:7").header("A", "1").header("b", "2"),
        Message::new("t", json!({"n": 1})).id("a").key("order:8").header("A", "1").header("b", "2"),
        Message::new("t", json!({"n": 1})).id("a").key("order:7").header("A", "1"),
        Message::new("t", "").id("absent"),
        Message::new("t", ()).id("empty"),
        Message::new("t", ()).id("absent").header("a", "1"),
    ];
    for message in different {
        let answer = enqueue(&mut tx, &message).await;
        assert!(matches!(answer, Err(EnqueueError::DifferentContent { .. })), "{message:?}: {answer:?}");
    }
    tx.commit().await.expect("usable to the end");
}

async fn every_field_is_stored<S: Store>(db: &S) {
    let message = Message::new("订单", json!({"n": 1}))
        .id("订单:1")
        .key("k")
        .tag("vip")
        .aggregate("order", "4711")
        .event_type("OrderPaid")
        .schema_version(3)
        .header("z", "嗨 \"x\"")
        .header("a", "")
        .max_attempts(7)
        .trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Some("a=1"));
    let mut tx = db.begin().await;
    enqueue(&mut tx, &message).await.expect("enqueue");
    tx.commit().await.expect("commit");
    let columns = "topic || '|' || message_id || '|' || message_key || '|' || tag || '|' || aggregate_type || '|' || \
                   aggregate_id || '|' || event_type || '|' || schema_version || '|' || headers || '|' || \
                   content_type || '|' || payload || '|' || max_attempts || '|' || trace || '|' || trace_state";
    let stored = db
        .texts(&format!("select {columns} from outbox where due_at is null and payload_bytes is null"))
        .await;
    let expected = "订单|订单:1|k|vip|order|4711|OrderPaid|3|{\"z\":\"嗨 \\\"x\\\"\",\"a\":\"\"}|application/json|{\"n\":1}|7|\
                    00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01|a=1";
    assert_eq!(stored, [expected]);
    assert_eq!(db.number("select content_hash from outbox").await, message.content_hash().0);
}

async fn a_refused_message_leaves_the_transaction_usable<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    let refused = [
        order(1).id(""),
        order(1).id("x".repeat(256)),
        Message::new("two words", ()),
        Message::new("t", "nul \0"),
        Message::new("t", vec![0; (1 << 20) + 1]),
        order(1).key(""),
        order(1).header("a b", "1"),
        order(1).header("a", "1\r\nb: 2"),
        order(1).header("a", "1").header("A", "2"),
        order(1).max_attempts(0),
        order(1).tag("a\0"),
        order(1).due_at_us(i64::MAX),
    ];
    for message in refused {
        let answer = enqueue(&mut tx, &message).await;
        assert!(matches!(answer, Err(EnqueueError::Message(_))), "{message:?}: {answer:?}");
    }
    enqueue(&mut tx, &order(2)).await.expect("the transaction is usable");
    tx.commit().await.expect("commit");
    assert_eq!(db.ids().await, ["order:2"]);
}

async fn a_missing_table_says_which_command_is_needed<S: Store>(db: &S) {
    db.exec("drop view outbox_status").await.expect("drop the view");
    db.exec("drop table outbox").await.expect("drop the table");
    let mut tx = db.begin().await;
    let secret = Message::new("t", "geheim");
    match enqueue(&mut tx, &secret).await {
        Err(error @ EnqueueError::SchemaMissing(_)) => {
            assert!(error.to_string().contains("`postrider init`"), "{error}");
            assert!(!format!("{error} {error:?}").contains("geheim"), "{error:?}");
        }
        answer => panic!("{answer:?}"),
    }
}

/// A CHECK that fails makes PostgreSQL send the whole row as the detail of its error.
#[tokio::test]
async fn the_payload_is_in_no_error() {
    let db = Postgres::new().await;
    db.exec("alter table outbox add constraint no_vip check (tag <> 'vip')").await.expect("alter");
    let mut tx = db.begin().await;
    let error = enqueue(&mut tx, &Message::new("t", "geheim").tag("vip")).await.expect_err("the CHECK");
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("no_vip") && !shown.contains("geheim"), "{shown}");
}

/// The second writer waits for the first one's commit, then sees its row.
#[tokio::test]
async fn two_transactions_with_one_id_write_one_message() {
    let db = Postgres::new().await;
    let mut first = db.begin().await;
    let mut second = db.begin().await;
    enqueue(&mut first, &order(1)).await.expect("first");
    let waiting = tokio::spawn(async move {
        let answer = enqueue(&mut second, &order(1)).await;
        second.commit().await.expect("commit");
        answer
    });
    let blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    while db.number(blocked).await == 0 {
        tokio::task::yield_now().await;
    }
    first.commit().await.expect("commit");
    assert!(waiting.await.expect("task").expect("second").already);
    assert_eq!(db.ids().await, ["order:1"]);
}

#[tokio::test]
async fn a_conflict_that_a_snapshot_cannot_see_is_retryable() {
    let db = Postgres::new().await;
    let mut old = db.pool.begin_with("begin isolation level repeatable read").await.expect("begin");
    sqlx::query("select 1 from outbox").fetch_all(&mut *old).await.expect("take the snapshot");
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(1)).await.expect("enqueue");
    tx.commit().await.expect("commit");
    let answer = enqueue(&mut old, &order(1)).await;
    assert!(matches!(answer, Err(EnqueueError::Retryable(_))), "{answer:?}");
}

#[tokio::test]
async fn a_locked_sqlite_file_is_retryable() {
    let db = Sqlite::new().await;
    // A deferred transaction that has read before it writes, and another writer was faster.
    let mut reader = db.pool.begin().await.expect("begin");
    sqlx::query("select * from outbox").fetch_all(&mut *reader).await.expect("take the snapshot");
    let mut writer = db.begin().await;
    enqueue(&mut writer, &order(1)).await.expect("enqueue");
    writer.commit().await.expect("commit");
    let answer = enqueue(&mut reader, &order(2)).await;
    assert!(matches!(answer, Err(EnqueueError::Retryable(_))), "{answer:?}");
}

#[tokio::test]
async fn row_level_security_that_hides_the_row_is_named() {
    let db = Postgres::new().await;
    let mut tx = db.begin().await;
    enqueue(&mut tx, &order(1)).await.expect("enqueue");
    tx.commit().await.expect("commit");
    db.exec(
        "alter table outbox enable row level security; alter table outbox force row level security;
         create policy w on outbox for insert with check (true);
         create policy r on outbox for select using (message_id like 'mine%');",
    )
    .await
    .expect("policies");
    let role = format!("postrider_rls_{}", uuid::Uuid::now_v7().simple());
    db.exec(&format!("create role {role}; grant insert, select on outbox to {role}")).await.expect("role");
    let mut tx = db.begin().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!("set local role {role}")))
        .execute(&mut *tx)
        .await
        .expect("set role");
    let answer = enqueue(&mut tx, &order(1)).await;
    drop(tx);
    db.exec(&format!("drop owned by {role}; drop role {role}")).await.expect("drop the role");
    // INSERT … RETURNING asks for the right to see the row, so PostgreSQL says so by itself.
    let error = answer.expect_err("hidden");
    assert!(error.to_string().contains("row-level security"), "{error}");
}
