//! Cases about looking, and about what operators do.

use std::time::Duration;

use postrider_relay::inspect::{Filter, ListState, Order, Page, Selection, Status, Which};
use postrider_relay::message::{Origin, Payload, Position};
use postrider_relay::source::Verdict;

use super::{DatabaseUnderTest, NewMessage, all, dead, dead_holding, one, positions, retry, sent};

/// Ready, waiting, dead, cancelled, sent: nothing is missing.
pub async fn every_message_is_accounted_for<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.insert_many("m", None, 5).await;
    db.insert(&NewMessage { due_in: Some(Duration::from_secs(60)), ..NewMessage::of("later", None) }).await;
    let rows = relay.heads(&owned).await.rows;
    let settled =
        vec![one(&rows[0], sent()), one(&rows[1], retry(1, 1)), one(&rows[2], dead()), one(&rows[3], dead())];
    relay.settle(&owned, &settled).await;
    let admin = db.admin().await;
    let selection = Selection::Positions(vec![rows[3].position]);
    assert_eq!(admin.cancel(&selection, "anna", None).await.expect("cancel"), 1);
    let found = relay.source.inspect.unaccounted(0, 10, 10).await.expect("look");
    assert_eq!((found.unaccounted.as_slice(), found.looked_at, found.next_bucket), ([].as_slice(), 6, 0));
}

/// A queue row deleted by hand, or never written because the trigger was off.
pub async fn a_message_without_a_queue_row_is_found_and_nothing_else<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 5).await;
    relay.settle(&owned, &all(&relay.heads(&owned).await.rows[..2], &sent())).await;
    db.execute(&format!("delete from outbox_queue where id = {}", ids[3])).await;
    let inspect = &relay.source.inspect;
    assert_eq!(inspect.unaccounted(0, 1, 10).await.expect("look").unaccounted, [ids[3]]);
    assert_eq!(
        db.number(&format!(
            "select count(*) from outbox_status where id = {} and state = 'UNACCOUNTED'",
            ids[3]
        ))
        .await,
        1
    );

    let (off, on) = if db.shards() == 1 {
        ("drop trigger outbox_route_ready", "select 1")
    } else {
        ("alter table outbox disable trigger outbox_route", "alter table outbox enable trigger outbox_route")
    };
    db.execute(off).await;
    let silent = db.insert(&NewMessage::of("silent", None)).await;
    db.execute(on).await;
    assert_eq!(inspect.unaccounted(0, 1, 10).await.expect("look").unaccounted, [ids[3], silent]);
    assert_eq!(inspect.unaccounted(0, 1, 1).await.expect("look").unaccounted, [ids[3]]);
    assert_eq!(inspect.unaccounted(1, 1, 10).await.expect("look").looked_at, 0);

    // Queue rows whose messages were deleted by hand are not counted for the messages that lack one.
    db.execute(&format!("delete from outbox where id in ({}, {})", ids[2], ids[4])).await;
    assert_eq!(inspect.unaccounted(0, 1, 10).await.expect("look").unaccounted, [ids[3], silent]);
}

/// Counts stop at the cap; lag is the age of what could be sent now.
pub async fn the_summary_counts<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let inspect = &relay.source.inspect;
    let empty = inspect.summary(100).await.expect("count");
    assert_eq!((empty.ready, empty.waiting, empty.dead, empty.lag, empty.sent_5m), (0, 0, 0, None, 0));
    db.insert_many("m", None, 6).await;
    db.insert(&NewMessage { due_in: Some(Duration::from_secs(60)), ..NewMessage::of("later", None) }).await;
    let rows = relay.heads(&owned).await.rows;
    relay.settle(&owned, &all(&rows[..2], &sent())).await;
    relay.settle(&owned, &all(&rows[2..3], &dead())).await;
    let summary = inspect.summary(100).await.expect("count");
    assert_eq!((summary.ready, summary.waiting, summary.dead, summary.sent_5m), (3, 1, 1, 2));
    assert!(summary.lag.is_some());
    assert_eq!(inspect.summary(2).await.expect("count").ready, 2);
    // Nothing ready and nothing due: no lag, whatever waits for later.
    relay.settle(&owned, &all(&rows[3..], &sent())).await;
    assert_eq!(inspect.summary(100).await.expect("count").lag, None);
    db.execute("update outbox_waiting set due_at = (select created_at from outbox where message_id = 'm0')")
        .await;
    assert!(inspect.summary(100).await.expect("count").lag.is_some());
}

/// Dead messages with ids `m0` … of keys `k0` …
async fn with_dead<D: DatabaseUnderTest>(db: &D, verdicts: &[Verdict]) -> Vec<Position> {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    for n in 0..verdicts.len() {
        db.insert(&NewMessage::of(&format!("m{n}"), Some(&format!("k{n}")))).await;
    }
    let rows = relay.heads(&owned).await.rows;
    let settled: Vec<_> =
        rows.iter().zip(verdicts).map(|(head, verdict)| one(head, verdict.clone())).collect();
    relay.settle(&owned, &settled).await;
    relay.source.ownership.leave().await.expect("leave");
    rows.iter().map(|head| head.position).collect()
}

/// Due now, attempts zero, tries kept, audited; what is not dead is left alone.
pub async fn dead_messages_are_redriven_once<D: DatabaseUnderTest>(db: &D) {
    let ids = with_dead(db, &[dead(), dead(), sent()]).await;
    let admin = db.admin().await;
    let selection = Selection::Positions(vec![ids[0], ids[2], Position(999)]);
    assert_eq!(admin.redrive(&selection, "anna").await.expect("redrive"), 1);
    assert_eq!(admin.redrive(&selection, "anna").await.expect("redrive"), 0);
    let relay = db.relay(2).await;
    let owned = relay.acquire().await;
    let due = relay.due(&owned).await.rows;
    assert_eq!(due.len(), 1);
    assert_eq!((due[0].position, due[0].origin), (ids[0], Origin::Waiting { attempts: 0, tries: 4 }));
    assert_eq!(db.count("outbox_dead").await, 1);
    assert_eq!(
        db.number("select count(*) from outbox_audit where actor = 'anna' and action = 'redrive'").await,
        1
    );
    let shown = admin.show(&Which::Position(ids[0]), false).await.expect("show").expect("there");
    assert_eq!(shown.status.last_error.as_deref(), Some("refused: 422"));
    assert!(shown.audit[0].detail.as_deref().is_some_and(|detail| detail.contains("permanent")), "{shown:?}");
    assert_eq!(relay.settle(&owned, &all(&due, &sent())).await, [ids[0]]);
}

/// `on_dead = block`: the messages behind it wait until it has been decided.
pub async fn a_redriven_message_keeps_the_hold_on_its_key<D: DatabaseUnderTest>(db: &D) {
    let ids = with_dead(db, &[dead_holding(true), dead_holding(false)]).await;
    let redriven =
        db.admin().await.redrive(&Selection::Positions(ids.clone()), "anna").await.expect("redrive");
    assert_eq!(redriven, 2);
    let relay = db.relay(2).await;
    let owned = relay.acquire().await;
    let held = relay.source.ownership.held(&owned, None, 10).await.expect("read");
    assert_eq!(held.iter().map(|held| (held.position, held.dead)).collect::<Vec<_>>(), [(ids[0], false)]);
    let mut due = positions(&relay.due(&owned).await);
    due.sort_unstable();
    assert_eq!(due, ids);
}

/// Who, when, why; and it is never sent.
pub async fn dead_messages_are_cancelled_once<D: DatabaseUnderTest>(db: &D) {
    let ids = with_dead(db, &[dead(), dead()]).await;
    let admin = db.admin().await;
    let selection = Selection::MessageIds(vec!["m1".to_owned(), "unknown".to_owned()]);
    assert_eq!(admin.cancel(&selection, "anna", Some("wrong price")).await.expect("cancel"), 1);
    assert_eq!(admin.cancel(&selection, "anna", Some("wrong price")).await.expect("cancel"), 0);
    assert_eq!(admin.redrive(&selection, "anna").await.expect("redrive"), 0);
    let shown = admin.show(&Which::MessageId("m1".to_owned()), false).await.expect("show").expect("there");
    assert_eq!(shown.status.position, ids[1]);
    assert_eq!(shown.status.state, "CANCELLED");
    assert_eq!(shown.status.cancelled_by.as_deref(), Some("anna"));
    assert_eq!(shown.status.cancel_reason.as_deref(), Some("wrong price"));
    assert!(shown.status.cancelled_at_us.is_some());
    let audit = &shown.audit[0];
    assert_eq!((audit.actor.as_str(), audit.action.as_str()), ("anna", "cancel"));
    assert!(audit.detail.as_deref().is_some_and(|detail| detail.starts_with("wrong price; ")), "{audit:?}");
    assert_eq!(db.count("outbox_dead").await, 1);
}

/// By topic, key and reason, lowest first, no more than asked for.
pub async fn a_selection_by_topic_and_key_takes_no_others<D: DatabaseUnderTest>(db: &D) {
    let ids = with_dead(db, &[dead(), dead(), dead(), sent()]).await;
    let admin = db.admin().await;
    let select = |topic: Option<&str>, key: Option<&str>, reason, limit| Selection::Dead {
        topic: topic.map(str::to_owned),
        key: key.map(str::to_owned),
        reason,
        limit,
    };
    use postrider_relay::source::DeadReason::{Attempts, Permanent};
    let redrive = async |selection: &Selection| admin.redrive(selection, "anna").await.expect("redrive");
    assert_eq!(redrive(&select(Some("payments"), None, None, 10)).await, 0);
    assert_eq!(redrive(&select(None, None, Some(Attempts), 10)).await, 0);
    assert_eq!(redrive(&select(Some("orders"), Some("k1"), Some(Permanent), 10)).await, 1);
    assert_eq!(db.number("select min(id) from outbox_waiting").await, ids[1].0);
    assert_eq!(redrive(&select(None, None, None, 1)).await, 1);
    assert_eq!(db.number("select min(id) from outbox_waiting").await, ids[0].0);
    assert_eq!(redrive(&select(None, None, None, 10)).await, 1);
}

async fn listed<D: DatabaseUnderTest>(
    db: &D,
    state: ListState,
    key: Option<&str>,
    order: Order,
) -> Vec<Status> {
    let admin = db.admin().await;
    let filter = Filter { state, topic: Some("orders".to_owned()), key: key.map(str::to_owned) };
    let mut rows = Vec::new();
    let mut after = None;
    loop {
        let listing = admin.list(&filter, Page { order, after, limit: 2 }).await.expect("list");
        assert!(listing.rows.len() <= 2);
        rows.extend(listing.rows);
        match listing.next {
            Some(next) => after = Some(next),
            None => return rows,
        }
    }
}

/// Newest or oldest first, filtered by topic and key; each message in the list of its state alone.
pub async fn messages_are_listed_by_state_in_pages<D: DatabaseUnderTest>(db: &D) {
    let ids = with_dead(db, &[dead(), retry(1, 1), sent(), dead(), dead(), retry(2, 2)]).await;
    let ready = db.insert(&NewMessage::of("ready", Some("k1"))).await;
    db.insert(&NewMessage { topic: "other".to_owned(), ..NewMessage::of("other", Some("k1")) }).await;
    let admin = db.admin().await;
    admin.cancel(&Selection::Positions(vec![ids[4]]), "anna", None).await.expect("cancel");
    let ids_of = |rows: &[Status]| rows.iter().map(|row| row.position).collect::<Vec<_>>();
    let oldest = async |state, key| ids_of(&listed(db, state, key, Order::Oldest).await);
    assert_eq!(oldest(ListState::Pending, None).await, [ids[1], ids[5], ready]);
    assert_eq!(oldest(ListState::Waiting, None).await, [ids[1], ids[5]]);
    assert_eq!(oldest(ListState::Ready, None).await, [ready]);
    assert_eq!(oldest(ListState::Dead, None).await, [ids[0], ids[3]]);
    assert_eq!(oldest(ListState::Cancelled, None).await, [ids[4]]);
    assert_eq!(oldest(ListState::Sent, None).await, [ids[2]]);
    assert_eq!(oldest(ListState::Pending, Some("k1")).await, [ids[1], ready]);
    assert_eq!(oldest(ListState::Dead, Some("k1")).await, []);
    assert_eq!(oldest(ListState::Cancelled, Some("k4")).await, [ids[4]]);
    let newest = listed(db, ListState::Pending, None, Order::Newest).await;
    assert_eq!(ids_of(&newest), [ready, ids[5], ids[1]]);
    assert_eq!((newest[1].state.as_str(), newest[1].attempts, newest[1].tries), ("PENDING", 2, Some(2)));
    assert!(newest[1].due_at_us.is_some_and(|due| due > newest[1].created_at_us));
    let dead = listed(db, ListState::Dead, Some("k3"), Order::Newest).await;
    assert_eq!(ids_of(&dead), [ids[3]]);
    assert_eq!((dead[0].state.as_str(), dead[0].dead_reason.as_deref()), ("DEAD", Some("permanent")));
    assert_eq!(dead[0].key.as_deref(), Some("k3"));
}

/// Through the buckets of the receipts, in both directions.
pub async fn sent_messages_are_listed_from_their_receipts<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mut ids = db.insert_many("a", Some("k"), 5).await;
    relay.settle(&owned, &all(&relay.heads(&owned).await.rows[..2], &sent())).await;
    relay.settle_heads(&owned, &sent()).await;
    // The next ids are several buckets further on.
    db.skip_ids(20_000).await;
    ids.extend(db.insert_many("b", Some("k"), 3).await);
    relay.settle_heads(&owned, &sent()).await;
    assert!(ids[5].0 > 20_000);
    let oldest = listed(db, ListState::Sent, Some("k"), Order::Oldest).await;
    assert_eq!(oldest.iter().map(|row| row.position).collect::<Vec<_>>(), ids);
    assert!(oldest.iter().all(|row| row.sent_at_us.is_some() && row.sink.as_deref() == Some("nats")));
    ids.reverse();
    let newest = listed(db, ListState::Sent, None, Order::Newest).await;
    assert_eq!(newest.iter().map(|row| row.position).collect::<Vec<_>>(), ids);
    assert_eq!(listed(db, ListState::Sent, Some("other"), Order::Newest).await, []);
}

/// Its row, its place, its receipts, what operators did; the payload on request alone.
pub async fn one_message_is_shown_with_everything_known<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(5).await;
    let owned = relay.acquire().await;
    let message = NewMessage {
        headers: Some(r#"{"b":"1","a":"2"}"#.to_owned()),
        text: Some("{\"n\":1}".to_owned()),
        ..NewMessage::of("order:4711:paid", Some("order:4711"))
    };
    let id = db.insert(&message).await;
    let admin = db.admin().await;
    let by_id = Which::MessageId("order:4711:paid".to_owned());
    let shown = admin.show(&by_id, false).await.expect("show").expect("there");
    assert_eq!((shown.status.position, shown.status.state.as_str()), (id, "PENDING"));
    assert_eq!(shown.headers, [("b".to_owned(), "1".to_owned()), ("a".to_owned(), "2".to_owned())]);
    assert_eq!((shown.payload_bytes, shown.payload), (Some(7), None));
    assert!(shown.lane.is_some() && shown.receipts.is_empty() && shown.audit.is_empty());

    relay
        .settle_heads(&owned, &Verdict::Sent { sink: "nats".into(), evidence: Some("ORDERS:17".to_owned()) })
        .await;
    let shown = admin.show(&Which::Position(id), true).await.expect("show").expect("there");
    assert_eq!(shown.status.state, "SENT");
    assert_eq!(shown.status.evidence.as_deref(), Some("ORDERS:17"));
    assert_eq!(shown.payload, Some(Payload::Text("{\"n\":1}".into())));
    let receipt = &shown.receipts[0];
    assert_eq!(
        (receipt.relay, receipt.sink.as_str(), receipt.evidence.as_deref()),
        (5, "nats", Some("ORDERS:17"))
    );
    assert_eq!(Some(receipt.sent_at_us), shown.status.sent_at_us);
    assert_eq!(admin.show(&Which::MessageId("unknown".to_owned()), true).await.expect("show"), None);
    assert_eq!(admin.show(&Which::Position(Position(999)), true).await.expect("show"), None);
}

/// Who owns what, and how often it was left behind.
pub async fn relays_and_shards_are_listed<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    relay.acquire().await;
    db.expire(1).await;
    db.relay(2).await.acquire().await;
    let admin = db.admin().await;
    let relays = admin.relays().await.expect("list");
    assert_eq!(
        relays.iter().map(|row| (row.relay, row.is_live())).collect::<Vec<_>>(),
        [(2, true), (1, false)]
    );
    let shards = admin.shards().await.expect("list");
    assert_eq!(shards.len(), db.shards() as usize);
    assert!(shards.iter().all(|row| {
        row.owner == Some(2)
            && row.instance.as_deref() == Some("relay-2")
            && row.unclean_ends == 1
            && row.acquired_at_us.is_some()
            && row.suspect.is_none()
    }));
}
