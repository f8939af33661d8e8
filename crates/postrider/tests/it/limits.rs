//! The CHECKs of the schema refuse what `enqueue` refuses, and nothing that it lets pass.

use postrider::{Limits, Message};

use crate::common::{Postgres, Sqlite, Store, on_both};

on_both! { plain_sql_is_refused_where_enqueue_refuses }

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
        assert!(db.exec(&sql).await.is_err(), "accepted: {columns}: {:.60}", values);
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
    let definition = db.texts("select pg_get_constraintdef(oid) from pg_constraint where conname = 'outbox_topic_form'").await;
    assert!(definition[0].contains(check), "{definition:?}");
    for collation in ["\"default\"", "\"C\"", "\"C.UTF-8\"", "\"und-x-icu\"", "\"zh-x-icu\""] {
        let refused = db
            .texts(&format!(
                "select c from generate_series(1, 1114111) c where c not between 55296 and 57343 \
                 and chr(c) collate {collation} ~ '[[:space:][:cntrl:]]'"
            ))
            .await;
        assert!(refused.len() > 60, "{collation}: {}", refused.len());
        for code in refused {
            assert!(!allowed(code.parse().expect("a number")), "U+{:04X} {collation}", code.parse::<u32>().unwrap_or(0));
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
