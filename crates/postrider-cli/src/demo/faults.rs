//! The faults of the demo, as wrappers around a real sink and a real settler.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use postrider_relay::message::Outgoing;
use postrider_relay::sink::{
    Capabilities, DurabilityTier, Outcome, Outcomes, Refusal, Retry, Scope, Sink, SinkError,
};
use postrider_relay::source::{Owned, SettleReport, Settled, Settler, SourceError, Verdict};

use super::Event;

/// Publish calls that an outage refuses. The relay probes with one message at a time, so this is how often it asks in vain.
const OUTAGE_CALLS: u32 = 4;
/// From this try on a message meets no more faults: the demo ends.
const HARMLESS_FROM_TRY: u32 = 3;

/// A sink that refuses now and then, loses answers, and is down once.
pub(super) struct FaultySink {
    inner: Arc<dyn Sink>,
    seed: u64,
    down_after: Option<u32>,
    published: AtomicU32,
    refused_calls: AtomicU32,
    tell: fn(&Event),
}

impl FaultySink {
    pub(super) fn new(inner: Arc<dyn Sink>, seed: u64, down_after: Option<u32>, tell: fn(&Event)) -> Self {
        Self { inner, seed, down_after, published: AtomicU32::new(0), refused_calls: AtomicU32::new(0), tell }
    }

    /// Whether this call falls into the outage; tells its beginning and its end.
    fn is_down(&self, messages: u32) -> bool {
        let before = self.published.load(Ordering::SeqCst);
        if self.down_after.is_none_or(|after| before < after) {
            self.published.fetch_add(messages, Ordering::SeqCst);
            return false;
        }
        let refused = self.refused_calls.fetch_add(1, Ordering::SeqCst);
        match refused {
            0 => (self.tell)(&Event::SinkDown),
            OUTAGE_CALLS => (self.tell)(&Event::SinkUp),
            _ => {}
        }
        refused < OUTAGE_CALLS
    }

    /// What happens to this try of this message: always the same for the same seed, however messages are batched.
    fn fate(&self, outgoing: &Outgoing) -> Fate {
        if outgoing.try_number >= HARMLESS_FROM_TRY {
            return Fate::Passes;
        }
        let mut hasher = DefaultHasher::new();
        (self.seed, &outgoing.message.message_id, outgoing.try_number).hash(&mut hasher);
        match hasher.finish() % 100 {
            0..8 => Fate::Refused,
            8..13 => Fate::AnswerLost,
            _ => Fate::Passes,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Passes,
    Refused,
    AnswerLost,
}

fn refusal(scope: Scope, code: &str, text: &str) -> Outcome {
    Outcome::Refused(Refusal { scope, retry: Retry::Backoff, code: code.to_owned(), text: text.to_owned() })
}

#[async_trait]
impl Sink for FaultySink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        if self.is_down(u32::try_from(batch.len()).unwrap_or(u32::MAX)) {
            for index in 0..batch.len() {
                outcomes
                    .report(index, refusal(Scope::Sink, "down", "the sink is down (a fault of the demo)"));
            }
            return;
        }
        let mut passing = Vec::with_capacity(batch.len());
        let mut places = Vec::with_capacity(batch.len());
        for (index, outgoing) in batch.into_iter().enumerate() {
            let fate = self.fate(&outgoing);
            if fate == Fate::Refused {
                let id = outgoing.message.message_id.clone();
                (self.tell)(&Event::Refused { id });
                outcomes.report(index, refusal(Scope::Message, "busy", "not now (a fault of the demo)"));
                continue;
            }
            places.push((index, fate, outgoing.message.message_id.clone()));
            passing.push(outgoing);
        }
        let (inner, mut answers) = Outcomes::channel();
        let forward = async {
            while let Some((index, outcome)) = answers.recv().await {
                let Some((index, fate, id)) = usize::try_from(index).ok().and_then(|i| places.get(i)) else {
                    continue;
                };
                if *fate == Fate::AnswerLost && matches!(outcome, Outcome::Accepted { .. }) {
                    (self.tell)(&Event::AnswerLost { id: id.clone() });
                    outcomes.report(
                        *index,
                        Outcome::Unknown { why: "the answer got lost (a fault of the demo)".to_owned() },
                    );
                } else {
                    outcomes.report(*index, outcome);
                }
            }
        };
        tokio::join!(self.inner.publish(passing, inner), forward);
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        self.inner.check().await
    }

    /// Not ordered: a refused message lets the next ones of its batch pass.
    fn capabilities(&self) -> Capabilities {
        Capabilities { ordered: false, ..self.inner.capabilities() }
    }

    fn destination(&self, topic: &str) -> String {
        self.inner.destination(topic)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

/// A settler that, from a certain number of sent messages on, never comes back: the process is to be killed there.
pub(super) struct HoldingSettler {
    inner: Arc<dyn Settler>,
    after: u32,
    sent: AtomicU32,
    tell: fn(&Event),
}

impl HoldingSettler {
    pub(super) fn new(inner: Arc<dyn Settler>, after: u32, tell: fn(&Event)) -> Self {
        Self { inner, after, sent: AtomicU32::new(0), tell }
    }
}

#[async_trait]
impl Settler for HoldingSettler {
    async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Result<SettleReport, SourceError> {
        let sent = settled.iter().filter(|s| matches!(s.verdict, Verdict::Sent { .. })).count();
        let sent = u32::try_from(sent).unwrap_or(u32::MAX);
        let before = self.sent.fetch_add(sent, Ordering::SeqCst);
        if before.saturating_add(sent) < self.after {
            return self.inner.settle(owned, settled).await;
        }
        if before < self.after {
            (self.tell)(&Event::Holding { messages: sent });
        }
        std::future::pending().await
    }
}
