//! A sink that remembers what it accepted, in order, and misbehaves on request. Only for failures that a real server
//! cannot be made to give at a chosen moment; the real sinks have their own suite.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider_relay::message::Outgoing;
use postrider_relay::sink::{
    Capabilities, DurabilityTier, Outcome, Outcomes, Refusal, Retry, Scope, Sink, SinkError,
};

use crate::ledger::Arrival;

/// What the sink does with a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Takes it.
    Accept,
    /// Takes it after a while.
    AcceptAfter(Duration),
    /// Takes it and loses the answer.
    AcceptSilently,
    /// Refuses.
    Refuse(Scope, Retry),
    /// Never answers.
    Hang,
}

type Script = Box<dyn FnMut(&Outgoing) -> Behaviour + Send>;

/// Remembers and misbehaves. Clones share everything.
#[derive(Clone)]
pub struct MemorySink {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    arrivals: Vec<Arrival>,
    script: Script,
    offered: u64,
    open: usize,
    most_open: usize,
}

impl std::fmt::Debug for MemorySink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemorySink").field("arrivals", &self.lock().arrivals.len()).finish_non_exhaustive()
    }
}

impl Default for MemorySink {
    fn default() -> Self {
        Self::scripted(|_| Behaviour::Accept)
    }
}

impl MemorySink {
    /// A sink that asks `script` what to do with each message.
    #[must_use]
    pub fn scripted(script: impl FnMut(&Outgoing) -> Behaviour + Send + 'static) -> Self {
        let inner = Inner { arrivals: vec![], script: Box::new(script), offered: 0, open: 0, most_open: 0 };
        Self { inner: Arc::new(Mutex::new(inner)) }
    }

    /// Replaces the script.
    pub fn behave(&self, script: impl FnMut(&Outgoing) -> Behaviour + Send + 'static) {
        self.lock().script = Box::new(script);
    }

    /// What it has taken, in order.
    #[must_use]
    pub fn arrivals(&self) -> Vec<Arrival> {
        self.lock().arrivals.clone()
    }

    /// Messages handed to it, whatever became of them.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.lock().offered
    }

    /// Highest number of messages it had not answered at one time.
    #[must_use]
    pub fn most_open(&self) -> usize {
        self.lock().most_open
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take(&self, message: &Outgoing) {
        let m = &message.message;
        self.lock().arrivals.push(Arrival { message_id: m.message_id.clone(), position: m.position.0 });
    }

    async fn one(&self, message: Outgoing, index: usize, behaviour: Behaviour, outcomes: Outcomes) {
        match behaviour {
            Behaviour::Accept => {
                self.take(&message);
                outcomes.report(index, Outcome::Accepted { evidence: None });
            }
            Behaviour::AcceptAfter(pause) => {
                tokio::time::sleep(pause).await;
                self.take(&message);
                outcomes.report(index, Outcome::Accepted { evidence: None });
            }
            Behaviour::AcceptSilently => {
                self.take(&message);
                outcomes.report(index, Outcome::Unknown { why: "answer lost".into() });
            }
            Behaviour::Refuse(scope, retry) => {
                let refusal =
                    Refusal { scope, retry, code: "test".into(), text: "refused by the script".into() };
                outcomes.report(index, Outcome::Refused(refusal));
            }
            Behaviour::Hang => std::future::pending().await,
        }
    }
}

/// Counts a message as open until it is dropped, also when the publish is cancelled.
struct Open<'a>(&'a MemorySink);

impl<'a> Open<'a> {
    fn new(sink: &'a MemorySink) -> Self {
        let mut inner = sink.lock();
        inner.offered += 1;
        inner.open += 1;
        inner.most_open = inner.most_open.max(inner.open);
        drop(inner);
        Self(sink)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.lock().open -= 1;
    }
}

#[async_trait]
impl Sink for MemorySink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        let decided: Vec<(Outgoing, Behaviour)> = {
            let mut inner = self.lock();
            batch
                .into_iter()
                .map(|m| {
                    let behaviour = (inner.script)(&m);
                    (m, behaviour)
                })
                .collect()
        };
        let all = decided.into_iter().enumerate().map(|(index, (message, behaviour))| {
            let outcomes = outcomes.clone();
            let open = Open::new(self);
            async move {
                self.one(message, index, behaviour, outcomes).await;
                drop(open);
            }
        });
        futures_util::future::join_all(all).await;
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        Ok(DurabilityTier::LocalMemory)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { ordered: true, deduplicates: false, max_bytes: None }
    }
}
