//! One suite for every [`Sink`], and what it needs to run on a real one.
//!
//! A broker gives a [`Rig`]: how to open the sink, how to read back what it holds, how to stop and start the broker. The cases
//! stand in [`suite`]; [`sink_suite!`](crate::sink_suite) makes tests of those that fit a broker.

pub mod file;
pub mod nats;
pub mod proxy;
pub mod stdout;
pub mod suite;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use postrider_relay::message::{Message, Outgoing, Payload, Position};
use postrider_relay::sink::{Outcome, Outcomes, Sink};

/// A real sink under test, with a place of its own for one test.
#[async_trait]
pub trait Rig: Send + Sync {
    /// Opens the sink. One at a time.
    async fn open(&self) -> Arc<dyn Sink>;

    /// Everything the sink holds, in its order.
    async fn received(&self) -> Vec<Received>;

    /// Makes the broker unreachable without warning, as by `kill -9` or by unmounting.
    async fn stop(&self);

    /// Makes it reachable again, with what it has kept.
    async fn start(&self);

    /// Turns a message into one that the sink must refuse for good; `false` where it takes everything.
    fn poison(&self, _message: &mut Message) -> bool {
        false
    }
}

/// A message as a consumer sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its id.
    pub message_id: String,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub key: Option<String>,
    /// Its place in the outbox.
    pub position: i64,
    /// Which publish brought it.
    pub try_number: u32,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Trace context.
    pub trace: Option<String>,
    /// The producer's own headers.
    pub headers: BTreeMap<String, String>,
    /// The payload; `None` = absent.
    pub payload: Option<Bytes>,
}

/// A message with this id, in the order of `position`.
#[must_use]
pub fn message(message_id: &str, position: i64) -> Message {
    Message {
        position: Position(position),
        message_id: message_id.to_owned(),
        topic: "orders".to_owned(),
        tag: None,
        key: Some("order:1".to_owned()),
        aggregate_type: None,
        aggregate_id: None,
        event_type: None,
        schema_version: None,
        headers: Vec::new(),
        content_type: None,
        payload: Payload::Text(Bytes::from_static(b"{}")),
        max_attempts: None,
        trace: None,
        trace_state: None,
        created_at_us: 1_700_000_000_000_000,
    }
}

/// The first try of a message.
#[must_use]
pub fn outgoing(message: Message) -> Outgoing {
    Outgoing { message: Arc::new(message), try_number: 1 }
}

/// `count` small messages `m0`, `m1` …, from `first` on.
#[must_use]
pub fn batch(first: i64, count: i64) -> Vec<Outgoing> {
    (first..first + count).map(|n| outgoing(message(&format!("m{n}"), n))).collect()
}

/// Publishes and returns the outcomes by index.
///
/// # Panics
/// When a message gets no outcome, two, or one beyond the batch.
pub async fn publish(sink: &dyn Sink, batch: Vec<Outgoing>) -> Vec<Outcome> {
    let mut outcomes: Vec<Option<Outcome>> = vec![None; batch.len()];
    let (reporter, mut receiver) = Outcomes::channel();
    sink.publish(batch, reporter).await;
    while let Some((index, outcome)) = receiver.recv().await {
        let slot = outcomes
            .get_mut(index as usize)
            .unwrap_or_else(|| panic!("outcome for {index}, beyond the batch"));
        assert!(slot.is_none(), "second outcome for {index}: {slot:?}, then {outcome:?}");
        *slot = Some(outcome);
    }
    outcomes
        .into_iter()
        .enumerate()
        .map(|(index, outcome)| outcome.unwrap_or_else(|| panic!("no outcome for {index}")))
        .collect()
}

/// Whether the sink has it.
#[must_use]
pub fn accepted(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Accepted { .. })
}

/// Publishes until everything is accepted, as a relay would: refused and unknown messages come again with the same id.
///
/// # Panics
/// After 600 rounds: the sink does not recover.
pub async fn publish_until_accepted(sink: &dyn Sink, mut batch: Vec<Outgoing>) {
    for _ in 0..600 {
        let outcomes = publish(sink, batch.clone()).await;
        batch = batch
            .into_iter()
            .zip(&outcomes)
            .filter(|(_, outcome)| !accepted(outcome))
            .map(|(m, _)| m)
            .collect();
        if batch.is_empty() {
            return;
        }
        assert!(
            !outcomes.iter().any(|outcome| matches!(outcome, Outcome::Refused(r) if r.scope == postrider_relay::sink::Scope::Message)),
            "an outage is nobody's fault: {outcomes:?}"
        );
        // Paces the repeats like a breaker's probe; nothing is concluded from the time.
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    panic!("{} messages are still not accepted", batch.len());
}

/// Reads a line of the file and stdout sinks.
///
/// # Panics
/// When it is not in the documented form.
#[must_use]
pub fn parse_line(line: &str) -> Received {
    let value: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
    let text = |name: &str| value.get(name).map(|v| v.as_str().expect("text").to_owned());
    let payload = match (text("payload"), text("payload_base64")) {
        (Some(text), None) => Some(Bytes::from(text)),
        (None, Some(encoded)) => Some(Bytes::from(STANDARD.decode(encoded).expect("base64"))),
        (None, None) => None,
        both => panic!("both payloads: {both:?}"),
    };
    Received {
        message_id: text("message_id").expect("an id"),
        topic: text("topic").expect("a topic"),
        key: text("key"),
        position: value["position"].as_i64().expect("a position"),
        try_number: u32::try_from(value["try"].as_u64().expect("a try")).expect("a small number"),
        content_type: text("content_type"),
        trace: text("trace"),
        headers: value["headers"]
            .as_object()
            .expect("an object")
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str().expect("text").to_owned()))
            .collect(),
        payload,
    }
}

/// Makes one test per named case of the suite, each on a fresh rig from the async function.
#[macro_export]
macro_rules! sink_suite {
    ($rig:path: $($case:ident),+ $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                $crate::sink::suite::$case(&$rig().await).await;
            }
        )+
    };
}
