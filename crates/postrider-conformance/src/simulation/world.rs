//! The world of one schedule: what happens when, until everything has arrived or a promise is broken.

use std::collections::{BTreeMap, BTreeSet};

use postrider_relay::core::{Answer, CallId, Event, Flight, Mono, Request, Ticket};
use postrider_relay::message::{Lane, Position};
use postrider_relay::source::SourceError;

use super::agenda::Agenda;
use super::ledger::{Ledger, Violation, broken};
use super::options::{Mutant, Options, chance, micros};
use super::producers::{Producers, Step};
use super::relays::Node;
use super::sink::{Broker, Nature, Outage};
use super::store::{Change, Place, Row, Store};

/// Longest time after the last fault in which everything must have arrived.
const HEAL: u64 = 400_000_000;
/// How long an outage lasts that goes on when all else has healed.
const LASTING: u64 = 40_000_000;
/// Longest time of the final stop.
const DRAIN: u64 = 10_000_000;
/// More events than any sound schedule needs.
const MOST_EVENTS: usize = 300_000;

#[derive(Debug)]
pub(super) enum Ev {
    Transaction { t: usize, step: Step },
    Effect { node: usize, relay: u64, call: CallId, request: Request, answer: Option<u64> },
    Answer { node: usize, relay: u64, call: CallId, result: Result<Answer, SourceError> },
    Carry { node: usize, relay: u64, hand: Box<Hand> },
    Arrive { node: usize, relay: u64, ticket: Ticket, position: Position, sink: usize },
    Report { node: usize, relay: u64, ticket: Ticket, outcome: Option<postrider_relay::sink::Outcome> },
    Deadline { node: usize, relay: u64, tickets: Vec<Ticket> },
    Wake { node: usize, relay: u64 },
    Flush { node: usize, relay: u64 },
    Start { node: usize },
    Crash { node: usize },
    Pause { node: usize, length: u64 },
    Resume { node: usize },
    Stop { node: usize },
    Sink { sink: usize, outage: Option<Outage> },
    Destination { sink: usize, topic: u8, outage: Option<Outage> },
    ClockStep { by: i64 },
    Operator,
    Heal,
    LastingEnds,
}

/// A publish on its way to the sink.
#[derive(Debug)]
pub(super) struct Hand {
    pub(super) sink: usize,
    pub(super) batch: Vec<Flight>,
    pub(super) not_after: Mono,
    pub(super) deadline: Mono,
}

pub(super) struct World {
    pub(super) options: Options,
    pub(super) rng: fastrand::Rng,
    pub(super) now: u64,
    pub(super) agenda: Agenda<Ev>,
    pub(super) store: Store,
    pub(super) ledger: Ledger,
    pub(super) brokers: Vec<Broker>,
    pub(super) natures: Vec<Nature>,
    pub(super) nodes: Vec<Node>,
    pub(super) next_relay: u64,
    producers: Producers,
    pub(super) healed: bool,
    healed_at: u64,
    /// Everything has arrived; the relays are being stopped.
    pub(super) closing: bool,
    pub(super) violation: Option<Violation>,
    pub(super) events: usize,
    pub(super) hash: u64,
    pub(super) log: Option<Vec<String>>,
    pub(super) seen: BTreeMap<&'static str, u64>,
    pub(super) changes: Vec<Change>,
    /// Counts commits, changes of rows and publishes.
    pub(super) version: u64,
}

macro_rules! say {
    ($world:expr, $($arg:tt)*) => {
        if $world.log.is_some() {
            let line = format!("{:>10.3} ms  {}", $world.now as f64 / 1_000.0, format_args!($($arg)*));
            if let Some(log) = &mut $world.log {
                log.push(line);
            }
        }
    };
}
pub(super) use say;

impl World {
    pub(super) fn new(seed: u64, mutant: Option<Mutant>, record: bool) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let options = Options::draw(&mut rng, mutant);
        let (producers, begins) = Producers::draw(&mut rng, &options);
        let mut world = Self {
            store: Store::new(&options),
            ledger: Ledger::new(options.clock_steps > 0),
            brokers: (0..options.sinks).map(|_| Broker::default()).collect(),
            natures: Vec::new(),
            nodes: (0..options.relays).map(|_| Node::default()).collect(),
            next_relay: 1,
            now: 0,
            agenda: Agenda::new(),
            producers,
            healed: false,
            healed_at: 0,
            closing: false,
            violation: None,
            events: 0,
            hash: 0xcbf2_9ce4_8422_2325,
            log: record.then(Vec::new),
            seen: BTreeMap::new(),
            changes: Vec::new(),
            version: 0,
            options,
            rng,
        };
        for (t, at) in begins.into_iter().enumerate() {
            world.agenda.plan(at, Ev::Transaction { t, step: Step::Begin });
        }
        world.plan_faults();
        world
    }

    fn plan_faults(&mut self) {
        let o = &self.options;
        let (until, relays, sinks) = (o.faults_until, o.relays, o.sinks);
        let lease = micros(o.settings.lease);
        let (crashes, pauses, stops) = (o.crashes, o.pauses, o.stops);
        let (outages, destinations, topics) = (o.outages, o.destination_outages, o.topics);
        let (steps, operator) = (o.clock_steps, o.operator);
        let (rng, agenda) = (&mut self.rng, &mut self.agenda);
        for node in 0..relays {
            agenda.plan(rng.u64(0..lease / 2), Ev::Start { node });
        }
        for _ in 0..crashes {
            agenda.plan(rng.u64(0..until), Ev::Crash { node: rng.usize(0..relays) });
        }
        for _ in 0..pauses {
            let length = rng.u64(1_000..2 * lease);
            agenda.plan(rng.u64(0..until), Ev::Pause { node: rng.usize(0..relays), length });
        }
        for _ in 0..stops {
            agenda.plan(rng.u64(0..until), Ev::Stop { node: rng.usize(0..relays) });
        }
        for _ in 0..outages {
            let (sink, at, length) = (rng.usize(0..sinks), rng.u64(0..until), rng.u64(1_000..2 * lease));
            agenda.plan(at, Ev::Sink { sink, outage: Some(Outage::draw(rng, true)) });
            agenda.plan(at + length, Ev::Sink { sink, outage: None });
        }
        for _ in 0..destinations {
            let (sink, topic) = (rng.usize(0..sinks), rng.u8(0..topics));
            let (at, length) = (rng.u64(0..until), rng.u64(1_000..2 * lease));
            agenda.plan(at, Ev::Destination { sink, topic, outage: Some(Outage::draw(rng, true)) });
            agenda.plan(at + length, Ev::Destination { sink, topic, outage: None });
        }
        for _ in 0..steps {
            let by = rng.i64(-3_000_000..3_000_000);
            agenda.plan(rng.u64(0..until), Ev::ClockStep { by });
        }
        for _ in 0..operator {
            agenda.plan(rng.u64(0..until), Ev::Operator);
        }
        agenda.plan(until, Ev::Heal);
    }

    pub(super) fn hit(&mut self, what: &'static str) {
        *self.seen.entry(what).or_insert(0) += 1;
    }

    pub(super) fn check(&mut self, verdict: Result<(), Violation>) {
        if let Err(v) = verdict
            && self.violation.is_none()
        {
            say!(self, "!!! {}: {}", v.promise, v.text);
            self.violation = Some(v);
        }
    }

    pub(super) fn chance(&mut self, p: f64) -> bool {
        !self.healed && chance(&mut self.rng, p)
    }

    pub(super) fn trace(&mut self, kind: u64, a: u64, b: u64) {
        for part in [self.now, kind, a, b] {
            self.hash = (self.hash ^ part).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
    }

    /// Runs to the end.
    pub(super) fn run(&mut self) {
        while self.violation.is_none() {
            let Some((at, event)) = self.agenda.next() else {
                self.stuck();
                break;
            };
            self.now = at;
            self.events += 1;
            if self.events > MOST_EVENTS {
                self.check(broken("no work without need", format!("{MOST_EVENTS} events, and no end")));
                break;
            }
            if self.healed && at > self.healed_at + HEAL {
                self.stuck();
                break;
            }
            self.happen(event);
            if self.healed && self.producers.open == 0 && self.store.pending == 0 && !self.closing {
                self.close();
            }
            if self.closing && self.nodes.iter().all(|n| n.core.is_none()) {
                let verdict = self.ledger.complete(&self.store);
                self.check(verdict);
                break;
            }
        }
    }

    fn dump(&mut self) {
        for i in 0..self.nodes.len() {
            if let Some(dump) = self.nodes[i].core.as_ref().map(postrider_relay::core::Core::dump) {
                say!(self, "relay {}: {dump}", self.nodes[i].relay);
            }
        }
    }

    fn stuck(&mut self) {
        self.dump();
        let open: Vec<String> = self
            .store
            .rows
            .iter()
            .filter(|r| r.place.pending())
            .take(5)
            .map(|r| format!("{} ({:?}, key {:?})", r.position, r.place, r.key))
            .collect();
        let text = if self.closing {
            "the relays did not stop".to_owned()
        } else {
            format!("not delivered long after the last fault: {}", open.join(", "))
        };
        self.check(broken("everything ends", text));
    }

    fn close(&mut self) {
        say!(self, "everything has arrived; the relays are stopped");
        self.closing = true;
        for node in 0..self.nodes.len() {
            if self.nodes[node].core.is_some() {
                self.stop(node, DRAIN);
            }
        }
    }

    fn happen(&mut self, event: Ev) {
        if let Some(node) = event.driver()
            && self.nodes[node].paused
        {
            self.nodes[node].deferred.push(event);
            return;
        }
        match event {
            Ev::Transaction { t, step } => self.transaction(t, step),
            Ev::Effect { node, relay, call, request, answer } => {
                self.effect(node, relay, call, &request, answer);
            }
            Ev::Answer { node, relay, call, result } => self.answer(node, relay, call, result),
            Ev::Carry { node, relay, hand } => self.hand_over(node, relay, *hand),
            Ev::Arrive { node, relay, ticket, position, sink } => {
                self.arrive(node, relay, ticket, position, sink);
            }
            Ev::Report { node, relay, ticket, outcome } => self.report(node, relay, ticket, outcome),
            Ev::Deadline { node, relay, tickets } => self.deadline(node, relay, &tickets),
            Ev::Wake { node, relay } => self.woken(node, relay),
            Ev::Flush { node, relay } => {
                if self.nodes[node].relay == relay {
                    self.nodes[node].flush_planned = false;
                    self.step(node);
                }
            }
            event => self.intervene(&event),
        }
    }

    /// What comes from outside: faults, operators, the end of the faults.
    fn intervene(&mut self, event: &Ev) {
        match *event {
            Ev::Start { node } => self.start(node),
            Ev::Crash { node } => self.crash(node),
            Ev::Pause { node, length } => self.pause(node, length),
            Ev::Resume { node } => self.resume(node),
            Ev::Stop { node } => {
                let drain = self.rng.u64(1_000..2_000_000);
                self.stop(node, drain);
            }
            Ev::Sink { sink, outage } if !self.healed => {
                say!(self, "sink {sink}: {outage:?}");
                self.brokers[sink].down = outage;
            }
            Ev::Destination { sink, topic, outage } if !self.healed => {
                say!(self, "destination {topic} of sink {sink}: {outage:?}");
                self.brokers[sink].destinations[usize::from(topic)] = outage;
            }
            Ev::ClockStep { by } => {
                say!(self, "the database's clock steps by {by} µs");
                self.store.offset += by;
            }
            Ev::Operator => self.operate(),
            Ev::Heal => self.heal(),
            Ev::LastingEnds => self.end_lasting(),
            _ => {}
        }
    }

    fn transaction(&mut self, t: usize, step: Step) {
        let rows = self.store.rows.len();
        let next = self.producers.step(t, step, self.now, &mut self.store, &mut self.rng, &self.options);
        while self.natures.len() < self.store.rows.len() {
            let nature = Nature::draw(&mut self.rng, &self.options);
            self.natures.push(nature);
        }
        self.trace(1, t as u64, step as u64);
        self.version += 1;
        if self.log.is_some() {
            for i in rows..self.store.rows.len() {
                let (r, nature) = (self.store.rows[i].clone(), self.natures[i]);
                say!(
                    self,
                    "transaction {t} inserts {} lane {:?} shard {} key {:?} topic {} due {:?} {nature:?}",
                    r.position,
                    r.lane,
                    r.shard.0,
                    r.key,
                    r.message.topic,
                    r.due
                );
            }
            let tx = self.producers.transactions[t].clone();
            match step {
                Step::Begin | Step::Number => {
                    say!(self, "transaction {t}: {step:?}, number {:?}, key {:?}", tx.number, tx.key);
                }
                _ if next.is_none() => {
                    say!(self, "transaction {t} ends, committed: {} {:?}", tx.commits, tx.rows);
                }
                _ => {}
            }
        }
        match next {
            Some((step, pause)) => self.agenda.plan(self.now + pause, Ev::Transaction { t, step }),
            None if step != Step::Begin => {
                if let Some(next) = self.producers.unlock(t) {
                    self.agenda.plan(self.now, Ev::Transaction { t: next, step: Step::Insert });
                }
                if self.rng.bool() {
                    let node = self.rng.usize(0..self.nodes.len());
                    self.deliver(node, Event::Hint);
                }
            }
            None => {}
        }
    }

    /// An operator redrives or cancels a dead message; at the end, until no key is blocked.
    fn operate(&mut self) {
        let dead: Vec<(Position, bool)> = self
            .store
            .rows
            .iter()
            .filter_map(|r| match r.place {
                Place::Dead { holds, .. } => Some((r.position, holds)),
                _ => None,
            })
            .filter(|(_, holds)| !self.healed || *holds)
            .collect();
        if self.closing {
            return;
        }
        if self.healed {
            self.agenda.plan(self.now + 500_000, Ev::Operator);
        }
        if dead.is_empty() {
            return;
        }
        let (position, holds) = dead[self.rng.usize(0..dead.len())];
        let Place::Dead { tries, .. } = self.store.row(position).place else { return };
        let poison = self.natures[usize::try_from(position.0 - 1).unwrap_or_default()].poison;
        if self.rng.bool() && !(self.healed && poison) {
            say!(self, "an operator redrives {position}");
            self.hit("redriven");
            let due = self.store.clock(self.now);
            self.store.set(position, Place::Waiting { due, attempts: 0, tries, holds });
            self.ledger.redriven(position);
        } else {
            say!(self, "an operator cancels {position}");
            self.hit("cancelled");
            self.store.set(position, Place::Cancelled);
        }
    }

    /// What is neither bound for the part that is down nor behind such a message has arrived by now.
    fn end_lasting(&mut self) {
        let Some((sink, topic)) = self.options.lasting else { return };
        let down = |r: &Row| {
            let t: u8 = r.message.topic.parse().unwrap_or_default();
            usize::from(t) % self.options.sinks == sink && topic.is_none_or(|d| d == t)
        };
        let pending: Vec<&Row> = self.store.rows.iter().filter(|r| r.place.pending()).collect();
        let behind: BTreeSet<&Lane> = pending.iter().filter(|r| down(r)).map(|r| &r.lane).collect();
        let blocked: BTreeSet<&Lane> = (self.store.rows.iter())
            .filter(|r| matches!(r.place, Place::Dead { holds: true, .. }))
            .map(|r| &r.lane)
            .collect();
        let late = pending.iter().find(|r| !behind.contains(&r.lane) && !blocked.contains(&r.lane));
        let verdict = match late {
            Some(r) => {
                broken("an outage holds back only its own", format!("{} waits: {:?}", r.position, r.place))
            }
            None => Ok(()),
        };
        let late_seen = verdict.is_err();
        if !pending.is_empty() {
            self.hit("lasting outage");
        }
        if late_seen {
            self.dump();
        }
        say!(self, "sink {sink} topic {topic:?} is up again");
        self.brokers[sink] = Broker::default();
        self.check(verdict);
    }

    fn heal(&mut self) {
        say!(self, "no more faults from here");
        self.healed = true;
        self.healed_at = self.now;
        for broker in &mut self.brokers {
            *broker = Broker::default();
        }
        if let Some((sink, topic)) = self.options.lasting {
            let outage = Some(Outage::draw(&mut self.rng, true));
            say!(self, "sink {sink} topic {topic:?} stays down: {outage:?}");
            match topic {
                Some(topic) => self.brokers[sink].destinations[usize::from(topic)] = outage,
                None => self.brokers[sink].down = outage,
            }
            self.agenda.plan(self.now + LASTING, Ev::LastingEnds);
        }
        for node in 0..self.nodes.len() {
            if self.nodes[node].paused {
                self.resume(node);
            }
            if self.nodes[node].core.is_none() {
                self.agenda.plan(self.now + 1_000, Ev::Start { node });
            }
        }
        self.agenda.plan(self.now, Ev::Operator);
    }
}

impl Ev {
    /// The relay process that must run for this to happen.
    fn driver(&self) -> Option<usize> {
        match self {
            Self::Answer { node, .. }
            | Self::Carry { node, .. }
            | Self::Report { node, .. }
            | Self::Deadline { node, .. }
            | Self::Wake { node, .. }
            | Self::Flush { node, .. }
            | Self::Stop { node } => Some(*node),
            _ => None,
        }
    }
}
