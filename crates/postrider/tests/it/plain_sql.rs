//! The INSERT of the README, through the programs of the databases.

use postrider::{Message, enqueue};
use serde_json::json;

use crate::common::{Postgres, Sqlite, Store};

/// The SQL blocks of the README that mention the outbox, as they stand there.
fn documented() -> Vec<String> {
    let readme = include_str!("../../README.md");
    let blocks: Vec<String> = readme
        .split("```sql\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .filter(|block| block.contains("insert into outbox"))
        .map(str::to_owned)
        .collect();
    assert!(!blocks.is_empty(), "the README documents the INSERT");
    blocks
}

const ACCOUNT: &str = "create table account (id text primary key, balance int not null); \
                       insert into account values ('alice', 100)";

#[tokio::test]
async fn psql_writes_messages_as_documented() {
    let db = Postgres::new().await;
    db.psql(ACCOUNT);
    for block in documented() {
        db.psql(&block);
    }
    check(&db).await;
    let shown = db.psql("select state from outbox_status");
    assert_eq!(shown, "PENDING");
}

#[tokio::test]
async fn sqlite3_writes_messages_as_documented() {
    let db = Sqlite::new().await;
    db.sqlite3(ACCOUNT);
    for block in documented() {
        db.sqlite3(&block);
    }
    check(&db).await;
    assert_eq!(db.sqlite3("select state from outbox_status"), "PENDING");
}

async fn check<S: Store>(db: &S) {
    assert_eq!(db.ids().await, ["transfer:17"]);
    assert_eq!(db.number("select balance from account").await, 70);
    assert_eq!(db.number("select count(*) from outbox_queue").await, 1);
    // The library takes it for what it is.
    let same = Message::new("transfers", json!({"amount": 30, "from": "alice"}))
        .id("transfer:17")
        .key("alice")
        .header("tenant", "eu-1");
    let mut tx = db.begin().await;
    assert!(enqueue(&mut tx, &same).await.expect("the same").already);
    tx.commit().await.expect("commit");
}

#[tokio::test]
async fn sqlite3_of_debian_can_make_and_use_the_schema() {
    let db = Sqlite::empty();
    db.sqlite3(&postrider::schema::sql(postrider::Dialect::Sqlite));
    db.sqlite3("insert into outbox (message_id, topic, payload_bytes) values ('a', 't', x'00ff')");
    assert_eq!(db.sqlite3("select message_id, state from outbox_status"), "a|PENDING");
    let mut tx = db.begin().await;
    assert!(enqueue(&mut tx, &Message::new("t", b"\x00\xff").id("a")).await.expect("the same").already);
    tx.commit().await.expect("commit");
}
