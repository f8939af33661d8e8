//! The state machine itself: its state, and the one function through which everything happens.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::breaker::Breaker;
use super::lanes::Lanes;
use super::ownership::Ownership;
use super::protocol::{
    Action, Answer, CallId, Event, Mono, Notice, Request, Route, SinkId, SinkSpec, Ticket,
};
use super::publishing::{DestKey, Destination, InFlight, Loaded, SinkState};
use super::reading::Reading;
use super::settings::Settings;
use super::settling::Settling;
use crate::message::{Lane, Position, Shard};
use crate::source::SourceError;

/// The relay's core for one source.
///
/// Not thread-safe by design: one driver owns it, calls [`Core::step`] with what has happened, carries out the actions,
/// and calls again at [`Core::next_wake`] at the latest.
pub struct Core {
    pub(super) settings: Settings,
    pub(super) rng: fastrand::Rng,
    pub(super) route: Box<dyn Route>,
    pub(super) sinks: Vec<SinkState>,
    pub(super) destinations: BTreeMap<DestKey, Destination>,
    pub(super) ownership: Ownership,
    pub(super) reading: Reading,
    pub(super) lanes: Lanes,
    /// Ready to be loaded, lowest first.
    pub(super) to_load: BTreeMap<Position, Lane>,
    pub(super) loaded: BTreeMap<Position, Loaded>,
    pub(super) loading: usize,
    /// Since when a small read of messages has waited for company.
    pub(super) load_waits: Option<Mono>,
    /// Most messages per read now: halved by a read that failed, because many large ones may not arrive in time.
    pub(super) load_limit: usize,
    pub(super) buffered_bytes: u64,
    pub(super) flights: BTreeMap<Ticket, InFlight>,
    /// Tried without an outcome to record; they go again at their time.
    pub(super) pausing: BTreeSet<(Mono, Position)>,
    pub(super) settling: Settling,
    pub(super) blocked: super::blocked::BlockedKeys,
    pub(super) calls: BTreeMap<CallId, Request>,
    pub(super) stop: Option<super::stopping::Stop>,
    pub(super) counters: Counters,
    pub(super) actions: Vec<Action>,
    pub(super) wake: Option<Mono>,
    next_call: u64,
    next_ticket: u64,
}

/// What has happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages with a committed receipt.
    pub sent: u64,
    /// Failed attempts recorded.
    pub retried: u64,
    /// Messages recorded as dead.
    pub dead: u64,
    /// Publishes handed out.
    pub published: u64,
    /// Publishes without a verdict.
    pub unknown: u64,
    /// Results dropped because their shard had passed on.
    pub fenced: u64,
    /// Outcomes that found no row.
    pub vanished: u64,
    /// Messages that committed late and that the window found in time.
    pub late: u64,
    /// Messages that only the sweep found.
    pub swept: u64,
    /// Pages of one lane's tail read.
    pub lane_pages: u64,
    /// Pages of the queue read for the sake of many lanes' tails.
    pub rescans: u64,
    /// Confirming retries of messages that were refused for good.
    pub confirms: u64,
    /// Messages sent as the probe of a breaker.
    pub probes: u64,
    /// Settles repeated because their answer was lost.
    pub ambiguous: u64,
    /// Highest number of messages published and not settled at one time.
    pub most_in_flight: u64,
}

/// A breaker that is open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenBreaker {
    /// The sink.
    pub sink: Arc<str>,
    /// The destination within it; `None` = the whole sink.
    pub destination: Option<Arc<str>>,
    /// Since when.
    pub since: Mono,
    /// Why.
    pub reason: String,
    /// Whether waiting does not help: credentials, rights, configuration.
    pub needs_operator: bool,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("counters", &self.counters)
            .field("in_memory", &self.lanes.len())
            .field("flights", &self.flights.len())
            .finish_non_exhaustive()
    }
}

impl Core {
    /// A core that owns nothing yet. `seed` drives jitter and tie-breaking; `route` maps topics to `sinks`.
    ///
    /// # Panics
    /// If there is no sink.
    #[must_use]
    pub fn new(settings: Settings, sinks: Vec<SinkSpec>, route: Box<dyn Route>, seed: u64) -> Self {
        assert!(!sinks.is_empty(), "a relay needs a sink");
        Self {
            settings,
            rng: fastrand::Rng::with_seed(seed),
            route,
            sinks: sinks.into_iter().map(SinkState::new).collect(),
            destinations: BTreeMap::new(),
            ownership: Ownership::default(),
            reading: Reading::default(),
            lanes: Lanes::default(),
            to_load: BTreeMap::new(),
            loaded: BTreeMap::new(),
            loading: 0,
            load_waits: None,
            load_limit: usize::MAX,
            buffered_bytes: 0,
            flights: BTreeMap::new(),
            pausing: BTreeSet::new(),
            settling: Settling::default(),
            blocked: super::blocked::BlockedKeys::default(),
            calls: BTreeMap::new(),
            stop: None,
            counters: Counters::default(),
            actions: Vec::new(),
            wake: None,
            next_call: 0,
            next_ticket: 0,
        }
    }

    /// Takes in what has happened and returns what to do now. `now` never goes backward.
    pub fn step(&mut self, events: impl IntoIterator<Item = Event>, now: Mono) -> Vec<Action> {
        for event in events {
            self.handle(event, now);
        }
        self.pump(now);
        std::mem::take(&mut self.actions)
    }

    /// When to step again at the latest, if nothing happens before.
    #[must_use]
    pub fn next_wake(&self) -> Option<Mono> {
        self.wake
    }

    /// What has happened since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Messages published and not settled.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.sinks.iter().map(|s| s.in_flight).sum()
    }

    /// Shards this relay works on.
    #[must_use]
    pub fn shards(&self) -> usize {
        self.ownership.active()
    }

    /// Keys held back in memory (retries, blocks, destinations that are down).
    #[must_use]
    pub fn held_lanes(&self) -> usize {
        self.lanes.stopped()
    }

    /// The breakers that are open now.
    #[must_use]
    pub fn open_breakers(&self) -> Vec<OpenBreaker> {
        let describe = |b: &Breaker, sink: &Arc<str>, destination: Option<&Arc<str>>| {
            b.why().map(|(since, why, needs_operator)| OpenBreaker {
                sink: sink.clone(),
                destination: destination.cloned(),
                since,
                reason: why.to_owned(),
                needs_operator,
            })
        };
        let sinks = self.sinks.iter().filter_map(|s| describe(&s.breaker, &s.name, None));
        let destinations = self.destinations.iter().filter_map(|((sink, destination), d)| {
            describe(&d.breaker, &self.sinks[sink.0].name, Some(destination))
        });
        sinks.chain(destinations).collect()
    }

    fn handle(&mut self, event: Event, now: Mono) {
        match event {
            Event::Tick => {}
            Event::Hint => self.reading.hint(),
            Event::Answered { call, result } => self.answered(call, result, now),
            Event::Outcome { ticket, outcome } => self.outcome(ticket, outcome, now),
            Event::Stop { drain } => self.begin_stop(now.plus(drain)),
        }
    }

    fn answered(&mut self, call: CallId, result: Result<Answer, SourceError>, now: Mono) {
        let Some(request) = self.calls.remove(&call) else { return };
        let answer = match result {
            Ok(answer) => answer,
            Err(error) => return self.failed(call, request, &error, now),
        };
        match (request, answer) {
            (Request::Acquire { .. }, Answer::Acquired(a)) => self.acquired(&a, now),
            (Request::Held { owned, limit, .. }, Answer::Held(rows)) if self.is_recheck(call) => {
                self.rechecked(owned, limit, &rows, now);
            }
            (Request::Held { owned, limit, .. }, Answer::Held(rows)) => {
                self.held_loaded(&owned, limit, &rows, now);
            }
            (Request::Renew { owned }, Answer::Renewed(r)) => self.renewed(&owned, &r, now),
            (Request::Release { owned }, Answer::Done) => self.released(&owned),
            (Request::Leave, Answer::Done) => self.left(),
            (Request::Heads { owned, range }, Answer::Heads(h)) => {
                self.heads_read(call, &owned, range, h, now);
            }
            (Request::Due { owned, limit, .. }, Answer::Heads(h)) => {
                self.due_read(call, &owned, limit, h, now);
            }
            (Request::Lane { owned, lane, range }, Answer::Heads(h)) => {
                self.lane_read(call, owned, &lane, range, &h);
            }
            (Request::Messages { owned, positions }, Answer::Messages(m)) => {
                self.messages_read(&owned, &positions, m);
            }
            (Request::Settle { owned, settled }, Answer::Settled(r)) => {
                self.settled(&owned, settled, &r, now);
            }
            (request, _) => panic!("an answer of another kind to {}", request.kind()),
        }
    }

    fn failed(&mut self, call: CallId, request: Request, error: &SourceError, now: Mono) {
        let operator = matches!(error, SourceError::Operator(_));
        let kind = request.kind();
        self.notice(Notice::CallFailed { kind, operator, error: error.to_string() });
        match request {
            Request::Held { .. } if self.is_recheck(call) => self.recheck_failed(now),
            Request::Acquire { .. } | Request::Held { .. } | Request::Renew { .. } => {
                self.ownership_failed(&request, now);
            }
            Request::Release { owned } => self.release_failed(&owned, now),
            Request::Leave => self.left(),
            Request::Heads { .. } | Request::Due { .. } | Request::Lane { .. } => {
                self.read_failed(call, &request, now);
            }
            Request::Messages { positions, .. } => self.messages_failed(&positions, now),
            Request::Settle { owned, settled } => self.settle_failed(&owned, settled, now),
        }
    }

    /// Does everything that may be done now, and notes when to look again.
    fn pump(&mut self, now: Mono) {
        self.wake = None;
        self.pump_stop(now);
        self.pump_ownership(now);
        self.pump_pausing(now);
        self.pump_blocked(now);
        self.pump_settle(now);
        if self.stop.is_none() {
            self.pump_probes(now);
            self.pump_reading(now);
            self.pump_loading(now);
            self.pump_publish(now);
        }
    }

    /// Looks again at `at` at the latest.
    pub(super) fn wake_at(&mut self, at: Mono) {
        self.wake = Some(self.wake.map_or(at, |w| w.min(at)));
    }

    pub(super) fn notice(&mut self, notice: Notice) {
        self.actions.push(Action::Notice(notice));
    }

    pub(super) fn call(&mut self, request: Request) -> CallId {
        self.next_call += 1;
        let call = CallId(self.next_call);
        self.calls.insert(call, request.clone());
        self.actions.push(Action::Call { call, request });
        call
    }

    /// The number that the next call will have at least.
    pub(super) fn upcoming_call(&self) -> CallId {
        CallId(self.next_call + 1)
    }

    pub(super) fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    /// Looks at a lane again after a change of it, and sorts its messages into what may be loaded and sent.
    pub(super) fn review(&mut self, lane: &Lane) {
        let v = self.lanes.review(lane, self.settings.protections.lanes);
        for p in v.unload {
            self.unload(p);
            self.to_load.remove(&p);
        }
        for p in v.rest.iter().chain(&v.forget) {
            self.to_load.remove(p);
        }
        for p in v.rest {
            self.set_sendable(p, false);
        }
        for p in v.send {
            self.to_load.remove(&p);
            self.set_sendable(p, true);
        }
        for p in v.load {
            self.to_load.insert(p, lane.clone());
        }
        if v.wants_page {
            self.reading.hungry.insert(lane.clone());
        } else {
            self.reading.hungry.remove(lane);
        }
    }

    /// Drops all that is known of shards that have passed on to another relay.
    pub(super) fn lose(&mut self, shard: Shard) {
        if !self.ownership.forget(shard) {
            return;
        }
        self.drop_memory(shard);
        let (accepted, mut fenced) = self.settling.drop_shard(shard);
        for (sink, n) in accepted {
            self.sinks[sink.0].in_flight -= n;
            fenced += n;
        }
        self.notice(Notice::Lost { shard });
        self.count_fenced(fenced);
    }

    /// Forgets all messages of a shard.
    pub(super) fn drop_memory(&mut self, shard: Shard) {
        for p in self.lanes.positions_of(shard) {
            self.unload(p);
            self.unpark(p);
        }
        self.lanes.drop_shard(shard);
        self.to_load.retain(|p, _| self.lanes.lane_of(*p).is_some());
        self.pausing.retain(|(_, p)| self.lanes.lane_of(*p).is_some());
        self.reading.drop_shard(shard, &self.lanes);
    }

    pub(super) fn random(&mut self) -> f64 {
        self.rng.f64()
    }

    pub(super) fn sink(&mut self, id: SinkId) -> &mut SinkState {
        &mut self.sinks[id.0]
    }
}

/// Backoff of calls that failed: 100 ms, doubling, at most 5 s, so that a database that is back is noticed soon and one
/// that is down is not hammered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CallBackoff {
    failures: u32,
    until: Mono,
}

impl CallBackoff {
    pub(super) fn failed(&mut self, now: Mono) {
        self.failures = self.failures.saturating_add(1);
        let ms = 100u64 << self.failures.saturating_sub(1).min(6);
        self.until = now.plus(std::time::Duration::from_millis(ms.min(5_000)));
    }

    pub(super) fn worked(&mut self) {
        *self = Self::default();
    }

    /// When the next call may go.
    pub(super) fn until(&self) -> Mono {
        self.until
    }
}

/// First in, first out, without duplicates; for what waits its turn.
pub(super) type Queue<T> = VecDeque<T>;
