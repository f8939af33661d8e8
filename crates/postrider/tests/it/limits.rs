//! The CHECKs of the schema refuse what `enqueue` refuses, and nothing that it lets pass.

use std::time::Duration;

use postrider::{Limits, Message, Payload, enqueue, enqueue_all};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::common::{Postgres, Sqlite, Store, on_both};

on_both! {
    plain_sql_is_refused_where_enqueue_refuses
    whatever_passes_the_check_is_taken_by_the_database
}

/// Text of any characters, mostly short, sometimes at the limit of 255 bytes.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![8 => "\\PC{0,12}", 2 => any::<String>(), 1 => "[a-z]{253,257}", 1 => "[嗨😀]{63,86}", 1 => Just(String::new())]
}

fn any_payload() -> impl Strategy<Value = Payload> {
    prop_oneof![
        Just(Payload::Absent),
        any_text().prop_map(Payload::Text),
        any_text().prop_map(Payload::Json),
        any::<Vec<u8>>().prop_map(Payload::Bytes),
    ]
}

fn any_message() -> impl Strategy<Value = Message> {
    let names = (any_text(), any_text(), any_text(), any_text(), any_text(), any_text());
    let extras = (
        proptest::collection::vec(("[a-zA-Z0-9!#$%&'*+.^_`|~-]{0,9}", any_text()), 0..4),
        any::<i32>(),
        any::<u32>(),
        prop_oneof![any::<i64>(), 0..4_102_444_800_000_000_i64],
        any::<u64>(),
        any::<u16>(),
    );
    (names, any_payload(), extras).prop_map(
        |(names, payload, (headers, version, attempts, at, delay, set))| {
            let set = |bit: u32| set & (1 << bit) != 0;
            let unique = uuid::Uuid::now_v7().to_string();
            let mut m = Message::new(if set(0) { names.0 } else { "t".to_owned() }, payload);
            m = m.id(if set(1) { names.1.clone() + &unique } else { unique });
            m = if set(2) { m.key(names.2) } else { m };
            m = if set(3) { m.aggregate(names.3.clone(), names.4.clone()) } else { m };
            m = if set(4) { m.tag(names.4) } else { m };
            m = if set(5) { m.event_type(names.5.clone()).content_type(names.3) } else { m };
            m = if set(6) { m.trace(names.5, Some(&names.1)) } else { m };
            m = if set(7) { m.schema_version(version) } else { m };
            m = if set(8) { m.max_attempts(attempts) } else { m };
            m = if set(9) { m.due_at_us(at) } else { m };
            m = if set(10) { m.delay(Duration::from_micros(delay >> 12)) } else { m };
            if set(11) { headers.into_iter().fold(m, |m, (name, value)| m.header(name, value)) } else { m }
        },
    )
}

/// Otherwise a message that passes could abort the caller's transaction.
async fn whatever_passes_the_check_is_taken_by_the_database<S: Store>(db: &S) {
    let mut runner = TestRunner::deterministic();
    let (mut taken, mut batch) = (0, Vec::new());
    let mut tx = db.begin().await;
    for _ in 0..2_000 {
        let message = any_message().new_tree(&mut runner).expect("a message").current();
        if message.check(&Limits::default()).is_err() {
            continue;
        }
        taken += 1;
        let first = enqueue(&mut tx, &message).await;
        assert!(!first.unwrap_or_else(|error| panic!("{message:?}: {error}")).already);
        assert!(enqueue(&mut tx, &message).await.expect("again").already, "{message:?}");
        batch.push(message.id(uuid::Uuid::now_v7().to_string()));
    }
    enqueue_all(&mut tx, &batch).await.expect("the same as a batch");
    tx.commit().await.expect("commit");
    assert!(taken >= 100, "{taken} of 2,000 were tried");
    assert_eq!(db.number("select count(*) from outbox").await, 2 * taken);
    // One by one and as a batch every column is stored alike. (Delays count from two times.)
    let columns = "topic, tag, message_key, aggregate_type, aggregate_id, event_type, schema_version, headers, content_type, \
                   payload, payload_bytes, max_attempts, trace, trace_state, content_hash";
    let pairs = format!(
        "select count(*) from (select {columns} from outbox group by {columns} having count(*) % 2 = 1) odd"
    );
    assert_eq!(db.number(&pairs).await, 0);
}

async fn plain_sql_is_refused_where_enqueue_refuses<S: Store>(db: &S) {
    let long = "x".repeat(256);
    let headers = format!("{{\"a\":\"{}\"}}", "x".repeat(16 << 10));
    let refused = [
        ("message_id, topic", "'', 't'".to_owned()),
        ("message_id, topic", format!("'{long}', 't'")),
        ("message_id, topic", "null, 't'".to_owned()),
        ("message_id, topic", "'a', ''".to_owned()),
        ("message_id, topic", format!("'a', '{long}'")),
        ("message_id, topic", "'a', 'two words'".to_owned()),
        ("message_id, topic", "'a', 'tab\there'".to_owned()),
        ("message_id, topic", "'a', 'ideographic\u{3000}space'".to_owned()),
        ("message_id, topic", "'a', 'control\u{1}'".to_owned()),
        ("message_id, topic, message_key", "'a', 't', ''".to_owned()),
        ("message_id, topic, message_key", format!("'a', 't', '{long}'")),
        ("message_id, topic, aggregate_type", "'a', 't', 'order'".to_owned()),
        ("message_id, topic, aggregate_id", "'a', 't', '7'".to_owned()),
        ("message_id, topic, payload, payload_bytes", "'a', 't', 'x', 'y'".to_owned()),
        ("message_id, topic, max_attempts", "'a', 't', 0".to_owned()),
        ("message_id, topic, headers", format!("'a', 't', '{headers}'")),
        ("message_id, topic, headers", "'a', 't', 'no json'".to_owned()),
        ("message_id, topic, headers", "'a', 't', '[1]'".to_owned()),
        ("message_id, topic, headers", "'a', 't', '{\"a\":1}'".to_owned()),
        ("message_id, topic, headers", "'a', 't', '{\"a\":null}'".to_owned()),
        ("message_id, topic, headers", "'a', 't', '{\"a\":{\"b\":\"c\"}}'".to_owned()),
    ];
    for (columns, values) in refused {
        let sql = format!("insert into outbox ({columns}) values ({values})");
        assert!(db.exec(&sql).await.is_err(), "accepted: {columns}: {values:.60}");
    }
    assert_eq!(db.number("select count(*) from outbox").await, 0);
}

fn allowed(code: u32) -> bool {
    let topic: String = char::from_u32(code).into_iter().collect();
    Message::new(topic, ()).check(&Limits::default()).is_ok()
}

/// No character that `enqueue` lets pass violates the CHECK, which would abort the caller's transaction: not even where the
/// database's collation has other ideas of white space and control characters.
#[tokio::test]
async fn no_character_of_a_topic_surprises_postgres() {
    let db = Postgres::new().await;
    let check = "topic !~ '[[:space:][:cntrl:]]'::text";
    let definition = db
        .texts("select pg_get_constraintdef(oid) from pg_constraint where conname = 'outbox_topic_form'")
        .await;
    assert!(definition[0].contains(check), "{definition:?}");
    let wanted = "select distinct quote_ident(collname) from pg_collation \
                  where collname in ('default', 'C', 'C.utf8', 'en_US.utf8', 'und-x-icu', 'zh-x-icu')";
    let collations = db.texts(wanted).await;
    assert!(collations.len() >= 4, "{collations:?}");
    for collation in collations {
        let refused = db
            .texts(&format!(
                "select c from generate_series(1, 1114111) c where c not between 55296 and 57343 \
                 and chr(c) collate {collation} ~ '[[:space:][:cntrl:]]'"
            ))
            .await;
        assert!(refused.len() > 60, "{collation}: {}", refused.len());
        for code in refused {
            assert!(
                !allowed(code.parse().expect("a number")),
                "U+{:04X} {collation}",
                code.parse::<u32>().unwrap_or(0)
            );
        }
    }
}

#[tokio::test]
async fn no_character_of_a_topic_surprises_sqlite() {
    let db = Sqlite::new().await;
    let table = &db.texts("select sql from sqlite_master where name = 'outbox'").await[0];
    let start = table.find("topic not glob").expect("the CHECK") + "topic not glob".len();
    let length = table[start..].find("']*'").expect("its end") + "']*'".len();
    let pattern = &table[start..start + length];
    let refused = db
        .texts(&format!(
            "with recursive c (c) as (select 1 union all select c + 1 from c where c < 1114111) \
             select c from c where c not between 55296 and 57343 and char(c) glob {pattern}"
        ))
        .await;
    assert!(refused.len() > 60, "{}", refused.len());
    for code in refused {
        assert!(!allowed(code.parse().expect("a number")), "U+{:04X}", code.parse::<u32>().unwrap_or(0));
    }
}
