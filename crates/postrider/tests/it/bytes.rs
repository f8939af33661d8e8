//! Bytes in = bytes out.

use postrider::{Message, Payload, enqueue};
use serde_json::json;
use sqlx::Row;

use crate::common::{Postgres, Sqlite, Store, on_both};

/// What a row holds: text and bytes.
type Stored = (Option<String>, Option<Vec<u8>>);

trait Read: Store {
    async fn payload(&self, message_id: &str) -> Stored;
}

const READ: &str = "select payload, payload_bytes from outbox where message_id = $1";

impl Read for Postgres {
    async fn payload(&self, message_id: &str) -> Stored {
        let row = sqlx::query(READ).bind(message_id).fetch_one(&self.pool).await.expect("read");
        (row.get(0), row.get(1))
    }
}

impl Read for Sqlite {
    async fn payload(&self, message_id: &str) -> Stored {
        let row = sqlx::query(READ).bind(message_id).fetch_one(&self.pool).await.expect("read");
        (row.get(0), row.get(1))
    }
}

on_both! { every_payload_comes_out_as_it_went_in }

fn corpus() -> Vec<Payload> {
    let every_byte: Vec<u8> = (0..=255).collect();
    vec![
        Payload::Absent,
        "".into(),
        Vec::new().into(),
        every_byte.clone().into(),
        b"\0".into(),
        b"\\x00 \\ '".into(),
        every_byte.repeat(4_096).into(),
        "a".repeat(1 << 20).into(),
        "👩‍👩‍👧 嗨 \u{10ffff} \u{fffe}".into(),
        "\u{1}\u{7f}\r\n\t\u{85}\u{2028}".into(),
        "'; drop table outbox; -- $1 ?1 \\".into(),
        // As a signature was made over it: spaces, a repeated key, 1.0, a number beyond 64 bits, escapes.
        Payload::Json(r#"{"b":1.0,  "a":12345678901234567890,"a":2, "n":"\u0000 \ud83d\ude00"}"#.to_owned()),
        Payload::Json(r#"{"lone surrogate":"\ud83d"}"#.to_owned()),
        json!({"nul": "\0", "emoji": "😀"}).into(),
    ]
}

async fn every_payload_comes_out_as_it_went_in<S: Read>(db: &S) {
    let mut tx = db.begin().await;
    for (n, payload) in corpus().into_iter().enumerate() {
        enqueue(&mut tx, &Message::new("t", payload).id(n.to_string())).await.expect("enqueue");
    }
    tx.commit().await.expect("commit");
    for (n, payload) in corpus().into_iter().enumerate() {
        let (text, bytes) = db.payload(&n.to_string()).await;
        let expected = match payload {
            Payload::Absent => (None, None),
            Payload::Text(text) | Payload::Json(text) => (Some(text), None),
            Payload::Bytes(bytes) => (None, Some(bytes)),
        };
        assert!((text, bytes) == expected, "number {n}");
    }
    let sizes = db
        .number("select sum(coalesce(length(cast(payload as text)), 0)) from outbox where payload = ''")
        .await;
    assert_eq!(sizes, 0, "an empty text is not NULL");
    assert_eq!(db.number("select count(*) from outbox where payload = ''").await, 1);
    assert_eq!(db.number("select bytes from outbox_queue order by bytes desc limit 1").await, 1 << 20);
}
