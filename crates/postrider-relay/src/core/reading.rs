//! What to read next. By state, never by "last id seen": ids are handed out before commit, so a low id can appear late.
//!
//! A poll is a read of the ready rows above `high`, followed by a second read of the window `(low, high]` before those
//! rows reach the lanes: its later snapshot contains every predecessor that committed before them. `low` follows `high`
//! once no transaction that could still commit below it is running (see [`Cohort`]). Shards acquired together start
//! as a cohort of their own at zero and join the others when they have caught up. A sweep without any bound finds what
//! no window can know.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::lanes::{Lanes, Stage};
use super::machine::{CallBackoff, Core, Queue};
use super::protocol::{CallId, Mono, Notice, Request};
use crate::message::{Head, Lane, Position, Shard};
use crate::source::{DueCursor, Heads, Owned, Range, Snapshot};

/// Share of the time that sweeps may take: a pause of 20 times their duration.
const SWEEP_REST: u32 = 20;
/// Longest pause after a slice of a sweep of the due rows, however long that took: retries may depend on it, and a stall
/// of the database for some seconds must not delay them by minutes.
const DUE_SWEEP_REST: Duration = Duration::from_secs(2);
/// Shortest pause between two slices of a sweep.
const SWEEP_SLICE_PAUSE: Duration = Duration::from_millis(50);
/// Behind polls that bring nothing new the window is only read for what has committed late, and then it may take a fifth
/// of the time: a pause of 4 times its duration, at least [`MARK_EVERY`]. While a writer stays open the window covers
/// all that has flowed since (about 20 pages per 1,000 ids), and at each idle poll that would be most of the load.
const WINDOW_REST: u32 = 4;
/// A window that took this long or longer is followed by a pause as long as it took, whatever is new: it takes half of
/// the time at most. Below it (some 30,000 ids) reading on at once is cheaper than waiting.
const LONG_WINDOW: Duration = Duration::from_millis(10);
/// Two marks of the late window are at least this far apart.
const MARK_EVERY: Duration = Duration::from_millis(20);

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

impl Cohort {
    /// Notes what a read of the window (or of the head, where there is no window) says about how far late commits are
    /// excluded. `asked` = when that read was asked for; marks noted in it are not above what it covered.
    fn observe(&mut self, snapshot: Snapshot, asked: Mono, margin: Duration) {
        if snapshot == Snapshot::ORDERED {
            self.low = self.high;
            self.marks.clear();
            return;
        }
        while let Some(m) = self.marks.front() {
            if m.xmax.is_some_and(|x| snapshot.xmin >= x) {
                self.low = self.low.max(m.high);
                self.marks.pop_front();
            } else {
                break;
            }
        }
        for m in &mut self.marks {
            if m.xmax.is_none() && asked >= m.noted.plus(margin) {
                m.xmax = Some(snapshot.xmax);
            }
        }
    }

    fn mark(&mut self, now: Mono) {
        let newest = self.marks.back();
        if self.high > self.low
            && newest.is_none_or(|m| m.high < self.high && now.since(m.noted) >= MARK_EVERY)
        {
            self.marks.push_back(Mark { high: self.high, noted: now, xmax: None });
        }
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

    fn pump_poll(&mut self, now: Mono) {
        if self.reading.poll.is_some() || self.reading.cohorts.is_empty() || !self.wants_heads() {
            return;
        }
        let hinted = std::mem::take(&mut self.reading.hinted);
        let paced = if hinted { Mono(0) } else { self.reading.poll_at };
        let at = self.reading.poll_backoff.until().max(self.reading.window_pause).max(paced);
        if now < at {
            self.reading.hinted = hinted;
            self.wake_at(at);
            return;
        }
        self.merge_cohorts();
        self.reading.turn = (self.reading.turn + 1) % self.reading.cohorts.len();
        let cohort = &self.reading.cohorts[self.reading.turn];
        // Each poll reads the whole window again. Where that holds many rows (of keys that are held back), a poll reads as
        // many new ones as there is room for, so that the window costs each row once and not ten times.
        let room = (self.settings.buffer_heads as usize).saturating_sub(self.lanes.flowing());
        let many = u32::try_from(cohort.window_rows.min(room)).unwrap_or(u32::MAX);
        let limit = self.settings.head_batch.max(many);
        let range = Range { after: cohort.high, up_to: None, limit };
        let (id, high) = (cohort.id, cohort.high);
        let owned = self.ownership.owned(cohort.shards.iter().copied());
        let call = self.call(Request::Heads { owned: owned.clone(), range });
        self.reading.open_reads.insert(call);
        self.reading.poll = Some(Poll {
            first: call,
            call,
            cohort: id,
            owned,
            heads: vec![],
            full: false,
            window: vec![],
            window_to: high,
            in_window: false,
            asked: now,
            snapshot: None,
        });
    }

    /// Joins cohorts that have caught up: positions both have passed stay passed, everything else is read again.
    fn merge_cohorts(&mut self) {
        let cohorts = &mut self.reading.cohorts;
        let mut i = 1;
        while i < cohorts.len() {
            let (main, rest) = cohorts.split_at_mut(i);
            let (main, c) = (&mut main[0], &rest[0]);
            let near = c.caught_up && main.caught_up && c.low >= main.low;
            if near {
                main.high = main.high.min(c.high);
                main.low = main.low.min(c.low).min(main.high);
                main.marks.retain(|m| m.high <= main.high);
                main.shards.extend(c.shards.iter().copied());
                cohorts.remove(i);
            } else {
                i += 1;
            }
        }
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

    fn poll_answered(&mut self, range: Range, h: Heads, now: Mono) {
        let Some(mut poll) = self.reading.poll.take() else { return };
        if poll.in_window {
            poll.window = h.rows;
            poll.snapshot = Some(h.snapshot);
            return self.end_poll(&poll, now);
        }
        poll.full = h.rows.len() >= range.limit as usize;
        poll.heads = h.rows;
        let Some(c) = self.reading.cohorts.iter().find(|c| c.id == poll.cohort) else {
            return self.end_poll(&poll, now);
        };
        // A database in which ids commit in order needs no window.
        if c.low < c.high && h.snapshot != Snapshot::ORDERED && self.settings.protections.late_window {
            // Due rows that wait for a poll rely on its window.
            if poll.heads.is_empty() && self.reading.due.early.is_empty() && now < c.window_at {
                return self.end_poll(&poll, now);
            }
            let low = c.low;
            poll.asked = now;
            self.read_window(poll, low);
        } else {
            poll.snapshot = Some(h.snapshot);
            self.end_poll(&poll, now);
        }
    }

    /// In one read, however large: the pages of several would see different snapshots, and a later page a message whose
    /// predecessor, committed with it, an earlier page had just missed.
    fn read_window(&mut self, mut poll: Poll, after: Position) {
        let range = Range { after, up_to: Some(poll.window_to), limit: u32::MAX };
        poll.owned.retain(|o| self.ownership.holds(*o));
        poll.call = self.call(Request::Heads { owned: poll.owned.clone(), range });
        poll.in_window = true;
        self.reading.poll = Some(poll);
    }

    /// Head and window are here: their rows go to the lanes, and the positions move.
    fn end_poll(&mut self, poll: &Poll, now: Mono) {
        let owned: Vec<Owned> = poll.owned.iter().copied().filter(|o| self.ownership.holds(*o)).collect();
        let works: BTreeSet<Shard> =
            owned.iter().map(|o| o.shard).filter(|s| self.ownership.works(*s)).collect();
        let highest = poll.heads.last().map(|h| h.position);
        let mut admit = |rows: &[Head]| -> usize {
            rows.iter().map(|h| usize::from(works.contains(&h.shard) && self.admit(poll.first, h))).sum()
        };
        let late = admit(&poll.window);
        let new = late + admit(&poll.heads);
        self.counters.late += late as u64;
        self.reading.close_read(poll.first);
        self.reading.poll_backoff.worked();
        self.reading.last_poll = Some(now);
        let top = self.reading.cohorts.first().map(|c| c.high).unwrap_or_default();
        let window = poll.in_window.then(|| now.since(poll.asked));
        if let Some(took) = window.filter(|took| *took >= LONG_WINDOW) {
            self.reading.window_pause = now.plus(took);
        }
        if let Some(c) = self.reading.cohorts.iter_mut().find(|c| c.id == poll.cohort) {
            c.high = c.high.max(highest.unwrap_or_default());
            c.caught_up = !poll.full;
            if c.caught_up {
                // All that this read could see was returned, so positions that others have passed are passed here too;
                // what it could not see lies in the window.
                c.high = c.high.max(top);
            }
            if let Some(snapshot) = poll.snapshot {
                c.observe(snapshot, poll.asked, self.settings.late_margin);
            }
            if let Some(took) = window {
                c.window_at = now.plus((took * WINDOW_REST).max(MARK_EVERY));
                c.window_rows = poll.window.len();
            }
            c.mark(now);
        }
        let new = new + self.admit_early(poll);
        self.pause_after_poll(new, poll.full, now);
    }

    fn pause_after_poll(&mut self, new: usize, full: bool, now: Mono) {
        let r = &mut self.reading;
        let catching_up = r.cohorts.len() > 1;
        r.pause = if new > 0 || full {
            Duration::ZERO
        } else {
            let longest = if catching_up { Duration::from_millis(20) } else { self.settings.idle_poll };
            (r.pause * 2).clamp(Duration::from_millis(1), longest.max(Duration::from_millis(1)))
        };
        r.poll_at = now.plus(r.pause);
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

    fn pump_due(&mut self, now: Mono) {
        if self.reading.due.call.is_some() || self.reading.cohorts.is_empty() || !self.wants_due() {
            return;
        }
        let d = &self.reading.due;
        let at = d.at.min(d.sweep_at).max(d.backoff.until());
        if now < at {
            self.wake_at(at);
            return;
        }
        let sweeping = now >= d.sweep_at;
        let after = if sweeping { d.sweep } else { d.cursor };
        let shards: Vec<Shard> = self.reading.cohorts.iter().flat_map(|c| c.shards.iter().copied()).collect();
        let owned = self.ownership.owned(shards);
        let call = self.call(Request::Due { owned, after, limit: self.settings.pages.due });
        self.reading.open_reads.insert(call);
        let d = &mut self.reading.due;
        d.call = Some(call);
        d.sweeping = sweeping;
        d.since = now;
    }

    pub(super) fn due_read(&mut self, call: CallId, owned: &[Owned], limit: u32, h: Heads, now: Mono) {
        self.lose_missing(owned, &h.mine);
        let works: BTreeSet<Shard> = self.works_of(owned);
        let full = h.rows.len() >= limit as usize;
        let (ready, early): (Vec<Head>, Vec<Head>) =
            h.rows.into_iter().filter(|r| works.contains(&r.shard)).partition(|r| self.in_turn(r));
        let new = ready.iter().filter(|head| self.admit(call, head)).count();
        self.keep_early(call, owned, early);
        let d = &mut self.reading.due;
        d.call = None;
        d.backoff.worked();
        if let Some(next) = h.next {
            // A sweep only ever finds more than the cursor; it moves it forward too, never back.
            d.cursor = d.cursor.max(next);
        }
        if d.sweeping {
            d.sweep = h.next.filter(|_| full).unwrap_or_default();
            let pause = if full {
                SWEEP_SLICE_PAUSE.min(self.settings.sweep_every)
            } else {
                self.settings.sweep_every
            };
            let rest = (now.since(d.since) * SWEEP_REST).min(DUE_SWEEP_REST);
            d.sweep_at = now.plus(pause.max(rest));
        }
        d.at = if full && new > 0 { now } else { now.plus(self.settings.idle_poll) };
    }

    /// Whether all ready rows of its key that come before a due row have been read. For a message that holds its key
    /// there are none: its predecessors were recorded before its failure was.
    fn in_turn(&self, head: &Head) -> bool {
        let holds =
            self.lanes.entry(head.position).is_some_and(|e| matches!(e.stage, Stage::Held | Stage::Blocked));
        let cohort = self.reading.cohorts.iter().find(|c| c.shards.contains(&head.shard));
        holds || cohort.is_some_and(|c| head.position <= c.low)
    }

    fn keep_early(&mut self, call: CallId, owned: &[Owned], rows: Vec<Head>) {
        let kept: usize = self.reading.due.early.iter().map(|e| e.rows.len()).sum();
        if rows.is_empty() || kept + rows.len() > 2 * self.settings.pages.due as usize {
            // Where there are too many a later sweep brings them.
            return self.reading.close_read(call);
        }
        let from = self.upcoming_call();
        self.reading.hinted = true;
        self.reading.due.early.push(EarlyDue { call, from, owned: owned.to_vec(), rows });
    }

    /// A poll has ended: gives the due rows that waited for it to their lanes.
    fn admit_early(&mut self, poll: &Poll) -> usize {
        let mut new = 0;
        for mut early in std::mem::take(&mut self.reading.due.early) {
            let works = self.works_of(&early.owned);
            let late_enough = early.from <= poll.first;
            let polled = self.reading.cohorts.iter().find(|c| c.id == poll.cohort);
            let (ready, rest) = early.rows.into_iter().filter(|r| works.contains(&r.shard)).partition(|r| {
                let covered = polled
                    .is_some_and(|c| c.shards.contains(&r.shard) && (!poll.full || r.position <= c.high));
                self.in_turn(r) || late_enough && covered
            });
            let ready: Vec<Head> = ready;
            new += ready.iter().filter(|head| self.admit(early.call, head)).count();
            early.rows = rest;
            if early.rows.is_empty() {
                self.reading.close_read(early.call);
            } else {
                self.reading.due.early.push(early);
            }
        }
        new
    }

    fn works_of(&self, owned: &[Owned]) -> BTreeSet<Shard> {
        owned
            .iter()
            .filter(|o| self.ownership.holds(**o) && self.ownership.works(o.shard))
            .map(|o| o.shard)
            .collect()
    }

    fn pump_sweep(&mut self, now: Mono) {
        if self.reading.sweep.call.is_some() || self.reading.cohorts.is_empty() || !self.wants_heads() {
            return;
        }
        let at = self.reading.sweep.at;
        if now < at {
            self.wake_at(at);
            return;
        }
        // Only where everything up to `low` has been read once: in a younger cohort a sweep could bring n+1 before n.
        let up_to = self.reading.cohorts.first().map(|c| c.low).unwrap_or_default();
        if up_to <= self.reading.sweep.after {
            self.reading.sweep.after = Position::default();
            self.reading.sweep.at = now.plus(self.settings.sweep_every);
            return;
        }
        let shards: Vec<Shard> =
            self.reading.cohorts.iter().take(1).flat_map(|c| c.shards.iter().copied()).collect();
        let range =
            Range { after: self.reading.sweep.after, up_to: Some(up_to), limit: self.settings.head_batch };
        let owned = self.ownership.owned(shards);
        let call = self.call(Request::Heads { owned, range });
        self.reading.open_reads.insert(call);
        self.reading.sweep.call = Some(call);
        self.reading.sweep.since = now;
    }

    fn sweep_answered(&mut self, call: CallId, owned: &[Owned], range: Range, h: &Heads, now: Mono) {
        let works = self.works_of(owned);
        let mut found = 0;
        for head in &h.rows {
            found += usize::from(works.contains(&head.shard) && self.admit(call, head));
        }
        self.reading.close_read(call);
        let s = &mut self.reading.sweep;
        s.call = None;
        let rest = now.since(s.since) * SWEEP_REST;
        match h.rows.last() {
            Some(last) if h.rows.len() >= range.limit as usize => {
                s.after = last.position;
                s.at = now.plus(rest.max(SWEEP_SLICE_PAUSE));
            }
            _ => {
                s.after = Position::default();
                s.at = now.plus(rest.max(self.settings.sweep_every));
            }
        }
        if found > 0 {
            self.counters.swept += found as u64;
            self.notice(Notice::SweepFound { count: found });
        }
    }

    /// Reads on where lanes have left off: few lanes one by one, many by one pass over the queue.
    fn pump_lanes(&mut self, now: Mono) {
        if self.reading.hungry.is_empty() || self.reading.rescan.is_some() {
            return;
        }
        let at = self.reading.lane_backoff.until();
        if now < at {
            self.wake_at(at);
            return;
        }
        if self.to_load.len() >= self.settings.buffer_heads as usize {
            return;
        }
        if self.reading.hungry.len() > self.settings.pages.lanes_by_rescan {
            return self.begin_rescan();
        }
        let lanes: Vec<Lane> = self.reading.hungry.iter().cloned().collect();
        for lane in lanes {
            self.read_lane(lane);
        }
    }

    fn read_lane(&mut self, lane: Lane) {
        let Some(state) = self.lanes.get_mut(&lane) else { return };
        let (false, Some(t)) = (state.paging, state.tail) else { return };
        let range =
            Range { after: Position(t.from.0 - 1), up_to: Some(t.to), limit: self.settings.pages.lane };
        let Some(owned) = self.ownership.owned([state.shard]).pop() else { return };
        if !self.ownership.works(owned.shard) {
            return;
        }
        state.paging = true;
        let call = self.call(Request::Lane { owned, lane: lane.clone(), range });
        self.reading.open_reads.insert(call);
        self.reading.lane_calls.insert(call, lane);
    }

    pub(super) fn lane_read(&mut self, call: CallId, owned: Owned, lane: &Lane, range: Range, h: &Heads) {
        self.reading.lane_calls.remove(&call);
        self.reading.lane_backoff.worked();
        self.lose_missing(&[owned], &h.mine);
        if self.works_of(&[owned]).is_empty() {
            self.reading.close_read(call);
            return;
        }
        let rows: Vec<Head> =
            h.rows.iter().filter(|r| !self.known_elsewhere(call, r.position)).cloned().collect();
        let full = h.rows.len() >= range.limit as usize;
        let end = range.up_to.unwrap_or_default();
        let read_to = if full { h.rows.last().map_or(end, |r| r.position) } else { end };
        self.counters.lane_pages += 1;
        self.lanes.page(lane, &rows, range.after, read_to);
        self.reading.close_read(call);
        self.review(lane);
    }

    fn known_elsewhere(&self, call: CallId, position: Position) -> bool {
        self.reading.outdated(call, position) || self.settling.knows(position)
    }

    fn begin_rescan(&mut self) {
        let lanes: BTreeSet<Lane> = self
            .reading
            .hungry
            .iter()
            .filter(|l| self.lanes.get(l).is_some_and(|s| !s.paging && self.ownership.works(s.shard)))
            .cloned()
            .collect();
        let tails = lanes.iter().filter_map(|l| self.lanes.get(l)?.tail);
        let bounds = tails.fold(None, |acc: Option<(Position, Position)>, t| match acc {
            None => Some((t.from, t.to)),
            Some((from, to)) => Some((from.min(t.from), to.max(t.to))),
        });
        let Some((from, to)) = bounds else { return };
        self.rescan_page(Position(from.0 - 1), to, lanes);
    }

    fn rescan_page(&mut self, after: Position, to: Position, lanes: BTreeSet<Lane>) {
        let shards: BTreeSet<Shard> = lanes.iter().filter_map(|l| Some(self.lanes.get(l)?.shard)).collect();
        let owned = self.ownership.owned(shards);
        if owned.is_empty() {
            return;
        }
        let range = Range { after, up_to: Some(to), limit: self.settings.head_batch };
        let call = self.call(Request::Heads { owned, range });
        self.reading.open_reads.insert(call);
        self.reading.rescan = Some(Rescan { call, after, to, lanes });
    }

    fn rescan_answered(&mut self, call: CallId, owned: &[Owned], range: Range, h: &Heads) {
        let Some(mut scan) = self.reading.rescan.take() else { return };
        self.counters.rescans += 1;
        self.reading.lane_backoff.worked();
        let works = self.works_of(owned);
        scan.lanes.retain(|l| self.lanes.get(l).is_some_and(|s| works.contains(&s.shard)));
        let rows: Vec<Head> = h
            .rows
            .iter()
            .filter(|r| works.contains(&r.shard) && !self.known_elsewhere(call, r.position))
            .cloned()
            .collect();
        let full = h.rows.len() >= range.limit as usize;
        let read_to = if full { h.rows.last().map_or(scan.to, |r| r.position) } else { scan.to };
        let touched: Vec<Lane> = scan.lanes.iter().cloned().collect();
        let most = self.settings.lane_heads as usize;
        self.lanes.rescan(&rows, scan.after, read_to, most, &mut scan.lanes);
        self.reading.close_read(call);
        for lane in touched {
            self.review(&lane);
        }
        if full && !scan.lanes.is_empty() {
            self.rescan_page(read_to, scan.to, scan.lanes);
        }
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
