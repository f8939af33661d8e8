//! The sink suite on a real NATS server, and what only NATS has.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::stream::{Config, DiscardPolicy, StorageType};
use bytes::Bytes;
use futures_util::StreamExt as _;
use postrider_conformance::sink::nats::{NatsRig, NatsServer, STREAM, read, required};
use postrider_conformance::sink::proxy::Proxy;
use postrider_conformance::sink::{Rig, accepted, batch, message, outgoing, publish, publish_until_accepted};
use postrider_conformance::sink_suite;
use postrider_relay::message::{Outgoing, Payload};
use postrider_relay::sink::{DurabilityTier, Outcome, Outcomes, Refusal, Retry, Scope, Sink, SinkError};
use postrider_relay::sinks::{SinkOptions, connect};

async fn rig() -> NatsRig {
    NatsRig::new().await
}

sink_suite!(rig:
    answers_once_per_message_in_order,
    batches_at_the_same_time_keep_their_order,
    payload_bytes_arrive_unchanged,
    headers_arrive,
    a_poison_message_does_not_stop_its_neighbours,
    an_outage_is_nobodys_fault,
    a_server_restart_in_the_middle_loses_nothing,
    a_closed_sink_accepts_nothing,
    outcomes_that_nobody_awaits_do_no_harm,
);

fn to(topic: &str, n: i64) -> Outgoing {
    let mut message = message(&format!("{topic}-{n}"), n);
    message.topic = topic.to_owned();
    outgoing(message)
}

fn sized(n: i64, bytes: usize) -> Outgoing {
    let mut message = message(&format!("m{n}"), n);
    message.payload = Payload::Binary(Bytes::from(vec![b'x'; bytes]));
    outgoing(message)
}

#[track_caller]
fn refusal(outcome: &Outcome) -> &Refusal {
    match outcome {
        Outcome::Refused(refusal) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

#[track_caller]
fn refused(outcome: &Outcome, scope: Scope, retry: Retry, code: &str) {
    let refusal = refusal(outcome);
    assert_eq!(
        (refusal.scope, refusal.retry, refusal.code.as_str()),
        (scope, retry, code),
        "{}",
        refusal.text
    );
}

async fn open(url: &str) -> Arc<dyn Sink> {
    connect(url, &NatsRig::options()).await.expect("the sink opens")
}

async fn fails(url: &str) -> SinkError {
    connect(url, &NatsRig::options()).await.err().expect("the sink must not open")
}

async fn stream(context: &jetstream::Context, name: &str, subjects: &[&str]) {
    let subjects = subjects.iter().map(|&subject| subject.to_owned()).collect();
    context
        .create_stream(Config { name: name.to_owned(), subjects, ..Config::default() })
        .await
        .expect("the stream is made");
}

#[tokio::test]
async fn the_server_of_the_services_script_works() {
    let url = required("NATS_URL");
    let sink = open(&url).await;
    assert_eq!(sink.check().await.unwrap(), DurabilityTier::LocalMemory);
    assert!(sink.capabilities().deduplicates);
    assert_eq!(sink.capabilities().max_bytes, Some(1 << 20));
}

#[tokio::test]
async fn evidence_is_stream_and_sequence() {
    let rig = NatsRig::new().await;
    let sink = rig.open().await;
    let outcomes = publish(&*sink, batch(0, 2)).await;
    let evidence = |n: u64| Outcome::Accepted { evidence: Some(format!("{STREAM}:{n}")) };
    assert_eq!(outcomes, [evidence(1), evidence(2)]);
    assert_eq!(sink.destination("orders"), "shop.orders");
}

/// Two outboxes, such as one database per tenant, may have the same ids. What the server drops as a repeat of somebody
/// else's message must not count as sent.
#[tokio::test]
async fn an_id_that_another_outbox_has_used_is_not_taken_for_sent() {
    let rig = NatsRig::new().await;
    let sink = rig.open().await;
    let ours = batch(0, 1);
    let mut theirs = message(&ours[0].message.message_id, 77);
    theirs.topic = ours[0].message.topic.clone();
    assert!(accepted(&publish(&*sink, ours.clone()).await[0]));
    let outcomes = publish(&*sink, vec![outgoing(theirs)]).await;
    refused(&outcomes[0], Scope::Message, Retry::Backoff, "id_taken");
    assert!(accepted(&publish(&*sink, ours).await[0]), "a true repeat");
    assert_eq!(rig.received().await.len(), 1);
}

#[tokio::test]
async fn a_repeated_id_is_accepted_once_more_and_kept_once() {
    let rig = NatsRig::new().await;
    let sink = rig.open().await;
    let first = publish(&*sink, batch(0, 3)).await;
    let mut again = batch(0, 3);
    again.iter_mut().for_each(|outgoing| outgoing.try_number = 2);
    assert_eq!(publish(&*sink, again).await, first, "the evidence is that of the first");
    assert_eq!(rig.received().await.len(), 3);
}

#[tokio::test]
async fn with_dedupe_off_a_repeat_is_kept_twice() {
    let rig = NatsRig::with(Config::default(), "&dedupe=false").await;
    let sink = rig.open().await;
    assert!(!sink.capabilities().deduplicates);
    for _ in 0..2 {
        assert!(publish(&*sink, batch(0, 3)).await.iter().all(accepted));
    }
    let positions: Vec<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert_eq!(positions, [0, 1, 2, 0, 1, 2]);
}

#[tokio::test]
async fn a_missing_stream_and_missing_jetstream_are_told_at_start() {
    let server = NatsServer::start("");
    let error = fails(&format!("nats://{}?stream=NONE", server.address())).await;
    assert!(matches!(error, SinkError::Operator(_)), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("NONE") && text.contains(&server.address()) && text.contains("stream add"),
        "{text}"
    );

    let plain = NatsServer::plain();
    let error = fails(&format!("nats://{}", plain.address())).await;
    assert!(matches!(&error, SinkError::Operator(text) if text.contains("without JetStream")), "{error:?}");
}

#[tokio::test]
async fn a_subject_without_a_stream_is_the_destinations_fault() {
    let server = NatsServer::start("");
    let (_, context) = server.client().await;
    stream(&context, "A", &["a.>"]).await;
    let sink = open(&format!("nats://{}", server.address())).await;
    let outcomes = publish(&*sink, vec![to("a.x", 0), to("b.x", 1), to("b.x", 2), to("a.y", 3)]).await;
    assert!(accepted(&outcomes[0]) && accepted(&outcomes[3]), "{outcomes:?}");
    for outcome in &outcomes[1..3] {
        refused(outcome, Scope::DestinationAuth, Retry::Backoff, "10059");
        assert!(refusal(outcome).text.contains("b.x"));
    }
    stream(&context, "B", &["b.>"]).await;
    assert!(publish(&*sink, vec![to("b.x", 1)]).await.iter().all(accepted), "the operator has mended it");
}

#[tokio::test]
async fn a_subject_of_another_stream_is_not_accepted() {
    let server = NatsServer::start("");
    let (_, context) = server.client().await;
    stream(&context, "A", &["a.>"]).await;
    stream(&context, "B", &["b.>"]).await;
    let sink = open(&format!("nats://{}?stream=A", server.address())).await;
    let outcomes = publish(&*sink, vec![to("a.x", 0), to("b.x", 1)]).await;
    assert!(accepted(&outcomes[0]));
    refused(&outcomes[1], Scope::DestinationAuth, Retry::Backoff, "10060");
    assert!(read(&context, "B").await.is_empty());
}

#[tokio::test]
async fn a_full_stream_is_the_destinations_fault_until_there_is_room() {
    let config = Config { max_messages: 2, discard: DiscardPolicy::New, ..Config::default() };
    let rig = NatsRig::with(config, "").await;
    let sink = rig.open().await;
    let outcomes = publish(&*sink, batch(0, 4)).await;
    assert!(outcomes[..2].iter().all(accepted), "{outcomes:?}");
    for outcome in &outcomes[2..] {
        refused(outcome, Scope::Destination, Retry::Backoff, "10077");
    }
    rig.jetstream().await.get_stream(STREAM).await.unwrap().purge().await.unwrap();
    assert!(publish(&*sink, batch(2, 2)).await.iter().all(accepted));
    assert_eq!(rig.received().await.len(), 2);
}

#[tokio::test]
async fn a_sealed_stream_needs_an_operator() {
    let rig = NatsRig::new().await;
    let sink = rig.open().await;
    let context = rig.jetstream().await;
    let config = context.get_stream(STREAM).await.unwrap().cached_info().config.clone();
    context.update_stream(Config { sealed: true, ..config }).await.unwrap();
    refused(&publish(&*sink, batch(0, 1)).await[0], Scope::DestinationAuth, Retry::Backoff, "10109");
}

#[tokio::test]
async fn a_message_too_large_is_refused_alone() {
    let rig = NatsRig::with(Config { max_message_size: 10_000, ..Config::default() }, "").await;
    let sink = rig.open().await;
    let outcomes =
        publish(&*sink, vec![sized(0, 10), sized(1, 20_000), sized(2, 2 << 20), sized(3, 10)]).await;
    assert!(accepted(&outcomes[0]) && accepted(&outcomes[3]), "{outcomes:?}");
    refused(&outcomes[1], Scope::Message, Retry::Never, "10054");
    refused(&outcomes[2], Scope::Message, Retry::Never, "max_payload");
    assert_eq!(rig.received().await.len(), 2);
}

#[tokio::test]
async fn headers_too_large_for_the_server_are_refused_alone() {
    let rig = NatsRig::new().await;
    let sink = rig.open().await;
    let mut large = message("large", 0);
    large.headers = vec![("x".to_owned(), "y".repeat(70_000))];
    let outcomes = publish(&*sink, vec![outgoing(large), to("orders", 1)]).await;
    refused(&outcomes[0], Scope::Message, Retry::Never, "10097");
    assert!(accepted(&outcomes[1]));
}

#[tokio::test]
async fn a_slow_message_does_not_hold_back_its_neighbours() {
    let server = NatsServer::start("");
    let (client, context) = server.client().await;
    stream(&context, STREAM, &["fast.>"]).await;
    // Answers in place of a stream, when the test says so.
    let mut slow = client.subscribe("slow.x").await.unwrap();
    client.flush().await.unwrap();
    let options = SinkOptions { publish_timeout: Duration::from_secs(60), ..SinkOptions::default() };
    let sink = connect(&format!("nats://{}", server.address()), &options).await.unwrap();
    let (outcomes, mut reported) = Outcomes::channel();
    let publishing = tokio::spawn(async move {
        sink.publish(vec![to("slow.x", 0), to("fast.x", 1), to("fast.y", 2)], outcomes).await;
    });
    let mut fast = BTreeSet::new();
    for _ in 0..2 {
        let (index, outcome) = reported.recv().await.unwrap();
        assert!(accepted(&outcome));
        fast.insert(index);
    }
    assert_eq!(fast, BTreeSet::from([1, 2]), "both are told while the slow one waits");
    let request = slow.next().await.unwrap();
    client.publish(request.reply.unwrap(), "{\"stream\":\"SLOW\",\"seq\":9}".into()).await.unwrap();
    let outcome = Outcome::Accepted { evidence: Some("SLOW:9".to_owned()) };
    assert_eq!(reported.recv().await, Some((0, outcome)));
    publishing.await.unwrap();
    assert_eq!(reported.recv().await, None);
}

#[tokio::test]
async fn an_answer_that_is_no_acknowledgement_and_silence_are_unknown() {
    let server = NatsServer::start("");
    let (client, _) = server.client().await;
    let mut requests = client.subscribe("odd.>").await.unwrap();
    client.flush().await.unwrap();
    let options = SinkOptions { publish_timeout: Duration::from_millis(500), ..SinkOptions::default() };
    let sink = connect(&format!("nats://{}", server.address()), &options).await.unwrap();
    let answering = tokio::spawn(async move {
        for answer in ["hello", "{}", "{\"stream\":\"\",\"seq\":1}"] {
            let request = requests.next().await.unwrap();
            client.publish(request.reply.unwrap(), answer.into()).await.unwrap();
        }
        // The fourth gets no answer at all.
        requests.next().await
    });
    let outcomes = publish(&*sink, (0..4).map(|n| to("odd.x", n)).collect()).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Unknown { .. })), "{outcomes:?}");
    answering.await.unwrap();
}

const USERS: &str = r#"
authorization { users: [
  { user: relay, password: "right horse", permissions: { publish: ["shop.allowed.>", "$JS.API.>"], subscribe: ["_INBOX.>"] } }
  { user: narrow, password: p, permissions: { publish: ["shop.allowed.>"], subscribe: ["_INBOX.>"] } }
  { user: deaf, password: p, permissions: { publish: [">"], subscribe: ["other.>"] } }
  { user: admin, password: p }
] }"#;

async fn guarded() -> (NatsServer, jetstream::Context) {
    let server = NatsServer::start(USERS);
    let options = async_nats::ConnectOptions::with_user_and_password("admin".into(), "p".into());
    let context = jetstream::new(options.connect(server.address()).await.expect("the server answers"));
    stream(&context, STREAM, &["shop.>"]).await;
    (server, context)
}

#[tokio::test]
async fn a_subject_without_permission_needs_an_operator_and_stops_nobody_else() {
    let (server, context) = guarded().await;
    for user in ["relay:right%20horse", "narrow:p"] {
        let sink = open(&format!("nats://{user}@{}?stream={STREAM}&dedupe=false", server.address())).await;
        let batch = vec![
            to("shop.allowed.x", 0),
            to("shop.secret.x", 1),
            to("shop.allowed.x", 2),
            to("shop.secret.y", 3),
        ];
        for _ in 0..2 {
            let outcomes = publish(&*sink, batch.clone()).await;
            assert!(accepted(&outcomes[0]) && accepted(&outcomes[2]), "{outcomes:?}");
            for outcome in [&outcomes[1], &outcomes[3]] {
                refused(outcome, Scope::DestinationAuth, Retry::Backoff, "permissions");
            }
            assert!(refusal(&outcomes[3]).text.contains("shop.secret.y"));
        }
    }
    assert!(read(&context, STREAM).await.iter().all(|m| m.topic == "shop.allowed.x"));
}

#[tokio::test]
async fn many_messages_without_permission_are_all_answered() {
    let (server, _) = guarded().await;
    let sink = open(&format!("nats://relay:right%20horse@{}?stream={STREAM}", server.address())).await;
    let outcomes = publish(&*sink, (0..500).map(|n| to("shop.secret.x", n)).collect()).await;
    for outcome in &outcomes {
        refused(outcome, Scope::DestinationAuth, Retry::Backoff, "permissions");
    }
}

#[tokio::test]
async fn a_user_who_may_not_listen_is_told_what_is_missing() {
    let (server, _) = guarded().await;
    let error = fails(&format!("nats://deaf:p@{}?stream={STREAM}", server.address())).await;
    assert!(matches!(&error, SinkError::Operator(text) if text.contains("_INBOX")), "{error:?}");
}

#[tokio::test]
async fn wrong_credentials_are_told_without_the_secret() {
    let (server, _) = guarded().await;
    for user in ["relay:geheim", "geheim", "nobody:geheim"] {
        let error = fails(&format!("nats://{user}@{}", server.address())).await;
        assert!(matches!(error, SinkError::Operator(_)), "{error:?}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("credentials") && !text.contains("geheim"), "{text}");
    }
    let error = fails(&format!("nats://{}?creds=/no/such/file.creds", server.address())).await;
    assert!(matches!(&error, SinkError::Operator(text) if text.contains("/no/such/file.creds")), "{error:?}");
    let token = NatsServer::start("authorization { token: \"geheim\" }");
    open(&format!("nats://geheim@{}", token.address())).await;
    open(&format!("nats://{}?token=geheim", token.address())).await;
}

#[tokio::test]
async fn credentials_that_stop_working_need_an_operator_until_they_work_again() {
    let (mut server, _) = guarded().await;
    let url = format!("nats://relay:right%20horse@{}?stream={STREAM}", server.address());
    let sink = open(&url).await;
    server.kill();
    server.configure(&USERS.replace("right horse", "changed"));
    server.run();
    loop {
        let outcomes = publish(&*sink, vec![to("shop.allowed.x", 0)]).await;
        match &outcomes[0] {
            Outcome::Refused(refusal) if refusal.scope == Scope::SinkAuth => {
                assert!(
                    refusal.text.contains("credentials") && !refusal.text.contains("horse"),
                    "{}",
                    refusal.text
                );
                break;
            }
            Outcome::Accepted { .. } => panic!("accepted with the old password"),
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    server.kill();
    server.configure(USERS);
    server.run();
    while !accepted(&publish(&*sink, vec![to("shop.allowed.x", 0)]).await[0]) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_sink_that_starts_before_its_server_refuses_and_then_works() {
    let mut server = NatsServer::start("");
    let (_, context) = server.client().await;
    stream(&context, STREAM, &["shop.>"]).await;
    server.kill();
    let options = SinkOptions { start_offline: true, ..NatsRig::options() };
    let url = format!("nats://127.0.0.1:1,{}?stream={STREAM}&subject=shop.{{topic}}", server.address());
    let sink = connect(&url, &options).await.unwrap();
    for outcome in publish(&*sink, batch(0, 3)).await {
        refused(&outcome, Scope::Sink, Retry::Backoff, "disconnected");
    }
    server.run();
    publish_until_accepted(&*sink, batch(0, 3)).await;
    let (_, context) = server.client().await;
    assert_eq!(read(&context, STREAM).await.len(), 3);
}

#[tokio::test]
async fn the_tier_says_what_an_acknowledgement_is_worth() {
    for storage in [StorageType::File, StorageType::Memory] {
        let rig = NatsRig::with(Config { storage, ..Config::default() }, "").await;
        assert_eq!(rig.open().await.check().await.unwrap(), DurabilityTier::LocalMemory);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_refused_on_a_stalled_connection_never_arrives_late() {
    let rig = NatsRig::with(Config::default(), "&dedupe=false").await;
    let proxy = Proxy::start(rig.address()).await;
    let options = SinkOptions { publish_timeout: Duration::from_secs(1), ..SinkOptions::default() };
    let sink = connect(&rig.url().replace(rig.address(), proxy.address()), &options).await.unwrap();
    assert!(publish(&*sink, vec![sized(0, 10)]).await.iter().all(accepted));
    proxy.freeze();
    // Far more than the buffers of the system hold.
    let outcomes = publish(&*sink, (1..65).map(|n| sized(n, 512 << 10)).collect()).await;
    let mut never = BTreeSet::new();
    for (outcome, n) in outcomes.iter().zip(1..) {
        match outcome {
            Outcome::Refused(refusal) => {
                assert_eq!(refusal.scope, Scope::Sink);
                never.insert(n);
            }
            Outcome::Unknown { .. } => {}
            Outcome::Accepted { .. } => panic!("accepted through a frozen proxy"),
        }
    }
    assert!(!never.is_empty(), "some never left: {outcomes:?}");
    proxy.thaw();
    publish_until_accepted(&*sink, vec![sized(100, 10)]).await;
    // What the old connection still brings is in order before its end; one more on it would show here.
    publish_until_accepted(&*sink, vec![sized(101, 10)]).await;
    let received: BTreeSet<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert!(received.is_disjoint(&never), "late: {:?}", received.intersection(&never));
    assert!(received.is_superset(&BTreeSet::from([0, 100, 101])));
}

/// The client library would connect again by itself, and then send what had piled up: see `sinks/nats/session.rs`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_is_never_used_again() {
    let rig = NatsRig::new().await;
    let proxy = Proxy::start(rig.address()).await;
    let sink =
        connect(&rig.url().replace(rig.address(), proxy.address()), &NatsRig::options()).await.unwrap();
    for cuts in 0..5 {
        publish_until_accepted(&*sink, batch(cuts * 10, 10)).await;
        assert_eq!(
            proxy.connections(),
            1 + usize::try_from(cuts).unwrap(),
            "one connection per cut, made by the sink"
        );
        proxy.cut();
        // Until the sink has noticed, messages may still go into the broken connection.
        while publish(&*sink, batch(1_000, 1)).await.iter().any(accepted) {}
    }
    assert!(rig.received().await.len() >= 50);
}

/// Three servers that know each other.
fn cluster() -> Vec<NatsServer> {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    // All held at once, so that they differ.
    let held: Vec<_> = (0..3).map(|_| free()).collect();
    let ports: Vec<u16> = held.iter().map(|port| port.local_addr().expect("bound").port()).collect();
    drop(held);
    let routes: Vec<String> = ports.iter().map(|port| format!("nats-route://127.0.0.1:{port}")).collect();
    let config = |n: usize| {
        let (port, routes) = (ports[n], routes.join(", "));
        format!("server_name: n{n}\ncluster {{ name: c, listen: \"127.0.0.1:{port}\", routes: [{routes}] }}")
    };
    (0..3).map(|n| NatsServer::start(&config(n))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_replicas_survive_one_of_them() {
    let mut servers = cluster();
    let (_, context) = servers[1].client().await;
    let config = Config {
        name: STREAM.to_owned(),
        subjects: vec!["shop.>".to_owned()],
        num_replicas: 3,
        ..Config::default()
    };
    // Until the servers have elected a leader, JetStream refuses.
    let mut refusals = 0;
    while let Err(error) = context.create_stream(config.clone()).await {
        refusals += 1;
        assert!(refusals < 600, "the cluster does not form: {error}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let addresses: Vec<String> = servers.iter().map(NatsServer::address).collect();
    let url = format!("nats://{}?stream={STREAM}&subject=shop.{{topic}}", addresses.join(","));
    let sink = open(&url).await;
    assert_eq!(sink.check().await.unwrap(), DurabilityTier::ReplicatedMemory);
    publish_until_accepted(&*sink, batch(0, 100)).await;
    // Its leader, the sink's server, or neither: the outcome is the same.
    servers[0].kill();
    for first in (100..1_000).step_by(100) {
        publish_until_accepted(&*sink, batch(first, 100)).await;
    }
    let received: BTreeSet<i64> = read(&context, STREAM).await.iter().map(|m| m.position).collect();
    assert_eq!(received, (0..1_000).collect());
}
