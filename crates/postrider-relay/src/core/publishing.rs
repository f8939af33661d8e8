//! What is loaded, and what is handed to which sink.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use super::breaker::{Breaker, Pass};
use super::lanes::Stage;
use super::machine::Core;
use super::protocol::{Action, Flight, Mono, Notice, Request, SinkId, SinkSpec};
use crate::message::{Message, Position, Shard};
use crate::source::{Messages, Owned, Settled, Verdict};

/// A destination within a sink: what a breaker is kept for.
pub(super) type DestKey = (SinkId, Arc<str>);

/// Most messages of one publish call.
const PUBLISH_BATCH: usize = 500;
/// Reads of whole messages under way at a time.
const LOADS_AT_ONCE: usize = 2;
/// While much is in memory, a read of fewer than half of `load_batch` messages waits this long for company. Otherwise
/// each answer of the sink makes room for a few messages and they are read at once, a statement for 300 instead of 500
/// messages while draining. A relay at rest reads at once.
const LOAD_LINGER: std::time::Duration = std::time::Duration::from_millis(5);

pub(super) struct SinkState {
    pub(super) name: Arc<str>,
    pub(super) breaker: Breaker,
    /// Published and not settled.
    pub(super) in_flight: usize,
    /// Loaded and not published.
    buffered: usize,
    /// First of their lane and loaded, lowest first.
    sendable: BTreeSet<Position>,
    /// Waiting for the sink or one of its destinations to come back, lowest first.
    parked: BTreeMap<Position, Arc<str>>,
    /// Brought back to be the probe.
    candidate: Option<Position>,
}

impl SinkState {
    pub(super) fn new(spec: SinkSpec) -> Self {
        Self {
            name: spec.name,
            breaker: Breaker::default(),
            in_flight: 0,
            buffered: 0,
            sendable: BTreeSet::new(),
            parked: BTreeMap::new(),
            candidate: None,
        }
    }
}

/// A destination that is down, or was a moment ago.
#[derive(Debug, Default)]
pub(super) struct Destination {
    pub(super) breaker: Breaker,
    parked: BTreeSet<Position>,
    /// Brought back to be the probe.
    candidate: Option<Position>,
}

impl Destination {
    /// Nothing is known of it that is worth remembering.
    pub(super) fn is_idle(&self) -> bool {
        self.parked.is_empty() && self.breaker.is_quiet()
    }
}

/// A message whose payload is here.
pub(super) struct Loaded {
    pub(super) message: Arc<Message>,
    pub(super) dest: DestKey,
}

/// A publish under way.
#[derive(Clone, Debug)]
pub(super) struct InFlight {
    pub(super) position: Position,
    pub(super) owned: Owned,
    pub(super) dest: DestKey,
    pub(super) bytes: u32,
    pub(super) keyed: bool,
    pub(super) max_attempts: Option<u32>,
}

impl Core {
    /// Whether we own something and the right to send lasts long enough for one publish.
    pub(super) fn may_send(&self, now: Mono) -> bool {
        now.plus(self.settings.publish_timeout) <= self.ownership.deadline()
    }

    /// Whether reading is of use: the lease has not run out altogether.
    pub(super) fn may_send_soon(&self, now: Mono) -> bool {
        now < self.ownership.deadline()
    }

    /// Whether at least one sink takes messages, or can only be probed with one that is not in memory yet.
    pub(super) fn some_sink_open(&self) -> bool {
        (0..self.sinks.len()).any(|id| {
            !self.sinks[id].breaker.is_open()
                || self.parked_for(SinkId(id), |d| !d.breaker.is_open()).is_none()
        })
    }

    /// The next parked message of a sink for its probe, if it must be one of those.
    ///
    /// Those of destinations that are open, in turns, so that one message that never gets an answer does not keep the
    /// others from showing that the sink works. Then those that are still to be loaded. Those of destinations that are
    /// shut come last, since they would say little about the sink.
    fn probe_for(&self, sink: SinkId, now: Mono) -> Option<Position> {
        let open = self.parked_for(sink, |d| !d.breaker.is_open());
        if open.is_some() || !self.to_load.is_empty() {
            return open;
        }
        self.parked_for(sink, |d| d.breaker.pass(now) == Pass::Probe)
    }

    fn parked_for(&self, sink: SinkId, which: impl Fn(&Destination) -> bool) -> Option<Position> {
        let last = self.sinks[sink.0].candidate.unwrap_or_default();
        let fitting =
            || self.destinations.iter().filter(|((s, _), d)| *s == sink && which(d)).map(|(_, d)| &d.parked);
        let after = (Bound::Excluded(last), Bound::Unbounded);
        fitting()
            .filter_map(|parked| parked.range(after).next().copied())
            .min()
            .or_else(|| fitting().filter_map(|parked| parked.first().copied()).min())
    }

    // ---- loading -----------------------------------------------------------------------------------------------

    /// How many more messages may be loaded.
    fn load_room(&self, now: Mono) -> usize {
        let most = self.settings.in_flight as usize;
        let room: usize = self
            .sinks
            .iter()
            .map(|s| match s.breaker.pass(now) {
                Pass::All => most.saturating_sub(s.buffered),
                Pass::Probe => usize::from(s.sendable.is_empty()),
                Pass::Nothing => 0,
            })
            .sum();
        room.saturating_sub(self.loading).min(self.settings.load_batch as usize).min(self.load_limit)
    }

    /// Whether a read of `room` messages now would be small, and there is time for it to grow.
    fn load_may_wait(&mut self, room: usize, now: Mono) -> bool {
        let half = self.settings.load_batch as usize / 2;
        let small = room.min(self.to_load.len()) < half;
        let busy = self.loaded.len() + self.loading + self.flights.len() >= half;
        if !(small && busy) {
            self.load_waits = None;
            return false;
        }
        let until = self.load_waits.get_or_insert(now).plus(LOAD_LINGER);
        if now >= until {
            self.load_waits = None;
            return false;
        }
        self.wake_at(until);
        true
    }

    pub(super) fn pump_loading(&mut self, now: Mono) {
        self.unpark_open(now);
        while self.calls.values().filter(|r| matches!(r, Request::Messages { .. })).count() < LOADS_AT_ONCE {
            let room = self.load_room(now);
            if room == 0 || self.to_load.is_empty() || self.load_may_wait(room, now) {
                return;
            }
            let positions = self.take_to_load(room);
            if positions.is_empty() {
                return;
            }
            let shards: BTreeSet<Shard> = positions
                .iter()
                .filter_map(|p| Some(self.lanes.get(self.lanes.lane_of(*p)?)?.shard))
                .collect();
            let owned = self.ownership.owned(shards);
            self.loading += positions.len();
            self.call(Request::Messages { owned, positions });
        }
    }

    fn take_to_load(&mut self, room: usize) -> Vec<Position> {
        let mut taken = Vec::new();
        while taken.len() < room {
            let Some((&position, lane)) = self.to_load.first_key_value() else { break };
            let works = self.lanes.get(lane).is_some_and(|l| self.ownership.works(l.shard));
            let Some(entry) = self.lanes.entry_mut(position).filter(|e| works && e.stage == Stage::Ready)
            else {
                self.to_load.pop_first();
                continue;
            };
            // One message may always be in memory, however large it is.
            if self.buffered_bytes > 0
                && self.buffered_bytes + u64::from(entry.bytes) > self.settings.buffer_bytes
            {
                break;
            }
            entry.stage = Stage::Loading;
            self.buffered_bytes += u64::from(entry.bytes);
            self.to_load.pop_first();
            taken.push(position);
        }
        taken
    }

    pub(super) fn messages_read(&mut self, owned: &[Owned], positions: &[Position], m: Messages) {
        self.loading -= positions.len();
        self.load_limit = self.load_limit.saturating_mul(2);
        self.lose_missing(owned, &m.mine);
        let mut found: BTreeMap<Position, Message> = m.found.into_iter().map(|m| (m.position, m)).collect();
        for &position in positions {
            let Some(entry) = self.lanes.entry_mut(position).filter(|e| e.stage == Stage::Loading) else {
                continue; // its shard has passed on, or is being given back
            };
            match found.remove(&position) {
                Some(message) => {
                    entry.stage = Stage::Loaded;
                    self.take_in(position, message);
                }
                None => {
                    self.reading.remember_orphan(position);
                    self.notice(Notice::Missing { position });
                    self.forget_message(position);
                }
            }
        }
    }

    fn take_in(&mut self, position: Position, message: Message) {
        let dest = self.route.route(&message.topic);
        let full = self.sinks[dest.0.0].buffered >= self.settings.in_flight as usize;
        let shut = self.sinks[dest.0.0].breaker.is_open()
            || self.destinations.get(&dest).is_some_and(|d| d.breaker.is_open());
        self.sink(dest.0).buffered += 1;
        self.loaded.insert(position, Loaded { message: Arc::new(message), dest: dest.clone() });
        if full && !shut {
            self.park(position, &dest);
        }
        if let Some(lane) = self.lanes.lane_of(position).cloned() {
            self.review(&lane);
        }
    }

    pub(super) fn messages_failed(&mut self, positions: &[Position], now: Mono) {
        self.loading -= positions.len();
        self.load_limit = (positions.len() / 2).max(1);
        let again = now.plus(std::time::Duration::from_millis(200));
        for &position in positions {
            if let Some(entry) = self.lanes.entry_mut(position).filter(|e| e.stage == Stage::Loading) {
                entry.stage = Stage::Pausing;
                self.buffered_bytes -= u64::from(entry.bytes);
                self.pausing.insert((again, position));
                self.review_of(position);
            }
        }
    }

    /// Lets go of a payload in memory. The entry's stage is the caller's matter. Nothing if there is none.
    pub(super) fn unload(&mut self, position: Position) {
        if let Some(l) = self.loaded.remove(&position) {
            let sink = self.sink(l.dest.0);
            sink.buffered -= 1;
            sink.sendable.remove(&position);
            if let Some(entry) = self.lanes.entry_mut(position) {
                if entry.stage == Stage::Loaded {
                    entry.stage = Stage::Ready;
                }
                self.buffered_bytes -= u64::from(entry.bytes);
            }
        } else if let Some(entry) = self.lanes.entry_mut(position).filter(|e| e.stage == Stage::Loading) {
            // The read under way will find it in another stage and leave it alone.
            entry.stage = Stage::Ready;
            self.buffered_bytes -= u64::from(entry.bytes);
        }
    }

    pub(super) fn set_sendable(&mut self, position: Position, yes: bool) {
        let Some(l) = self.loaded.get(&position) else { return };
        let sink = l.dest.0;
        if yes {
            self.sink(sink).sendable.insert(position);
        } else {
            self.sink(sink).sendable.remove(&position);
        }
    }

    /// Removes a message from memory; its lane goes on.
    pub(super) fn forget_message(&mut self, position: Position) {
        self.unload(position);
        self.to_load.remove(&position);
        if let Some((lane, _)) = self.lanes.remove(position) {
            self.review(&lane);
        }
    }

    // ---- destinations that are down ----------------------------------------------------------------------------

    /// Sets a message aside until its destination is back.
    pub(super) fn park(&mut self, position: Position, dest: &DestKey) {
        self.unload(position);
        self.to_load.remove(&position);
        let Some(entry) = self.lanes.entry_mut(position) else { return };
        entry.stage = Stage::Parked(dest.clone());
        self.sink(dest.0).parked.insert(position, dest.1.clone());
        self.destinations.entry(dest.clone()).or_default().parked.insert(position);
        if let Some(lane) = self.lanes.lane_of(position).cloned() {
            self.review(&lane);
        }
    }

    /// Takes a message out of the parked ones, where it stands among them.
    pub(super) fn unpark(&mut self, position: Position) -> bool {
        let Some(entry) = self.lanes.entry_mut(position) else { return false };
        let Stage::Parked(dest) = entry.stage.clone() else { return false };
        entry.stage = Stage::Ready;
        self.sink(dest.0).parked.remove(&position);
        if let Some(d) = self.destinations.get_mut(&dest) {
            d.parked.remove(&position);
            if d.is_idle() {
                self.destinations.remove(&dest);
            }
        }
        if let Some(lane) = self.lanes.lane_of(position).cloned() {
            self.review(&lane);
        }
        true
    }

    /// Parked messages whose way is open again become ready, as many as there is room for, lowest first. What is still to
    /// be loaded takes room from them only where it is older, else they would wait until a whole backlog has gone.
    fn unpark_open(&mut self, now: Mono) {
        for id in 0..self.sinks.len() {
            let s = &self.sinks[id];
            let room = (self.settings.in_flight as usize).saturating_sub(s.buffered + self.loading);
            if s.parked.is_empty() || room == 0 || s.breaker.pass(now) != Pass::All {
                continue;
            }
            for p in self.lowest_open(SinkId(id), room) {
                self.unpark(p);
            }
        }
    }

    /// The lowest parked messages of a sink whose destinations are open, at most `room` less what is older and to be loaded.
    fn lowest_open(&self, sink: SinkId, room: usize) -> Vec<Position> {
        let open = self.destinations.iter().filter(|((s, _), d)| *s == sink && !d.breaker.is_open());
        let mut next: BTreeSet<(Position, &DestKey)> =
            open.filter_map(|(key, d)| Some((*d.parked.first()?, key))).collect();
        let Some((lowest, _)) = next.first() else { return Vec::new() };
        let room = room - self.to_load.range(..lowest).take(room).count();
        let mut found = Vec::new();
        while found.len() < room
            && let Some((p, key)) = next.pop_first()
        {
            found.push(p);
            let after = (Bound::Excluded(p), Bound::Unbounded);
            next.extend(self.destinations[key].parked.range(after).next().map(|p| (*p, key)));
        }
        found
    }

    /// Brings back one parked message for each breaker whose probe is due.
    pub(super) fn pump_probes(&mut self, now: Mono) {
        let mut wanted: Vec<Position> = Vec::new();
        let mut wakes: Vec<Mono> = Vec::new();
        for id in 0..self.sinks.len() {
            wakes.extend(self.sinks[id].breaker.probe_at());
            let due = self.sinks[id].breaker.pass(now) == Pass::Probe && self.sinks[id].sendable.is_empty();
            if due && !self.on_its_way(self.sinks[id].candidate) {
                let candidate = self.probe_for(SinkId(id), now);
                self.sinks[id].candidate = candidate.or(self.sinks[id].candidate);
                wanted.extend(candidate);
            }
        }
        let mut candidates = Vec::new();
        for (key, d) in &self.destinations {
            wakes.extend(d.breaker.probe_at());
            let due = d.breaker.pass(now) == Pass::Probe && !self.sinks[key.0.0].breaker.is_open();
            if due && !self.on_its_way(d.candidate) {
                candidates.extend(d.parked.first().map(|p| (key.clone(), *p)));
            }
        }
        for (key, p) in candidates {
            self.destinations.entry(key).or_default().candidate = Some(p);
            wanted.push(p);
        }
        for at in wakes.into_iter().filter(|at| *at > now) {
            self.wake_at(at);
        }
        for p in wanted {
            self.unpark(p);
        }
    }

    /// Whether a message brought back for a probe will reach the sink soon, so that no other is needed.
    fn on_its_way(&self, candidate: Option<Position>) -> bool {
        candidate.is_some_and(|p| {
            self.lanes.entry(p).is_some_and(|e| match e.stage {
                Stage::Ready => self.to_load.contains_key(&p),
                Stage::Loading | Stage::Loaded => true,
                _ => false,
            })
        })
    }

    /// A breaker has opened: what is loaded for its scope is set aside.
    pub(super) fn park_scope(&mut self, sink: SinkId, dest: Option<&Arc<str>>) {
        let all: Vec<(Position, DestKey)> = self
            .loaded
            .iter()
            .filter(|(_, l)| l.dest.0 == sink && dest.is_none_or(|d| *d == l.dest.1))
            .map(|(p, l)| (*p, l.dest.clone()))
            .collect();
        for (p, dest) in all {
            // What stands behind another one of its key was let go of with that.
            if self.loaded.contains_key(&p) {
                self.park(p, &dest);
            }
        }
    }

    // ---- handing over ------------------------------------------------------------------------------------------

    pub(super) fn pump_publish(&mut self, now: Mono) {
        if !self.may_send(now) {
            return;
        }
        for id in 0..self.sinks.len() {
            while let Some(batch) = self.batch(SinkId(id), now) {
                self.counters.published += batch.len() as u64;
                self.counters.most_in_flight = self.counters.most_in_flight.max(self.in_flight() as u64);
                let deadline = now.plus(self.settings.publish_timeout);
                let not_after = Mono(self.ownership.deadline().0.saturating_sub(deadline.0 - now.0));
                self.actions.push(Action::Publish { sink: SinkId(id), batch, not_after, deadline });
            }
        }
    }

    fn batch(&mut self, id: SinkId, now: Mono) -> Option<Vec<Flight>> {
        let mut batch = Vec::new();
        while batch.len() < PUBLISH_BATCH && self.sinks[id.0].in_flight < self.settings.in_flight as usize {
            let Some(position) = self.sinks[id.0].sendable.pop_first() else { break };
            match self.permit(position, now) {
                Permit::Go => batch.push(self.take_off(position)),
                Permit::Probe => {
                    let flight = self.take_off(position);
                    self.mark_probe(&flight, now);
                    batch.push(flight);
                    break;
                }
                Permit::Park(dest) => self.park(position, &dest),
                Permit::No => {}
            }
        }
        (!batch.is_empty()).then_some(batch)
    }

    fn permit(&self, position: Position, now: Mono) -> Permit {
        let (Some(l), Some(lane)) = (self.loaded.get(&position), self.lanes.lane_of(position)) else {
            return Permit::No;
        };
        if !self.lanes.get(lane).is_some_and(|s| self.ownership.works(s.shard)) {
            return Permit::No;
        }
        let sink = self.sinks[l.dest.0.0].breaker.pass(now);
        let dest = self.destinations.get(&l.dest).map_or(Pass::All, |d| d.breaker.pass(now));
        match (sink, dest) {
            (Pass::All, Pass::All) => Permit::Go,
            (Pass::Nothing, _) | (_, Pass::Nothing) => Permit::Park(l.dest.clone()),
            _ => Permit::Probe,
        }
    }

    fn mark_probe(&mut self, flight: &Flight, now: Mono) {
        let Some(f) = self.flights.get(&flight.ticket) else { return };
        self.counters.probes += 1;
        let dest = f.dest.clone();
        let sink = &mut self.sinks[dest.0.0].breaker;
        if sink.pass(now) == Pass::Probe {
            sink.probing(flight.ticket);
        }
        if let Some(d) = self.destinations.get_mut(&dest)
            && d.breaker.pass(now) == Pass::Probe
        {
            d.breaker.probing(flight.ticket);
        }
    }

    /// The message leaves memory and is in flight.
    fn take_off(&mut self, position: Position) -> Flight {
        let ticket = self.ticket();
        let loaded = self.loaded.remove(&position).expect("permitted");
        let lane = self.lanes.lane_of(position).expect("permitted");
        let shard = self.lanes.get(lane).expect("permitted").shard;
        let token = self.ownership.token(shard).expect("permitted");
        let entry = self.lanes.entry_mut(position).expect("permitted");
        entry.stage = Stage::Flying;
        entry.tries = entry.tries.saturating_add(1);
        let (try_number, bytes, origin) = (entry.tries, entry.bytes, entry.origin);
        let sink = self.sink(loaded.dest.0);
        sink.buffered -= 1;
        sink.in_flight += 1;
        let flight = InFlight {
            position,
            owned: Owned { shard, token },
            dest: loaded.dest,
            bytes,
            keyed: loaded.message.key.is_some(),
            max_attempts: loaded.message.max_attempts,
        };
        self.ownership.busy(shard, 1);
        if !self.settings.protections.settle_after_ack {
            let verdict = Verdict::Sent { sink: self.sinks[flight.dest.0.0].name.clone(), evidence: None };
            self.settling.push(Settled { position, shard, origin, verdict }, flight.dest.0, Mono(0));
        }
        self.flights.insert(ticket, flight);
        Flight { ticket, message: loaded.message, try_number }
    }
}

enum Permit {
    Go,
    /// As the one probe of a breaker.
    Probe,
    Park(DestKey),
    /// Its shard is not worked (any more).
    No,
}

impl Core {
    /// For tests: what is in memory, for people.
    #[doc(hidden)]
    #[must_use]
    pub fn dump(&self) -> String {
        let sinks: Vec<String> = self
            .sinks
            .iter()
            .map(|s| {
                format!(
                    "{}: {:?}, in flight {}, buffered {}, sendable {:?}, parked {:?}, candidate {:?}",
                    s.name, s.breaker, s.in_flight, s.buffered, s.sendable, s.parked, s.candidate
                )
            })
            .collect();
        format!(
            "{:?}\n{:?}\n{:?}\nto load {:?}\nloading {}, bytes {}\nflights {:?}\npausing {:?}\n{:?}\n{sinks:?}\n{:?}\ncalls {:?}\n{:?}",
            self.ownership,
            self.reading,
            self.lanes,
            self.to_load,
            self.loading,
            self.buffered_bytes,
            self.flights,
            self.pausing,
            self.settling,
            self.destinations,
            self.calls,
            self.wake,
        )
    }

    /// For tests: panics if the books of the core do not agree with each other.
    #[doc(hidden)]
    pub fn check_books(&self) {
        let buffered: usize = self.sinks.iter().map(|s| s.buffered).sum();
        assert_eq!(buffered, self.loaded.len(), "buffered messages");
        for s in &self.sinks {
            for p in &s.sendable {
                assert!(self.loaded.contains_key(p), "sendable without payload");
            }
            for p in s.parked.keys() {
                let stage = self.lanes.entry(*p).map(|e| &e.stage);
                assert!(matches!(stage, Some(Stage::Parked(_))), "{p} is parked and {stage:?}");
            }
        }
        let sent = self.settling.sent_unsettled();
        assert_eq!(self.in_flight(), self.flights.len() + sent, "in flight");
        if self.flights.is_empty() && self.loaded.is_empty() && self.loading == 0 {
            assert_eq!(self.buffered_bytes, 0, "bytes without messages");
        }
    }
}
