//! One poll: the ready rows above `high`, then the late window below them, then both to their lanes.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Cohort, Mark, Poll};
use crate::core::machine::Core;
use crate::core::protocol::{Mono, Request};
use crate::message::{Head, Position, Shard};
use crate::source::{Heads, Owned, Range, Snapshot};

/// Behind polls that bring nothing new the window is only read for what has committed late, and then it may take a fifth
/// of the time: a pause of 4 times its duration, at least [`MARK_EVERY`]. While a writer stays open the window covers
/// all that has flowed since (about 20 pages per 1,000 ids), and at each idle poll that would be most of the load.
const WINDOW_REST: u32 = 4;
/// A window that took this long or longer is followed by a pause as long as it took, whatever is new: it takes half of
/// the time at most. Below it (some 30,000 ids) reading on at once is cheaper than waiting.
const LONG_WINDOW: Duration = Duration::from_millis(10);
/// Two marks of the late window are at least this far apart.
const MARK_EVERY: Duration = Duration::from_millis(20);

impl Cohort {
    /// Notes what a read of the window (or of the head, where there is no window) says about how far late commits are
    /// excluded. `asked` = when that read was asked for; marks noted in it are not above what it covered.
    pub(super) fn observe(&mut self, snapshot: Snapshot, asked: Mono, margin: Duration) {
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

    pub(super) fn mark(&mut self, now: Mono) {
        let newest = self.marks.back();
        if self.high > self.low
            && newest.is_none_or(|m| m.high < self.high && now.since(m.noted) >= MARK_EVERY)
        {
            self.marks.push_back(Mark { high: self.high, noted: now, xmax: None });
        }
    }
}

impl Core {
    pub(super) fn pump_poll(&mut self, now: Mono) {
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

    pub(super) fn poll_answered(&mut self, range: Range, h: Heads, now: Mono) {
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
}
