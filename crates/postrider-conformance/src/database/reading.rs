//! Cases about reading.

use std::collections::BTreeSet;
use std::time::Duration;

use postrider_relay::message::{Origin, Payload, Position};
use postrider_relay::source::{DueCursor, Owned, Range};

use super::{DatabaseUnderTest, NewMessage, everything, positions, retry_after};

/// A message exists if and only if its transaction committed.
pub async fn a_rolled_back_message_is_never_read<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.insert_in_transaction(&NewMessage::of("rolled back", Some("k")), false).await;
    let kept = db.insert(&NewMessage::of("kept", Some("k"))).await;
    assert_eq!(positions(&relay.heads(&owned).await), [kept]);
    assert_eq!(
        relay.source.reader.messages(&owned, &[kept]).await.expect("read").found[0].message_id,
        "kept"
    );
}

/// After is exclusive, up to is inclusive, the lowest come first.
pub async fn rows_come_in_order_and_within_the_range<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 6).await;
    let heads =
        async |range: Range| positions(&relay.source.reader.heads(&owned, range).await.expect("read"));
    assert_eq!(heads(everything()).await, ids);
    assert_eq!(heads(Range { after: ids[1], ..everything() }).await, ids[2..]);
    assert_eq!(heads(Range { after: ids[1], up_to: Some(ids[3]), limit: 100 }).await, ids[2..=3]);
    assert_eq!(heads(Range { limit: 2, ..everything() }).await, ids[..2]);
    assert_eq!(heads(Range { after: ids[5], ..everything() }).await, []);
}

/// With a token that is not current nothing is read, and the shard is not said to be ours.
pub async fn every_read_is_fenced_by_its_token<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let retried = db.insert(&NewMessage::of("retried", Some("k"))).await;
    relay.settle_heads(&owned, &retry_after(Duration::ZERO, 1, 1)).await;
    let ready = db.insert(&NewMessage::of("ready", Some("k"))).await;
    let head = relay.heads(&owned).await.rows.remove(0);
    let stolen: Vec<Owned> = owned.iter().map(|one| Owned { token: one.token ^ 1, ..*one }).collect();

    let heads = relay.heads(&stolen).await;
    assert!(heads.rows.is_empty() && heads.mine.is_empty(), "{heads:?}");
    let due = relay.due(&stolen).await;
    assert!(due.rows.is_empty() && due.mine.is_empty(), "{due:?}");
    let shard = stolen.iter().find(|one| one.shard == head.shard).expect("owned");
    let lane = relay.source.reader.lane(*shard, &head.lane, everything()).await.expect("read");
    assert!(lane.rows.is_empty() && lane.mine.is_empty(), "{lane:?}");
    assert_eq!(relay.source.reader.messages(&stolen, &[ready]).await.expect("read").mine, []);
    assert_eq!(relay.source.ownership.held(&stolen, None, 10).await.expect("read"), []);

    assert_eq!(positions(&relay.heads(&owned).await), [ready]);
    assert_eq!(positions(&relay.due(&owned).await), [retried]);
    assert_eq!(relay.source.ownership.held(&owned, None, 10).await.expect("read").len(), 1);
}

/// An empty answer under current tokens differs from one without them.
pub async fn what_is_mine_is_said_even_when_nothing_matches<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mine: BTreeSet<_> = owned.iter().map(|one| one.shard).collect();
    let said = |shards: Vec<_>| shards.into_iter().collect::<BTreeSet<_>>();
    assert_eq!(said(relay.heads(&owned).await.mine), mine);
    assert_eq!(said(relay.due(&owned).await.mine), mine);
    let messages = relay.source.reader.messages(&owned, &[]).await.expect("read");
    assert_eq!(said(messages.mine), mine);
    let before = relay.heads(&owned).await.snapshot;
    db.insert(&NewMessage::of("m", None)).await;
    let after = relay.heads(&owned).await.snapshot;
    assert!(after.xmin >= before.xmin && after.xmax >= before.xmax, "{before:?} {after:?}");
}

/// Keys do not mix, whatever stands between.
pub async fn a_lane_reads_its_own_messages_alone<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mut hot = db.insert_many("hot", Some("hot"), 3).await;
    db.insert_many("cold", Some("cold"), 3).await;
    hot.extend(db.insert_many("more", Some("hot"), 2).await);
    let head = relay.heads(&owned).await.rows.remove(0);
    let shard = *owned.iter().find(|one| one.shard == head.shard).expect("owned");
    let lane = async |range: Range| {
        positions(&relay.source.reader.lane(shard, &head.lane, range).await.expect("read"))
    };
    assert_eq!(lane(everything()).await, hot);
    assert_eq!(lane(Range { after: hot[0], up_to: Some(hot[3]), limit: 2 }).await, hot[1..3]);
}

/// Delayed messages join the due ones by the database's clock, not before.
pub async fn a_delayed_message_is_due_by_the_database_clock<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let later = NewMessage { due_in: Some(Duration::from_secs(3_600)), ..NewMessage::of("later", Some("k")) };
    let later = db.insert(&later).await;
    let now = NewMessage { due_in: Some(Duration::ZERO), ..NewMessage::of("now", Some("k")) };
    let now = db.insert(&now).await;
    assert_eq!(positions(&relay.heads(&owned).await), [now]);
    assert!(relay.due(&owned).await.rows.is_empty());
    assert!(relay.source.ownership.held(&owned, None, 10).await.expect("read").is_empty());

    db.make_due(later).await;
    let due = relay.due(&owned).await;
    assert_eq!(positions(&due), [later]);
    assert_eq!(due.rows[0].origin, Origin::Waiting { attempts: 0, tries: 0 });
}

/// The cursor goes on where the page ended, also among rows of one time.
pub async fn due_rows_come_by_time_in_pages<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 5).await;
    relay.settle_heads(&owned, &retry_after(Duration::ZERO, 1, 1)).await;
    // One time for all but the last, which is earlier.
    db.execute("update outbox_waiting set due_at = (select min(due_at) from outbox_waiting)").await;
    db.make_due(ids[4]).await;
    let mut cursor = DueCursor::default();
    let mut seen = Vec::new();
    loop {
        let page = relay.source.reader.due(&owned, cursor, 2).await.expect("read");
        seen.extend(positions(&page));
        assert!(page.rows.len() <= 2);
        if page.rows.len() < 2 {
            break; // where to go on is said after the last page, too
        }
        cursor = page.next.expect("a full page says where to go on");
    }
    assert_eq!(seen, [ids[4], ids[0], ids[1], ids[2], ids[3]]);
}

/// Bytes in are bytes out; text and bytes, empty and absent differ; headers keep their order.
pub async fn payload_and_headers_arrive_unchanged<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let bytes: Vec<u8> = (0..=255).collect();
    let large = "ä😀\u{feff}\r\n\t\"\\".repeat(20_000);
    let plain = NewMessage { topic: "订单".to_owned(), ..NewMessage::of("", None) };
    let cases: Vec<(Option<String>, Option<Vec<u8>>, Payload)> = vec![
        (None, None, Payload::Absent),
        (Some(String::new()), None, Payload::Text(vec![].into())),
        (None, Some(vec![]), Payload::Binary(vec![].into())),
        (None, Some(bytes.clone()), Payload::Binary(bytes.into())),
        (Some(large.clone()), None, Payload::Text(large.into())),
    ];
    let mut expected = Vec::new();
    for (n, (text, bytes, payload)) in cases.into_iter().enumerate() {
        let message = NewMessage {
            message_id: format!("m{n}"),
            text,
            bytes,
            aggregate: Some(("order".to_owned(), format!("{n}"))),
            headers: Some(r#"{"z":"1","a":"\u0041 \"","ü":""}"#.to_owned()),
            ..plain.clone()
        };
        expected.push((db.insert(&message).await, payload));
    }
    let ids: Vec<Position> = expected.iter().map(|(id, _)| *id).collect();
    let mut found = relay.source.reader.messages(&owned, &ids).await.expect("read").found;
    found.sort_by_key(|message| message.position);
    for (n, (message, (id, payload))) in found.iter().zip(&expected).enumerate() {
        assert_eq!((message.position, &message.payload), (*id, payload));
        assert_eq!(message.topic, "订单");
        assert_eq!(message.key.as_deref(), Some(format!("order:{n}").as_str()));
        let headers: Vec<(&str, &str)> =
            message.headers.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(headers, [("z", "1"), ("a", "A \""), ("ü", "")]);
        assert!(message.created_at_us > 1_600_000_000_000_000);
    }
    for head in relay.heads(&owned).await.rows {
        let payload = &expected.iter().find(|(id, _)| *id == head.position).expect("inserted").1;
        assert_eq!(head.bytes as usize, payload.bytes().len());
    }
}

/// What is gone from the outbox is simply not in the answer.
pub async fn missing_messages_are_left_out<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 3).await;
    db.execute(&format!("delete from outbox where id = {}", ids[1])).await;
    let messages = relay.source.reader.messages(&owned, &ids).await.expect("read");
    let mut found: Vec<Position> = messages.found.iter().map(|message| message.position).collect();
    found.sort_unstable();
    assert_eq!(found, [ids[0], ids[2]]);
}
