//! The unbounded sweep: finds what no window can know, for a bounded share of the time.

use super::{SWEEP_REST, SWEEP_SLICE_PAUSE};
use crate::core::machine::Core;
use crate::core::protocol::{CallId, Mono, Notice, Request};
use crate::message::{Position, Shard};
use crate::source::{Heads, Owned, Range};

impl Core {
    pub(super) fn pump_sweep(&mut self, now: Mono) {
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

    pub(super) fn sweep_answered(
        &mut self,
        call: CallId,
        owned: &[Owned],
        range: Range,
        h: &Heads,
        now: Mono,
    ) {
        let works = self.works_of(owned);
        let mut found = 0;
        for head in &h.rows {
            let new = works.contains(&head.shard) && self.admit(call, head);
            found += usize::from(new && !self.reading.orphans.contains(&head.position));
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
}
