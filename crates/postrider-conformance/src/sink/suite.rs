//! The cases. Each takes a fresh rig.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use postrider_relay::message::{Outgoing, Payload};
use postrider_relay::sink::{Outcome, Outcomes, Retry, Scope};
use tokio::sync::watch;

use super::{Rig, accepted, batch, message, outgoing, publish, publish_until_accepted};

/// Every message of a batch gets one outcome, and the sink holds them once each, in the order of the batch.
pub async fn answers_once_per_message_in_order(rig: &dyn Rig) {
    let sink = rig.open().await;
    assert!(publish(&*sink, Vec::new()).await.is_empty());
    for first in [0, 300] {
        let outcomes = publish(&*sink, batch(first, 300)).await;
        assert!(outcomes.iter().all(accepted), "{outcomes:?}");
    }
    let received: Vec<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert_eq!(received, (0..600).collect::<Vec<_>>());
}

/// Batches published at the same time keep their own order and lose nothing.
pub async fn batches_at_the_same_time_keep_their_order(rig: &dyn Rig) {
    let sink = rig.open().await;
    let publishes = (0..8).map(|n| {
        let sink = Arc::clone(&sink);
        tokio::spawn(async move { publish(&*sink, batch(n * 100, 100)).await })
    });
    for outcomes in futures_util::future::join_all(publishes).await {
        assert!(outcomes.expect("no panic").iter().all(accepted));
    }
    let received: Vec<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert_eq!(received.len(), 800);
    for n in 0..8 {
        let own: Vec<i64> = received.iter().copied().filter(|p| p / 100 == n).collect();
        assert_eq!(own, (n * 100..n * 100 + 100).collect::<Vec<_>>());
    }
}

/// Bytes in = bytes out, and empty differs from absent.
pub async fn payload_bytes_arrive_unchanged(rig: &dyn Rig) {
    let all: Vec<u8> = (0..=255).collect();
    let payloads = [
        Payload::Absent,
        Payload::Text(Bytes::new()),
        Payload::Binary(Bytes::new()),
        Payload::Text(Bytes::from_static(br#"{"b":1.0,  "a":12345678901234567890,"a":2}"#)),
        Payload::Text(Bytes::from("emoji 🦀, line\r\nbreaks\n, quotes \" \\ and \u{2028}")),
        Payload::Text(Bytes::from_static(b"NUL \0 inside")),
        Payload::Text(Bytes::from_static(&[0xff, 0xfe, b'"', b'\n'])),
        Payload::Binary(Bytes::from(all)),
        Payload::Binary(Bytes::from(vec![b'\n'; 100_000])),
    ];
    let sink = rig.open().await;
    let messages = payloads.iter().zip(0..).map(|(payload, n)| {
        let mut message = message(&format!("m{n}"), n);
        message.payload = payload.clone();
        outgoing(message)
    });
    assert!(publish(&*sink, messages.collect()).await.iter().all(accepted));
    let received = rig.received().await;
    assert_eq!(received.len(), payloads.len());
    for (payload, received) in payloads.iter().zip(received) {
        let sent = if *payload == Payload::Absent { None } else { Some(payload.bytes()) };
        assert_eq!(received.payload, sent, "{payload:?}");
    }
}

/// Id, key, topic, position, try, content type, trace and the producer's headers arrive as they are.
pub async fn headers_arrive(rig: &dyn Rig) {
    let headers = [("X-Tenant", "acme"), ("x-tenant-2", ""), ("who", "Zoë 🦀"), ("q", "a=\"b\"; c\\d")];
    let headers: BTreeMap<String, String> =
        headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    let mut full = message("order:4711:paid ünïcode", 42);
    full.headers = headers.clone().into_iter().collect();
    full.content_type = Some("application/json; charset=utf-8".to_owned());
    full.trace = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".to_owned());
    let mut bare = message("bare", 43);
    bare.key = None;
    let sink = rig.open().await;
    let batch = vec![Outgoing { message: Arc::new(full.clone()), try_number: 3 }, outgoing(bare)];
    assert!(publish(&*sink, batch).await.iter().all(accepted));
    let received = rig.received().await;
    let [first, second] = &received[..] else { panic!("{received:?}") };
    assert_eq!((first.message_id.as_str(), first.topic.as_str()), ("order:4711:paid ünïcode", "orders"));
    assert_eq!((first.key.as_deref(), first.position, first.try_number), (Some("order:1"), 42, 3));
    assert_eq!((&first.content_type, &first.trace), (&full.content_type, &full.trace));
    assert_eq!(first.headers, headers);
    assert_eq!((second.key.as_deref(), &second.content_type, second.headers.len()), (None, &None, 0));
}

/// A message the sink can never take is refused for good; the ones around it go through.
pub async fn a_poison_message_does_not_stop_its_neighbours(rig: &dyn Rig) {
    let sink = rig.open().await;
    let mut poison = message("poison", 1);
    assert!(rig.poison(&mut poison), "this sink takes everything; leave this case out");
    let outcomes = publish(
        &*sink,
        vec![outgoing(message("m0", 0)), outgoing(poison.clone()), outgoing(message("m2", 2))],
    )
    .await;
    assert!(accepted(&outcomes[0]) && accepted(&outcomes[2]), "{outcomes:?}");
    let Outcome::Refused(refusal) = &outcomes[1] else { panic!("{outcomes:?}") };
    assert_eq!((refusal.scope, refusal.retry), (Scope::Message, Retry::Never));
    assert!(!refusal.code.is_empty() && !refusal.text.is_empty());
    // The sink works on.
    let again = publish(&*sink, vec![outgoing(poison), outgoing(message("m3", 3))]).await;
    assert!(!accepted(&again[0]) && accepted(&again[1]), "{again:?}");
    let received: Vec<String> = rig.received().await.into_iter().map(|m| m.message_id).collect();
    assert_eq!(received, ["m0", "m2", "m3"]);
}

/// While the sink cannot be reached nothing is accepted and no message is blamed; afterwards it accepts again.
pub async fn an_outage_is_nobodys_fault(rig: &dyn Rig) {
    let sink = rig.open().await;
    assert!(publish(&*sink, batch(0, 10)).await.iter().all(accepted));
    rig.stop().await;
    let mut refused = BTreeSet::new();
    for first in [10, 20, 30] {
        for (outcome, position) in publish(&*sink, batch(first, 10)).await.iter().zip(first..) {
            match outcome {
                Outcome::Unknown { .. } => {}
                Outcome::Refused(refusal) if matches!(refusal.scope, Scope::Sink | Scope::SinkAuth) => {
                    refused.insert(position);
                }
                other => panic!("during an outage: {other:?}"),
            }
        }
    }
    assert!(sink.check().await.is_err(), "the sink says that it cannot take messages");
    rig.start().await;
    // What was refused is not in the sink, however long the outage; only what is published again may come.
    publish_until_accepted(&*sink, batch(100, 1)).await;
    let received: BTreeSet<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert!(
        received.is_disjoint(&refused),
        "refused, but in the sink: {:?}",
        received.intersection(&refused)
    );
    publish_until_accepted(&*sink, batch(10, 30)).await;
    let received: BTreeSet<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert_eq!(received, (0..40).chain([100]).collect());
    assert!(sink.check().await.is_ok());
}

/// The broker dies while messages flow and comes back: everything that was accepted is there.
pub async fn a_server_restart_in_the_middle_loses_nothing(rig: &dyn Rig) {
    const MESSAGES: i64 = 2_000;
    const BATCH: i64 = 20;
    let sink = rig.open().await;
    let (progress, mut seen) = watch::channel(0);
    let flow = tokio::spawn(async move {
        for first in (0..MESSAGES).step_by(usize::try_from(BATCH).expect("small")) {
            publish_until_accepted(&*sink, batch(first, BATCH)).await;
            progress.send_replace(first + BATCH);
        }
    });
    for at in [MESSAGES / 4, MESSAGES / 2] {
        seen.wait_for(|&accepted| accepted >= at).await.expect("the flow goes on");
        rig.stop().await;
        rig.start().await;
    }
    flow.await.expect("everything is accepted in the end");
    let received: BTreeSet<i64> = rig.received().await.iter().map(|m| m.position).collect();
    assert_eq!(received, (0..MESSAGES).collect());
}

/// After closing, nothing is accepted, and nothing hangs.
pub async fn a_closed_sink_accepts_nothing(rig: &dyn Rig) {
    let sink = rig.open().await;
    assert!(publish(&*sink, batch(0, 1)).await.iter().all(accepted));
    sink.close().await;
    sink.close().await;
    assert!(!publish(&*sink, batch(1, 2)).await.iter().any(accepted));
    assert!(sink.check().await.is_err());
    assert_eq!(rig.received().await.len(), 1);
}

/// Nobody listens to the outcomes any more: the sink does not care.
pub async fn outcomes_that_nobody_awaits_do_no_harm(rig: &dyn Rig) {
    let sink = rig.open().await;
    let (outcomes, receiver) = Outcomes::channel();
    drop(receiver);
    sink.publish(batch(0, 5), outcomes).await;
    assert!(publish(&*sink, batch(5, 5)).await.iter().all(accepted));
}
