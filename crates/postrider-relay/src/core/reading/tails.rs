//! Reads on where lanes have left off: few lanes one by one, many by one pass over the queue.

use std::collections::BTreeSet;

use super::Rescan;
use crate::core::machine::Core;
use crate::core::protocol::{CallId, Mono, Request};
use crate::message::{Head, Lane, Position, Shard};
use crate::source::{Heads, Owned, Range};

impl Core {
    /// Reads on where lanes have left off: few lanes one by one, many by one pass over the queue.
    pub(super) fn pump_lanes(&mut self, now: Mono) {
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

    pub(in crate::core) fn lane_read(
        &mut self,
        call: CallId,
        owned: Owned,
        lane: &Lane,
        range: Range,
        h: &Heads,
    ) {
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

    pub(super) fn rescan_answered(&mut self, call: CallId, owned: &[Owned], range: Range, h: &Heads) {
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
}
