//! Small worlds around the core, step by step, for what no file of it shows alone.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::machine::Core;
use super::protocol::{Action, Answer, CallId, Event, Flight, Mono, Request, Route, SinkId, SinkSpec};
use super::settings::Settings;
use crate::message::{Head, Lane, Message, Origin, Payload, Position, Shard};
use crate::sink::{Outcome, Refusal, Retry, Scope};
use crate::source::{Acquired, Heads, Messages, Owned, Renewed, SettleReport, Snapshot, SourceError};

struct OneSink;

impl Route for OneSink {
    fn route(&self, topic: &str) -> (SinkId, Arc<str>) {
        (SinkId(0), topic.into())
    }
}

/// A queue of messages of so many keys, and a sink that answers for one message per millisecond.
struct World {
    core: Core,
    now: Mono,
    queue: BTreeSet<i64>,
    flights: VecDeque<Flight>,
    sent: Vec<i64>,
    token: i64,
    keys: i64,
    /// Calls of these kinds wait in `pending` until the test answers.
    slow: Vec<&'static str>,
    pending: Vec<(CallId, Request)>,
}

impl World {
    fn new(settings: Settings, messages: i64) -> Self {
        let sinks = vec![SinkSpec { name: "sink".into() }];
        let core = Core::new(settings, sinks, Box::new(OneSink), 1);
        Self {
            core,
            now: Mono(1),
            queue: (1..=messages).collect(),
            flights: VecDeque::new(),
            sent: vec![],
            token: 1,
            keys: i64::MAX,
            slow: vec![],
            pending: vec![],
        }
    }

    /// Steps until nothing is left to answer for but publishes.
    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        while !events.is_empty() {
            for action in self.core.step(std::mem::take(&mut events), self.now) {
                match action {
                    Action::Call { call, request } if self.slow.contains(&request.kind()) => {
                        self.pending.push((call, request));
                    }
                    Action::Call { call, request } => {
                        events.push(Event::Answered { call, result: Ok(self.answer(request)) });
                    }
                    Action::Publish { batch, .. } => self.flights.extend(batch),
                    Action::Notice(_) | Action::Stopped { .. } => {}
                }
            }
        }
    }

    fn answer(&mut self, request: Request) -> Answer {
        let heads = |rows, mine| Answer::Heads(Heads { rows, mine, snapshot: Snapshot::ORDERED, next: None });
        let mine = vec![Shard(0)];
        match request {
            Request::Acquire { have } => {
                let now = Owned { shard: Shard(0), token: self.token };
                let owned = if have.contains(&now) { vec![] } else { vec![now] };
                Answer::Acquired(Acquired { owned, unclean: vec![], live_relays: 1, shards: 1 })
            }
            Request::Held { .. } => Answer::Held(vec![]),
            Request::Renew { .. } => Answer::Renewed(Renewed { mine, live_relays: 1 }),
            Request::Release { .. } | Request::Leave => Answer::Done,
            Request::Due { .. } | Request::Lane { .. } => heads(vec![], mine),
            Request::Heads { range, .. } => {
                let to = range.up_to.map_or(i64::MAX, |p| p.0);
                let ids = self.queue.iter().filter(|id| **id > range.after.0 && **id <= to);
                heads(ids.take(range.limit as usize).map(|id| head(*id, self.keys)).collect(), mine)
            }
            Request::Messages { positions, .. } => {
                Answer::Messages(Messages { found: positions.into_iter().map(message).collect(), mine })
            }
            Request::Settle { settled, .. } => {
                let settled: Vec<Position> = settled.into_iter().map(|s| s.position).collect();
                for p in &settled {
                    self.queue.remove(&p.0);
                    self.sent.push(p.0);
                }
                Answer::Settled(SettleReport { settled, mine })
            }
        }
    }

    fn take(&mut self, kind: &str) -> Vec<(CallId, Request)> {
        self.pending.extract_if(.., |(_, request)| request.kind() == kind).collect()
    }

    fn answer_all(&mut self, kind: &str) {
        let taken = self.take(kind);
        assert!(!taken.is_empty(), "no {kind} under way");
        for (call, request) in taken {
            let result = Ok(self.answer(request));
            self.step(Event::Answered { call, result });
        }
    }

    /// The sink answers for the message that has waited longest, a millisecond later.
    fn sink_answers(&mut self, outcome: Outcome) {
        self.now = self.now.plus(Duration::from_millis(1));
        match self.flights.pop_front() {
            Some(f) => self.step(Event::Outcome { ticket: f.ticket, outcome: Some(outcome) }),
            None => self.step(Event::Tick),
        }
    }
}

fn head(id: i64, keys: i64) -> Head {
    Head {
        position: Position(id),
        lane: Lane::Hash(id % keys),
        shard: Shard(0),
        bytes: 1,
        origin: Origin::Queue,
    }
}

fn message(position: Position) -> Message {
    Message {
        position,
        message_id: position.to_string(),
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
    }
}

/// What was set aside during an outage is the oldest there is; a backlog behind it must not keep it waiting.
#[test]
fn what_was_set_aside_goes_before_the_backlog_that_grew_meanwhile() {
    let settings =
        Settings { in_flight: 4, load_batch: 4, head_batch: 8, buffer_heads: 64, ..Settings::default() };
    let mut world = World::new(settings, 500);
    world.step(Event::Tick);
    let down =
        Refusal { scope: Scope::Sink, retry: Retry::Backoff, code: "down".into(), text: "down".into() };
    assert_eq!(world.flights.len(), 4);
    for _ in 0..4 {
        world.sink_answers(Outcome::Refused(down.clone()));
    }
    for _ in 0..600 {
        world.sink_answers(Outcome::Accepted { evidence: None });
    }
    let place = |id: i64| world.sent.iter().position(|sent| *sent == id);
    for id in 1..=8 {
        assert!(place(id).is_some_and(|at| at < 50), "{id} was sent as number {:?}", place(id));
    }
}

/// A shard is lost and taken again while a settle of the first time is under way. It comes back fenced, so the message
/// stands in the queue as before: a read that began under the new token must bring it, or the next of its key passes.
#[test]
fn a_fenced_settle_does_not_hide_its_message_from_a_read_of_the_next_ownership() {
    let mut world = World::new(Settings::default(), 2);
    world.keys = 1;
    world.step(Event::Tick);
    world.slow = vec!["settle", "heads"];
    let refusal =
        Refusal { scope: Scope::Message, retry: Retry::Backoff, code: "1".into(), text: "no".into() };
    world.sink_answers(Outcome::Refused(refusal));
    world.token = 2;
    world.now = world.now.plus(Duration::from_secs(2));
    world.step(Event::Tick);
    // The read of the first ownership ends, and that of the second begins before the settle has its answer.
    world.answer_all("heads");
    let fenced = world.take("settle").into_iter().map(|(call, _)| call);
    for call in fenced {
        world.step(Event::Answered { call, result: Ok(Answer::Settled(SettleReport::default())) });
    }
    world.slow.clear();
    world.answer_all("heads");
    let sent: Vec<i64> = world.flights.iter().map(|f| f.message.position.0).collect();
    assert_eq!(sent, [1], "it is sent again, and before the next of its key");
}

/// Large messages may not arrive within the deadline all together; one by one they do.
#[test]
fn a_read_of_messages_that_fails_is_repeated_in_halves() {
    let mut world = World::new(Settings { load_batch: 8, ..Settings::default() }, 8);
    world.slow = vec!["messages"];
    world.step(Event::Tick);
    let mut sizes = Vec::new();
    for _ in 0..4 {
        for (call, request) in world.take("messages") {
            let Request::Messages { positions, .. } = request else { panic!("asked for messages") };
            sizes.push(positions.len());
            let error = SourceError::Temporary("deadline".to_owned());
            world.step(Event::Answered { call, result: Err(error) });
        }
        world.now = world.now.plus(Duration::from_secs(1));
        world.step(Event::Tick);
    }
    assert_eq!(sizes[0], 8);
    assert_eq!(sizes[1], 4, "{sizes:?}");
    assert!(sizes.contains(&1), "{sizes:?}");
}
