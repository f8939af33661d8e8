//! What has arrived, read from the sink itself.

use std::path::Path;
use std::time::Duration;

use async_nats::jetstream::{self, consumer, stream};
use futures_util::StreamExt as _;
use serde::Deserialize;

use crate::ledger::Arrival;

/// The lines of a file sink, in their order.
///
/// # Panics
/// If the file cannot be read, or a line is not one of ours.
#[must_use]
pub fn arrivals_in_file(path: &Path) -> Vec<Arrival> {
    #[derive(Deserialize)]
    struct Line {
        message_id: String,
        position: i64,
    }
    let text = std::fs::read_to_string(path).expect("the sink's file");
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete
        .lines()
        .map(|line| {
            let line: Line = serde_json::from_str(line).expect("a line of the file sink");
            Arrival { message_id: line.message_id, position: line.position }
        })
        .collect()
}

/// A JetStream stream of its own; removed with [`TestStream::remove`].
#[derive(Debug)]
pub struct TestStream {
    server: String,
    name: String,
}

impl TestStream {
    /// Creates it on the server at `server`.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn create(server: &str) -> Self {
        let this = Self { server: server.to_owned(), name: format!("drill_{:016x}", fastrand::u64(..)) };
        let config = stream::Config {
            name: this.name.clone(),
            subjects: vec![format!("{}.>", this.name)],
            ..stream::Config::default()
        };
        this.context().await.create_stream(config).await.expect("a stream");
        this
    }

    async fn context(&self) -> jetstream::Context {
        jetstream::new(async_nats::connect(&self.server).await.expect("NATS answers"))
    }

    /// The address of a sink that publishes into it. The broker's own dedupe is off: it would hide duplicates.
    #[must_use]
    pub fn sink(&self) -> String {
        format!("{}?stream={1}&subject={1}.{{topic}}&dedupe=false", self.server, self.name)
    }

    /// Everything in it, by sequence, read by a consumer that shares nothing with the sink.
    ///
    /// # Panics
    /// If it cannot be read, or a message is not in the documented form.
    pub async fn arrivals(&self) -> Vec<Arrival> {
        let mut stream = self.context().await.get_stream(&self.name).await.expect("the stream");
        let expected = stream.info().await.expect("the stream answers").state.messages;
        let config = consumer::pull::OrderedConfig::default();
        let consumer = stream.create_consumer(config).await.expect("a consumer");
        let mut messages = consumer.messages().await.expect("messages");
        let mut arrivals = Vec::new();
        while (arrivals.len() as u64) < expected {
            let next = tokio::time::timeout(Duration::from_secs(60), messages.next()).await;
            let message = next.expect("the next message").expect("a message").expect("a message");
            let headers = message.headers.as_ref().expect("headers");
            let header = |name: &str| headers.get(name).expect("a header of ours").as_str();
            arrivals.push(Arrival {
                message_id: header("Postrider-Message-Id").to_owned(),
                position: header("Postrider-Position").parse().expect("a position"),
            });
        }
        arrivals
    }

    /// Removes it.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn remove(self) {
        self.context().await.delete_stream(&self.name).await.expect("the stream is removed");
    }
}
