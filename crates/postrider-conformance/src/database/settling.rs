//! Cases about recording outcomes.

use std::time::Duration;

use postrider_relay::message::{Head, Origin, Position};
use postrider_relay::source::{Owned, SettleReport, Settled, Verdict};

use super::{DatabaseUnderTest, NewMessage, all, dead, one, positions, retry, retry_after, sent};

/// Where the messages are: queue, waiting, dead, receipts.
async fn places<D: DatabaseUnderTest>(db: &D) -> [i64; 4] {
    let sent = db.number("select coalesce(sum(n), 0) from outbox_sent").await;
    [db.count("outbox_queue").await, db.count("outbox_waiting").await, db.count("outbox_dead").await, sent]
}

/// The receipt is written with the deletion, and the view says SENT.
pub async fn a_sent_message_leaves_the_queue_for_a_receipt<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(7).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", Some("k"), 3).await;
    assert_eq!(relay.settle_heads(&owned, &sent()).await, ids);
    assert_eq!(places(db).await, [0, 0, 0, 3]);
    assert_eq!(
        db.number("select count(*) from outbox_status where state = 'SENT' and sink = 'nats'").await,
        3
    );
    assert_eq!(db.number("select min(relay) from outbox_sent").await, 7);
}

/// No verdict is written under a token that is not current.
pub async fn a_settle_under_an_old_token_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.insert_many("m", None, 4).await;
    let rows = relay.heads(&owned).await.rows;
    let stolen: Vec<Owned> = owned.iter().map(|one| Owned { token: one.token ^ 1, ..*one }).collect();
    for verdict in [sent(), retry(1, 1), dead()] {
        let report = relay.source.settler.settle(&stolen, &all(&rows, &verdict)).await.expect("settle");
        assert_eq!(report, SettleReport::default());
        let report = relay.source.settler.settle(&[], &all(&rows, &verdict)).await.expect("settle");
        assert_eq!(report, SettleReport::default());
    }
    assert_eq!(places(db).await, [4, 0, 0, 0]);
}

/// A takeover commits between a relay's read and its settle: one outcome per message, the late one is fenced.
pub async fn a_late_settle_after_a_takeover_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    let (old, new) = (db.relay(1).await, db.relay(2).await);
    let before = old.acquire().await;
    let ids = db.insert_many("m", Some("k"), 5).await;
    let read = old.heads(&before).await.rows;
    db.expire(1).await;
    let after = new.acquire().await;
    assert_eq!(after.len(), before.len());

    // The new owner records a retry; the old one comes with its acknowledgements, and with refusals of its own.
    let settled = new.settle(&after, &all(&new.heads(&after).await.rows[..1], &retry(1, 1))).await;
    assert_eq!(settled, ids[..1]);
    for verdict in [sent(), retry(1, 1), dead()] {
        let report = old.source.settler.settle(&before, &all(&read, &verdict)).await.expect("settle");
        assert_eq!(report, SettleReport::default());
    }
    assert_eq!(places(db).await, [4, 1, 0, 0]);
    assert_eq!(new.settle_heads(&after, &sent()).await, ids[1..]);
    assert_eq!(places(db).await, [0, 1, 0, 4]);
}

async fn twice<D: DatabaseUnderTest>(db: &D, head: fn(&[Head]) -> &[Head], verdict: Verdict) -> [i64; 4] {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.insert_many("m", Some("k"), 3).await;
    let rows = relay.heads(&owned).await.rows;
    let settled = all(head(&rows), &verdict);
    assert_eq!(relay.settle(&owned, &settled).await.len(), settled.len());
    let before = places(db).await;
    let due = db.number("select coalesce(sum(tries), 0) from outbox_waiting").await;
    let report = relay.source.settler.settle(&owned, &settled).await.expect("settle");
    assert_eq!(report.settled, []);
    assert!(!report.mine.is_empty(), "the shard is still ours");
    assert_eq!(places(db).await, before);
    assert_eq!(db.number("select coalesce(sum(tries), 0) from outbox_waiting").await, due);
    before
}

/// One receipt, however often the same acknowledgement is recorded.
pub async fn settling_sent_twice_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    assert_eq!(twice(db, |rows| rows, sent()).await, [0, 0, 0, 3]);
}

/// The second finds no queue row.
pub async fn settling_a_retry_twice_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    assert_eq!(twice(db, |rows| &rows[..2], retry(1, 1)).await, [1, 2, 0, 0]);
}

/// The second finds no queue row.
pub async fn settling_dead_twice_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    assert_eq!(twice(db, |rows| &rows[..1], dead()).await, [2, 0, 1, 0]);
}

/// The waiting row has moved on: it is not the one that was read.
pub async fn settling_a_repeated_retry_twice_changes_nothing<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let id = db.insert(&NewMessage::of("m", Some("k"))).await;
    relay.settle_heads(&owned, &retry_after(Duration::ZERO, 1, 1)).await;
    let again = all(&relay.due(&owned).await.rows, &retry(2, 2));
    assert_eq!(relay.settle(&owned, &again).await, [id]);
    let due = db.due_in_us(id).await;
    db.make_due(id).await;
    for settled in
        [again, all(&[head_of(id, &owned, 1, 1)], &sent()), all(&[head_of(id, &owned, 1, 1)], &dead())]
    {
        assert_eq!(relay.settle(&owned, &settled).await, []);
    }
    assert!(db.due_in_us(id).await < due, "the due time was not written again");
    assert_eq!(places(db).await, [0, 1, 0, 0]);
    assert_eq!(db.number("select tries from outbox_waiting").await, 2);
}

/// A refusal that never reached the sink counts an attempt and no try: repeated, it is still recognised.
pub async fn a_retry_that_counted_no_try_is_not_repeated<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let id = db.insert(&NewMessage::of("m", Some("k"))).await;
    relay.settle_heads(&owned, &retry_after(Duration::ZERO, 1, 0)).await;
    let again = all(&relay.due(&owned).await.rows, &retry(2, 0));
    assert_eq!(relay.settle(&owned, &again).await, [id]);
    assert_eq!(relay.settle(&owned, &again).await, []);
    assert_eq!(db.number("select attempts from outbox_waiting").await, 2);
}

/// A head as if it had been read from waiting.
fn head_of(position: Position, owned: &[Owned], attempts: u32, tries: u32) -> Head {
    Head {
        position,
        lane: postrider_relay::message::Lane::Hash(0),
        shard: owned[0].shard,
        bytes: 0,
        origin: Origin::Waiting { attempts, tries },
    }
}

/// An acknowledgement that finds no row is never SENT.
pub async fn an_acknowledgement_for_a_missing_row_is_not_settled<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 2).await;
    let rows = relay.heads(&owned).await.rows;
    db.execute(&format!("delete from outbox_queue where id = {}", ids[0])).await;
    let report = relay.source.settler.settle(&owned, &all(&rows, &sent())).await.expect("settle");
    assert_eq!(report.settled, [ids[1]]);
    assert!(rows.iter().all(|row| report.mine.contains(&row.shard)));
    assert_eq!(places(db).await, [0, 0, 0, 1]);
}

/// Rows are deleted by id, never by range: what was not read is not settled.
pub async fn a_row_between_two_settled_ids_survives<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", Some("k"), 3).await;
    let rows = relay.heads(&owned).await.rows;
    let settled = vec![one(&rows[0], sent()), one(&rows[2], sent())];
    assert_eq!(relay.settle(&owned, &settled).await, [ids[0], ids[2]]);
    assert_eq!(positions(&relay.heads(&owned).await), [ids[1]]);
    assert_eq!(
        db.number(&format!("select count(*) from outbox_status where id = {} and state = 'PENDING'", ids[1]))
            .await,
        1
    );
}

/// One receipt per 4,096 ids and sink; evidence stands beside its id, and is null where nobody gave any.
pub async fn receipts_name_ids_sinks_and_evidence<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mut ids = db.insert_many("m", None, 4).await;
    db.skip_ids(20_000).await;
    ids.extend(db.insert_many("far", None, 1).await);
    let rows = relay.heads(&owned).await.rows;
    let to = |sink: &str, evidence: Option<&str>| Verdict::Sent {
        sink: sink.into(),
        evidence: evidence.map(str::to_owned),
    };
    let settled = vec![
        one(&rows[0], to("a", Some("seq:1"))),
        one(&rows[1], to("b", None)),
        one(&rows[2], to("a", None)),
        one(&rows[3], to("a", Some("seq:3"))),
        one(&rows[4], to("a", Some("seq:4"))),
    ];
    assert_eq!(relay.settle(&owned, &settled).await, ids);
    assert_eq!(db.count("outbox_sent").await, 3);
    assert_eq!(db.number("select n from outbox_sent where sink = 'a' and bucket = 0").await, 3);
    assert_eq!(db.number("select n from outbox_sent where bucket > 0").await, 1);
    assert_eq!(db.number("select count(*) from outbox_sent where sink = 'b' and evidence is null").await, 1);
    let evidence = |id: Position, what: &str| {
        format!("select count(*) from outbox_status where id = {id} and sink = 'a' and {what}")
    };
    assert_eq!(db.number(&evidence(ids[0], "evidence = 'seq:1'")).await, 1);
    assert_eq!(db.number(&evidence(ids[2], "evidence is null")).await, 1);
    assert_eq!(db.number(&evidence(ids[3], "evidence = 'seq:3'")).await, 1);
    assert_eq!(db.number(&evidence(ids[4], "evidence = 'seq:4'")).await, 1);
}

/// Nothing of one message is written to another.
pub async fn attempts_tries_backoff_and_error_are_kept_per_message<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 3).await;
    let rows = relay.heads(&owned).await.rows;
    let settled: Vec<Settled> = (1_u32..)
        .zip(&rows)
        .map(|(n, head)| {
            let verdict = Verdict::Retry {
                backoff: Duration::from_secs(u64::from(n) * 1_000),
                attempts: n,
                tries: n + 10,
                error: format!("error {n}"),
                holds_key: n == 2,
            };
            one(head, verdict)
        })
        .collect();
    relay.settle(&owned, &settled).await;
    for (n, id) in (1_i64..).zip(&ids) {
        let query = format!(
            "select count(*) from outbox_waiting where id = {id} and attempts = {n} and tries = {n} + 10 and last_error = 'error {n}'"
        );
        assert_eq!(db.number(&query).await, 1);
        let due = db.due_in_us(*id).await;
        assert!(due > (n * 1_000 - 500) * 1_000_000 && due <= n * 1_000 * 1_000_000, "{n}: {due}");
    }
    let held = relay.source.ownership.held(&owned, None, 10).await.expect("read");
    assert_eq!(held.iter().map(|held| held.position).collect::<Vec<_>>(), [ids[1]]);
    assert_eq!(held[0].lane, rows[1].lane);
    assert!(!held[0].dead);
}

/// Retried, dead and sent messages go from waiting, with what was counted.
pub async fn a_waiting_message_is_settled_where_it_stands<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", Some("k"), 4).await;
    relay.settle_heads(&owned, &retry_after(Duration::ZERO, 1, 2)).await;
    let due = relay.due(&owned).await.rows;
    assert!(due.iter().all(|head| head.origin == Origin::Waiting { attempts: 1, tries: 2 }), "{due:?}");
    let settled =
        vec![one(&due[0], sent()), one(&due[1], retry(2, 3)), one(&due[2], dead()), one(&due[3], sent())];
    assert_eq!(relay.settle(&owned, &settled).await, ids);
    assert_eq!(places(db).await, [0, 1, 1, 2]);
    assert_eq!(db.number("select attempts * 100 + tries from outbox_waiting").await, 203);
    assert_eq!(
        db.number("select attempts * 100 + tries from outbox_dead where reason = 'permanent'").await,
        304
    );
}

/// A caller's slip does not write two outcomes.
pub async fn of_a_message_given_twice_the_first_verdict_counts<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let id = db.insert(&NewMessage::of("m", None)).await;
    let head = relay.heads(&owned).await.rows.remove(0);
    let settled = vec![one(&head, sent()), one(&head, dead()), one(&head, sent())];
    assert_eq!(relay.settle(&owned, &settled).await, [id]);
    assert_eq!(places(db).await, [0, 0, 0, 1]);
}

/// Whatever a sink answers can be stored.
pub async fn odd_texts_are_stored<D: DatabaseUnderTest>(db: &D) {
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", Some("a'\"\\key"), 3).await;
    let rows = relay.heads(&owned).await.rows;
    let odd = "nul \0 quote ' \" back \\ {1,2} NULL 订单 ".to_owned() + &"long ".repeat(1_000);
    let settled = vec![
        one(&rows[0], Verdict::Sent { sink: "a,b\"{}".into(), evidence: Some(odd.clone()) }),
        one(
            &rows[1],
            Verdict::Retry {
                backoff: Duration::ZERO,
                attempts: 1,
                tries: 1,
                error: odd.clone(),
                holds_key: true,
            },
        ),
        one(&rows[2], dead()),
    ];
    assert_eq!(relay.settle(&owned, &settled).await, ids);
    assert_eq!(places(db).await, [0, 1, 1, 1]);
    assert_eq!(db.number("select length(last_error) from outbox_waiting").await, 1_000);
    let due = relay.due(&owned).await.rows;
    assert_eq!(due[0].lane, rows[1].lane, "the lane survives its way through waiting");
}
