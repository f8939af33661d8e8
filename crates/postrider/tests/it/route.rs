//! The trigger: every message stands in the ready queue or among the waiting, in the producer's own transaction.

use std::time::Duration;

use postrider::{Message, enqueue, schema};
use sqlx::Executor;

use crate::common::{Postgres, Sqlite, Store, on_both};

on_both! {
    a_message_is_ready_and_a_delayed_one_waits
    a_due_time_in_the_past_is_at_once
    chinese_topics_ids_and_keys_are_kept
}

async fn put<S: Store>(db: &S, messages: &[Message]) {
    let mut tx = db.begin().await;
    for message in messages {
        enqueue(&mut tx, message).await.expect("enqueue");
    }
    tx.commit().await.expect("commit");
}

const QUEUE: &str = "select message_id from outbox join outbox_queue using (id) order by id";
const WAITING: &str = "select message_id from outbox join outbox_waiting using (id) order by id";

async fn a_message_is_ready_and_a_delayed_one_waits<S: Store>(db: &S) {
    let hour = Duration::from_secs(3_600);
    put(
        db,
        &[
            Message::new("t", ()).id("now").delay(Duration::ZERO),
            Message::new("t", "12345").id("later").delay(hour),
            Message::new("t", ()).id("far").due_at_us(4_102_444_800_000_000),
        ],
    )
    .await;
    assert_eq!(db.texts(QUEUE).await, ["now"]);
    assert_eq!(db.texts(WAITING).await, ["later", "far"]);
    assert_eq!(db.texts("select bytes from outbox_waiting order by id").await, ["5", "0"]);
    assert_eq!(db.texts("select distinct state from outbox_status").await, ["PENDING"]);
    assert_eq!(db.number("select count(*) from outbox where due_at is null").await, 1);
}

async fn a_due_time_in_the_past_is_at_once<S: Store>(db: &S) {
    put(db, &[Message::new("t", ()).id("past").due_at_us(0)]).await;
    assert_eq!(db.texts(QUEUE).await, ["past"]);
}

async fn chinese_topics_ids_and_keys_are_kept<S: Store>(db: &S) {
    put(db, &[Message::new("订单.已支付", "付款成功").id("订单:4711").key("客户:张三").tag("重要")]).await;
    let stored = db.texts(
        "select topic || '|' || message_id || '|' || message_key || '|' || tag || '|' || payload from outbox",
    );
    assert_eq!(stored.await, ["订单.已支付|订单:4711|客户:张三|重要|付款成功"]);
}

#[tokio::test]
async fn delays_count_from_the_database_clock_in_microseconds() {
    let db = Postgres::new().await;
    let sent = [
        Message::new("t", ()).id("a").delay(Duration::from_micros(3_600_000_001)),
        Message::new("t", ()).id("b").due_at_us(4_102_444_800_123_456),
    ];
    put(&db, &sent).await;
    // The delay is taken before the row's own time, both inside one statement.
    let a = db.number("select (due_at between created_at + interval '3599 s' and created_at + interval '3600.000001 s')::int
                       from outbox where message_id = 'a'");
    assert_eq!(a.await, 1);
    let b = db.texts("select to_char(due_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') from outbox where message_id = 'b'");
    assert_eq!(b.await, ["2100-01-01 00:00:00.123456"]);
    assert_eq!(
        db.number("select count(*) from outbox o join outbox_waiting w using (id) where o.due_at = w.due_at")
            .await,
        2
    );
}

#[tokio::test]
async fn delays_on_sqlite_count_from_its_clock() {
    let db = Sqlite::new().await;
    put(&db, &[Message::new("t", ()).id("a").delay(Duration::from_micros(3_600_000_001))]).await;
    let difference = db.number("select due_at - created_at from outbox").await;
    // One statement sees one time on SQLite.
    assert_eq!(difference, 3_600_000_001);
}

#[tokio::test]
async fn messages_of_one_key_share_a_lane_whether_key_or_aggregate_names_it() {
    let db = Postgres::new().await;
    put(
        &db,
        &[
            Message::new("t", ()).key("order:7"),
            Message::new("t", ()).aggregate("order", "7"),
            Message::new("t", ()),
            Message::new("t", ()),
        ],
    )
    .await;
    assert_eq!(db.number("select count(distinct key_hash) from outbox_queue").await, 3);
    assert_eq!(db.number("select count(*) from outbox_queue where shard = key_hash & 63").await, 4);
    let db = Sqlite::new().await;
    put(&db, &[Message::new("t", ()).key("order:7"), Message::new("t", ()).aggregate("order", "7")]).await;
    assert_eq!(db.texts("select distinct lane from outbox_queue").await, ["k:order:7"]);
}

/// Two installations in one database, neither of them in "public", and a caller whose search_path ends elsewhere.
#[tokio::test]
async fn an_installation_can_stand_in_any_schema() {
    let db = Postgres::empty().await;
    let mut conn = db.connect().await;
    for name in ["one", "Two two"] {
        let prepare = format!("create schema \"{name}\"; set search_path = \"{name}\", public");
        conn.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(prepare))).await.expect("schema");
        let migrated = schema::migrate(&mut conn).await.expect("migrate");
        assert_eq!((migrated.from, migrated.to), (0, schema::VERSION), "{name}");
        let mut tx = sqlx::Connection::begin(&mut conn).await.expect("begin");
        enqueue(&mut tx, &Message::new("t", ()).id(name)).await.expect("enqueue");
        tx.commit().await.expect("commit");
        // The search_path that the migration set was its transaction's own.
        let path: String = sqlx::query_scalar("show search_path").fetch_one(&mut conn).await.expect("show");
        assert_eq!(path, format!("\"{name}\", public").replace("\"one\"", "one"));
    }
    // A caller without search_path: the trigger finds its own schema all the same.
    db.exec("set search_path = ''; insert into one.outbox (message_id, topic) values ('bare', 't')")
        .await
        .expect("insert");
    assert_eq!(
        db.texts("select message_id from one.outbox join one.outbox_queue using (id) order by id").await,
        ["one", "bare"]
    );
    assert_eq!(db.number("select count(*) from \"Two two\".outbox_queue").await, 1);
    assert_eq!(
        db.number(
            "select count(*) from pg_class where relname = 'outbox' and relnamespace = 'public'::regnamespace"
        )
        .await,
        0
    );
}
