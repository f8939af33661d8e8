//! A message takes effect once per consumer.

use std::process::Command;
use std::sync::Arc;

use postrider::{Begin, ContentHash, Dead, Inbox, InboxError, enqueue};
use sqlx::{AssertSqlSafe, Connection};

use crate::common::{Postgres, Sqlite, Store, on_both};

on_both! {
    the_first_is_told_from_repeats_per_consumer
    a_rolled_back_effect_runs_again
    other_content_under_a_handled_id_is_an_alarm
    without_a_hash_nothing_is_compared
    names_outside_the_limits_are_refused_and_the_transaction_goes_on
    a_buried_message_is_kept_with_its_body
    a_process_killed_inside_the_handler_leaves_nothing
}

fn inbox(consumer: &str) -> Inbox {
    Inbox::new(consumer).expect("a name")
}

async fn begin<S: Store>(db: &S, consumer: &str, id: &str, content: Option<i64>) -> Begin {
    let mut tx = db.begin().await;
    let begin = inbox(consumer).begin(&mut tx, id, content.map(ContentHash), Some(7)).await.expect("begin");
    tx.commit().await.expect("commit");
    begin
}

async fn the_first_is_told_from_repeats_per_consumer<S: Store>(db: &S) {
    assert_eq!(begin(db, "billing", "a", Some(1)).await, Begin::First);
    assert_eq!(begin(db, "billing", "a", Some(1)).await, Begin::Repeat);
    assert_eq!(begin(db, "shipping", "a", Some(1)).await, Begin::First);
    assert_eq!(begin(db, "billing", "A", Some(1)).await, Begin::First, "ids are compared byte by byte");
    assert_eq!(
        db.number("select count(*) from inbox where position = 7 and handled_at is not null").await,
        3
    );
}

async fn a_rolled_back_effect_runs_again<S: Store>(db: &S) {
    let mut tx = db.begin().await;
    assert_eq!(inbox("c").begin(&mut tx, "a", None, None).await.expect("begin"), Begin::First);
    tx.rollback().await.expect("rollback");
    assert_eq!(begin(db, "c", "a", None).await, Begin::First);
    assert_eq!(begin(db, "c", "a", None).await, Begin::Repeat);
}

async fn other_content_under_a_handled_id_is_an_alarm<S: Store>(db: &S) {
    assert_eq!(begin(db, "c", "a", Some(1)).await, Begin::First);
    let mismatch = Begin::Mismatch { stored: ContentHash(1), received: ContentHash(2) };
    assert_eq!(begin(db, "c", "a", Some(2)).await, mismatch);
    assert_eq!(begin(db, "c", "a", Some(1)).await, Begin::Repeat, "the stored hash stays");
}

async fn without_a_hash_nothing_is_compared<S: Store>(db: &S) {
    assert_eq!(begin(db, "c", "a", None).await, Begin::First);
    assert_eq!(begin(db, "c", "a", Some(2)).await, Begin::Repeat);
    assert_eq!(begin(db, "c", "b", Some(2)).await, Begin::First);
    assert_eq!(begin(db, "c", "b", None).await, Begin::Repeat);
}

async fn names_outside_the_limits_are_refused_and_the_transaction_goes_on<S: Store>(db: &S) {
    assert!(Inbox::new("").is_err() && Inbox::new("x".repeat(256)).is_err() && Inbox::new("a\0").is_err());
    let mut tx = db.begin().await;
    for id in ["", &"x".repeat(256), "nul\0"] {
        let answer = inbox("c").begin(&mut tx, id, None, None).await;
        assert!(matches!(answer, Err(InboxError::Name(_))), "{answer:?}");
    }
    assert_eq!(inbox("c").begin(&mut tx, "a", None, None).await.expect("usable"), Begin::First);
    tx.commit().await.expect("commit");
}

async fn a_buried_message_is_kept_with_its_body<S: Store>(db: &S) {
    let headers = [("a".to_owned(), "1".to_owned())];
    let long = format!("nul \0 {}", "é".repeat(2_000));
    let mut dead = Dead {
        message_id: "m",
        topic: "t",
        body: Some(b"\x00\xff"),
        headers: &headers,
        attempts: 3,
        error: &long,
    };
    for attempts in [3, 4] {
        dead.attempts = attempts;
        let mut tx = db.begin().await;
        inbox("c").bury(&mut tx, &dead).await.expect("bury");
        tx.commit().await.expect("commit");
    }
    assert_eq!(
        db.texts("select attempts || '|' || headers || '|' || topic from inbox_dead").await,
        ["4|{\"a\":\"1\"}|t"]
    );
    assert_eq!(db.number("select length(last_error) from inbox_dead").await, 1_000);
    assert_eq!(db.number("select length(body) from inbox_dead").await, 2);
}

/// The child handles the message, then is killed before it commits.
async fn a_process_killed_inside_the_handler_leaves_nothing<S: Killed>(db: &S) {
    db.exec("create table effect (n int)").await.expect("create");
    let exe = std::env::current_exe().expect("this test program");
    let status = Command::new(exe)
        .args(["inbox::child_that_is_killed_inside_the_handler", "--exact"])
        .env("POSTRIDER_TEST_HANDLE", db.address())
        .output()
        .expect("run the child")
        .status;
    assert!(!status.success(), "the child was killed: {status}");
    assert_eq!(db.number("select count(*) from effect").await, 0);
    assert_eq!(begin(db, "c", "a", None).await, Begin::First, "it runs again");
}

trait Killed: Store {
    fn address(&self) -> String;
}

impl Killed for Postgres {
    fn address(&self) -> String {
        self.url.clone()
    }
}

impl Killed for Sqlite {
    fn address(&self) -> String {
        format!("sqlite://{}", self.path.display())
    }
}

/// No test by itself: the child of the one above.
#[tokio::test]
async fn child_that_is_killed_inside_the_handler() {
    let Ok(address) = std::env::var("POSTRIDER_TEST_HANDLE") else { return };
    if address.starts_with("sqlite:") {
        let mut conn = sqlx::SqliteConnection::connect(&address).await.expect("open");
        handle_and_die(conn.begin_with("BEGIN IMMEDIATE").await.expect("begin")).await;
    } else {
        let mut conn = sqlx::PgConnection::connect(&address).await.expect("connect");
        handle_and_die(conn.begin().await.expect("begin")).await;
    }
}

async fn handle_and_die<DB: postrider::Database>(mut tx: sqlx::Transaction<'_, DB>)
where
    for<'c> &'c mut DB::Connection: sqlx::Executor<'c, Database = DB>,
    DB::Arguments: sqlx::IntoArguments<DB>,
{
    assert_eq!(inbox("c").begin(&mut tx, "a", None, None).await.expect("begin"), Begin::First);
    sqlx::query("insert into effect values (1)").execute(&mut *tx).await.expect("the effect");
    crate::schema::kill_this_process();
}

/// 16 copies of each message at once, each with its effect in the same transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_sixteen_concurrent_copies_one_takes_effect() {
    const IDS: usize = 60;
    let mut db = Postgres::new().await;
    db.pool =
        sqlx::postgres::PgPoolOptions::new().max_connections(16).connect(&db.url).await.expect("connect");
    let db = Arc::new(db);
    db.exec("create table effect (message_id text not null)").await.expect("create");
    let copies: Vec<_> = (0..16)
        .map(|copy| {
            let db = Arc::clone(&db);
            tokio::spawn(async move {
                let mut firsts = 0;
                for n in 0..IDS {
                    // Half of the copies come from the other end.
                    let id = if copy % 2 == 0 { n } else { IDS - 1 - n };
                    firsts += usize::from(handle(&db, &format!("m{id}"), copy).await);
                }
                firsts
            })
        })
        .collect();
    let mut firsts = 0;
    for copy in copies {
        firsts += copy.await.expect("a copy");
    }
    assert_eq!(firsts, IDS);
    assert_eq!(db.number("select count(*) from effect").await, IDS as i64);
    assert_eq!(db.number("select count(distinct message_id) from effect").await, IDS as i64);
}

/// One copy; every seventh one's transaction fails after the effect and comes again.
async fn handle(db: &Postgres, id: &str, copy: usize) -> bool {
    let mut failures = usize::from(copy.is_multiple_of(7));
    loop {
        let mut tx = db.begin().await;
        if inbox("c").begin(&mut tx, id, Some(ContentHash(9)), None).await.expect("begin") != Begin::First {
            tx.rollback().await.expect("rollback");
            return false;
        }
        let effect = format!("insert into effect values ('{id}')");
        sqlx::raw_sql(AssertSqlSafe(effect)).execute(&mut *tx).await.expect("the effect");
        if failures == 0 {
            tx.commit().await.expect("commit");
            return true;
        }
        failures -= 1;
        tx.rollback().await.expect("rollback");
    }
}

/// What was enqueued, read from a line of the file sink, has the hash that `enqueue` stored.
#[tokio::test]
async fn a_received_line_has_the_hash_that_enqueue_stored() {
    let db = Sqlite::new().await;
    let message =
        postrider::Message::new("t", serde_json::json!({"n": 1})).aggregate("order", "7").header("A", "1");
    let mut tx = db.begin().await;
    enqueue(&mut tx, &message).await.expect("enqueue");
    tx.commit().await.expect("commit");
    let line = r#"{"message_id":"x","topic":"t","key":"order:7","headers":{"A":"1"},"content_type":"application/json","payload":"{\"n\":1}"}"#;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.jsonl");
    std::fs::write(&path, format!("{line}\n")).expect("write");
    let batch = postrider::consumer::read(&path, 0).expect("read");
    assert_eq!(db.number("select content_hash from outbox").await, batch.received[0].content_hash().0);
}
