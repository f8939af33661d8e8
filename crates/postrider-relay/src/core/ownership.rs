//! Which shards are ours, and until when we may send.

use std::collections::BTreeMap;

use super::machine::{CallBackoff, Core};
use super::protocol::{Mono, Notice, Request};
use crate::message::{Position, Shard};
use crate::source::{Acquired, Held, Owned, Renewed};

/// How often a relay that is not working its full share looks for free shards. A takeover must not take longer than this
/// after the database calls a lease expired.
const LOOK_EVERY: std::time::Duration = std::time::Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Ownership {
    shards: BTreeMap<Shard, OwnedShard>,
    total: u32,
    live_relays: u32,
    /// Nothing is sent after this time, less the time a publish may take.
    deadline: Mono,
    expired_told: bool,
    renew_at: Mono,
    renewing_since: Option<Mono>,
    look_at: Mono,
    looking_since: Option<Mono>,
    backoff: CallBackoff,
    held_backoff: CallBackoff,
    held_next: Vec<HeldLoad>,
}

#[derive(Clone, Copy, Debug)]
struct OwnedShard {
    token: i64,
    stage: ShardStage,
    /// Messages published or decided and not settled.
    busy: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShardStage {
    /// Its held keys are being loaded.
    Loading,
    Active,
    /// To be given back when nothing of it is in flight.
    Draining,
    Releasing,
}

/// Held keys still to be loaded for shards acquired together, or to be looked at again (`recheck`).
#[derive(Clone, Debug)]
struct HeldLoad {
    owned: Vec<Owned>,
    after: Option<(Shard, Position)>,
    at: Mono,
}

impl Ownership {
    pub(super) fn active(&self) -> usize {
        self.shards.values().filter(|s| s.stage == ShardStage::Active).count()
    }

    pub(super) fn token(&self, shard: Shard) -> Option<i64> {
        self.shards.get(&shard).map(|s| s.token)
    }

    /// Whether `owned` is what we own now, and not an earlier ownership of the same shard.
    pub(super) fn holds(&self, owned: Owned) -> bool {
        self.token(owned.shard) == Some(owned.token)
    }

    /// Whether new work of the shard may be taken.
    pub(super) fn works(&self, shard: Shard) -> bool {
        self.shards.get(&shard).is_some_and(|s| s.stage == ShardStage::Active)
    }

    pub(super) fn owned(&self, shards: impl IntoIterator<Item = Shard>) -> Vec<Owned> {
        shards.into_iter().filter_map(|shard| Some(Owned { shard, token: self.token(shard)? })).collect()
    }

    /// All shards that are not being given back.
    pub(super) fn all(&self) -> Vec<Owned> {
        let kept = self.shards.iter().filter(|(_, s)| s.stage != ShardStage::Releasing);
        kept.map(|(shard, s)| Owned { shard: *shard, token: s.token }).collect()
    }

    pub(super) fn deadline(&self) -> Mono {
        self.deadline
    }

    pub(super) fn busy(&mut self, shard: Shard, delta: isize) {
        if let Some(s) = self.shards.get_mut(&shard) {
            s.busy = s.busy.saturating_add_signed(delta);
        }
    }

    pub(super) fn forget(&mut self, shard: Shard) -> bool {
        self.shards.remove(&shard).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.is_empty()
    }

    fn share(&self) -> usize {
        self.total.div_ceil(self.live_relays.max(1)) as usize
    }
}

impl Core {
    pub(super) fn acquired(&mut self, a: &Acquired, now: Mono) {
        let o = &mut self.ownership;
        let since = o.looking_since.take().unwrap_or(now);
        o.backoff.worked();
        o.total = a.shards;
        o.live_relays = a.live_relays;
        if o.renew_at == Mono::default() {
            // The first acquisition writes the relay's row: the lease counts from before it was asked for.
            o.deadline = since.plus(self.settings.lease.saturating_sub(self.settings.margin));
            o.renew_at = since.plus(self.settings.renew_every);
        }
        if a.owned.is_empty() {
            return;
        }
        for owned in &a.owned {
            // Taken again after a loss that we have not noticed yet: what we knew is from the earlier ownership.
            self.lose(owned.shard);
            let shard = OwnedShard { token: owned.token, stage: ShardStage::Loading, busy: 0 };
            self.ownership.shards.insert(owned.shard, shard);
        }
        self.notice(Notice::Acquired { shards: a.owned.len(), unclean: a.unclean.len() });
        if self.settings.protections.held_keys {
            self.ownership.held_next.push(HeldLoad { owned: a.owned.clone(), after: None, at: now });
        } else {
            self.activate(&a.owned, now);
        }
    }

    pub(super) fn held_loaded(&mut self, owned: &[Owned], limit: u32, rows: &[Held], now: Mono) {
        self.ownership.held_backoff.worked();
        for held in rows {
            // Not if the shard was lost and taken again since: what held a key then may be settled now.
            let ours = owned.iter().any(|o| o.shard == held.shard && self.ownership.holds(*o));
            if ours && self.ownership.shards.get(&held.shard).is_some_and(|s| s.stage == ShardStage::Loading)
            {
                self.lanes.hold(&held.lane, held.shard, held.position, held.dead);
                if held.dead {
                    self.blocked.note(held.position);
                }
                self.review(&held.lane);
            }
        }
        match rows.last() {
            Some(last) if rows.len() >= limit as usize => {
                let after = Some((last.shard, last.position));
                self.ownership.held_next.push(HeldLoad { owned: owned.to_vec(), after, at: now });
            }
            _ => self.activate(owned, now),
        }
    }

    /// The shards are worked from now on, beginning with a read from position zero.
    fn activate(&mut self, owned: &[Owned], _now: Mono) {
        let mut shards = Vec::new();
        for o in owned {
            if let Some(s) = self.ownership.shards.get_mut(&o.shard)
                && s.token == o.token
                && s.stage == ShardStage::Loading
            {
                s.stage = ShardStage::Active;
                shards.push(o.shard);
            }
        }
        self.reading.add_cohort(shards);
    }

    pub(super) fn renewed(&mut self, asked: &[Owned], r: &Renewed, now: Mono) {
        let since = self.ownership.renewing_since.take().unwrap_or(now);
        let o = &mut self.ownership;
        o.backoff.worked();
        o.live_relays = r.live_relays;
        o.deadline = since.plus(self.settings.lease.saturating_sub(self.settings.margin));
        o.renew_at = since.plus(self.settings.renew_every);
        o.expired_told = false;
        self.lose_missing(asked, &r.mine);
        self.hand_over_surplus();
    }

    /// Loses the shards of `asked` that are not in `mine`, unless we own them anew since.
    pub(super) fn lose_missing(&mut self, asked: &[Owned], mine: &[Shard]) {
        for owned in asked {
            if self.ownership.holds(*owned) && !mine.contains(&owned.shard) {
                self.lose(owned.shard);
            }
        }
    }

    fn hand_over_surplus(&mut self) {
        let o = &mut self.ownership;
        if self.stop.is_some() || o.total == 0 {
            return;
        }
        let share = o.share();
        let kept =
            o.shards.values().filter(|s| matches!(s.stage, ShardStage::Active | ShardStage::Loading)).count();
        let surplus = kept.saturating_sub(share);
        let shards: Vec<Shard> = o
            .shards
            .iter_mut()
            .rev()
            .filter(|(_, s)| s.stage == ShardStage::Active)
            .take(surplus)
            .map(|(shard, s)| {
                s.stage = ShardStage::Draining;
                *shard
            })
            .collect();
        for shard in shards {
            self.set_aside(shard);
        }
    }

    pub(super) fn ownership_failed(&mut self, request: &Request, now: Mono) {
        let o = &mut self.ownership;
        match request {
            Request::Acquire { .. } => o.looking_since = None,
            Request::Renew { .. } => o.renewing_since = None,
            Request::Held { owned, after, .. } => {
                o.held_backoff.failed(now);
                let at = o.held_backoff.until();
                o.held_next.push(HeldLoad { owned: owned.clone(), after: *after, at });
                return;
            }
            _ => {}
        }
        o.backoff.failed(now);
    }

    pub(super) fn released(&mut self, owned: &[Owned]) {
        for o in owned {
            if self.ownership.holds(*o) {
                self.ownership.forget(o.shard);
            }
        }
        self.notice(Notice::Released { shards: owned.len() });
    }

    /// Not certain whether they were released: the next renewal tells; until then they are not worked.
    pub(super) fn release_failed(&mut self, owned: &[Owned], now: Mono) {
        self.ownership.backoff.failed(now);
        for o in owned {
            if self.ownership.holds(*o)
                && let Some(s) = self.ownership.shards.get_mut(&o.shard)
            {
                s.stage = ShardStage::Draining;
            }
        }
    }

    /// All shards are to be given back.
    pub(super) fn drain_all(&mut self) {
        let shards: Vec<Shard> = self.ownership.shards.keys().copied().collect();
        for s in self.ownership.shards.values_mut() {
            if s.stage != ShardStage::Releasing {
                s.stage = ShardStage::Draining;
            }
        }
        for shard in shards {
            self.set_aside(shard);
        }
    }

    /// While stopping: shards that were acquired meanwhile are given back too.
    pub(super) fn drain_new(&mut self) {
        for s in self.ownership.shards.values_mut() {
            if matches!(s.stage, ShardStage::Loading | ShardStage::Active) {
                s.stage = ShardStage::Draining;
            }
        }
    }

    /// Forgets what is in memory of a shard that is being given back, except what is in flight or being recorded.
    fn set_aside(&mut self, shard: Shard) {
        self.reading.leave(shard);
        for p in self.lanes.positions_of(shard) {
            self.to_load.remove(&p);
            self.unload(p);
        }
    }

    pub(super) fn pump_ownership(&mut self, now: Mono) {
        self.tell_expiry(now);
        let ready = self.ownership.backoff.until();
        if now < ready {
            self.wake_at(ready);
            return;
        }
        self.release_drained();
        self.pump_renew(now);
        if self.stop.is_none() {
            self.pump_look(now);
            self.pump_held(now);
        }
    }

    fn tell_expiry(&mut self, now: Mono) {
        let o = &mut self.ownership;
        if !o.shards.is_empty() && now >= o.deadline && !o.expired_told {
            o.expired_told = true;
            self.notice(Notice::LeaseExpired);
        }
    }

    fn pump_renew(&mut self, now: Mono) {
        let o = &mut self.ownership;
        if o.renew_at == Mono::default() || o.renewing_since.is_some() {
            return;
        }
        if now < o.renew_at {
            let at = o.renew_at;
            self.wake_at(at);
            return;
        }
        o.renewing_since = Some(now);
        let owned = o.all();
        self.call(Request::Renew { owned });
    }

    fn pump_look(&mut self, now: Mono) {
        let every = LOOK_EVERY.min(self.settings.renew_every);
        let o = &mut self.ownership;
        if o.looking_since.is_some() {
            return;
        }
        if now < o.look_at {
            let at = o.look_at;
            self.wake_at(at);
            return;
        }
        o.look_at = now.plus(every);
        o.looking_since = Some(now);
        let have = o.shards.iter().map(|(shard, s)| Owned { shard: *shard, token: s.token }).collect();
        let at = o.look_at;
        self.wake_at(at);
        self.call(Request::Acquire { have });
    }

    fn pump_held(&mut self, now: Mono) {
        let due: Vec<HeldLoad>;
        (due, self.ownership.held_next) =
            std::mem::take(&mut self.ownership.held_next).into_iter().partition(|h| h.at <= now);
        for h in due {
            let owned: Vec<Owned> = h.owned.into_iter().filter(|o| self.ownership.holds(*o)).collect();
            if !owned.is_empty() {
                self.call(Request::Held { owned, after: h.after, limit: self.settings.pages.held });
            }
        }
        if let Some(at) = self.ownership.held_next.iter().map(|h| h.at).min() {
            self.wake_at(at);
        }
    }

    fn release_drained(&mut self) {
        let mut owned = Vec::new();
        for (shard, s) in &mut self.ownership.shards {
            if s.stage == ShardStage::Draining && s.busy == 0 {
                s.stage = ShardStage::Releasing;
                owned.push(Owned { shard: *shard, token: s.token });
            }
        }
        if owned.is_empty() {
            return;
        }
        for o in &owned {
            self.drop_memory(o.shard);
        }
        self.call(Request::Release { owned });
    }
}
