//! Named points at which a relay stands still until it is released or killed.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use postrider_relay::message::Outgoing;
use postrider_relay::sink::{Capabilities, DurabilityTier, Outcome, Outcomes, Sink, SinkError};
use postrider_relay::source::{Owned, SettleReport, Settled, Settler, SourceError};
use tokio::sync::watch;

/// Where a relay can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A batch is about to go to the sink.
    BeforeSend,
    /// The sink has acknowledged a message, and the relay does not know it yet.
    AfterAck,
    /// Outcomes are about to be recorded.
    BeforeSettle,
    /// Outcomes are recorded and committed, and the relay does not know it yet.
    InSettle,
}

impl Point {
    /// All of them, in the order a message meets them.
    pub const ALL: [Self; 4] = [Self::BeforeSend, Self::AfterAck, Self::BeforeSettle, Self::InSettle];
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BeforeSend => "before-send",
            Self::AfterAck => "after-ack",
            Self::BeforeSettle => "before-settle",
            Self::InSettle => "in-settle",
        })
    }
}

impl FromStr for Point {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|point| point.to_string() == name).ok_or_else(|| {
            format!("'{name}' is no point; there are: before-send, after-ack, before-settle, in-settle")
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Armed,
    Held,
    Released,
}

/// Holds everything that comes to its point, from the first call after enough messages have passed it, until released.
///
/// While something is held, nothing new is published either: what is in flight stays what it was.
pub struct Gate {
    point: Option<Point>,
    after: u64,
    passed: AtomicU64,
    state: watch::Sender<State>,
    reached: Box<dyn Fn(Point, u64) + Send + Sync>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("point", &self.point)
            .field("state", &*self.state.borrow())
            .finish_non_exhaustive()
    }
}

impl Gate {
    /// Holds at `point` once `after` messages have passed it; `reached` is called then, once, with the number of messages
    /// that have come to the point. Without a point it holds nothing.
    #[must_use]
    pub fn new(
        point: Option<Point>,
        after: u64,
        reached: impl Fn(Point, u64) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (state, passed) = (watch::Sender::new(State::Armed), AtomicU64::new(0));
        Arc::new(Self { point, after, passed, state, reached: Box::new(reached) })
    }

    /// Lets everything go, now and later.
    pub fn release(&self) {
        self.state.send_replace(State::Released);
    }

    /// Whether something is held.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        *self.state.borrow() == State::Held
    }

    /// Waits until something is held.
    pub async fn held(&self) {
        self.wait(|state| state == State::Held).await;
    }

    async fn wait(&self, done: impl Fn(State) -> bool) {
        // The sender is ours: it cannot be gone while we wait.
        self.state.subscribe().wait_for(|state| done(*state)).await.expect("the gate is there");
    }

    /// `messages` come to `point`.
    async fn pass(&self, point: Point, messages: usize) {
        if self.point != Some(point) || messages == 0 {
            return;
        }
        let passed = self.passed.fetch_add(messages as u64, Ordering::Relaxed);
        if passed < self.after {
            return;
        }
        let first = self.state.send_if_modified(|state| {
            let first = *state == State::Armed;
            if first {
                *state = State::Held;
            }
            first
        });
        if first {
            (self.reached)(point, passed + messages as u64);
        }
        self.stay_shut().await;
    }

    /// Waits while something is held.
    async fn stay_shut(&self) {
        self.wait(|state| state != State::Held).await;
    }
}

/// A sink with the points [`Point::BeforeSend`] and [`Point::AfterAck`].
pub struct HoldSink {
    /// The sink.
    pub sink: Arc<dyn Sink>,
    /// What holds.
    pub gate: Arc<Gate>,
}

impl fmt::Debug for HoldSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldSink").field("gate", &self.gate).finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for HoldSink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        self.gate.stay_shut().await;
        self.gate.pass(Point::BeforeSend, batch.len()).await;
        let (inner, mut reports) = Outcomes::channel();
        let forward = async {
            while let Some((index, outcome)) = reports.recv().await {
                if matches!(outcome, Outcome::Accepted { .. }) {
                    self.gate.pass(Point::AfterAck, 1).await;
                }
                outcomes.report(index as usize, outcome);
            }
        };
        tokio::join!(self.sink.publish(batch, inner), forward);
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        self.sink.check().await
    }

    fn capabilities(&self) -> Capabilities {
        self.sink.capabilities()
    }

    fn destination(&self, topic: &str) -> String {
        self.sink.destination(topic)
    }

    async fn close(&self) {
        self.sink.close().await;
    }
}

/// A settler with the points [`Point::BeforeSettle`] and [`Point::InSettle`].
pub struct HoldSettler {
    /// The settler.
    pub settler: Arc<dyn Settler>,
    /// What holds.
    pub gate: Arc<Gate>,
}

impl fmt::Debug for HoldSettler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldSettler").field("gate", &self.gate).finish_non_exhaustive()
    }
}

#[async_trait]
impl Settler for HoldSettler {
    async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Result<SettleReport, SourceError> {
        self.gate.pass(Point::BeforeSettle, settled.len()).await;
        let report = self.settler.settle(owned, settled).await?;
        self.gate.pass(Point::InSettle, settled.len()).await;
        Ok(report)
    }
}
