//! Retries and delayed messages whose time has come.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{EarlyDue, Poll, SWEEP_REST, SWEEP_SLICE_PAUSE};
use crate::core::lanes::Stage;
use crate::core::machine::Core;
use crate::core::protocol::{CallId, Mono, Request};
use crate::message::{Head, Shard};
use crate::source::{Heads, Owned};

/// Longest pause after a slice of a sweep of the due rows, however long that took: retries may depend on it, and a stall
/// of the database for some seconds must not delay them by minutes.
const DUE_SWEEP_REST: Duration = Duration::from_secs(2);

impl Core {
    pub(super) fn pump_due(&mut self, now: Mono) {
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

    pub(in crate::core) fn due_read(
        &mut self,
        call: CallId,
        owned: &[Owned],
        limit: u32,
        h: Heads,
        now: Mono,
    ) {
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
    pub(super) fn admit_early(&mut self, poll: &Poll) -> usize {
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
}
