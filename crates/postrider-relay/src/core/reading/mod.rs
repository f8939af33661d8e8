//! What to read next. By state, never by "last id seen": ids are handed out before commit, so a low id can appear late.
//!
//! A poll is a read of the ready rows above `high`, followed by a second read of the window `(low, high]` before those
//! rows reach the lanes: its later snapshot contains every predecessor that committed before them. `low` follows `high`
//! once no transaction that could still commit below it is running (see [`Cohort`]). Shards acquired together start
//! as a cohort of their own at zero and join the others when they have caught up. A sweep without any bound finds what
//! no window can know.

mod due;
mod poll;
mod sweep;
mod tails;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::lanes::Lanes;
use super::machine::{CallBackoff, Core, Queue};
use super::protocol::{CallId, Mono, Request};
use crate::message::{Head, Lane, Position, Shard};
use crate::source::{DueCursor, Heads, Owned, Range, Snapshot};

/// Share of the time that sweeps may take: a pause of 20 times their duration.
const SWEEP_REST: u32 = 20;
/// Queue rows without a message that are remembered.
const ORPHANS: usize = 1_000;
/// Shortest pause between two slices of a sweep.
const SWEEP_SLICE_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(super) struct Reading {
    cohorts: Vec<Cohort>,
    next_cohort: u64,
    /// Which cohort is polled next.
    turn: usize,
    poll: Option<Poll>,
    poll_at: Mono,
    /// Pause after the last poll that brought nothing.
    pause: Duration,
    hinted: bool,
    poll_backoff: CallBackoff,
    /// No poll before this time, hint or not: the last window was long.
    window_pause: Mono,
    due: DuePoll,
    sweep: Sweep,
    /// Lanes whose next messages are not in memory.
    pub(super) hungry: BTreeSet<Lane>,
    lane_calls: BTreeMap<CallId, Lane>,
    rescan: Option<Rescan>,
    lane_backoff: CallBackoff,
    /// Reads under way whose rows are from a snapshot that may be older than a settle; polls count until they end.
    open_reads: BTreeSet<CallId>,
    /// Positions settled while reads were under way: those reads must not bring them back.
    recent: BTreeMap<Position, CallId>,
    recent_order: Queue<(CallId, Vec<Position>)>,
    /// Queued positions without a message, as far as they are remembered: the sweep meets them each time and finds nothing new.
    orphans: BTreeSet<Position>,
    /// The last poll went well at this time.
    pub(super) last_poll: Option<Mono>,
}

/// Shards that are read together, and how far.
#[derive(Debug, Default)]
struct Cohort {
    /// Never used again.
    id: u64,
    shards: BTreeSet<Shard>,
    high: Position,
    /// All that can still commit at or below it is in memory or settled.
    low: Position,
    /// Points on the way to a new `low`.
    marks: Queue<Mark>,
    /// The last poll found nothing more above `high`.
    caught_up: bool,
    /// Without new rows above it the window is not read again before this time.
    window_at: Mono,
    /// Rows that the last window returned.
    window_rows: usize,
}

/// `low` may become `high` when every transaction older than `xmax` has ended. `xmax` is taken from a snapshot at least
/// the late margin after `high` was noted, because an id exists a moment before its transaction can be seen.
#[derive(Clone, Copy, Debug)]
struct Mark {
    high: Position,
    noted: Mono,
    xmax: Option<u64>,
}

/// A poll under way: first the head, then the window.
#[derive(Debug)]
struct Poll {
    /// Its first call; rows are judged by it.
    first: CallId,
    call: CallId,
    /// Not by its shards: one of them may have been lost and taken again meanwhile, in a cohort that begins at zero.
    cohort: u64,
    owned: Vec<Owned>,
    heads: Vec<Head>,
    full: bool,
    window: Vec<Head>,
    window_to: Position,
    in_window: bool,
    /// When the read that `snapshot` is from was asked for.
    asked: Mono,
    /// Of the window, or of the head where there is no window to read.
    snapshot: Option<Snapshot>,
}

#[derive(Debug, Default)]
struct DuePoll {
    call: Option<CallId>,
    cursor: DueCursor,
    sweeping: bool,
    at: Mono,
    /// Where a sweep of the due rows goes on; from the start, if it is not under way.
    sweep: DueCursor,
    sweep_at: Mono,
    /// When the read under way was asked for.
    since: Mono,
    backoff: CallBackoff,
    /// Rows that must not pass ready ones of their key that have not been read yet.
    early: Vec<EarlyDue>,
}

/// Due rows above `low`: ready ones of their transaction may not have been read. They reach their lanes when a poll that
/// began later than they were read has come to their position: it has seen everything that had committed with them.
#[derive(Debug)]
struct EarlyDue {
    call: CallId,
    /// The first poll that will do.
    from: CallId,
    owned: Vec<Owned>,
    rows: Vec<Head>,
}

#[derive(Debug, Default)]
struct Sweep {
    call: Option<CallId>,
    after: Position,
    since: Mono,
    at: Mono,
}

#[derive(Debug)]
struct Rescan {
    call: CallId,
    after: Position,
    to: Position,
    lanes: BTreeSet<Lane>,
}

impl Reading {
    /// This row of the queue has no message. Forgetting some costs a wrong count of the sweep, so few are kept.
    pub(super) fn remember_orphan(&mut self, position: Position) {
        if self.orphans.len() >= ORPHANS {
            self.orphans.pop_first();
        }
        self.orphans.insert(position);
    }

    pub(super) fn hint(&mut self) {
        self.hinted = true;
    }

    pub(super) fn add_cohort(&mut self, shards: Vec<Shard>) {
        if shards.is_empty() {
            return;
        }
        self.next_cohort += 1;
        self.cohorts.push(Cohort {
            id: self.next_cohort,
            shards: shards.into_iter().collect(),
            ..Cohort::default()
        });
        self.due.cursor = DueCursor::default();
        self.hinted = true;
    }

    /// The shard is not read any more.
    pub(super) fn leave(&mut self, shard: Shard) {
        for c in &mut self.cohorts {
            c.shards.remove(&shard);
        }
        self.cohorts.retain(|c| !c.shards.is_empty());
    }

    pub(super) fn drop_shard(&mut self, shard: Shard, lanes: &Lanes) {
        self.leave(shard);
        self.hungry.retain(|l| lanes.get(l).is_some());
    }

    /// These positions are recorded now; reads that began before must not bring them back.
    pub(super) fn note_settled(&mut self, positions: Vec<Position>, next: CallId) {
        if self.open_reads.is_empty() {
            return;
        }
        for p in &positions {
            self.recent.insert(*p, next);
        }
        self.recent_order.push_back((next, positions));
    }

    fn close_read(&mut self, call: CallId) {
        self.open_reads.remove(&call);
        let oldest = self.open_reads.first().copied();
        while let Some((tag, _)) = self.recent_order.front() {
            if oldest.is_some_and(|o| o < *tag) {
                break;
            }
            let Some((tag, positions)) = self.recent_order.pop_front() else { break };
            for p in positions {
                if self.recent.get(&p) == Some(&tag) {
                    self.recent.remove(&p);
                }
            }
        }
    }

    /// Whether a row read by `call` had been recorded while the read was under way.
    fn outdated(&self, call: CallId, position: Position) -> bool {
        self.recent.get(&position).is_some_and(|tag| call < *tag)
    }
}

impl Core {
    pub(super) fn pump_reading(&mut self, now: Mono) {
        if !self.may_send_soon(now) {
            return;
        }
        self.pump_poll(now);
        self.pump_due(now);
        self.pump_sweep(now);
        self.pump_lanes(now);
    }

    /// Whether there is room for more narrow rows.
    fn wants_heads(&self) -> bool {
        self.lanes.stopped() < self.settings.held_lanes as usize && self.wants_due()
    }

    /// Whether there is room for due rows. They are what releases held lanes, so the number of those is no reason to wait.
    fn wants_due(&self) -> bool {
        self.lanes.flowing() < self.settings.buffer_heads as usize
            && self.to_load.len() < self.settings.head_batch as usize
            && self.some_sink_open()
    }

    pub(super) fn heads_read(&mut self, call: CallId, owned: &[Owned], range: Range, h: Heads, now: Mono) {
        self.lose_missing(owned, &h.mine);
        if self.reading.poll.as_ref().is_some_and(|p| p.call == call) {
            self.poll_answered(range, h, now);
        } else if self.reading.sweep.call == Some(call) {
            self.sweep_answered(call, owned, range, &h, now);
        } else if self.reading.rescan.as_ref().is_some_and(|r| r.call == call) {
            self.rescan_answered(call, owned, range, &h);
        }
    }

    /// Gives a row to its lane unless it is known, or was recorded while the read was under way.
    fn admit(&mut self, call: CallId, head: &Head) -> bool {
        if self.reading.outdated(call, head.position) || self.settling.knows(head.position) {
            return false;
        }
        let new = self.lanes.admit(head, self.settings.lane_heads as usize);
        if new {
            self.review(&head.lane);
        }
        new
    }

    fn known_elsewhere(&self, call: CallId, position: Position) -> bool {
        self.reading.outdated(call, position) || self.settling.knows(position)
    }

    fn works_of(&self, owned: &[Owned]) -> BTreeSet<Shard> {
        owned
            .iter()
            .filter(|o| self.ownership.holds(**o) && self.ownership.works(o.shard))
            .map(|o| o.shard)
            .collect()
    }

    pub(super) fn read_failed(&mut self, call: CallId, request: &Request, now: Mono) {
        let r = &mut self.reading;
        if r.poll.as_ref().is_some_and(|p| p.call == call) {
            // Rows that were read but not handed to their lanes are read again.
            if let Some(poll) = r.poll.take() {
                r.close_read(poll.first);
            }
            r.poll_backoff.failed(now);
        } else if r.due.call == Some(call) {
            r.due.call = None;
            r.due.backoff.failed(now);
        } else if r.sweep.call == Some(call) {
            r.sweep.call = None;
            r.sweep.at = now.plus(self.settings.sweep_every);
        } else if r.rescan.as_ref().is_some_and(|s| s.call == call) {
            r.rescan = None;
            r.lane_backoff.failed(now);
        } else if let Request::Lane { lane, .. } = request {
            r.lane_calls.remove(&call);
            r.lane_backoff.failed(now);
            if let Some(state) = self.lanes.get_mut(lane) {
                state.paging = false;
            }
        }
        self.reading.close_read(call);
    }
}
