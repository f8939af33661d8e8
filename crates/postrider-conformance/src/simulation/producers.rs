//! Business transactions: ids are taken at the insert, and rows appear at the commit. The transactions of a key follow
//! each other (they hold its row from before their insert), all others overlap as they like.

use std::collections::VecDeque;
use std::sync::Arc;

use postrider_relay::message::{Lane, Message, Payload, Position, Shard};

use super::options::{Options, chance, micros};
use super::store::{Place, Row, Store};

#[derive(Clone, Debug)]
pub(super) struct Transaction {
    pub(super) key: Option<u8>,
    inserts: usize,
    pub(super) number: Option<u64>,
    pub(super) rows: Vec<Position>,
    pause: u64,
    pub(super) commits: bool,
    /// Its number comes this long after its first id.
    late_by: Option<u64>,
}

/// What a transaction does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Begin,
    Number,
    Insert,
    End,
}

#[derive(Debug, Default)]
pub(super) struct Producers {
    pub(super) transactions: Vec<Transaction>,
    /// Who holds the row of each key, and who waits for it.
    locks: Vec<(Option<usize>, VecDeque<usize>)>,
    pub(super) open: usize,
}

impl Producers {
    /// Draws all transactions; returns when each begins.
    pub(super) fn draw(rng: &mut fastrand::Rng, o: &Options) -> (Self, Vec<u64>) {
        let mut p = Self { locks: vec![(None, VecDeque::new()); usize::from(o.keys)], ..Self::default() };
        let mut begins = Vec::new();
        let burst_at = rng.u64(0..o.faults_until);
        for _ in 0..o.transactions {
            let key = (!chance(rng, o.unkeyed)).then(|| rng.u8(0..o.keys));
            let late = chance(rng, o.late_number);
            let very_late = key.is_none() && chance(rng, o.very_late_number);
            let margin = micros(o.settings.late_margin);
            let late_by = if very_late {
                Some(margin + rng.u64(0..200_000))
            } else {
                late.then(|| rng.u64(0..margin.max(1)))
            };
            let long = chance(rng, o.long_transaction);
            p.transactions.push(Transaction {
                key,
                // Two keys share a lane only by a collision of 64 bits. With several late messages of each the lane could
                // be read past a message that no poll has seen; that is not worth a remedy.
                inserts: if key.is_some() && o.lanes_collide { 1 } else { rng.usize(1..=3) },
                number: None,
                rows: Vec::new(),
                pause: if long { rng.u64(50_000..800_000) } else { rng.u64(0..5_000) },
                commits: !chance(rng, o.rollback),
                late_by,
            });
            begins.push(if o.burst { burst_at + rng.u64(0..20_000) } else { rng.u64(0..o.faults_until) });
        }
        p.open = p.transactions.len();
        (p, begins)
    }

    /// Carries out a step of transaction `t`; returns the next one and the pause before it. `None` = it waits for a lock
    /// or has ended.
    pub(super) fn step(
        &mut self,
        t: usize,
        step: Step,
        now: u64,
        store: &mut Store,
        rng: &mut fastrand::Rng,
        o: &Options,
    ) -> Option<(Step, u64)> {
        match step {
            Step::Begin => {
                let tx = &mut self.transactions[t];
                if tx.late_by.is_none() && rng.bool() {
                    tx.number = Some(store.number());
                }
                if let Some(key) = tx.key {
                    let (holder, queue) = &mut self.locks[usize::from(key)];
                    if holder.is_some() {
                        queue.push_back(t);
                        return None;
                    }
                    *holder = Some(t);
                }
                Some((Step::Insert, rng.u64(0..1_000)))
            }
            Step::Number => {
                self.transactions[t].number = Some(store.number());
                Some(self.after_insert(t))
            }
            Step::Insert => self.insert(t, now, store, rng, o),
            Step::End => {
                let tx = &self.transactions[t];
                store.end(tx.number, &tx.rows, tx.commits);
                self.open -= 1;
                None
            }
        }
    }

    fn insert(
        &mut self,
        t: usize,
        now: u64,
        store: &mut Store,
        rng: &mut fastrand::Rng,
        o: &Options,
    ) -> Option<(Step, u64)> {
        // Where ids commit in order there is one writer at a time: all inserts and the commit are one instant.
        let at_once = if o.ordered { self.transactions[t].inserts } else { 1 };
        for _ in 0..at_once {
            let key = self.transactions[t].key.filter(|_| !chance(rng, 0.1));
            let row = new_row(store.rows.len(), key, now, store, rng, o);
            let tx = &mut self.transactions[t];
            tx.rows.push(row.position);
            tx.inserts -= 1;
            store.rows.push(row);
        }
        if o.ordered {
            return self.step(t, Step::End, now, store, rng, o);
        }
        let tx = &mut self.transactions[t];
        if tx.number.is_none() {
            if let Some(late) = tx.late_by {
                return Some((Step::Number, late));
            }
            tx.number = Some(store.number());
        }
        Some(self.after_insert(t))
    }

    fn after_insert(&self, t: usize) -> (Step, u64) {
        let tx = &self.transactions[t];
        if tx.inserts > 0 { (Step::Insert, tx.pause / 3) } else { (Step::End, tx.pause) }
    }

    /// Who goes on now that transaction `t` has ended.
    pub(super) fn unlock(&mut self, t: usize) -> Option<usize> {
        let (holder, queue) = &mut self.locks[usize::from(self.transactions[t].key?)];
        *holder = queue.pop_front();
        *holder
    }
}

fn new_row(n: usize, key: Option<u8>, now: u64, store: &Store, rng: &mut fastrand::Rng, o: &Options) -> Row {
    let position = Position(i64::try_from(n).unwrap_or_default() + 1);
    let number = match key {
        Some(k) if o.lanes_collide => i64::from(k / 2),
        Some(k) => i64::from(k),
        None => 1_000 + position.0,
    };
    let lane = if o.ordered { Lane::Key(Arc::from(number.to_string())) } else { Lane::Hash(number) };
    let shard = Shard(i16::try_from(number % i64::from(o.shards)).unwrap_or_default());
    let topic = rng.u8(0..o.topics);
    let due = chance(rng, o.delayed)
        .then(|| store.clock(now) + i64::try_from(rng.u64(1_000..600_000)).unwrap_or_default());
    let max_attempts = chance(rng, 0.1).then(|| rng.u32(1..=3));
    let message = Message {
        position,
        message_id: position.0.to_string(),
        topic: topic.to_string(),
        tag: None,
        key: key.map(|k| k.to_string()),
        aggregate_type: None,
        aggregate_id: None,
        event_type: None,
        schema_version: None,
        headers: Vec::new(),
        content_type: None,
        payload: Payload::Absent,
        max_attempts,
        trace: None,
        trace_state: None,
        created_at_us: 0,
    };
    Row {
        position,
        lane,
        shard,
        key,
        bytes: rng.u32(0..60),
        due,
        place: Place::Open,
        message: Arc::new(message),
    }
}
