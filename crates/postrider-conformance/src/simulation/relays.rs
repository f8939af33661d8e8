//! Relay processes: a core each, driven as the real driver does it, and the ways in which they end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postrider_relay::core::{
    Action, Answer, CallId, Core, Event, Mono, Notice, Request, Route, SinkId, SinkSpec, Ticket,
};
use postrider_relay::message::{Position, Shard};
use postrider_relay::sink::Outcome;
use postrider_relay::source::SourceError;

use super::ledger::{Told, broken};
use super::options::Mutant;
use super::store::Change;
use super::world::{Ev, Hand, World, say};

/// Most calls of a relay in a second in which nothing changes.
const MOST_IDLE_CALLS: u32 = 250;

#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) relay: u64,
    pub(super) core: Option<Core>,
    pub(super) paused: bool,
    /// What its driver would have done while it was paused.
    pub(super) deferred: Vec<Ev>,
    inbox: Vec<Event>,
    pub(super) flush_planned: bool,
    /// Publishes without an outcome: their message and sink.
    open: BTreeMap<Ticket, (Position, usize)>,
    /// The tokens the core has been told of.
    tokens: BTreeMap<Shard, i64>,
    wake: Option<u64>,
    stopping: bool,
    /// It has time enough to stop, and nothing fails any more.
    stops_at_ease: bool,
    /// Steps at one instant, to notice a core that spins.
    spins: (u64, u32),
    /// Calls since something last changed anywhere, and when they began.
    idle_calls: (u64, u64, u32),
}

/// Even topics to the first sink, odd ones to the second.
#[derive(Debug)]
struct ByTopic {
    sinks: usize,
    names: Vec<Arc<str>>,
}

impl Route for ByTopic {
    fn route(&self, topic: &str) -> (SinkId, Arc<str>) {
        let n: usize = topic.parse().unwrap_or_default();
        (SinkId(n % self.sinks), self.names[n].clone())
    }
}

impl World {
    pub(super) fn start(&mut self, node: usize) {
        if self.nodes[node].core.is_some() || self.closing {
            return;
        }
        let relay = self.next_relay;
        self.next_relay += 1;
        let sinks = self.options.sinks;
        let specs =
            (0..sinks).map(|s| SinkSpec { name: if s == 0 { "one".into() } else { "two".into() } }).collect();
        let names = (0..4).map(|t: u8| Arc::from(t.to_string())).collect();
        let route = Box::new(ByTopic { sinks, names });
        let seed = self.rng.u64(..);
        let core = Core::new(self.options.settings.clone(), specs, route, seed);
        self.nodes[node] = Node { relay, core: Some(core), ..Node::default() };
        say!(self, "relay {relay} starts");
        self.deliver(node, Event::Tick);
    }

    /// The process ends; what is in its memory is gone, what is on the wire is not.
    fn gone(&mut self, node: usize) {
        let n = &mut self.nodes[node];
        let Some(core) = n.core.take() else { return };
        let relay = n.relay;
        *n = Node { relay: 0, ..Node::default() };
        self.ledger.relay_gone(relay);
        let c = core.counters();
        for (what, n) in [
            ("sent", c.sent),
            ("retried", c.retried),
            ("dead", c.dead),
            ("unknown", c.unknown),
            ("fenced", c.fenced),
            ("late commit found by the window", c.late),
            ("found by the sweep", c.swept),
            ("lane page", c.lane_pages),
            ("rescan", c.rescans),
            ("confirming retry", c.confirms),
            ("probe", c.probes),
            ("ambiguous settle", c.ambiguous),
        ] {
            if n > 0 {
                *self.seen.entry(what).or_insert(0) += n;
            }
        }
        if !self.closing {
            let again = self.rng.u64(1_000..1_500_000);
            self.agenda.plan(self.now + again, Ev::Start { node });
        }
    }

    pub(super) fn crash(&mut self, node: usize) {
        if self.nodes[node].core.is_some() && !self.healed {
            say!(self, "relay {} crashes", self.nodes[node].relay);
            self.hit("crash");
            self.gone(node);
        }
    }

    pub(super) fn pause(&mut self, node: usize, length: u64) {
        if self.nodes[node].core.is_some() && !self.nodes[node].paused && !self.healed {
            say!(self, "relay {} is paused for {length} µs", self.nodes[node].relay);
            self.hit("pause");
            self.nodes[node].paused = true;
            self.agenda.plan(self.now + length, Ev::Resume { node });
        }
    }

    pub(super) fn resume(&mut self, node: usize) {
        if !std::mem::take(&mut self.nodes[node].paused) {
            return;
        }
        say!(self, "relay {} goes on", self.nodes[node].relay);
        for event in std::mem::take(&mut self.nodes[node].deferred) {
            self.agenda.plan(self.now, event);
        }
        self.deliver(node, Event::Tick);
    }

    pub(super) fn stop(&mut self, node: usize, drain: u64) {
        if self.nodes[node].core.is_some() && !self.nodes[node].stopping {
            say!(self, "relay {} is asked to stop within {drain} µs", self.nodes[node].relay);
            self.nodes[node].stopping = true;
            self.nodes[node].stops_at_ease = self.closing;
            self.deliver(node, Event::Stop { drain: Duration::from_micros(drain) });
        }
    }

    // ---- events to the core ------------------------------------------------------------------------------------

    pub(super) fn deliver(&mut self, node: usize, event: Event) {
        if self.nodes[node].core.is_none() {
            return;
        }
        self.nodes[node].inbox.push(event);
        if !self.options.batching || self.nodes[node].paused {
            return self.step(node);
        }
        if !self.nodes[node].flush_planned {
            self.nodes[node].flush_planned = true;
            let (at, relay) = (self.now + self.rng.u64(0..1_000), self.nodes[node].relay);
            self.agenda.plan(at, Ev::Flush { node, relay });
        }
    }

    pub(super) fn step(&mut self, node: usize) {
        let n = &mut self.nodes[node];
        if n.paused {
            return;
        }
        let Some(core) = &mut n.core else { return };
        let events = std::mem::take(&mut n.inbox);
        for event in &events {
            if let Event::Answered { result: Ok(Answer::Acquired(a)), .. } = event {
                n.tokens.extend(a.owned.iter().map(|o| (o.shard, o.token)));
            }
        }
        let actions = core.step(events, Mono(self.now));
        n.spins = if n.spins.0 == self.now { (self.now, n.spins.1 + 1) } else { (self.now, 0) };
        let spins = n.spins.1;
        if self.options.mutant != Some(Mutant::SettleAfterAck) {
            core.check_books();
        }
        let (flying, most) =
            (core.in_flight(), self.options.settings.in_flight as usize * self.options.sinks);
        let relay = n.relay;
        if flying > most {
            self.check(broken("in flight within its limit", format!("{flying} of {most}")));
        }
        if spins > 2_000 {
            self.check(broken("no work without need", format!("relay {relay} spins")));
        }
        self.plan_wake(node);
        for action in actions {
            self.carry_out(node, relay, action);
        }
    }

    fn plan_wake(&mut self, node: usize) {
        let n = &mut self.nodes[node];
        let Some(at) = n.core.as_ref().and_then(Core::next_wake) else { return };
        let at = at.0.max(self.now);
        if n.wake.is_none_or(|w| w > at) {
            n.wake = Some(at);
            let relay = n.relay;
            self.agenda.plan(at, Ev::Wake { node, relay });
        }
    }

    pub(super) fn woken(&mut self, node: usize, relay: u64) {
        let n = &mut self.nodes[node];
        if n.relay != relay || n.wake.is_none_or(|w| w > self.now) {
            return;
        }
        n.wake = None;
        if n.core.as_ref().and_then(Core::next_wake).is_some_and(|w| w.0 <= self.now) {
            self.trace(2, relay, 0);
            self.nodes[node].inbox.push(Event::Tick);
            self.step(node);
        } else {
            self.plan_wake(node);
        }
    }

    fn carry_out(&mut self, node: usize, relay: u64, action: Action) {
        match action {
            Action::Call { call, request } => self.call(node, relay, call, request),
            Action::Publish { sink, batch, not_after, deadline } => {
                let hand = Hand { sink: sink.0, batch, not_after, deadline };
                if self.options.late_hands {
                    let at = self.now + self.rng.u64(0..3_000);
                    self.agenda.plan(at, Ev::Carry { node, relay, hand: Box::new(hand) });
                } else {
                    self.hand_over(node, relay, hand);
                }
            }
            Action::Notice(notice) => self.notice(relay, &notice),
            Action::Stopped { undecided } => {
                say!(self, "relay {relay} has stopped, {undecided} undecided");
                self.hit(if undecided == 0 { "stop" } else { "stop with undecided messages" });
                if self.nodes[node].stops_at_ease && undecided > 0 {
                    let text = format!("relay {relay} stopped with {undecided} undecided messages");
                    self.check(broken("a graceful stop leaves nothing undecided", text));
                }
                self.gone(node);
            }
        }
    }

    fn notice(&mut self, relay: u64, notice: &Notice) {
        say!(self, "relay {relay}: {notice:?}");
        match notice {
            Notice::Vanished { position } => {
                let text = format!("relay {relay} found no row to settle for {position}, shard owned");
                self.check(broken("no outcome without its row", text));
            }
            Notice::Missing { position } => {
                self.check(broken("no row without its message", format!("{position}")));
            }
            Notice::BreakerOpened { operator, destination, .. } => {
                self.hit(if destination.is_some() { "destination breaker" } else { "sink breaker" });
                if *operator {
                    self.hit("breaker for an operator");
                }
            }
            Notice::BreakerClosed { .. } => self.hit("breaker closed"),
            Notice::LeaseExpired => self.hit("lease expired"),
            Notice::Lost { .. } => self.hit("shard lost"),
            _ => {}
        }
    }

    // ---- calls to the store ------------------------------------------------------------------------------------

    fn call(&mut self, node: usize, relay: u64, call: CallId, request: Request) {
        let o = &self.options;
        let (usual, slow) = (o.call_time, o.slow_call_time);
        let (p_slow, p_fails, p_lost, p_late) = (o.slow_call, o.call_fails, o.answer_lost, o.effect_late);
        let late_by = o.effect_late_by;
        let mut time = self.rng.u64(usual / 4..usual * 2);
        if self.chance(p_slow) {
            time += self.rng.u64(0..slow);
        }
        let back = self.rng.u64(usual / 4..usual);
        let error = || Err(SourceError::Temporary("connection lost".to_owned()));
        say!(self, "relay {relay} calls {}: {request:?}", call.0);
        self.count_idle_call(node, relay);
        if self.chance(p_fails) {
            return self.agenda.plan(self.now + time, Ev::Answer { node, relay, call, result: error() });
        }
        let mut answer = Some(back);
        if self.chance(p_lost) {
            answer = None;
            let at = self.now + time + back;
            self.agenda.plan(at, Ev::Answer { node, relay, call, result: error() });
        } else if self.chance(p_late) {
            answer = None;
            self.agenda.plan(self.now + time, Ev::Answer { node, relay, call, result: error() });
            time += self.rng.u64(0..late_by);
            self.hit("effect after its call was given up");
        }
        self.agenda.plan(self.now + time, Ev::Effect { node, relay, call, request, answer });
    }

    /// A relay that calls without end while nothing changes is in a loop.
    fn count_idle_call(&mut self, node: usize, relay: u64) {
        let (version, since, calls) = self.nodes[node].idle_calls;
        let fresh = version != self.version || self.now > since + 1_000_000;
        let calls = if fresh { 1 } else { calls + 1 };
        self.nodes[node].idle_calls = (self.version, if fresh { self.now } else { since }, calls);
        if calls > MOST_IDLE_CALLS {
            let text = format!("relay {relay}: {calls} calls within a second, and nothing has changed");
            self.check(broken("no work without need", text));
        }
    }

    pub(super) fn effect(
        &mut self,
        node: usize,
        relay: u64,
        call: CallId,
        request: &Request,
        answer: Option<u64>,
    ) {
        let mut changes = std::mem::take(&mut self.changes);
        let result = self.store.effect(relay, request, self.now, &mut changes);
        self.trace(3, relay, call.0);
        say!(self, "relay {relay} effect {}: {result:?}", call.0);
        let settles = matches!(request, Request::Settle { .. });
        for change in changes.drain(..) {
            self.changed(relay, &change);
        }
        self.changes = changes;
        if let Some(back) = answer {
            let event = Ev::Answer { node, relay, call, result: Ok(result) };
            self.agenda.plan(self.now + back, event);
        }
        let p = self.options.crash_at_settle;
        if settles && self.nodes[node].relay == relay && self.chance(p) {
            self.crash(node);
        }
    }

    fn changed(&mut self, relay: u64, change: &Change) {
        say!(self, "    {change:?}");
        self.version += 1;
        let verdict = match change {
            Change::Sent { position, evidence } => self.ledger.sent(*position, relay, evidence.as_deref()),
            Change::Retried { position, before, attempts } => {
                self.ledger.retried(*position, *before, *attempts)
            }
            Change::Died { position, reason, attempts, holds } => {
                if *holds {
                    self.hit("blocked key");
                }
                self.ledger.died(*position, *reason, *attempts)
            }
            Change::GivenBack { owned } => self.ledger.given_back(&self.store, *owned),
            Change::Taken { unclean, from_itself } => {
                if *unclean {
                    self.hit("takeover");
                }
                if *from_itself {
                    self.hit("shard of a lost acquisition taken again");
                }
                Ok(())
            }
            Change::Fenced => {
                self.hit("fenced settle");
                Ok(())
            }
        };
        self.check(verdict);
    }

    pub(super) fn answer(
        &mut self,
        node: usize,
        relay: u64,
        call: CallId,
        result: Result<Answer, SourceError>,
    ) {
        if self.nodes[node].relay == relay {
            self.trace(4, relay, call.0);
            say!(self, "relay {relay} answer {}: {}", call.0, if result.is_ok() { "ok" } else { "error" });
            self.deliver(node, Event::Answered { call, result });
        }
    }

    // ---- publishes to the sinks --------------------------------------------------------------------------------

    pub(super) fn hand_over(&mut self, node: usize, relay: u64, hand: Hand) {
        if self.nodes[node].relay != relay {
            return;
        }
        if Mono(self.now) > hand.not_after {
            self.hit("not handed over in time");
            for f in &hand.batch {
                say!(self, "relay {relay} does not hand over {}: too late", f.message.position);
                self.agenda.plan(self.now, Ev::Report { node, relay, ticket: f.ticket, outcome: None });
                self.nodes[node].open.insert(f.ticket, (f.message.position, hand.sink));
            }
            return;
        }
        let tickets = hand.batch.iter().map(|f| f.ticket).collect();
        self.agenda.plan(hand.deadline.0.max(self.now), Ev::Deadline { node, relay, tickets });
        for f in hand.batch {
            let position = f.message.position;
            let shard = self.store.row(position).shard;
            let token = self.nodes[node].tokens.get(&shard).copied().unwrap_or_default();
            self.trace(5, relay, f.ticket.0);
            self.version += 1;
            say!(self, "relay {relay} publishes {position}, ticket {}, try {}", f.ticket.0, f.try_number);
            let verdict = self.ledger.handed(&self.store, position, (relay, f.ticket, token), self.now);
            self.check(verdict);
            self.nodes[node].open.insert(f.ticket, (position, hand.sink));
            self.check_open(node, hand.sink);
            let usual = self.options.publish_time;
            let mut time = self.rng.u64(usual / 4..usual * 2);
            let (p_slow, p_lost) = (self.options.slow_publish, self.options.publish_lost);
            if self.chance(p_slow) {
                time += self.rng.u64(0..3_000_000);
            }
            if self.chance(p_lost) {
                say!(self, "    it is lost on the way");
                continue;
            }
            let arrive = Ev::Arrive { node, relay, ticket: f.ticket, position, sink: hand.sink };
            self.agenda.plan(self.now + time, arrive);
        }
    }

    fn check_open(&mut self, node: usize, sink: usize) {
        let open = self.nodes[node].open.values().filter(|(_, s)| *s == sink).count();
        if open > self.options.settings.in_flight as usize {
            self.check(broken("in flight within its limit", format!("{open} open at sink {sink}")));
        }
    }

    pub(super) fn arrive(
        &mut self,
        node: usize,
        relay: u64,
        ticket: Ticket,
        position: Position,
        sink: usize,
    ) {
        let topic: u8 = self.store.row(position).message.topic.parse().unwrap_or_default();
        let nature = &mut self.natures[usize::try_from(position.0 - 1).unwrap_or_default()];
        let arrival = self.brokers[sink].arrive(topic, nature, ticket.0, &mut self.rng);
        self.trace(6, relay, ticket.0);
        say!(self, "sink {sink} gets {position} from relay {relay}, ticket {}: {arrival:?}", ticket.0);
        if arrival.accepted {
            let verdict = self.ledger.accepted(&self.store, position, relay, ticket);
            self.check(verdict);
        }
        if let Some(for_good) = arrival.refused {
            self.ledger.refused(position, for_good);
        }
        let p = self.options.publish_answer_lost;
        if let Some(outcome) = arrival.answer
            && !self.chance(p)
        {
            let back = self.rng.u64(100..1_000 + self.options.publish_time);
            let outcome = Some(outcome);
            self.agenda.plan(self.now + back, Ev::Report { node, relay, ticket, outcome });
        }
        let p = self.options.crash_at_acceptance;
        if arrival.accepted && self.nodes[node].relay == relay && self.chance(p) {
            self.crash(node);
        }
    }

    pub(super) fn report(&mut self, node: usize, relay: u64, ticket: Ticket, outcome: Option<Outcome>) {
        if self.nodes[node].relay != relay {
            return;
        }
        let Some((position, _)) = self.nodes[node].open.remove(&ticket) else { return };
        let told = match &outcome {
            None => Told::NotSent,
            Some(Outcome::Accepted { .. }) => Told::Accepted,
            Some(Outcome::Unknown { .. }) => Told::Unknown,
            Some(Outcome::Refused(_)) => Told::Refused,
        };
        self.trace(7, relay, ticket.0);
        say!(self, "relay {relay} learns of {position}, ticket {}: {told:?}", ticket.0);
        self.ledger.told(position, relay, ticket, told);
        self.deliver(node, Event::Outcome { ticket, outcome });
    }

    pub(super) fn deadline(&mut self, node: usize, relay: u64, tickets: &[Ticket]) {
        for ticket in tickets {
            if self.nodes[node].relay == relay && self.nodes[node].open.contains_key(ticket) {
                let outcome = Some(Outcome::Unknown { why: "no answer".to_owned() });
                self.report(node, relay, *ticket, outcome);
            }
        }
    }
}
