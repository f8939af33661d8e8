//! One batch on its way to a sink: handed over in time or not at all, one outcome per message, a deadline for all.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::mpsc::UnboundedSender;

use super::driver::Clock;
use crate::core::{Event, Flight, Mono, Ticket};
use crate::message::Outgoing;
use crate::sink::{Outcome, Outcomes, Sink};

/// Hands `batch` to the sink, unless `not_after` has passed, and sends one outcome per message to `events`: what the
/// sink reports, else `Unknown` at the deadline, after a panic, or when the sink has ended without a word.
pub(super) async fn publish(
    sink: Arc<dyn Sink>,
    batch: Vec<Flight>,
    not_after: Mono,
    deadline: Mono,
    clock: Clock,
    events: UnboundedSender<Event>,
) {
    let tickets: Vec<Ticket> = batch.iter().map(|f| f.ticket).collect();
    let mut open = Open { tickets: tickets.into_iter().map(Some).collect(), events };
    // The process may have been stopped for a while between the decision and this line.
    if clock.now() > not_after {
        return open.close(|| None);
    }
    let messages: Vec<Outgoing> =
        batch.into_iter().map(|f| Outgoing { message: f.message, try_number: f.try_number }).collect();
    let (outcomes, mut reports) = Outcomes::channel();
    let publishing = AssertUnwindSafe(sink.publish(messages, outcomes)).catch_unwind();
    tokio::pin!(publishing);
    let timeout = tokio::time::sleep_until(clock.instant(deadline));
    tokio::pin!(timeout);
    let mut why = "the sink ended without an outcome";
    let mut running = true;
    loop {
        tokio::select! {
            biased;
            report = reports.recv() => match report {
                Some((index, outcome)) => open.report(index, outcome),
                None if running => {
                    // All reporters are gone; the call itself may still clean up.
                    if publishing.as_mut().await.is_err() {
                        why = "the sink panicked";
                    }
                    running = false;
                }
                None => break,
            },
            result = &mut publishing, if running => {
                running = false;
                if result.is_err() {
                    why = "the sink panicked";
                }
            }
            () = &mut timeout => {
                why = "no answer within the publish deadline";
                break;
            }
        }
        if open.is_done() && !running {
            return;
        }
    }
    open.close(|| Some(Outcome::Unknown { why: why.to_owned() }));
}

/// Messages of a batch without an outcome yet.
struct Open {
    tickets: Vec<Option<Ticket>>,
    events: UnboundedSender<Event>,
}

impl Open {
    fn report(&mut self, index: u32, outcome: Outcome) {
        match self.tickets.get_mut(index as usize).and_then(Option::take) {
            Some(ticket) => self.send(ticket, Some(outcome)),
            None => {
                tracing::warn!(index, "a sink reported an outcome twice, or for no message; it is dropped");
            }
        }
    }

    fn is_done(&self) -> bool {
        self.tickets.iter().all(Option::is_none)
    }

    fn close(&mut self, outcome: impl Fn() -> Option<Outcome>) {
        for ticket in std::mem::take(&mut self.tickets).into_iter().flatten() {
            self.send(ticket, outcome());
        }
    }

    fn send(&self, ticket: Ticket, outcome: Option<Outcome>) {
        if self.events.send(Event::Outcome { ticket, outcome }).is_err() {
            tracing::debug!("an outcome arrived after the relay had ended");
        }
    }
}

impl Drop for Open {
    /// Also when the task is cancelled: no message stays without an outcome.
    fn drop(&mut self) {
        self.close(|| Some(Outcome::Unknown { why: "the publish was cancelled".to_owned() }));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use async_trait::async_trait;
    use tokio::sync::mpsc;

    use super::*;
    use crate::message::{Message, Payload, Position};
    use crate::sink::{Capabilities, DurabilityTier, SinkError};

    enum Behaviour {
        AcceptTwiceAndMiss,
        Panic,
        Hang,
    }

    #[async_trait]
    impl Sink for Behaviour {
        async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
            match self {
                Self::AcceptTwiceAndMiss => {
                    outcomes.report(0, Outcome::Accepted { evidence: None });
                    outcomes.report(0, Outcome::Unknown { why: "again".into() });
                    outcomes.report(batch.len(), Outcome::Accepted { evidence: None });
                }
                Self::Panic => panic!("broken sink"),
                Self::Hang => std::future::pending().await,
            }
        }

        async fn check(&self) -> Result<DurabilityTier, SinkError> {
            Ok(DurabilityTier::LocalMemory)
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities { ordered: false, deduplicates: false, max_bytes: None }
        }
    }

    fn flight(n: i64) -> Flight {
        let message = Message {
            position: Position(n),
            message_id: n.to_string(),
            topic: "t".into(),
            tag: None,
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            event_type: None,
            schema_version: None,
            headers: vec![],
            content_type: None,
            payload: Payload::Absent,
            max_attempts: None,
            trace: None,
            trace_state: None,
            created_at_us: 0,
        };
        Flight { ticket: Ticket(n as u64), message: Arc::new(message), try_number: 1 }
    }

    async fn outcomes_of(sink: Behaviour, not_after: Mono) -> Vec<(u64, Option<Outcome>)> {
        let (tx, mut rx) = mpsc::unbounded_channel();
        let clock = Clock::start();
        let deadline = clock.now().plus(Duration::from_secs(5));
        publish(Arc::new(sink), vec![flight(1), flight(2)], not_after, deadline, clock, tx).await;
        let mut seen = vec![];
        while let Some(Event::Outcome { ticket, outcome }) = rx.recv().await {
            seen.push((ticket.0, outcome));
        }
        seen
    }

    const LATER: Mono = Mono(u64::MAX);

    #[tokio::test(start_paused = true)]
    async fn each_message_gets_exactly_one_outcome() {
        let seen = outcomes_of(Behaviour::AcceptTwiceAndMiss, LATER).await;
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[0], (1, Some(Outcome::Accepted { evidence: None })));
        assert!(matches!(seen[1], (2, Some(Outcome::Unknown { .. }))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_and_a_hanging_sink_are_unknown() {
        for (sink, word) in [(Behaviour::Panic, "panicked"), (Behaviour::Hang, "deadline")] {
            let seen = outcomes_of(sink, LATER).await;
            assert_eq!(seen.len(), 2);
            for (_, outcome) in seen {
                assert!(matches!(outcome, Some(Outcome::Unknown { why }) if why.contains(word)));
            }
        }
    }

    #[tokio::test]
    async fn nothing_is_handed_over_after_the_right_to_send_has_ended() {
        let clock = Clock::start();
        let (tx, mut rx) = mpsc::unbounded_channel();
        tokio::task::yield_now().await;
        while clock.now() == Mono(0) {
            std::hint::spin_loop();
        }
        publish(Arc::new(Behaviour::Panic), vec![flight(1)], Mono(0), LATER, clock, tx).await;
        assert!(matches!(rx.recv().await, Some(Event::Outcome { outcome: None, .. })));
    }
}
