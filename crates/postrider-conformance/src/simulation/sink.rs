//! Brokers: what becomes of a message that arrives.

use std::time::Duration;

use postrider_relay::sink::{Outcome, Refusal, Retry, Scope};

use super::options::{Options, chance};

/// What a message does to the sink.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Nature {
    /// Refused for good, always.
    pub(super) poison: bool,
    /// Refused for good so often, then taken.
    pub(super) in_passing: u32,
    /// Refused so often, then taken.
    pub(super) soft: u32,
}

impl Nature {
    pub(super) fn draw(rng: &mut fastrand::Rng, o: &Options) -> Self {
        Self {
            poison: chance(rng, o.poison),
            in_passing: u32::from(chance(rng, o.refused_in_passing)),
            soft: if chance(rng, o.exhausting) {
                o.settings.max_attempts + rng.u32(0..2)
            } else if chance(rng, o.soft_refusal) {
                rng.u32(1..=2)
            } else {
                0
            },
        }
    }
}

/// How a sink or a destination is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outage {
    /// Refuses, and says that it is its own fault.
    Refuses { auth: bool, after: bool },
    /// Closes the connection; it may have taken the message.
    Resets,
    /// Says nothing.
    Silent,
}

impl Outage {
    pub(super) fn draw(rng: &mut fastrand::Rng, can_be_silent: bool) -> Self {
        match rng.u8(0..if can_be_silent { 4 } else { 2 }) {
            0 | 1 => Self::Refuses { auth: rng.u8(0..3) == 0, after: rng.u8(0..4) == 0 },
            2 => Self::Resets,
            _ => Self::Silent,
        }
    }
}

/// What an arrival does: whether it is in the log, and what is answered.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) accepted: bool,
    /// A refusal of this very message: for good or not.
    pub(super) refused: Option<bool>,
    pub(super) answer: Option<Outcome>,
}

#[derive(Debug, Default)]
pub(super) struct Broker {
    pub(super) down: Option<Outage>,
    /// By topic.
    pub(super) destinations: [Option<Outage>; 4],
}

impl Broker {
    pub(super) fn arrive(
        &self,
        topic: u8,
        nature: &mut Nature,
        ticket: u64,
        rng: &mut fastrand::Rng,
    ) -> Arrival {
        if let Some(outage) = self.down {
            return arrive_at(outage, Scope::Sink, Scope::SinkAuth, rng);
        }
        if let Some(outage) = self.destinations[usize::from(topic) % 4] {
            return arrive_at(outage, Scope::Destination, Scope::DestinationAuth, rng);
        }
        if nature.poison || nature.in_passing > 0 {
            nature.in_passing = nature.in_passing.saturating_sub(1);
            return refuse(Scope::Message, Retry::Never, Some(true));
        }
        if nature.soft > 0 {
            nature.soft -= 1;
            let retry = if rng.bool() {
                Retry::Backoff
            } else {
                Retry::After(Duration::from_millis(rng.u64(0..500)))
            };
            return refuse(Scope::Message, retry, Some(false));
        }
        let answer = Some(Outcome::Accepted { evidence: Some(ticket.to_string()) });
        Arrival { accepted: true, refused: None, answer }
    }
}

fn arrive_at(outage: Outage, fault: Scope, auth_fault: Scope, rng: &mut fastrand::Rng) -> Arrival {
    match outage {
        Outage::Refuses { auth, after } => {
            let retry =
                if after { Retry::After(Duration::from_millis(rng.u64(0..3_000))) } else { Retry::Backoff };
            refuse(if auth { auth_fault } else { fault }, retry, None)
        }
        Outage::Resets => Arrival {
            accepted: rng.u8(0..4) == 0,
            refused: None,
            answer: Some(Outcome::Unknown { why: "connection reset".to_owned() }),
        },
        Outage::Silent => Arrival { accepted: rng.u8(0..4) == 0, refused: None, answer: None },
    }
}

fn refuse(scope: Scope, retry: Retry, refused: Option<bool>) -> Arrival {
    let refusal = Refusal { scope, retry, code: String::new(), text: "refused".to_owned() };
    Arrival { accepted: false, refused, answer: Some(Outcome::Refused(refusal)) }
}
