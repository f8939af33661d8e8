//! Each role can do its job and nothing more.

use postrider::{Begin, Dead, Dialect, EnqueueError, Inbox, Message, enqueue, enqueue_all, schema};
use sqlx::{AssertSqlSafe, Transaction};

use crate::common::{Postgres, Store};

async fn installed() -> Postgres {
    let db = Postgres::new().await;
    for _ in 0..2 {
        db.exec(schema::grants(Dialect::Postgres)).await.expect("the script can be run again");
    }
    db
}

async fn acting_as(db: &Postgres, role: &str) -> Transaction<'static, sqlx::Postgres> {
    let mut tx = db.begin().await;
    sqlx::raw_sql(AssertSqlSafe(format!("set local role {role}"))).execute(&mut *tx).await.expect("set role");
    tx
}

/// Runs each statement by itself as `role`; all must be allowed, or all refused for want of a right.
async fn all(db: &Postgres, role: &str, allowed: bool, statements: &[&str]) {
    for sql in statements {
        let mut tx = acting_as(db, role).await;
        let answer = sqlx::raw_sql(AssertSqlSafe((*sql).to_owned())).execute(&mut *tx).await;
        let code = answer
            .as_ref()
            .err()
            .and_then(|error| error.as_database_error()?.code().map(std::borrow::Cow::into_owned));
        assert_eq!(code.as_deref(), if allowed { None } else { Some("42501") }, "{role}: {sql}: {answer:?}");
        tx.rollback().await.expect("rollback");
    }
}

/// As on PostgreSQL 13 and 14, where anybody may create in the schema public.
#[tokio::test]
async fn whoever_may_create_in_the_schema_does_not_run_as_the_owner_of_the_tables() {
    let db = installed().await;
    db.exec(
        "create function stranger(bigint, integer) returns bigint language plpgsql as
           $$ begin raise exception 'stranger ran as %', current_user; end $$;
         create operator & (leftarg = bigint, rightarg = integer, function = stranger);
         create function convert_to(text, text) returns bytea language plpgsql as
           $$ begin raise exception 'stranger ran as %', current_user; end $$;
         create function stranger(jsonb, text, jsonb) returns jsonb language plpgsql as
           $$ begin raise exception 'stranger ran as %', current_user; end $$;
         create aggregate jsonb_object_agg(text, jsonb) (sfunc = stranger, stype = jsonb);",
    )
    .await
    .expect("what a stranger creates");
    db.exec(
        "insert into outbox (message_id, topic, headers, payload) values ('sql', 't', '{\"a\":\"1\"}', 'x');
         insert into outbox (message_id, topic, due_at) values ('later', 't', now() + interval '1 hour');",
    )
    .await
    .expect("the trigger calls nothing of it");
    let mut tx = acting_as(&db, "postrider_producer").await;
    let same = Message::new("t", "x").id("sql").header("a", "1");
    assert!(enqueue(&mut tx, &same).await.expect("nor does the comparison").already);
}

#[tokio::test]
async fn a_producer_writes_messages_and_reads_none() {
    let db = installed().await;
    db.exec("insert into outbox (message_id, topic, payload) values ('sql', 't', 'x')")
        .await
        .expect("plain SQL");
    let mut tx = acting_as(&db, "postrider_producer").await;
    schema::ensure(&mut *tx).await.expect("it may look at the version");
    let message = Message::new("t", "1").id("a").delay(std::time::Duration::from_secs(9));
    assert!(!enqueue(&mut tx, &message).await.expect("new").already);
    assert!(enqueue(&mut tx, &message).await.expect("again").already);
    assert!(enqueue(&mut tx, &Message::new("t", "x").id("sql")).await.expect("plain SQL, the same").already);
    let other = enqueue(&mut tx, &Message::new("t", "y").id("sql")).await;
    assert!(matches!(other, Err(EnqueueError::DifferentContent { .. })), "{other:?}");
    let many = [Message::new("t", "2").id("b"), Message::new("t", "x").id("sql")];
    let answers = enqueue_all(&mut tx, &many).await.expect("many");
    assert_eq!(answers.iter().map(|a| a.already).collect::<Vec<_>>(), [false, true]);
    tx.commit().await.expect("commit");
    assert_eq!(db.number("select count(*) from outbox_queue").await, 2);
    all(
        &db,
        "postrider_producer",
        false,
        &[
            "select payload from outbox",
            "select topic from outbox",
            "select * from outbox_status",
            "update outbox set topic = 'x'",
            "delete from outbox",
            "insert into outbox_queue values (1, 1, 1, 1)",
            "delete from outbox_queue",
            "select * from outbox_waiting",
            "select * from outbox_sent",
            "insert into postrider_schema values (9, 'x')",
            "insert into inbox (consumer, message_id) values ('c', 'm')",
            "create table t (n int)",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_relay_reads_and_settles_and_changes_no_message() {
    let db = installed().await;
    db.exec("insert into outbox (message_id, topic, payload) values ('a', 't', 'x')")
        .await
        .expect("plain SQL");
    all(&db, "postrider_relay", true, &[
        "select * from postrider_schema",
        "select * from outbox",
        "select * from outbox_status",
        "insert into outbox_relay (relay, instance, version, expires_at) values (1, 'i', 'v', now())",
        "update outbox_relay set expires_at = now()",
        "delete from outbox_relay",
        "update outbox_shard set owner = 1, token = 2 where shard = 0",
        "select 1 from outbox_shard order by shard for share",
        "with d as (delete from outbox_queue returning *) insert into outbox_sent (bucket, sent_at, relay, n, sink, ids) \
         select id >> 12, now(), 1, 1, 's', array[id] from d",
        "with d as (delete from outbox_queue returning *) insert into outbox_waiting (id, key_hash, due_at, bytes, shard) \
         select id, key_hash, now(), bytes, shard from d",
        "update outbox_waiting set attempts = 1",
        "insert into outbox_queue (id, key_hash, bytes, shard) values (77, 1, 1, 1)",
        "insert into outbox_dead (id, key_hash, bytes, shard, attempts, tries, reason) values (1, 1, 1, 1, 1, 1, 'permanent')",
        "delete from outbox_dead",
        "insert into outbox_cancelled (id, cancelled_by) values (1, 'me')",
        "insert into outbox_audit (actor, action, message) values ('me', 'cancel', 1)",
    ])
    .await;
    all(
        &db,
        "postrider_relay",
        false,
        &[
            "insert into outbox (message_id, topic) values ('b', 't')",
            "update outbox set payload = 'y'",
            "delete from outbox",
            "delete from outbox_sent",
            "update outbox_sent set sink = 'x'",
            "delete from outbox_audit",
            "delete from outbox_shard",
            "insert into postrider_schema values (9, 'x')",
            "select outbox_same_content('a', 't', null, null, null, null)",
        ],
    )
    .await;
}

#[tokio::test]
async fn clean_up_deletes_and_reads_no_payload() {
    let db = installed().await;
    db.exec("insert into outbox (message_id, topic, payload) values ('a', 't', 'x')")
        .await
        .expect("plain SQL");
    all(&db, "postrider_cleanup", true, &[
        "delete from outbox o where id = 1 and created_at < now() and not exists (select from outbox_queue q where q.id = o.id)",
        "with r as (delete from outbox_sent where sent_at < now() returning ids) delete from outbox where id in (select unnest(ids) from r)",
        "delete from outbox_cancelled",
        "delete from inbox where handled_at < now()",
        "select id from outbox_waiting",
    ])
    .await;
    all(
        &db,
        "postrider_cleanup",
        false,
        &[
            "select payload from outbox",
            "insert into outbox (message_id, topic) values ('b', 't')",
            "update outbox set topic = 'x'",
            "delete from outbox_queue",
            "delete from outbox_dead",
            "delete from outbox_audit",
            "update outbox_shard set owner = 1",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_consumer_uses_the_inbox_alone() {
    let db = installed().await;
    let inbox = Inbox::new("billing").expect("a name");
    let mut tx = acting_as(&db, "postrider_consumer").await;
    assert_eq!(inbox.begin(&mut tx, "m", None, None).await.expect("begin"), Begin::First);
    assert_eq!(inbox.begin(&mut tx, "m", None, None).await.expect("begin"), Begin::Repeat);
    let dead = Dead { message_id: "n", topic: "t", error: "no", ..Dead::default() };
    inbox.bury(&mut tx, &dead).await.expect("bury");
    inbox.bury(&mut tx, &dead).await.expect("bury again");
    tx.commit().await.expect("commit");
    all(
        &db,
        "postrider_consumer",
        false,
        &[
            "delete from inbox",
            "update inbox set position = 1",
            "select id from outbox",
            "insert into outbox (message_id, topic) values ('b', 't')",
        ],
    )
    .await;
}

#[tokio::test]
async fn a_missing_grant_names_the_script() {
    let db = installed().await;
    let mut tx = acting_as(&db, "postrider_consumer").await;
    match enqueue(&mut tx, &Message::new("t", "geheim")).await {
        Err(error @ EnqueueError::Denied(_)) => {
            assert!(error.to_string().contains("grants.sql"), "{error}");
            assert!(!format!("{error:?}").contains("geheim"), "{error:?}");
        }
        answer => panic!("{answer:?}"),
    }
    drop(tx);
    let mut tx = acting_as(&db, "postrider_producer").await;
    let error = schema::migrate(&mut *tx).await;
    assert_eq!(error.expect("nothing to do, so no right is missing").from, schema::VERSION);
}
