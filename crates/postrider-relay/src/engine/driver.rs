//! The loop: events in, the core decides, actions out. And its supervisor.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::StopReport;
use super::health::Shared;
use super::notices::Notices;
use super::publish::publish;
use super::routes::Routes;
use crate::core::settings::Settings;
use crate::core::{Action, Answer, Core, Event, Mono, Request, SinkSpec};
use crate::sink::NamedSink;
use crate::source::{RelayState, Source, SourceError};

/// Events taken in per step; more wait for the next.
const EVENTS_PER_STEP: usize = 2_048;
/// Longest pause between two restarts of a loop that panicked.
const RESTART_CAP: Duration = Duration::from_secs(30);

/// Longest wait for the sinks to let go of what they hold: a disk that hangs must not keep a stopped relay alive.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// What a handle may ask for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Control {
    Hint,
    Stop { drain: Duration },
}

/// Monotonic time since the driver started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    start: Instant,
}

impl Clock {
    pub(super) fn start() -> Self {
        Self { start: Instant::now() }
    }

    pub(super) fn now(self) -> Mono {
        Mono::default().plus(self.start.elapsed())
    }

    pub(super) fn instant(self, at: Mono) -> Instant {
        // A day is as good as for ever here, and does not overflow.
        self.start + at.since(Mono::default()).min(self.start.elapsed() + Duration::from_secs(86_400))
    }
}

/// Everything a run of the loop needs.
pub(super) struct Driver {
    pub(super) source: Source,
    pub(super) sinks: Vec<NamedSink>,
    pub(super) routes: Routes,
    pub(super) settings: Settings,
    pub(super) seed: u64,
    pub(super) shared: Arc<Shared>,
}

impl Driver {
    /// Runs until a stop has ended. A panic of the loop is logged; it starts anew, with nothing remembered, when nothing
    /// of the old run can be in flight any more.
    pub(super) async fn supervise(self, mut commands: UnboundedReceiver<Control>) -> StopReport {
        let mut pause = Duration::from_secs(1);
        let report = loop {
            let run = AssertUnwindSafe(self.run(&mut commands)).catch_unwind().await;
            match run {
                Ok(report) => break report,
                Err(panic) => {
                    let text = panic_text(&panic);
                    tracing::error!(panic = text, restart_in = ?pause, "the relay's loop panicked; it starts anew");
                    self.shared.error(format!("the relay's loop panicked: {text}"));
                }
            }
            // What was handed over has ended by then; only after that may the shards be taken again.
            tokio::time::sleep(self.settings.publish_timeout.max(pause)).await;
            if let Err(error) = self.source.ownership.leave().await {
                tracing::warn!(%error, "could not give the shards back; they are free when the lease has run out");
            }
            pause = (pause * 2).min(RESTART_CAP);
        };
        close(&self.sinks).await;
        self.shared.ended();
        report
    }

    async fn run(&self, commands: &mut UnboundedReceiver<Control>) -> StopReport {
        let specs = self.sinks.iter().map(|s| SinkSpec { name: s.name.clone() }).collect();
        let core = Core::new(self.settings.clone(), specs, Box::new(self.routes.clone()), self.seed);
        let (events, inbox) = mpsc::unbounded_channel();
        let run = Run {
            driver: self,
            core,
            clock: Clock::start(),
            events,
            tasks: JoinSet::new(),
            notices: Notices::new(self.source.name.clone()),
        };
        run.run(inbox, commands).await
    }
}

/// The state of one run of the loop.
struct Run<'a> {
    driver: &'a Driver,
    core: Core,
    clock: Clock,
    events: UnboundedSender<Event>,
    /// Calls and publishes under way; aborted when the run ends.
    tasks: JoinSet<()>,
    notices: Notices,
}

impl Run<'_> {
    async fn run(
        mut self,
        mut inbox: UnboundedReceiver<Event>,
        commands: &mut UnboundedReceiver<Control>,
    ) -> StopReport {
        let mut buffer = vec![Event::Tick];
        let mut commanded = true;
        loop {
            let now = self.clock.now();
            let actions = self.core.step(buffer.drain(..), now);
            for action in actions {
                if let Some(report) = self.carry_out(action, now) {
                    self.report(now);
                    return report;
                }
            }
            self.report(now);
            while self.tasks.try_join_next().is_some() {}
            let wake = self.core.next_wake().map(|at| self.clock.instant(at));
            let sleep =
                tokio::time::sleep_until(wake.unwrap_or_else(|| Instant::now() + Duration::from_secs(1)));
            tokio::select! {
                n = inbox.recv_many(&mut buffer, EVENTS_PER_STEP) => debug_assert!(n > 0, "we hold a sender"),
                control = commands.recv(), if commanded => match control {
                    Some(Control::Hint) => buffer.push(Event::Hint),
                    Some(Control::Stop { drain }) => buffer.push(Event::Stop { drain }),
                    // All handles are gone: nobody can ask for anything any more; the relay goes on.
                    None => commanded = false,
                },
                () = sleep => buffer.push(Event::Tick),
            }
        }
    }

    fn carry_out(&mut self, action: Action, now: Mono) -> Option<StopReport> {
        match action {
            Action::Call { call, request } => {
                let events = self.events.clone();
                let source = self.driver.source.clone();
                let state = match request {
                    Request::Renew { .. } => self.state(now),
                    _ => RelayState::default(),
                };
                let shared = self.driver.shared.clone();
                self.tasks.spawn(async move {
                    let kind = request.kind();
                    let result = match AssertUnwindSafe(perform(&source, request, state)).catch_unwind().await
                    {
                        Ok(result) => result,
                        Err(panic) => {
                            Err(SourceError::Temporary(format!("{kind} panicked: {}", panic_text(&panic))))
                        }
                    };
                    let error = result.as_ref().err().map(ToString::to_string);
                    shared.source_answered(kind, error.as_deref());
                    if error.is_none() && kind == "renew" {
                        // If it came too late all the same, the core says so again.
                        shared.lease_lost(false);
                    }
                    if events.send(Event::Answered { call, result }).is_err() {
                        tracing::debug!(kind, "an answer arrived after the relay had ended");
                    }
                });
            }
            Action::Publish { sink, batch, not_after, deadline } => {
                let sink = self.driver.sinks[sink.0].sink.clone();
                self.tasks.spawn(publish(sink, batch, not_after, deadline, self.clock, self.events.clone()));
            }
            Action::Notice(notice) => self.notices.tell(&notice, &self.driver.shared),
            Action::Stopped { undecided } => return Some(StopReport { undecided }),
        }
        None
    }

    /// What `postrider status` shows of this relay.
    fn state(&self, now: Mono) -> RelayState {
        let breakers: Vec<_> = self
            .core
            .open_breakers()
            .into_iter()
            .map(|b| {
                serde_json::json!({
                    "sink": &*b.sink,
                    "destination": b.destination.as_deref(),
                    "open_for_seconds": now.since(b.since).as_secs(),
                    "reason": b.reason,
                    "needs_operator": b.needs_operator,
                })
            })
            .collect();
        let counters = self.core.counters();
        let json = serde_json::json!({
            "breakers": breakers,
            "last_error": self.driver.shared.snapshot().last_error.map(|e| e.to_string()),
            "in_flight": self.core.in_flight(),
            "held_keys": self.core.held_lanes(),
            "sent": counters.sent,
            "dead": counters.dead,
            "fenced": counters.fenced,
        });
        RelayState { json: json.to_string() }
    }

    fn report(&mut self, now: Mono) {
        self.driver.shared.report(&self.core, now);
    }
}

async fn perform(source: &Source, request: Request, state: RelayState) -> Result<Answer, SourceError> {
    Ok(match request {
        Request::Acquire { have } => Answer::Acquired(source.ownership.acquire(&have).await?),
        Request::Held { owned, after, limit } => {
            Answer::Held(source.ownership.held(&owned, after, limit).await?)
        }
        Request::Renew { owned } => Answer::Renewed(source.ownership.renew(&owned, &state).await?),
        Request::Release { owned } => {
            source.ownership.release(&owned).await?;
            Answer::Done
        }
        Request::Leave => {
            source.ownership.leave().await?;
            Answer::Done
        }
        Request::Heads { owned, range } => Answer::Heads(source.reader.heads(&owned, range).await?),
        Request::Due { owned, after, limit } => Answer::Heads(source.reader.due(&owned, after, limit).await?),
        Request::Lane { owned, lane, range } => Answer::Heads(source.reader.lane(owned, &lane, range).await?),
        Request::Messages { owned, positions } => {
            Answer::Messages(source.reader.messages(&owned, &positions).await?)
        }
        Request::Settle { owned, settled } => Answer::Settled(source.settler.settle(&owned, &settled).await?),
    })
}

async fn close(sinks: &[NamedSink]) {
    let closing = sinks.iter().map(|s| async move {
        if tokio::time::timeout(CLOSE_LIMIT, s.sink.close()).await.is_err() {
            tracing::warn!(sink = &*s.name, "the sink did not close in time; the relay ends without it");
        }
    });
    futures_util::future::join_all(closing).await;
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::message::Outgoing;
    use crate::sink::{Capabilities, DurabilityTier, Outcomes, Sink, SinkError};

    /// As the file sink on a disk that does not answer.
    struct Stuck;

    #[async_trait]
    impl Sink for Stuck {
        async fn publish(&self, _: Vec<Outgoing>, _: Outcomes) {}

        async fn check(&self) -> Result<DurabilityTier, SinkError> {
            Ok(DurabilityTier::LocalMemory)
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities { ordered: false, deduplicates: false, max_bytes: None }
        }

        async fn close(&self) {
            std::future::pending::<()>().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_sink_that_does_not_close_does_not_keep_the_relay_from_ending() {
        let sink = || NamedSink { name: "stuck".into(), sink: Arc::new(Stuck) };
        tokio::time::timeout(CLOSE_LIMIT * 2, close(&[sink(), sink(), sink()])).await.expect("it ends");
    }
}
