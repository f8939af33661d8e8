//! A database that holds an outbox. Every call takes effect at one instant.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use postrider_relay::core::{Answer, Request};
use postrider_relay::message::{Head, Lane, Message, Origin, Position, Shard};
use postrider_relay::source::{
    Acquired, DeadReason, DueCursor, Heads, Held, Messages, Owned, Range, Renewed, SettleReport, Settled,
    Snapshot, Verdict,
};

use super::options::{Mutant, Options, micros};

/// Its clock when virtual time begins.
const EPOCH: i64 = 1_000_000_000_000;

/// Where a message is: in one place at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Its transaction is open.
    Open,
    /// Its transaction was rolled back: there never was such a message.
    RolledBack,
    Queue,
    Waiting {
        due: i64,
        attempts: u32,
        tries: u32,
        holds: bool,
    },
    Dead {
        tries: u32,
        holds: bool,
    },
    Sent,
    Cancelled,
}

impl Place {
    pub(super) fn pending(self) -> bool {
        matches!(self, Self::Queue | Self::Waiting { .. })
    }

    pub(super) fn committed(self) -> bool {
        !matches!(self, Self::Open | Self::RolledBack)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) position: Position,
    pub(super) lane: Lane,
    pub(super) shard: Shard,
    pub(super) key: Option<u8>,
    pub(super) bytes: u32,
    /// When it is due, for a delayed message.
    pub(super) due: Option<i64>,
    pub(super) place: Place,
    pub(super) message: Arc<Message>,
}

/// What a call has changed, for those who check it.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Sent { position: Position, evidence: Option<String> },
    Retried { position: Position, before: u32, attempts: u32 },
    Died { position: Position, reason: DeadReason, attempts: u32, holds: bool },
    Taken { unclean: bool, from_itself: bool },
    GivenBack { owned: Owned },
    Fenced,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShardRow {
    pub(super) owner: Option<u64>,
    pub(super) token: i64,
}

#[derive(Debug)]
pub(super) struct Store {
    mutant: Option<Mutant>,
    ordered: bool,
    lease: i64,
    pub(super) rows: Vec<Row>,
    pub(super) shards: Vec<ShardRow>,
    /// When the row of a relay expires.
    relays: BTreeMap<u64, i64>,
    /// Transactions that have a number and have not ended.
    running: BTreeSet<u64>,
    next_number: u64,
    last_ended: u64,
    /// Its clock runs ahead of virtual time by this much.
    pub(super) offset: i64,
    next_token: i64,
    /// Committed messages that are neither sent nor dead nor cancelled.
    pub(super) pending: usize,
}

impl Store {
    pub(super) fn new(o: &Options) -> Self {
        Self {
            mutant: o.mutant,
            ordered: o.ordered,
            lease: i64::try_from(micros(o.settings.lease)).unwrap_or(i64::MAX),
            rows: Vec::new(),
            shards: vec![ShardRow::default(); usize::try_from(o.shards).unwrap_or(1)],
            relays: BTreeMap::new(),
            running: BTreeSet::new(),
            next_number: 100,
            last_ended: 99,
            offset: 0,
            next_token: 1,
            pending: 0,
        }
    }

    pub(super) fn clock(&self, now: u64) -> i64 {
        EPOCH + i64::try_from(now).unwrap_or(i64::MAX) + self.offset
    }

    pub(super) fn row(&self, position: Position) -> &Row {
        &self.rows[index(position)]
    }

    pub(super) fn shard(&self, shard: Shard) -> ShardRow {
        self.shards[usize::try_from(shard.0).unwrap_or_default()]
    }

    pub(super) fn set(&mut self, position: Position, place: Place) {
        let row = &mut self.rows[index(position)];
        self.pending = self.pending + usize::from(place.pending()) - usize::from(row.place.pending());
        row.place = place;
    }

    // ---- transactions of producers -----------------------------------------------------------------------------

    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.running.insert(self.next_number - 1);
        self.next_number - 1
    }

    pub(super) fn end(&mut self, number: Option<u64>, rows: &[Position], commit: bool) {
        if let Some(n) = number {
            self.running.remove(&n);
            self.last_ended = self.last_ended.max(n);
        }
        for &p in rows {
            let place = match self.row(p).due {
                _ if !commit => Place::RolledBack,
                Some(due) => Place::Waiting { due, attempts: 0, tries: 0, holds: false },
                None => Place::Queue,
            };
            self.set(p, place);
        }
    }

    fn snapshot(&self) -> Snapshot {
        if self.ordered {
            return Snapshot::ORDERED;
        }
        let xmax =
            if self.mutant == Some(Mutant::EndedXmax) { self.last_ended + 1 } else { self.next_number };
        Snapshot { xmin: self.running.first().copied().unwrap_or(xmax).min(xmax), xmax }
    }

    // ---- calls of relays ---------------------------------------------------------------------------------------

    pub(super) fn effect(
        &mut self,
        relay: u64,
        request: &Request,
        now: u64,
        changes: &mut Vec<Change>,
    ) -> Answer {
        match request {
            Request::Acquire { have } => Answer::Acquired(self.acquire(relay, have, now, changes)),
            Request::Held { owned, after, limit } => Answer::Held(self.held(owned, *after, *limit)),
            Request::Renew { owned } => {
                self.relays.insert(relay, self.clock(now) + self.lease);
                Answer::Renewed(Renewed { mine: self.current(owned), live_relays: self.live(now) })
            }
            Request::Release { owned } => {
                for o in owned {
                    if self.shard(o.shard).token == o.token {
                        self.give_back(*o, changes);
                    }
                }
                Answer::Done
            }
            Request::Leave => {
                self.relays.remove(&relay);
                for i in 0..self.shards.len() {
                    if self.shards[i].owner == Some(relay) {
                        let shard = Shard(i16::try_from(i).unwrap_or_default());
                        self.give_back(Owned { shard, token: self.shards[i].token }, changes);
                    }
                }
                Answer::Done
            }
            Request::Heads { owned, range } => Answer::Heads(self.heads(owned, *range, None)),
            Request::Lane { owned, lane, range } => Answer::Heads(self.heads(&[*owned], *range, Some(lane))),
            Request::Due { owned, after, limit } => Answer::Heads(self.due(owned, *after, *limit, now)),
            Request::Messages { owned, positions } => {
                let found = positions.iter().map(|p| (*self.row(*p).message).clone()).collect();
                Answer::Messages(Messages { found, mine: self.readable(owned) })
            }
            Request::Settle { owned, settled } => Answer::Settled(self.settle(owned, settled, now, changes)),
        }
    }

    fn current(&self, owned: &[Owned]) -> Vec<Shard> {
        owned.iter().filter(|o| self.shard(o.shard).token == o.token).map(|o| o.shard).collect()
    }

    fn readable(&self, owned: &[Owned]) -> Vec<Shard> {
        if self.mutant == Some(Mutant::ReadsUnfenced) {
            return owned.iter().map(|o| o.shard).collect();
        }
        self.current(owned)
    }

    fn live(&self, now: u64) -> u32 {
        let clock = self.clock(now);
        u32::try_from(self.relays.values().filter(|e| **e > clock).count()).unwrap_or(u32::MAX)
    }

    fn acquire(&mut self, relay: u64, have: &[Owned], now: u64, changes: &mut Vec<Change>) -> Acquired {
        let clock = self.clock(now);
        self.relays.insert(relay, clock + self.lease);
        let live_relays = self.live(now);
        let shards = u32::try_from(self.shards.len()).unwrap_or(u32::MAX);
        let share = shards.div_ceil(live_relays.max(1)) as usize;
        let mut a = Acquired { live_relays, shards, ..Acquired::default() };
        // Those of lost answers first: they count for the share, and are taken even above it.
        let mut order: Vec<(bool, usize)> = (0..self.shards.len())
            .map(|i| {
                let (row, shard) = (self.shards[i], Shard(i16::try_from(i).unwrap_or_default()));
                let known = have.iter().any(|o| o.shard == shard && o.token == row.token);
                (row.owner != Some(relay) || known, i)
            })
            .collect();
        order.sort_unstable();
        for (others, i) in order {
            let from_itself = !others;
            let shard = Shard(i16::try_from(i).unwrap_or_default());
            let row = self.shards[i];
            let expired = row.owner.is_some_and(|o| self.relays.get(&o).is_none_or(|e| *e <= clock));
            let free = (row.owner.is_none() || expired) && have.len() + a.owned.len() < share;
            if !free && !from_itself {
                continue;
            }
            self.next_token += 1;
            self.shards[i] = ShardRow { owner: Some(relay), token: self.next_token };
            a.owned.push(Owned { shard, token: self.next_token });
            if row.owner.is_some() {
                a.unclean.push(shard);
            }
            changes.push(Change::Taken { unclean: expired && !from_itself, from_itself });
        }
        a
    }

    fn give_back(&mut self, owned: Owned, changes: &mut Vec<Change>) {
        self.shards[usize::try_from(owned.shard.0).unwrap_or_default()] = ShardRow::default();
        changes.push(Change::GivenBack { owned });
    }

    fn held(&self, owned: &[Owned], after: Option<(Shard, Position)>, limit: u32) -> Vec<Held> {
        let mine = self.readable(owned);
        let mut held: Vec<Held> = self
            .rows
            .iter()
            .filter(|r| mine.contains(&r.shard) && after.is_none_or(|a| (r.shard, r.position) > a))
            .filter_map(|r| {
                let dead = match r.place {
                    Place::Waiting { holds: true, .. } => false,
                    Place::Dead { holds: true, .. } => true,
                    _ => return None,
                };
                Some(Held { position: r.position, lane: r.lane.clone(), shard: r.shard, dead })
            })
            .collect();
        held.sort_by_key(|h| (h.shard, h.position));
        held.truncate(limit as usize);
        held
    }

    fn heads(&self, owned: &[Owned], range: Range, lane: Option<&Lane>) -> Heads {
        let mine = self.readable(owned);
        let from = usize::try_from(range.after.0.max(0)).unwrap_or_default().min(self.rows.len());
        let to = range.up_to.map_or(self.rows.len(), |p| {
            usize::try_from(p.0.max(0)).unwrap_or_default().min(self.rows.len())
        });
        let rows = self.rows[from..to.max(from)]
            .iter()
            .filter(|r| {
                r.place == Place::Queue && mine.contains(&r.shard) && lane.is_none_or(|l| r.lane == *l)
            })
            .take(range.limit as usize)
            .map(|r| head(r, Origin::Queue))
            .collect();
        Heads { rows, mine, snapshot: self.snapshot(), next: None }
    }

    fn due(&self, owned: &[Owned], after: DueCursor, limit: u32, now: u64) -> Heads {
        let mine = self.readable(owned);
        let clock = self.clock(now);
        let mut found: Vec<(DueCursor, Head)> = Vec::new();
        for r in self.rows.iter().filter(|r| mine.contains(&r.shard)) {
            let Place::Waiting { due, attempts, tries, .. } = r.place else { continue };
            let at = DueCursor { due_at_us: due, position: r.position };
            if due <= clock && at > after {
                found.push((at, head(r, Origin::Waiting { attempts, tries })));
            }
        }
        found.sort_by_key(|(at, _)| *at);
        found.truncate(limit as usize);
        let next = found.last().map(|(at, _)| *at);
        let rows = found.into_iter().map(|(_, h)| h).collect();
        Heads { rows, mine, snapshot: self.snapshot(), next }
    }

    fn settle(
        &mut self,
        owned: &[Owned],
        settled: &[Settled],
        now: u64,
        changes: &mut Vec<Change>,
    ) -> SettleReport {
        let unfenced = self.mutant == Some(Mutant::SettleUnfenced);
        let mine = if unfenced { owned.iter().map(|o| o.shard).collect() } else { self.current(owned) };
        let mut done = Vec::new();
        for s in settled {
            if !mine.contains(&s.shard) {
                changes.push(Change::Fenced);
            } else if self.record(s, now, changes) {
                done.push(s.position);
            }
        }
        SettleReport { settled: done, mine }
    }

    fn record(&mut self, s: &Settled, now: u64, changes: &mut Vec<Change>) -> bool {
        let row = self.row(s.position);
        let before = match (s.origin, row.place) {
            (Origin::Queue, Place::Queue) => 0,
            (Origin::Waiting { tries, .. }, Place::Waiting { tries: t, attempts, .. })
                if tries == t || self.mutant == Some(Mutant::TriesUnmatched) =>
            {
                attempts
            }
            _ => return false,
        };
        let position = s.position;
        match &s.verdict {
            Verdict::Sent { evidence, .. } => {
                self.set(position, Place::Sent);
                changes.push(Change::Sent { position, evidence: evidence.clone() });
            }
            Verdict::Retry { backoff, attempts, tries, holds_key, .. } => {
                let due = self.clock(now) + i64::try_from(micros(*backoff)).unwrap_or(i64::MAX);
                let (attempts, tries, holds) = (*attempts, *tries, *holds_key);
                self.set(position, Place::Waiting { due, attempts, tries, holds });
                changes.push(Change::Retried { position, before, attempts });
            }
            Verdict::Dead { reason, attempts, tries, holds_key, .. } => {
                self.set(position, Place::Dead { tries: *tries, holds: *holds_key });
                let (reason, attempts, holds) = (*reason, *attempts, *holds_key);
                changes.push(Change::Died { position, reason, attempts, holds });
            }
        }
        true
    }
}

fn index(position: Position) -> usize {
    usize::try_from(position.0 - 1).unwrap_or(usize::MAX)
}

fn head(r: &Row, origin: Origin) -> Head {
    Head { position: r.position, lane: r.lane.clone(), shard: r.shard, bytes: r.bytes, origin }
}
