//! What an answer of the sink means for the message, its key, its destination and its sink.

use std::sync::Arc;
use std::time::Duration;

use super::lanes::Stage;
use super::machine::Core;
use super::protocol::{Mono, Notice, Ticket};
use super::publishing::{DestKey, InFlight};
use super::settings::OnDead;
use crate::message::{Origin, Position};
use crate::sink::{Outcome, Refusal, Retry, Scope};
use crate::source::{DeadReason, Settled, Verdict};

/// Pause before a message without a verdict is published again; doubles up to [`UNKNOWN_CAP`].
const UNKNOWN_FIRST: Duration = Duration::from_millis(50);
const UNKNOWN_CAP: Duration = Duration::from_secs(5);
/// Characters of an error that are kept.
const ERROR_CHARS: usize = 1_000;

impl Core {
    pub(super) fn outcome(&mut self, ticket: Ticket, outcome: Option<Outcome>, now: Mono) {
        let Some(f) = self.flights.remove(&ticket) else { return };
        self.buffered_bytes -= u64::from(f.bytes);
        self.judge_scope(ticket, &f.dest, outcome.as_ref(), now);
        if !self.ownership.holds(f.owned) {
            self.sink(f.dest.0).in_flight -= 1;
            self.counters.fenced += 1;
            self.notice(Notice::Fenced { count: 1 });
            return;
        }
        if !self.settings.protections.settle_after_ack {
            self.forget_message(f.position);
            return;
        }
        match outcome {
            Some(Outcome::Accepted { evidence }) => self.accepted(&f, evidence, now),
            Some(Outcome::Unknown { why }) => self.unknown(&f, why, now),
            Some(Outcome::Refused(r)) => self.refused(&f, &r, now),
            None => self.not_sent(&f),
        }
    }

    /// Opens and closes the breakers of the destination and the sink.
    fn judge_scope(&mut self, ticket: Ticket, dest: &DestKey, outcome: Option<&Outcome>, now: Mono) {
        let (random, other) = (self.random(), self.random());
        let settings = self.settings.breaker;
        match outcome {
            None => {
                self.sink(dest.0).breaker.probe_returned(ticket);
                if let Some(d) = self.destinations.get_mut(dest) {
                    d.breaker.probe_returned(ticket);
                }
            }
            Some(Outcome::Accepted { .. } | Outcome::Refused(Refusal { scope: Scope::Message, .. })) => {
                self.scope_worked(ticket, dest);
            }
            Some(Outcome::Unknown { why }) => {
                // Nobody knows whose fault it is. The sink's breaker closes with the first success elsewhere; then the
                // destination's keeps those that never answer from shutting it again and again.
                let d = self.destinations.entry(dest.clone()).or_default();
                if d.breaker.unknown(ticket, why, now, other, &settings) {
                    self.scope_opened(dest, true, false, why);
                }
                if self.sink(dest.0).breaker.unknown(ticket, why, now, random, &settings) {
                    self.scope_opened(dest, false, false, why);
                }
            }
            Some(Outcome::Refused(r)) if self.settings.protections.outage_uncounted => {
                self.scope_refused(ticket, dest, r, now, random);
            }
            Some(Outcome::Refused(_)) => {}
        }
    }

    fn scope_worked(&mut self, ticket: Ticket, dest: &DestKey) {
        let name = self.sinks[dest.0.0].name.clone();
        if self.sink(dest.0).breaker.worked(ticket) {
            self.notice(Notice::BreakerClosed { sink: name.clone(), destination: None });
        }
        let Some(d) = self.destinations.get_mut(dest) else { return };
        let closed = d.breaker.worked(ticket);
        if d.is_idle() {
            self.destinations.remove(dest);
        }
        if closed {
            self.notice(Notice::BreakerClosed { sink: name, destination: Some(dest.1.clone()) });
        }
    }

    fn scope_refused(&mut self, ticket: Ticket, dest: &DestKey, r: &Refusal, now: Mono, random: f64) {
        let settings = self.settings.breaker;
        let operator = matches!(r.scope, Scope::DestinationAuth | Scope::SinkAuth);
        let narrow = matches!(r.scope, Scope::Destination | Scope::DestinationAuth);
        let after = match r.retry {
            Retry::After(d) => Some(d),
            Retry::Never | Retry::Backoff => None,
        };
        let why = error_text(r);
        let breaker = if narrow {
            // The sink itself has answered.
            let name = self.sinks[dest.0.0].name.clone();
            if self.sink(dest.0).breaker.worked(ticket) {
                self.notice(Notice::BreakerClosed { sink: name, destination: None });
            }
            &mut self.destinations.entry(dest.clone()).or_default().breaker
        } else {
            if let Some(d) = self.destinations.get_mut(dest) {
                d.breaker.probe_returned(ticket);
            }
            &mut self.sink(dest.0).breaker
        };
        if breaker.refused(ticket, &why, after, operator, now, random, &settings) {
            self.scope_opened(dest, narrow, operator, &why);
        }
    }

    fn scope_opened(&mut self, dest: &DestKey, narrow: bool, operator: bool, why: &str) {
        let destination: Option<Arc<str>> = narrow.then(|| dest.1.clone());
        self.park_scope(dest.0, destination.as_ref());
        let sink = self.sinks[dest.0.0].name.clone();
        self.notice(Notice::BreakerOpened { sink, destination, operator, reason: why.to_owned() });
    }

    fn accepted(&mut self, f: &InFlight, evidence: Option<String>, now: Mono) {
        let origin = self.lanes.entry(f.position).map_or(Origin::Queue, |e| e.origin);
        let verdict = Verdict::Sent { sink: self.sinks[f.dest.0.0].name.clone(), evidence };
        self.settling.push(
            Settled { position: f.position, shard: f.owned.shard, origin, verdict },
            f.dest.0,
            now,
        );
        // The key goes on at once: first arrivals stay in order even if this receipt is never written.
        self.forget_message(f.position);
    }

    /// It was not handed to the sink: nothing has happened.
    fn not_sent(&mut self, f: &InFlight) {
        self.end_flight(f);
        if let Some(entry) = self.lanes.entry_mut(f.position) {
            entry.tries = entry.tries.saturating_sub(1);
            entry.stage = Stage::Ready;
        }
        self.review_of(f.position);
    }

    fn unknown(&mut self, f: &InFlight, why: String, now: Mono) {
        self.end_flight(f);
        self.counters.unknown += 1;
        self.notice(Notice::Unknown { position: f.position, why });
        let Some(entry) = self.lanes.entry_mut(f.position) else { return };
        entry.unknowns = entry.unknowns.saturating_add(1);
        let delay = UNKNOWN_FIRST.saturating_mul(1 << entry.unknowns.min(7)).min(UNKNOWN_CAP);
        let shut = self.destinations.get(&f.dest).is_some_and(|d| d.breaker.is_open());
        if shut || self.sinks[f.dest.0.0].breaker.is_open() {
            self.park(f.position, &f.dest.clone());
        } else {
            self.pause(f.position, now.plus(delay));
        }
    }

    fn refused(&mut self, f: &InFlight, r: &Refusal, now: Mono) {
        self.end_flight(f);
        let counted = r.scope == Scope::Message || !self.settings.protections.outage_uncounted;
        if !counted {
            if let Some(entry) = self.lanes.entry_mut(f.position) {
                entry.unknowns = 0;
            }
            return self.park(f.position, &f.dest.clone());
        }
        let random = self.random();
        let Some(entry) = self.lanes.entry_mut(f.position) else { return };
        entry.unknowns = 0;
        let (tries, attempts) = (entry.tries, entry.origin.attempts());
        let most = f.max_attempts.unwrap_or(self.settings.max_attempts);
        let error = error_text(r);
        match r.retry {
            Retry::Never if !entry.refused => {
                // One confirming retry: some gateways refuse in passing.
                entry.refused = true;
                self.counters.confirms += 1;
                self.pause(f.position, now.plus(self.settings.confirm_delay));
            }
            Retry::Never => self.give_up(f, DeadReason::Permanent, attempts, tries, error, now),
            _ if attempts + 1 >= most => {
                self.give_up(f, DeadReason::Attempts, attempts + 1, tries, error, now);
            }
            retry => {
                let own = self.settings.backoff.delay(attempts + 1, random);
                let backoff = if let Retry::After(d) = retry { own.max(d) } else { own };
                let verdict =
                    Verdict::Retry { backoff, attempts: attempts + 1, tries, error, holds_key: f.keyed };
                self.decide(f, verdict, now);
            }
        }
    }

    fn give_up(
        &mut self,
        f: &InFlight,
        reason: DeadReason,
        attempts: u32,
        tries: u32,
        error: String,
        now: Mono,
    ) {
        let holds_key = f.keyed && self.settings.on_dead == OnDead::Block;
        self.decide(f, Verdict::Dead { reason, attempts, tries, error, holds_key }, now);
    }

    /// The lane waits until the verdict is recorded.
    fn decide(&mut self, f: &InFlight, verdict: Verdict, now: Mono) {
        let Some(entry) = self.lanes.entry_mut(f.position) else { return };
        entry.stage = Stage::Settling;
        let origin = entry.origin;
        self.ownership.busy(f.owned.shard, 1);
        self.settling.push(
            Settled { position: f.position, shard: f.owned.shard, origin, verdict },
            f.dest.0,
            now,
        );
        if self.settings.protections.wait_for_settle {
            self.review_of(f.position);
        } else {
            self.forget_message(f.position);
        }
    }

    /// The message is not in flight any more, and nothing of it waits to be recorded.
    fn end_flight(&mut self, f: &InFlight) {
        self.sink(f.dest.0).in_flight -= 1;
        self.ownership.busy(f.owned.shard, -1);
    }

    fn pause(&mut self, position: Position, until: Mono) {
        if let Some(entry) = self.lanes.entry_mut(position) {
            entry.stage = Stage::Pausing;
            self.pausing.insert((until, position));
        }
        self.review_of(position);
    }

    pub(super) fn pump_pausing(&mut self, now: Mono) {
        while let Some(&(until, position)) = self.pausing.first() {
            if until > now {
                self.wake_at(until);
                return;
            }
            self.pausing.pop_first();
            if let Some(entry) = self.lanes.entry_mut(position).filter(|e| e.stage == Stage::Pausing) {
                entry.stage = Stage::Ready;
                self.review_of(position);
            }
        }
    }

    pub(super) fn review_of(&mut self, position: Position) {
        if let Some(lane) = self.lanes.lane_of(position).cloned() {
            self.review(&lane);
        }
    }
}

/// Code and text of a refusal, shortened, without control characters.
fn error_text(r: &Refusal) -> String {
    let full = if r.code.is_empty() { r.text.clone() } else { format!("{}: {}", r.code, r.text) };
    full.chars().map(|c| if c.is_control() { ' ' } else { c }).take(ERROR_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_text_is_short_and_has_no_control_characters() {
        let r = Refusal {
            scope: Scope::Message,
            retry: Retry::Backoff,
            code: "500".into(),
            text: format!("a\0b\n{}", "é".repeat(5_000)),
        };
        let text = error_text(&r);
        assert!(text.starts_with("500: a b é"));
        assert_eq!(text.chars().count(), ERROR_CHARS);
    }
}
