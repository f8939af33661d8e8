//! `stdout:` prints one line of JSON per message, the same as in a file.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{Address, SinkKind, SinkOptions, line};
use crate::message::Outgoing;
use crate::sink::{Capabilities, DurabilityTier, Outcome, Outcomes, Refusal, Retry, Scope, Sink, SinkError};

const CAPABILITIES: Capabilities = Capabilities { ordered: false, deduplicates: false, max_bytes: None };

pub(super) const KIND: SinkKind = SinkKind {
    name: "stdout",
    schemes: &["stdout"],
    capabilities: CAPABILITIES,
    help: "standard output, one line of JSON per message; for looking and for pipes",
    options: &[],
    connect: |address, options| async move { open(address, options) }.boxed(),
};

fn open(address: &Address, options: &SinkOptions) -> Result<Arc<dyn Sink>, SinkError> {
    if !address.rest.is_empty() {
        return Err(SinkError::Config(
            "the stdout sink is written stdout: with nothing behind it".to_owned(),
        ));
    }
    Ok(Arc::new(StdoutSink::to(Box::new(std::io::stdout()), options.publish_timeout)))
}

/// Writes lines to standard output, or to any other writer. Accepted means written and flushed: whoever reads the other
/// end may still lose it ([`DurabilityTier::PeerSaysSo`]).
pub struct StdoutSink {
    writer: Arc<Mutex<Box<dyn Write + Send>>>,
    publish_timeout: Duration,
}

impl std::fmt::Debug for StdoutSink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StdoutSink").finish_non_exhaustive()
    }
}

impl StdoutSink {
    /// A sink that writes to `writer`; a batch that takes longer than `publish_timeout` is unknown.
    #[must_use]
    pub fn to(writer: Box<dyn Write + Send>, publish_timeout: Duration) -> Self {
        Self { writer: Arc::new(Mutex::new(writer)), publish_timeout }
    }
}

#[async_trait]
impl Sink for StdoutSink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        if batch.is_empty() {
            return;
        }
        let messages = batch.len();
        let deadline = Instant::now() + self.publish_timeout;
        let Ok(mut writer) = tokio::time::timeout_at(deadline, Arc::clone(&self.writer).lock_owned()).await
        else {
            // The reader of an earlier batch is stuck; nothing of this one was written.
            return report_all(&outcomes, messages, &blocked());
        };
        let write = tokio::task::spawn_blocking(move || write_batch(&mut **writer, &batch));
        let outcome = match tokio::time::timeout_at(deadline, write).await {
            Ok(Ok(Ok(()))) => Outcome::Accepted { evidence: None },
            // How much of it the reader has seen is not known, not even when the pipe is broken.
            Ok(Ok(Err(error))) => {
                Outcome::Unknown { why: format!("writing to standard output failed: {error}") }
            }
            Ok(Err(_)) => Outcome::Unknown { why: "writing to standard output was interrupted".to_owned() },
            Err(_) => Outcome::Unknown { why: "standard output did not take the lines in time".to_owned() },
        };
        report_all(&outcomes, messages, &outcome);
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        Ok(DurabilityTier::PeerSaysSo)
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    /// One destination for all topics.
    fn destination(&self, _topic: &str) -> String {
        "stdout".to_owned()
    }
}

fn write_batch(writer: &mut dyn Write, batch: &[Outgoing]) -> std::io::Result<()> {
    let mut lines = Vec::new();
    for outgoing in batch {
        line::append(&mut lines, outgoing)?;
    }
    writer.write_all(&lines)?;
    writer.flush()
}

fn blocked() -> Outcome {
    Outcome::Refused(Refusal {
        scope: Scope::Sink,
        retry: Retry::Backoff,
        code: "blocked".to_owned(),
        text: "standard output is not being read; nothing of this batch was written".to_owned(),
    })
}

fn report_all(outcomes: &Outcomes, messages: usize, outcome: &Outcome) {
    for index in 0..messages {
        outcomes.report(index, outcome.clone());
    }
}
