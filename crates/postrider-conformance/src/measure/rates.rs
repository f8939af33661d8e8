//! Rates as ratios: what the sink adds to what the database and the relay need.

use std::fmt::Write as _;
use std::time::Instant;

use async_trait::async_trait;
use postrider_relay::core::settings::Settings;
use postrider_relay::message::Outgoing;
use postrider_relay::sink::{Capabilities, DurabilityTier, Outcome, Outcomes, Sink, SinkError};
use postrider_relay::sinks::{SinkOptions, connect};

use super::{DRAIN, bulk, source, until_sent};
use crate::testbed::{MemorySink, TestDatabase};

/// Accepts everything and remembers nothing.
#[derive(Debug)]
struct Null;

#[async_trait]
impl Sink for Null {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        for index in 0..batch.len() {
            outcomes.report(index, Outcome::Accepted { evidence: None });
        }
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        Ok(DurabilityTier::PeerSaysSo)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { ordered: true, deduplicates: false, max_bytes: None }
    }
}

/// Drains `messages` of 1 kB over `keys` keys into each sink, `rounds` times in turn, and returns a table of the rates as
/// ratios to the null sink of the same round.
///
/// # Panics
/// If a server refuses or nothing moves.
pub async fn rates(messages: u64, keys: u64, rounds: usize) -> String {
    let mut table = format!("{:<10}", "sink");
    let names = ["null", "memory", "nats"];
    let mut per_sink = vec![Vec::new(); names.len()];
    for round in 0..rounds {
        write!(table, " {:>9}", format!("round {}", round + 1)).expect("a string");
        let mut null = 0.0;
        for (i, name) in names.iter().enumerate() {
            let rate = rate(name, messages, keys).await;
            if i == 0 {
                null = rate;
            }
            per_sink[i].push((rate / null, rate));
        }
    }
    for (name, of_rounds) in names.iter().zip(per_sink) {
        write!(table, "\n{name:<10}").expect("a string");
        for (ratio, rate) in of_rounds {
            let cell = if *name == "null" { format!("{rate:.0}/s") } else { format!("{ratio:.2}x") };
            write!(table, " {cell:>9}").expect("a string");
        }
    }
    table
}

async fn rate(name: &str, messages: u64, keys: u64) -> f64 {
    let db = TestDatabase::new().await;
    db.write(&bulk("m", "orders", messages.cast_signed(), keys.cast_signed())).await;
    let settings = Settings::default();
    let source = source(&db, &settings).await;
    let (stream, sink): (Option<String>, std::sync::Arc<dyn Sink>) = match name {
        "null" => (None, std::sync::Arc::new(Null)),
        "memory" => (None, std::sync::Arc::new(MemorySink::default())),
        _ => {
            let (stream, url) = new_stream().await;
            (Some(stream), connect(&url, &SinkOptions::default()).await.expect("connect to NATS"))
        }
    };
    let since = Instant::now();
    let named = postrider_relay::sink::NamedSink { name: name.into(), sink };
    let relay = postrider_relay::engine::Relay::builder(source).sink(named).settings(settings);
    let relay = relay.start().expect("start");
    until_sent(&relay, messages).await;
    let took = since.elapsed();
    relay.stop(DRAIN).await;
    if let Some(stream) = stream {
        jetstream().await.delete_stream(stream).await.expect("delete the stream");
    }
    messages as f64 / took.as_secs_f64()
}

async fn jetstream() -> async_nats::jetstream::Context {
    let url = std::env::var("NATS_URL").expect("NATS_URL is not set: run `scripts/services up nats`");
    async_nats::jetstream::new(async_nats::connect(url).await.expect("connect to NATS"))
}

/// A stream on disk, and the address of a sink that writes to it without the broker's dedupe.
async fn new_stream() -> (String, String) {
    let name = format!("measure{:016x}", fastrand::u64(..));
    let config = async_nats::jetstream::stream::Config {
        name: name.clone(),
        subjects: vec![format!("{name}.>")],
        ..Default::default()
    };
    jetstream().await.create_stream(config).await.expect("create a stream");
    let url = std::env::var("NATS_URL").expect("NATS_URL");
    (name.clone(), format!("{url}?dedupe=false&stream={name}&subject={name}.%7Btopic%7D"))
}
