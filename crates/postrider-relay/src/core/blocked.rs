//! Keys that wait for an operator (`on_dead = block`). An operator's redrive shows as a due row; a cancellation shows
//! nowhere, so the dead messages that block a key are looked up again now and then.

use std::collections::BTreeSet;
use std::time::Duration;

use super::lanes::Stage;
use super::machine::Core;
use super::protocol::{CallId, Mono, Request};
use crate::message::{Position, Shard};
use crate::source::{Held, Owned};

/// Time between two looks.
const RECHECK_EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct BlockedKeys {
    /// Messages that block their key, and some that did.
    positions: BTreeSet<Position>,
    look: Option<Look>,
    at: Mono,
}

#[derive(Debug)]
struct Look {
    call: CallId,
    /// Those that blocked before the look began and have not been seen in it.
    missing: BTreeSet<Position>,
}

impl BlockedKeys {
    pub(super) fn note(&mut self, position: Position) {
        self.positions.insert(position);
    }
}

impl Core {
    pub(super) fn is_recheck(&self, call: CallId) -> bool {
        self.blocked.look.as_ref().is_some_and(|l| l.call == call)
    }

    pub(super) fn pump_blocked(&mut self, now: Mono) {
        if self.blocked.positions.is_empty() || self.blocked.look.is_some() || self.stop.is_some() {
            return;
        }
        if now < self.blocked.at {
            let at = self.blocked.at;
            return self.wake_at(at);
        }
        self.blocked.at = now.plus(RECHECK_EVERY);
        let lanes = &self.lanes;
        self.blocked.positions.retain(|p| lanes.entry(*p).is_some_and(|e| e.stage == Stage::Blocked));
        if self.blocked.positions.is_empty() {
            return;
        }
        let missing = self.blocked.positions.clone();
        let owned = self.ownership.all();
        self.look_on(owned, None, missing);
    }

    fn look_on(&mut self, owned: Vec<Owned>, after: Option<(Shard, Position)>, missing: BTreeSet<Position>) {
        let call = self.call(Request::Held { owned, after, limit: self.settings.pages.held });
        self.blocked.look = Some(Look { call, missing });
    }

    pub(super) fn rechecked(&mut self, owned: Vec<Owned>, limit: u32, rows: &[Held], now: Mono) {
        let Some(mut look) = self.blocked.look.take() else { return };
        for held in rows.iter().filter(|h| h.dead) {
            look.missing.remove(&held.position);
        }
        if let Some(last) = rows.last().filter(|_| rows.len() >= limit as usize) {
            return self.look_on(owned, Some((last.shard, last.position)), look.missing);
        }
        self.blocked.at = now.plus(RECHECK_EVERY);
        for position in look.missing {
            let held = self.lanes.lane_of(position).and_then(|l| self.lanes.get(l)).map(|l| l.shard);
            // A shard that was lost and taken again since is not what was looked at.
            let looked_at = owned.iter().any(|o| Some(o.shard) == held && self.ownership.holds(*o));
            if looked_at && self.lanes.entry(position).is_some_and(|e| e.stage == Stage::Blocked) {
                self.forget_message(position);
            }
        }
    }

    pub(super) fn recheck_failed(&mut self, now: Mono) {
        self.blocked.look = None;
        self.blocked.at = now.plus(RECHECK_EVERY);
    }
}
