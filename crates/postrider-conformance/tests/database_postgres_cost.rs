//! What the statements that run all the time cost on PostgreSQL: plans, pages and log bytes, whatever the statistics say.

use postrider_conformance::database::DatabaseUnderTest;
use postrider_conformance::database::postgres::Postgres;
use postrider_relay::sources::postgres_statements as statements;
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgConnection, Row};

/// Rows asked for by the loaded statements.
const LOADED: i64 = 500;

/// Pages of an idle statement, and of a loaded one on top of 5 for each row.
const BASE: i64 = 12;

/// The tables filled the way a long-running outbox is: 100,000 sent, 20,000 waiting (half of them due), 20,000 dead,
/// 2,000 ready. Everything is owned with tokens 1,000 to 1,063.
const FILL: &str = "
set session_replication_role = replica;
insert into outbox (message_id, topic, message_key, payload)
select 'm' || g, 'orders', 'k' || g % 500, repeat('x', 60) from generate_series(1, 142000) g;
insert into outbox_sent (bucket, sent_at, relay, n, sink, ids)
select g.id >> 12, now(), 1, count(*), 'nats', array_agg(g.id) from generate_series(1, 100000) g (id) group by g.id >> 12;
insert into outbox_waiting (id, key_hash, due_at, bytes, shard, attempts, tries, holds_key)
select id, id % 500, now() + (id - 110000) * interval '1 second', 60, id % 64, 1, 1, id % 10 = 0
from generate_series(100001, 120000) g (id);
insert into outbox_dead (id, key_hash, bytes, shard, attempts, tries, reason)
select id, id % 500, 60, id % 64, 3, 3, 'permanent' from generate_series(120001, 140000) g (id);
insert into outbox_queue (id, key_hash, bytes, shard)
select id, id % 500, 60, id % 64 from generate_series(140001, 142000) g (id);
update outbox_shard set owner = 1, token = 1000 + shard;
set session_replication_role = origin;";

const NO_AUTOVACUUM: &str = "
alter table outbox set (autovacuum_enabled = off);
alter table outbox_queue set (autovacuum_enabled = off);
alter table outbox_waiting set (autovacuum_enabled = off);
alter table outbox_dead set (autovacuum_enabled = off);
alter table outbox_sent set (autovacuum_enabled = off);
alter table outbox_shard set (autovacuum_enabled = off);";

#[derive(Clone, Copy, Debug)]
enum Statistics {
    None,
    /// Of tables that were empty then.
    Stale,
    Fresh,
}

async fn filled(statistics: Statistics) -> Postgres {
    let db = Postgres::fresh().await;
    db.execute(NO_AUTOVACUUM).await;
    match statistics {
        Statistics::None => db.execute(FILL).await,
        Statistics::Stale => {
            // Tables that were full, were emptied and kept their pages: no rows in many pages, says the catalog, and
            // whatever comes into them later is believed to be none.
            db.execute(FILL).await;
            emptied(&db).await;
            db.execute(FILL).await;
        }
        Statistics::Fresh => {
            db.execute(FILL).await;
            db.execute("vacuum analyze").await;
        }
    }
    db
}

/// Deletes everything and lets the catalog know.
async fn emptied(db: &Postgres) {
    db.execute("delete from outbox_queue; delete from outbox_waiting; delete from outbox_dead;").await;
    db.execute("delete from outbox_sent; delete from outbox;").await;
    db.execute("vacuum (analyze, truncate off)").await;
    db.execute("alter table outbox alter id restart").await;
}

/// A session prepared like the relay's, and with `mode` for its plans.
async fn session(db: &Postgres, mode: &str) -> PgConnection {
    let mut connection = db.connect().await;
    sqlx::query(statements::RELAY_SESSION)
        .bind("60000")
        .bind("30000")
        .execute(&mut connection)
        .await
        .expect("the relay's settings");
    let mode = format!("set plan_cache_mode = {mode}");
    sqlx::raw_sql(AssertSqlSafe(mode)).execute(&mut connection).await.expect("the mode of planning");
    connection
}

/// Prepares `sql` and explains its execution with `values`, as JSON.
async fn explain(connection: &mut PgConnection, sql: &str, values: &str) -> Value {
    let text = format!("deallocate all; prepare p as {sql}");
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *connection).await.expect("prepare");
    let text = format!("explain (analyze, buffers, wal, format json) execute p({values})");
    let row = sqlx::raw_sql(AssertSqlSafe(text)).fetch_one(connection).await.expect("explain");
    let plan: String = row.try_get_unchecked(0).expect("text");
    serde_json::from_str::<Value>(&plan).expect("JSON")[0]["Plan"].take()
}

fn number(plan: &Value, name: &str) -> i64 {
    plan[name].as_i64().unwrap_or(0)
}

fn pages(plan: &Value) -> i64 {
    number(plan, "Shared Hit Blocks") + number(plan, "Shared Read Blocks")
}

/// Every (table, index) that is scanned; the index is empty for a sequential scan.
fn scans(plan: &Value, found: &mut Vec<(String, String)>) {
    let text = |name: &str| plan[name].as_str().unwrap_or_default().to_owned();
    if text("Node Type").contains("Scan") && !text("Relation Name").is_empty() {
        found.push((text("Relation Name"), text("Index Name")));
    }
    for child in plan["Plans"].as_array().into_iter().flatten() {
        scans(child, found);
    }
}

fn must_scan(plan: &Value, what: &str, table: &str, index: &str) {
    let mut found = Vec::new();
    scans(plan, &mut found);
    found.retain(|(table, _)| table != "outbox_shard");
    assert!(!found.is_empty(), "{what} scans nothing: {plan:#}");
    for (scanned, by) in found.iter().filter(|(scanned, _)| scanned == table) {
        assert_eq!(by, index, "{what} reads {scanned} the wrong way: {plan:#}");
    }
    assert!(found.iter().all(|(_, by)| !by.is_empty()), "{what} reads a whole table: {plan:#}");
}

fn tokens() -> String {
    let tokens: Vec<String> = (1_000..1_064).map(|token| token.to_string()).collect();
    format!("'{{{}}}'::bigint[]", tokens.join(","))
}

fn ids(first: i64, count: i64) -> String {
    let ids: Vec<String> = (first..first + count).map(|id| id.to_string()).collect();
    format!("'{{{}}}'::bigint[]", ids.join(","))
}

/// An array of the same value.
fn same(value: &str, kind: &str, count: i64) -> String {
    format!("array_fill({value}::{kind}, array[{count}])")
}

async fn check_reads(connection: &mut PgConnection, what: &str) {
    let (tokens, most) = (tokens(), i64::MAX);
    let now = "(extract(epoch from now()) * 1000000)::bigint";
    let loaded = BASE + 5 * LOADED;
    let cases = [
        (
            "heads idle",
            statements::HEADS,
            format!("{tokens}, 142000, {most}, {LOADED}"),
            "outbox_queue",
            "outbox_queue_pkey",
            BASE,
        ),
        (
            "heads loaded",
            statements::HEADS,
            format!("{tokens}, 0, {most}, {LOADED}"),
            "outbox_queue",
            "outbox_queue_pkey",
            loaded,
        ),
        (
            "window",
            statements::HEADS,
            format!("{tokens}, 140100, 140110, {LOADED}"),
            "outbox_queue",
            "outbox_queue_pkey",
            BASE + 50,
        ),
        (
            "lane",
            statements::LANE,
            format!("{tokens}, 0, {most}, {LOADED}, 7"),
            "outbox_queue",
            "outbox_queue_pkey",
            BASE + 20,
        ),
        (
            "due idle",
            statements::DUE,
            format!("{tokens}, {now}, 0, {LOADED}"),
            "outbox_waiting",
            "outbox_waiting_due",
            BASE,
        ),
        (
            "due loaded",
            statements::DUE,
            format!("{tokens}, 0, 0, {LOADED}"),
            "outbox_waiting",
            "outbox_waiting_due",
            loaded,
        ),
        (
            "messages",
            statements::MESSAGES,
            format!("{tokens}, {}", ids(140_001, LOADED)),
            "outbox",
            "outbox_pkey",
            loaded,
        ),
        (
            "held",
            statements::HELD,
            format!("{tokens}, 0::smallint, 0, 63::smallint, {LOADED}"),
            "outbox_waiting",
            "outbox_waiting_holds",
            loaded,
        ),
    ];
    for (name, sql, values, table, index, most) in cases {
        let what = format!("{name}, {what}");
        let plan = explain(connection, sql, &values).await;
        must_scan(&plan, &what, table, index);
        assert!(pages(&plan) <= most, "{what}: {} pages, at most {most}: {plan:#}", pages(&plan));
    }
}

async fn check_settles(connection: &mut PgConnection, what: &str) {
    let (ready, waiting) = (ids(140_501, 250), ids(110_001, 250));
    let both = format!("{ready} || {waiting}");
    let start = format!(
        "{}, {ready}, {waiting}, {}, {}, {both}",
        tokens(),
        same("1", "int", 250),
        same("1", "int", 250)
    );
    let text = |value: &str| same(value, "text", 500);
    let cases = [
        ("sent", statements::SENT, format!("{start}, {}, {}, 1", text("'nats'"), text("'seq:1'"))),
        (
            "retry",
            statements::RETRY,
            format!(
                "{start}, {}, {}, {}, {}, {}",
                same("2", "int", 500),
                same("2", "int", 500),
                same("1000000", "bigint", 500),
                same("true", "boolean", 500),
                text("'503'")
            ),
        ),
        (
            "dead",
            statements::DEAD,
            format!(
                "{start}, {}, {}, {}, {}, {}",
                same("2", "int", 500),
                same("2", "int", 500),
                text("'permanent'"),
                same("false", "boolean", 500),
                text("'422'")
            ),
        ),
    ];
    for (name, sql, values) in cases {
        let what = format!("{name}, {what}");
        sqlx::raw_sql("begin").execute(&mut *connection).await.expect("begin");
        let plan = explain(connection, sql, &values).await;
        sqlx::raw_sql("rollback").execute(&mut *connection).await.expect("roll back");
        must_scan(&plan, &what, "outbox_queue", "outbox_queue_pkey");
        must_scan(&plan, &what, "outbox_waiting", "outbox_waiting_pkey");
        let text = plan.to_string();
        assert!(!text.contains("Nested Loop"), "{what} compares each with each: {plan:#}");
    }
}

async fn check(statistics: Statistics) {
    let db = filled(statistics).await;
    for mode in ["force_generic_plan", "force_custom_plan"] {
        let mut connection = session(&db, mode).await;
        let what = format!("{statistics:?} statistics, {mode}");
        check_reads(&mut connection, &what).await;
        check_settles(&mut connection, &what).await;
    }
    db.finish().await;
}

#[tokio::test]
async fn pages_and_plans_are_bounded_without_statistics() {
    check(Statistics::None).await;
}

#[tokio::test]
async fn pages_and_plans_are_bounded_with_stale_statistics() {
    check(Statistics::Stale).await;
}

#[tokio::test]
async fn pages_and_plans_are_bounded_with_fresh_statistics() {
    check(Statistics::Fresh).await;
}

/// Plans made while the tables were empty are kept by a session; they must still be right when the tables have filled.
#[tokio::test]
async fn a_plan_made_on_empty_tables_is_right_on_full_ones() {
    let db = Postgres::fresh().await;
    db.execute(NO_AUTOVACUUM).await;
    let mut connection = session(&db, "force_generic_plan").await;
    sqlx::raw_sql(AssertSqlSafe(format!(
        "prepare due as {}; prepare sent as {}",
        statements::DUE,
        statements::SENT
    )))
    .execute(&mut connection)
    .await
    .expect("prepare");
    let due = format!("{}, 0, 0, {LOADED}", tokens());
    let waiting = ids(110_001, LOADED);
    let ones = same("1", "int", LOADED);
    let text = |value: &str| same(value, "text", LOADED);
    let sent = format!(
        "{}, '{{}}', {waiting}, {ones}, {ones}, {waiting}, {}, {}, 1",
        tokens(),
        text("'nats'"),
        text("null")
    );
    let run = async |connection: &mut PgConnection, call: &str| {
        let text = format!("explain (analyze, buffers, format json) execute {call}");
        let row = sqlx::raw_sql(AssertSqlSafe(text)).fetch_one(connection).await.expect("explain");
        let plan: String = row.try_get_unchecked(0).expect("text");
        serde_json::from_str::<Value>(&plan).expect("JSON")[0]["Plan"].take()
    };
    run(&mut connection, &format!("due({due})")).await;
    run(&mut connection, &format!("sent({sent})")).await;
    db.execute(FILL).await;
    let plan = run(&mut connection, &format!("due({due})")).await;
    must_scan(&plan, "due", "outbox_waiting", "outbox_waiting_due");
    assert!(pages(&plan) <= BASE + 5 * LOADED, "{} pages: {plan:#}", pages(&plan));
    let plan = run(&mut connection, &format!("sent({sent})")).await;
    must_scan(&plan, "sent", "outbox_waiting", "outbox_waiting_pkey");
    assert_eq!(
        db.number("select sum(n) from outbox_sent where sent_at > now() - interval '1 minute'").await,
        100_000 + LOADED
    );
    db.finish().await;
}

/// 500 keys, batches of 500, with evidence: at most 100 log bytes per message, full-page images apart.
#[tokio::test]
async fn settling_writes_at_most_100_log_bytes_per_message() {
    let db = Postgres::fresh().await;
    db.execute(NO_AUTOVACUUM).await;
    db.execute(
        "update outbox_shard set owner = 1, token = 1000 + shard;
         insert into outbox (message_id, topic, message_key, payload)
         select 'm' || g, 'orders', 'k' || g % 500, repeat('x', 1000) from generate_series(1, 10000) g",
    )
    .await;
    let mut connection = session(&db, "force_generic_plan").await;
    let mut measured = Vec::new();
    for batch in 0..20 {
        let first = batch * LOADED + 1;
        let evidence: Vec<String> =
            (first..first + LOADED).map(|id| format!("ORDERS:{}", 1_000_000 + id)).collect();
        let values = format!(
            "{}, {batch_ids}, '{{}}', '{{}}', '{{}}', {batch_ids}, {}, '{{{}}}'::text[], 1",
            tokens(),
            same("'nats'", "text", LOADED),
            evidence.join(","),
            batch_ids = ids(first, LOADED),
        );
        let plan = explain(&mut connection, statements::SENT, &values).await;
        let receipt = plan["Plans"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|child| child["Subplan Name"] == "CTE receipt")
            .expect("the receipt");
        let images = number(&plan, "WAL FPI") + number(receipt, "WAL FPI");
        // The commit record is not part of the plan: 34 bytes and its header.
        let bytes = number(&plan, "WAL Bytes") + number(receipt, "WAL Bytes") + 64;
        if images == 0 {
            measured.push(bytes);
        }
    }
    assert_eq!(db.number("select sum(n) from outbox_sent").await, 10_000);
    assert!(!measured.is_empty(), "every batch held a full-page image");
    for bytes in &measured {
        assert!(*bytes <= 100 * LOADED, "{bytes} bytes for {LOADED} messages");
    }
    println!(
        "log bytes per message, batch by batch: {:?}",
        measured.iter().map(|b| b / LOADED).collect::<Vec<_>>()
    );
    db.finish().await;
}
