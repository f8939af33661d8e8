//! Lanes: the messages of one key, one at a time.
//!
//! A lane keeps its lowest messages in memory, as narrow entries in the order of their positions. The first of them
//! decides what may go. What is beyond, or behind a message that holds the lane back, is only remembered as a range of
//! positions ([`Tail`]) and read again when its turn comes: a key with 100,000 messages behind a failing one costs as
//! much memory as any other.

use std::collections::{BTreeMap, BTreeSet};

use super::publishing::DestKey;
use crate::message::{Head, Lane, Origin, Position, Shard};

/// Where a message of a lane stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// May be loaded when its turn comes.
    Ready,
    /// Its payload is being read.
    Loading,
    /// Its payload is here.
    Loaded,
    /// Handed to the sink.
    Flying,
    /// Its outcome is being recorded.
    Settling,
    /// Tried, no outcome to record yet; goes again when its time comes.
    Pausing,
    /// Its destination is down; nothing is counted.
    Parked(DestKey),
    /// A retry that is not due yet, recorded in the waiting table.
    Held,
    /// Dead, and its key waits for an operator.
    Blocked,
}

impl Stage {
    /// Whether what stands behind it need not be known: it will take a while.
    fn stops(&self) -> bool {
        matches!(self, Self::Parked(_) | Self::Held | Self::Blocked)
    }
}

/// One message in memory, narrow.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) position: Position,
    pub(super) bytes: u32,
    pub(super) origin: Origin,
    pub(super) stage: Stage,
    /// Publishes that may have reached the sink, this process's included.
    pub(super) tries: u32,
    /// Unknown outcomes in a row.
    pub(super) unknowns: u32,
    /// Refused for good once; the next such answer is final.
    pub(super) refused: bool,
}

impl Entry {
    pub(super) fn ready(head: &Head) -> Self {
        Self {
            position: head.position,
            bytes: head.bytes,
            origin: head.origin,
            stage: Stage::Ready,
            tries: head.origin.tries(),
            unknowns: 0,
            refused: false,
        }
    }

    fn holding(position: Position, stage: Stage) -> Self {
        Self { position, bytes: 0, origin: Origin::Queue, stage, tries: 0, unknowns: 0, refused: false }
    }
}

/// Messages of a lane in the ready queue that are not in memory: from the first to the last position seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail {
    pub(super) from: Position,
    pub(super) to: Position,
}

#[derive(Clone, Debug)]
pub(super) struct LaneState {
    pub(super) shard: Shard,
    /// By rising position.
    pub(super) entries: Vec<Entry>,
    pub(super) tail: Option<Tail>,
    /// A page of its tail is being read.
    pub(super) paging: bool,
    /// While something holds the lane back: how many of its messages are in memory.
    counted: Option<usize>,
}

impl LaneState {
    fn new(shard: Shard) -> Self {
        Self { shard, entries: Vec::with_capacity(1), tail: None, paging: false, counted: None }
    }

    pub(super) fn entry(&self, position: Position) -> Option<&Entry> {
        self.entries.binary_search_by_key(&position, |e| e.position).ok().map(|i| &self.entries[i])
    }

    pub(super) fn entry_mut(&mut self, position: Position) -> Option<&mut Entry> {
        self.entries.binary_search_by_key(&position, |e| e.position).ok().map(|i| &mut self.entries[i])
    }

    /// Whether something holds the lane back for longer.
    pub(super) fn stopped(&self) -> bool {
        self.entries.first().is_some_and(|e| e.stage.stops())
    }

    /// Whether its next messages are not in memory and nothing is in their way.
    pub(super) fn wants_page(&self) -> bool {
        self.tail.is_some_and(|t| self.entries.first().is_none_or(|e| e.position > t.from))
    }

    /// How many messages in memory come before `position`. Due ones may stand far behind, and must not count for what is
    /// to be read before them.
    fn before(&self, position: Position) -> usize {
        self.entries.partition_point(|e| e.position < position)
    }

    fn insert(&mut self, entry: Entry) {
        if let Err(at) = self.entries.binary_search_by_key(&entry.position, |e| e.position) {
            self.entries.insert(at, entry);
        }
    }

    /// All rows of the lane above `after` up to `read_to` are in memory now. If the tail has grown downward meanwhile,
    /// the read does not cover it and nothing moves.
    fn advance_tail(&mut self, after: Position, read_to: Position) {
        if let Some(t) = self.tail
            && t.from > after
        {
            let from = t.from.max(Position(read_to.0.saturating_add(1)));
            self.tail = (from <= t.to).then_some(Tail { from, to: t.to });
        }
    }

    fn extend_tail(&mut self, position: Position) {
        let t = self.tail.get_or_insert(Tail { from: position, to: position });
        t.from = t.from.min(position);
        t.to = t.to.max(position);
    }
}

/// What a message of a lane may do now; computed anew whenever the lane changes.
#[derive(Debug, Default)]
pub(super) struct Verdicts {
    /// May be loaded.
    pub(super) load: Vec<Position>,
    /// May be published.
    pub(super) send: Vec<Position>,
    /// Must not be loaded or sent (any more).
    pub(super) rest: Vec<Position>,
    /// Loaded, but behind something that holds the lane back: let go of the payload.
    pub(super) unload: Vec<Position>,
    /// Forgotten: now part of the tail.
    pub(super) forget: Vec<Position>,
    /// Its next messages are not in memory: read a page.
    pub(super) wants_page: bool,
    /// The lane has neither messages nor tail.
    pub(super) gone: bool,
}

/// How many messages of one lane are loaded ahead of its first, so that a busy key does not read them one by one,
/// and a few busy keys do not fill the memory.
const LOAD_AHEAD: usize = 4;

/// All lanes in memory.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: BTreeMap<Lane, LaneState>,
    index: BTreeMap<Position, Lane>,
    stopped: usize,
    stopped_entries: usize,
}

impl Lanes {
    pub(super) fn get(&self, lane: &Lane) -> Option<&LaneState> {
        self.lanes.get(lane)
    }

    pub(super) fn get_mut(&mut self, lane: &Lane) -> Option<&mut LaneState> {
        self.lanes.get_mut(lane)
    }

    pub(super) fn lane_of(&self, position: Position) -> Option<&Lane> {
        self.index.get(&position)
    }

    pub(super) fn entry_mut(&mut self, position: Position) -> Option<&mut Entry> {
        let lane = self.index.get(&position)?;
        self.lanes.get_mut(lane)?.entry_mut(position)
    }

    pub(super) fn entry(&self, position: Position) -> Option<&Entry> {
        self.lanes.get(self.index.get(&position)?)?.entry(position)
    }

    /// Lanes that something holds back for longer.
    pub(super) fn stopped(&self) -> usize {
        self.stopped
    }

    /// Messages in memory of lanes that nothing holds back for longer: they go on by themselves.
    pub(super) fn flowing(&self) -> usize {
        self.index.len().saturating_sub(self.stopped_entries)
    }

    /// Messages in memory.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    pub(super) fn positions_of(&self, shard: Shard) -> Vec<Position> {
        self.index
            .iter()
            .filter(|(_, lane)| self.lanes.get(*lane).is_some_and(|l| l.shard == shard))
            .map(|(p, _)| *p)
            .collect()
    }

    /// Takes in a row of the ready queue or a due row. Returns whether it was not known.
    ///
    /// A row of a lane that is held back, or that has enough in memory, only extends the lane's tail. A due row enters,
    /// since a page read of the queue would not bring it, unless its lane is held back and has enough in memory: then a
    /// later sweep of the due rows brings it.
    pub(super) fn admit(&mut self, head: &Head, most: usize) -> bool {
        let due = head.origin != Origin::Queue;
        let lane = self.lanes.entry(head.lane.clone()).or_insert_with(|| LaneState::new(head.shard));
        if let Some(entry) = lane.entry_mut(head.position) {
            if due && matches!(entry.stage, Stage::Held | Stage::Blocked) {
                *entry = Entry::ready(head);
                return true;
            }
            return false;
        }
        let before = lane.before(head.position);
        if due {
            if before > 0 && lane.stopped() && lane.entries.len() >= most {
                return false;
            }
        } else {
            if let Some(t) = lane.tail
                && head.position >= t.from
            {
                let new = head.position > t.to;
                lane.extend_tail(head.position);
                return new;
            }
            if before > 0 && (before >= most || lane.stopped()) {
                lane.extend_tail(head.position);
                return true;
            }
        }
        lane.insert(Entry::ready(head));
        self.index.insert(head.position, head.lane.clone());
        true
    }

    /// Takes in a message that holds its lane back, found at acquisition.
    pub(super) fn hold(&mut self, lane: &Lane, shard: Shard, position: Position, dead: bool) {
        let stage = if dead { Stage::Blocked } else { Stage::Held };
        let state = self.lanes.entry(lane.clone()).or_insert_with(|| LaneState::new(shard));
        state.insert(Entry::holding(position, stage));
        self.index.insert(position, lane.clone());
    }

    /// A page of the tail of `lane` has been read: all rows above `after` up to and including `read_to`.
    pub(super) fn page(&mut self, lane: &Lane, rows: &[Head], after: Position, read_to: Position) {
        let Some(state) = self.lanes.get_mut(lane) else { return };
        state.paging = false;
        for head in rows {
            if state.entry(head.position).is_none() {
                state.insert(Entry::ready(head));
                self.index.insert(head.position, lane.clone());
            }
        }
        state.advance_tail(after, read_to);
    }

    /// A page of the whole queue, above `after` up to and including `read_to`, has been read for the sake of the tails of
    /// `wanted`. Lanes that are full or held back leave `wanted`; the rest of their tail stays.
    pub(super) fn rescan(
        &mut self,
        rows: &[Head],
        after: Position,
        read_to: Position,
        most: usize,
        wanted: &mut BTreeSet<Lane>,
    ) {
        wanted.retain(|lane| {
            self.lanes.get(lane).is_some_and(|l| !l.stopped() && l.tail.is_some_and(|t| t.from > after))
        });
        for head in rows {
            if !wanted.contains(&head.lane) {
                continue;
            }
            let Some(state) = self.lanes.get_mut(&head.lane) else { continue };
            // What is above the tail has not been seen by a poll, and a predecessor may be missing here.
            if state.entry(head.position).is_some()
                || state.tail.is_none_or(|t| head.position < t.from || head.position > t.to)
            {
                continue;
            }
            if state.before(head.position) >= most {
                state.advance_tail(after, Position(head.position.0 - 1));
                wanted.remove(&head.lane);
                continue;
            }
            state.insert(Entry::ready(head));
            self.index.insert(head.position, head.lane.clone());
        }
        wanted.retain(|lane| {
            let Some(state) = self.lanes.get_mut(lane) else { return false };
            state.advance_tail(after, read_to);
            state.tail.is_some()
        });
    }

    /// Removes a message. Its lane stays as long as something else is known of it.
    pub(super) fn remove(&mut self, position: Position) -> Option<(Lane, Entry)> {
        let lane = self.index.remove(&position)?;
        let state = self.lanes.get_mut(&lane)?;
        let at = state.entries.binary_search_by_key(&position, |e| e.position).ok()?;
        let entry = state.entries.remove(at);
        Some((lane, entry))
    }

    /// Removes everything of a shard that has passed on.
    pub(super) fn drop_shard(&mut self, shard: Shard) {
        let lanes = &mut self.lanes;
        self.index.retain(|_, lane| lanes.get(lane).is_none_or(|l| l.shard != shard));
        lanes.retain(|_, l| l.shard != shard);
        self.stopped = lanes.values().filter(|l| l.counted.is_some()).count();
        self.stopped_entries = lanes.values().filter_map(|l| l.counted).sum();
    }

    /// Looks at the lane again after a change. `one_at_a_time` is the lane rule.
    pub(super) fn review(&mut self, lane: &Lane, one_at_a_time: bool) -> Verdicts {
        let mut v = Verdicts::default();
        let Some(state) = self.lanes.get_mut(lane) else { return v };
        judge(state, one_at_a_time, &mut v);
        for position in &v.forget {
            self.index.remove(position);
        }
        let stopped = state.stopped();
        let counted = stopped.then_some(state.entries.len());
        self.stopped = self.stopped + usize::from(stopped) - usize::from(state.counted.is_some());
        self.stopped_entries =
            self.stopped_entries + counted.unwrap_or_default() - state.counted.unwrap_or_default();
        state.counted = counted;
        v.wants_page = state.wants_page() && !stopped;
        if state.entries.is_empty() && state.tail.is_none() {
            v.gone = true;
            self.lanes.remove(lane);
        }
        v
    }
}

fn judge(state: &mut LaneState, one_at_a_time: bool, v: &mut Verdicts) {
    let mut held_back = false;
    // Behind a message that failed a moment ago nothing needs to be in memory; it would only be in the way of others.
    let mut delayed = false;
    // Nor behind one that has still to be loaded: the payloads of others must not take the room that it needs.
    let mut to_load = false;
    // A delayed message may join before one that is on its way: that one comes to its end first.
    let under_way = state.entries.iter().any(|e| matches!(e.stage, Stage::Flying | Stage::Settling));
    let mut keep = Vec::with_capacity(state.entries.len());
    for (i, mut entry) in std::mem::take(&mut state.entries).into_iter().enumerate() {
        let unread_before = state.tail.is_some_and(|t| t.from < entry.position);
        let may_load = !(held_back || delayed || unread_before) && i < LOAD_AHEAD;
        match entry.stage {
            Stage::Ready if may_load || !one_at_a_time => v.load.push(entry.position),
            Stage::Ready if held_back && entry.origin == Origin::Queue => {
                state.tail = Some(match state.tail {
                    None => Tail { from: entry.position, to: entry.position },
                    Some(t) => Tail { from: t.from.min(entry.position), to: t.to.max(entry.position) },
                });
                v.forget.push(entry.position);
                continue;
            }
            Stage::Loaded if one_at_a_time && (held_back || delayed || to_load || unread_before) => {
                entry.stage = Stage::Ready;
                v.unload.push(entry.position);
            }
            Stage::Loaded if (i == 0 && !under_way) || !one_at_a_time => v.send.push(entry.position),
            _ => v.rest.push(entry.position),
        }
        held_back |= one_at_a_time && entry.stage.stops();
        delayed |= one_at_a_time && matches!(entry.stage, Stage::Pausing | Stage::Settling);
        to_load |= one_at_a_time && entry.stage == Stage::Ready;
        keep.push(entry);
    }
    state.entries = keep;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(p: i64) -> Head {
        Head { position: Position(p), lane: Lane::Hash(7), shard: Shard(7), bytes: 10, origin: Origin::Queue }
    }

    fn due(p: i64) -> Head {
        Head { origin: Origin::Waiting { attempts: 1, tries: 1 }, ..head(p) }
    }

    const L: Lane = Lane::Hash(7);

    #[test]
    fn the_first_may_go_and_the_others_wait() {
        let mut lanes = Lanes::default();
        for p in [3, 1, 2] {
            assert!(lanes.admit(&head(p), 64));
        }
        assert!(!lanes.admit(&head(2), 64), "known");
        for p in 1..=3 {
            lanes.entry_mut(Position(p)).expect("known").stage = Stage::Loaded;
        }
        let v = lanes.review(&L, true);
        assert_eq!(v.send, [Position(1)]);
        assert_eq!(v.rest, [Position(2), Position(3)]);
    }

    #[test]
    fn a_held_lane_keeps_only_its_holder_and_a_range() {
        let mut lanes = Lanes::default();
        for p in 1..=5 {
            lanes.admit(&head(p), 64);
        }
        lanes.entry_mut(Position(1)).expect("known").stage = Stage::Held;
        let v = lanes.review(&L, true);
        assert_eq!(v.forget.len(), 4);
        assert_eq!(lanes.stopped(), 1);
        for p in 6..=100_000 {
            lanes.admit(&head(p), 64);
        }
        assert_eq!(lanes.len(), 1);
        assert_eq!(
            lanes.get(&L).expect("lane").tail,
            Some(Tail { from: Position(2), to: Position(100_000) })
        );

        assert!(lanes.admit(&due(1), 64), "due again");
        assert_eq!(lanes.review(&L, true).load, [Position(1)]);
        lanes.remove(Position(1));
        lanes.review(&L, true);
        assert!(lanes.get(&L).expect("lane").wants_page());
    }

    #[test]
    fn a_page_moves_the_tail_and_the_end_removes_it() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(1), 1);
        lanes.admit(&head(2), 1);
        lanes.admit(&head(9), 1);
        assert_eq!(lanes.get(&L).expect("lane").tail, Some(Tail { from: Position(2), to: Position(9) }));
        lanes.page(&L, &[head(2), head(4)], Position(1), Position(4));
        assert_eq!(lanes.get(&L).expect("lane").tail, Some(Tail { from: Position(5), to: Position(9) }));
        lanes.page(&L, &[head(9)], Position(4), Position(9));
        assert_eq!(lanes.get(&L).expect("lane").tail, None);
        assert_eq!(lanes.len(), 4);
    }

    #[test]
    fn a_due_row_behind_an_unread_range_waits_for_the_page() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(1), 1);
        lanes.admit(&head(2), 1);
        lanes.admit(&due(5), 1);
        lanes.remove(Position(1));
        let v = lanes.review(&L, true);
        assert!(v.load.is_empty(), "2 comes first and is not in memory");
        assert!(lanes.get(&L).expect("lane").wants_page());
    }

    #[test]
    fn due_messages_far_behind_do_not_keep_a_rescan_from_what_comes_before_them() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(1), 1);
        lanes.admit(&head(2), 1);
        lanes.admit(&due(8), 1);
        lanes.admit(&due(9), 1);
        lanes.remove(Position(1));
        let mut wanted = BTreeSet::from([L]);
        lanes.rescan(&[head(2)], Position(1), Position(2), 1, &mut wanted);
        assert_eq!(lanes.get(&L).expect("lane").tail, None);
        assert_eq!(lanes.review(&L, true).load[0], Position(2));
    }

    #[test]
    fn a_rescan_takes_nothing_above_the_tail() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(1), 1);
        lanes.admit(&head(2), 1);
        lanes.remove(Position(1));
        let mut wanted = BTreeSet::from([L]);
        lanes.rescan(&[head(2), head(7)], Position(1), Position(9), 64, &mut wanted);
        assert!(lanes.entry(Position(2)).is_some());
        assert!(lanes.entry(Position(7)).is_none(), "no poll has seen it");
    }

    #[test]
    fn a_payload_behind_a_message_still_to_be_loaded_is_let_go() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(5), 64);
        lanes.entry_mut(Position(5)).expect("known").stage = Stage::Loaded;
        lanes.admit(&head(3), 64);
        let v = lanes.review(&L, true);
        assert_eq!((v.load, v.unload), (vec![Position(3)], vec![Position(5)]));
    }

    #[test]
    fn due_messages_behind_a_held_one_are_limited() {
        let mut lanes = Lanes::default();
        lanes.hold(&L, Shard(7), Position(1), false);
        lanes.review(&L, true);
        for p in 2..100 {
            lanes.admit(&due(p), 4);
            lanes.review(&L, true);
        }
        assert_eq!((lanes.len(), lanes.flowing()), (4, 0));
    }

    #[test]
    fn a_due_message_waits_for_one_behind_it_that_is_on_its_way() {
        let mut lanes = Lanes::default();
        lanes.admit(&head(5), 64);
        lanes.admit(&due(3), 64);
        lanes.entry_mut(Position(5)).expect("known").stage = Stage::Flying;
        lanes.entry_mut(Position(3)).expect("known").stage = Stage::Loaded;
        assert!(lanes.review(&L, true).send.is_empty());
        lanes.remove(Position(5));
        assert_eq!(lanes.review(&L, true).send, [Position(3)]);
    }

    #[test]
    fn a_late_row_below_a_held_message_may_go() {
        let mut lanes = Lanes::default();
        lanes.hold(&L, Shard(7), Position(5), false);
        lanes.review(&L, true);
        assert!(lanes.admit(&head(3), 64));
        let v = lanes.review(&L, true);
        assert_eq!(v.load, [Position(3)]);
    }
}
