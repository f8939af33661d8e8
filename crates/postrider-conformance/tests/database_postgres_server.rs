//! What only a server with many writers can show: late commits, open takeovers, sharing, and refusals by the server.

use std::time::Duration;

use postrider_conformance::database::postgres::{Postgres, until_it_waits};
use postrider_conformance::database::{
    DatabaseUnderTest, NewMessage, Relay, all, everything, identity, positions, retry_after, sent,
};
use postrider_relay::message::Position;
use postrider_relay::source::{Owned, Range, RelayState, SettleReport, Source, SourceError};
use postrider_relay::sources::{self, SourceOptions};
use sqlx::{Connection, PgConnection, Row};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

#[tokio::test]
async fn a_low_id_that_commits_late_is_still_read() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mut writer = db.connect().await;
    let mut open = writer.begin().await.expect("begin");
    let low = Postgres::insert_on(&mut open, &NewMessage::of("low", Some("k"))).await;
    let xid: i64 = sqlx::query("select pg_current_xact_id()::text::bigint")
        .fetch_one(&mut *open)
        .await
        .expect("the transaction's id")
        .get(0);
    let high = db.insert(&NewMessage::of("high", Some("k"))).await;
    let first = relay.heads(&owned).await;
    assert_eq!(positions(&first), [high]);
    let xid = u64::try_from(xid).expect("ids are positive");
    assert!(first.snapshot.xmin <= xid, "{xid} was still running in {:?}", first.snapshot);
    open.commit().await.expect("commit");
    let window = Range { after: Position(0), up_to: Some(high), limit: 10 };
    let second = relay.source.reader.heads(&owned, window).await.expect("read");
    assert_eq!(positions(&second), [low, high]);
    db.finish().await;
}

/// Changes every token in an open transaction, the way a takeover does.
async fn steal(connection: &mut PgConnection) -> sqlx::Transaction<'_, sqlx::Postgres> {
    let mut transaction = connection.begin().await.expect("begin");
    sqlx::raw_sql(
        "select from outbox_shard order by shard for update;
         update outbox_shard set owner = 99, token = token + 1;",
    )
    .execute(&mut *transaction)
    .await
    .expect("take over");
    transaction
}

async fn settle_during_a_takeover(commit: bool) {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let ids = db.insert_many("m", None, 20).await;
    let rows = relay.heads(&owned).await.rows;
    let mut thief = db.connect().await;
    let open = steal(&mut thief).await;
    let Source { settler, .. } = relay.source.clone();
    let (tokens, settled) = (owned.clone(), all(&rows, &sent()));
    let settling = tokio::spawn(async move { settler.settle(&tokens, &settled).await.expect("settle") });
    until_it_waits(&db, &settling).await;
    if commit {
        open.commit().await.expect("commit");
        assert_eq!(settling.await.expect("no panic"), SettleReport::default());
        assert_eq!(db.count("outbox_queue").await, 20);
        assert_eq!(db.count("outbox_sent").await, 0);
    } else {
        open.rollback().await.expect("roll back");
        let mut report = settling.await.expect("no panic");
        report.settled.sort_unstable();
        assert_eq!(report.settled, ids);
    }
    db.finish().await;
}

#[tokio::test]
async fn a_settle_waits_for_an_open_takeover_and_is_fenced_when_it_commits() {
    settle_during_a_takeover(true).await;
}

#[tokio::test]
async fn a_settle_waits_for_an_open_takeover_and_goes_on_when_it_rolls_back() {
    settle_during_a_takeover(false).await;
}

#[tokio::test]
async fn reads_do_not_wait_for_an_open_takeover() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let id = db.insert(&NewMessage::of("m", None)).await;
    let mut thief = db.connect().await;
    let open = steal(&mut thief).await;
    assert_eq!(positions(&relay.heads(&owned).await), [id], "until it commits, the shard is still ours");
    open.commit().await.expect("commit");
    assert!(relay.heads(&owned).await.mine.is_empty());
    db.finish().await;
}

#[tokio::test]
async fn a_renewal_that_is_still_open_is_not_run_over() {
    let db = Postgres::fresh().await;
    let (old, new) = (db.relay(1).await, db.relay(2).await);
    let owned = old.acquire().await;
    db.expire(1).await;
    let mut renewing = db.connect().await;
    let mut open = renewing.begin().await.expect("begin");
    sqlx::raw_sql("update outbox_relay set expires_at = clock_timestamp() + interval '15 s' where relay = 1")
        .execute(&mut *open)
        .await
        .expect("renew");
    assert_eq!(new.acquire().await, [], "the row is being renewed right now");
    open.commit().await.expect("commit");
    assert_eq!(new.acquire().await, []);
    let renewed = old.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.mine.len(), owned.len());
    db.finish().await;
}

#[tokio::test]
async fn a_late_renewal_waits_for_an_open_takeover_and_then_sees_it() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.expire(1).await;
    let mut thief = db.connect().await;
    let open = steal(&mut thief).await;
    let Source { ownership, .. } = relay.source.clone();
    let renewing =
        tokio::spawn(async move { ownership.renew(&owned, &RelayState::default()).await.expect("renew") });
    until_it_waits(&db, &renewing).await;
    open.commit().await.expect("commit");
    assert_eq!(renewing.await.expect("no panic").mine, []);
    db.finish().await;
}

/// A transaction that runs while others end above it: PostgreSQL's own snapshot xmax would not bound it.
#[tokio::test]
async fn xmax_lies_above_every_running_transaction() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let mut connection = db.connect().await;
    let mut running = connection.begin().await.expect("begin");
    let xid: i64 = sqlx::query_scalar("select pg_current_xact_id()::text::bigint")
        .fetch_one(&mut *running)
        .await
        .expect("a transaction id");
    let snapshot = relay.source.reader.heads(&owned, everything()).await.expect("read").snapshot;
    assert!(
        snapshot.xmin <= xid.cast_unsigned() && xid.cast_unsigned() < snapshot.xmax,
        "{xid} {snapshot:?}"
    );
    running.commit().await.expect("commit");
    // Transactions of other databases of the server count too, so it may take them a moment to end.
    while relay.source.reader.heads(&owned, everything()).await.expect("read").snapshot.xmin
        <= xid.cast_unsigned()
    {
        tokio::task::yield_now().await;
    }
    db.finish().await;
}

#[tokio::test]
async fn three_relays_share_the_shards_evenly() {
    let db = Postgres::fresh().await;
    let relays = [db.relay(3).await, db.relay(1).await, db.relay(2).await];
    let mut first = relays[0].acquire().await;
    assert_eq!(first.len(), 64);
    assert!(relays[1].acquire().await.is_empty() && relays[2].acquire().await.is_empty());
    let renewed = relays[0].source.ownership.renew(&first, &RelayState::default()).await.expect("renew");
    assert_eq!(renewed.live_relays, 3);
    let given_back = first.split_off(22);
    relays[0].source.ownership.release(&given_back).await.expect("release");
    let second = relays[1].acquire().await;
    assert_eq!((second.len(), relays[2].acquire().await.len()), (21, 21));
    let nothing = relays[1].source.ownership.acquire(&second).await.expect("acquire");
    assert_eq!((nothing.owned.len(), nothing.live_relays, nothing.shards), (0, 3, 64));
    db.finish().await;
}

/// Takes everything from whoever has it, reads and settles, over and over.
async fn take_and_settle(db: &Postgres, relay: &Relay, other: i64, rounds: usize) {
    for round in 0..rounds {
        db.expire(other).await;
        let owned: Vec<Owned> = relay.acquire().await;
        let rows =
            relay.source.reader.heads(&owned, Range { limit: 40, ..everything() }).await.expect("read").rows;
        let verdict = if round % 3 == 0 { retry_after(Duration::ZERO, 1, 1) } else { sent() };
        relay.source.settler.settle(&owned, &all(&rows, &verdict)).await.expect("settle without a deadlock");
        let due = relay.source.reader.due(&owned, <_>::default(), 40).await.expect("read").rows;
        relay.source.settler.settle(&owned, &all(&due, &sent())).await.expect("settle without a deadlock");
        relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settles_and_takeovers_in_a_loop_end_in_one_receipt_per_message() {
    let db = Postgres::fresh().await;
    db.execute(
        "insert into outbox (message_id, topic, message_key, payload)
         select 'm' || g, 'orders', 'k' || g % 100, '{}' from generate_series(1, 3000) g",
    )
    .await;
    let (one, two) = (db.relay(1).await, db.relay(2).await);
    tokio::join!(take_and_settle(&db, &one, 2, 60), take_and_settle(&db, &two, 1, 60));
    db.expire(1).await;
    db.expire(2).await;
    let last = db.relay(3).await;
    let owned = last.acquire().await;
    last.settle_heads(&owned, &sent()).await;
    last.settle(&owned, &all(&last.due(&owned).await.rows, &sent())).await;
    let receipts = "(select unnest(ids) as id from outbox_sent) r";
    assert_eq!(db.number(&format!("select count(*) from {receipts}")).await, 3_000);
    assert_eq!(db.number(&format!("select count(distinct id) from {receipts}")).await, 3_000);
    assert_eq!(db.count("outbox_queue").await + db.count("outbox_waiting").await, 0);
    db.finish().await;
}

#[tokio::test]
async fn a_missing_grant_is_named() {
    let db = Postgres::fresh().await;
    let role = format!("{}_relay", db.name);
    db.execute(&format!(
        "create role {role} login password '{role}';
         grant select on outbox, outbox_cancelled, postrider_schema to {role};
         grant select, delete on outbox_queue to {role};
         grant select, insert, update, delete on outbox_waiting, outbox_dead, outbox_relay to {role};
         grant select, insert on outbox_sent to {role};
         grant select on outbox_shard to {role};"
    ))
    .await;
    let url = db.url_of(&role);
    let error =
        sources::open(&url, identity(1), &SourceOptions::default()).await.expect_err("a right is missing");
    let text = error.to_string();
    assert!(matches!(error, SourceError::Operator(_)), "{error:?}");
    assert!(
        text.contains("UPDATE on outbox_shard") && text.contains(&role) && text.contains("grant"),
        "{text}"
    );

    // With it, everything a relay does works, and nothing more was needed.
    db.execute(&format!("grant update on outbox_shard to {role}")).await;
    let source = sources::open(&url, identity(1), &SourceOptions::default()).await.expect("all rights there");
    let relay = Relay { number: 1, source };
    let owned = relay.acquire().await;
    db.insert_many("m", Some("k"), 3).await;
    let rows = relay.heads(&owned).await.rows;
    relay.settle(&owned, &all(&rows[..1], &retry_after(Duration::ZERO, 1, 1))).await;
    relay.settle(&owned, &all(&rows[1..2], &postrider_conformance::database::dead())).await;
    relay.settle(&owned, &all(&rows[2..], &sent())).await;
    let due = relay.due(&owned).await.rows;
    assert_eq!(relay.settle(&owned, &all(&due, &sent())).await.len(), 1);
    relay.source.ownership.held(&owned, None, 10).await.expect("read");
    relay.source.ownership.renew(&owned, &RelayState::default()).await.expect("renew");
    relay.source.inspect.unaccounted(0, 10, 10).await.expect("look");
    relay.source.inspect.summary(10).await.expect("count");
    relay.source.ownership.leave().await.expect("leave");
    drop(relay);
    db.execute(&format!("drop owned by {role}; drop role {role}")).await;
    db.finish().await;
}

#[tokio::test]
async fn a_read_only_server_is_refused() {
    let db = Postgres::fresh().await;
    db.execute(&format!("alter database {} set default_transaction_read_only = on", db.name)).await;
    let error = db.try_relay(1).await.expect_err("read-only");
    assert!(matches!(&error, SourceError::Operator(text) if text.contains("read-only")), "{error:?}");
    sources::admin(&db.url()).await.expect("looking is possible");
    db.finish().await;
}

#[tokio::test]
async fn a_missing_database_and_a_server_that_is_down_are_told_apart() {
    let db = Postgres::fresh().await;
    let url = db.url().replace(&db.name, "postrider_no_such_database");
    let error = sources::open(&url, identity(1), &SourceOptions::default()).await.expect_err("no database");
    assert!(
        matches!(&error, SourceError::Operator(text) if text.contains("create the database")),
        "{error:?}"
    );
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").await.expect("bind").local_addr().expect("bound").port();
    let url = format!("postgres://me:s3cret@127.0.0.1:{port}/app");
    let error =
        sources::open(&url, identity(1), &SourceOptions::default()).await.expect_err("nobody listens");
    assert!(matches!(&error, SourceError::Temporary(text) if !text.contains("s3cret")), "{error:?}");
    db.finish().await;
}

/// A server that answers the first message with `answer` and then says nothing more.
async fn server_that_answers(answer: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = [0; 4_096];
                // The first packet asks for TLS: no. The second starts the session.
                if socket.read(&mut buffer).await.is_ok() && socket.write_all(b"N").await.is_ok() {
                    let started = socket.read(&mut buffer).await.is_ok();
                    if started && socket.write_all(answer).await.is_ok() {
                        std::future::pending::<()>().await;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn a_wrong_password_is_said_and_not_shown() {
    let refused = b"E\0\0\0\x58SFATAL\0VFATAL\0C28P01\0Mpassword authentication failed for user \"me\"\0Fauth.c\0L1\0Rauth\0\0\0\0";
    let port = server_that_answers(refused).await;
    let url = format!("postgres://me:s3cret@127.0.0.1:{port}/app");
    let error = sources::open(&url, identity(1), &SourceOptions::default()).await.expect_err("refused");
    let text = error.to_string();
    assert!(matches!(error, SourceError::Operator(_)), "{error:?}");
    assert!(text.contains("password authentication failed") && text.contains("28P01"), "{text}");
    assert!(text.contains("check user and password") && !text.contains("s3cret"), "{text}");
}

#[tokio::test]
async fn a_connection_that_does_not_answer_is_given_up() {
    let port = server_that_answers(b"").await;
    let url = format!("postgres://me:s3cret@127.0.0.1:{port}/app");
    let options = SourceOptions { statement_timeout: Duration::from_millis(100), ..SourceOptions::default() };
    let error = sources::open(&url, identity(1), &options).await.expect_err("no answer");
    assert!(matches!(&error, SourceError::Temporary(text) if text.contains("no answer within")), "{error:?}");
}

#[tokio::test]
async fn a_killed_connection_is_replaced() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    let id = db.insert(&NewMessage::of("m", None)).await;
    relay.heads(&owned).await;
    db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity
         where datname = current_database() and pid <> pg_backend_pid()",
    )
    .await;
    let error = relay.source.reader.heads(&owned, everything()).await.expect_err("the session was ended");
    assert!(matches!(error, SourceError::Temporary(_)), "{error:?}");
    assert_eq!(positions(&relay.heads(&owned).await), [id]);
    db.finish().await;
}

#[tokio::test]
async fn no_session_is_left_in_a_transaction() {
    let db = Postgres::fresh().await;
    let relay = db.relay(1).await;
    let owned = relay.acquire().await;
    db.insert_many("m", None, 5).await;
    relay.settle_heads(&owned, &sent()).await;
    let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'";
    assert_eq!(db.number(open).await, 0);
    db.finish().await;
}
