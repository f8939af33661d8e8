//! What really happened to each message, kept apart from what the store says, and the promises checked against both.

use std::collections::BTreeSet;

use postrider_relay::core::Ticket;
use postrider_relay::message::Position;
use postrider_relay::source::{DeadReason, Owned};

use super::store::{Place, Row, Store};

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Violation {
    /// Which promise, in a word or two.
    pub promise: &'static str,
    /// What was seen.
    pub text: String,
}

pub(super) type Verdict = Result<(), Violation>;

pub(super) fn broken(promise: &'static str, text: String) -> Verdict {
    Err(Violation { promise, text })
}

/// What the relay that sent it was told about a publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Nothing,
    Accepted,
    Unknown,
    Refused,
    NotSent,
}

#[derive(Clone, Debug)]
pub(super) struct Publish {
    pub(super) relay: u64,
    pub(super) ticket: Ticket,
    token: i64,
    accepted: bool,
    told: Told,
    /// How often the message had been redriven then.
    round: u32,
}

/// One message.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub(super) copies: u32,
    /// Refusals of this message that may be tried again, since the last redrive.
    soft: u32,
    /// Refusals of this message for good.
    hard: u32,
    pub(super) publishes: Vec<Publish>,
    pub(super) redrives: u32,
    was_dead: bool,
}

#[derive(Debug)]
pub(super) struct Ledger {
    accounts: Vec<Account>,
    /// Relays that have crashed or stopped.
    gone: BTreeSet<u64>,
    /// The clock of the database jumps in this schedule: leases may end early, two relays may send at a time.
    pub(super) clock_steps: bool,
}

impl Ledger {
    pub(super) fn new(clock_steps: bool) -> Self {
        Self { accounts: Vec::new(), gone: BTreeSet::new(), clock_steps }
    }

    pub(super) fn of(&mut self, p: Position) -> &mut Account {
        let i = usize::try_from(p.0 - 1).unwrap_or_default();
        if self.accounts.len() <= i {
            self.accounts.resize(i + 1, Account::default());
        }
        &mut self.accounts[i]
    }

    fn get(&self, p: Position) -> Option<&Account> {
        self.accounts.get(usize::try_from(p.0 - 1).unwrap_or(usize::MAX))
    }

    pub(super) fn relay_gone(&mut self, relay: u64) {
        self.gone.insert(relay);
    }

    /// A message is handed to the sink.
    pub(super) fn handed(
        &mut self,
        store: &Store,
        p: Position,
        (relay, ticket, token): (u64, Ticket, i64),
        now: u64,
    ) -> Verdict {
        let row = store.row(p);
        if !row.place.committed() {
            return broken(
                "nothing invented",
                format!("{p} was published while its row was {:?}", row.place),
            );
        }
        if !self.clock_steps {
            let owner = store.shard(row.shard).owner;
            if owner != Some(relay) {
                let text =
                    format!("relay {relay} published {p} of shard {}, owned by {owner:?}", row.shard.0);
                return broken("sends only while it owns", text);
            }
            match row.place {
                Place::Waiting { due, .. } if due > store.clock(now) => {
                    return broken("not before it is due", format!("{p} was published, due at {due}"));
                }
                Place::Queue | Place::Waiting { .. } => {}
                place => return broken("states", format!("{p} was published while {place:?}")),
            }
        }
        // Who lost its shard to a step of the clock does not know it yet: the takeover is the witness.
        if store.shard(row.shard).token == token {
            self.repeated(store, row)?;
        }
        self.in_turn(store, row, token)?;
        let a = self.of(p);
        let round = a.redrives;
        a.publishes.push(Publish { relay, ticket, token, accepted: false, told: Told::Nothing, round });
        Ok(())
    }

    /// A further publish needs a witness: the one before ended in doubt, or its relay lost the right to it.
    fn repeated(&self, store: &Store, row: &Row) -> Verdict {
        let Some(a) = self.get(row.position) else { return Ok(()) };
        for b in a.publishes.iter().filter(|b| matches!(b.told, Told::Nothing | Told::Accepted)) {
            let witnessed = self.gone.contains(&b.relay)
                || store.shard(row.shard).token != b.token
                || b.round != a.redrives;
            if !witnessed {
                let text = format!("{} was published again after {b:?}", row.position);
                return broken("no duplicate without a witness", text);
            }
        }
        Ok(())
    }

    /// Whatever stands before it in its key is decided, or accepted under the same ownership.
    fn in_turn(&self, store: &Store, row: &Row, token: i64) -> Verdict {
        if row.key.is_none() || self.get(row.position).is_some_and(|a| a.redrives > 0) {
            return Ok(());
        }
        for before in store.rows.iter().take_while(|r| r.position < row.position) {
            if before.key != row.key {
                continue;
            }
            let a = self.get(before.position);
            let redriven = a.is_some_and(|a| a.redrives > 0);
            let accepted = a.is_some_and(|a| {
                a.publishes
                    .iter()
                    .any(|b| b.token == token && b.told == Told::Accepted && b.round == a.redrives)
            });
            let fine = match before.place {
                Place::Open => false,
                Place::RolledBack | Place::Sent | Place::Cancelled => true,
                Place::Dead { holds, .. } => !holds || redriven || a.is_some_and(|a| a.copies > 0),
                Place::Queue => accepted,
                Place::Waiting { tries, .. } => accepted || redriven || (before.due.is_some() && tries == 0),
            };
            if !fine {
                let text = format!(
                    "{} was published while {} of the same key was {:?}",
                    row.position, before.position, before.place
                );
                return broken("one at a time per key", text);
            }
        }
        Ok(())
    }

    /// The sink accepts a message.
    pub(super) fn accepted(&mut self, store: &Store, p: Position, relay: u64, ticket: Ticket) -> Verdict {
        let a = self.of(p);
        a.copies += 1;
        let (first, redriven) = (a.copies == 1, a.redrives > 0);
        if let Some(b) = a.publishes.iter_mut().find(|b| b.relay == relay && b.ticket == ticket) {
            b.accepted = true;
        }
        let row = store.row(p);
        if !first || redriven || row.key.is_none() {
            return Ok(());
        }
        for before in store.rows.iter().take_while(|r| r.position < p).filter(|r| r.key == row.key) {
            let a = self.get(before.position);
            let fine = a.is_some_and(|a| a.copies > 0 || a.was_dead)
                || before.due.is_some()
                || matches!(before.place, Place::RolledBack);
            if !fine {
                let text = format!("{p} arrived before {} ({:?})", before.position, before.place);
                return broken("first arrivals in order", text);
            }
        }
        Ok(())
    }

    pub(super) fn refused(&mut self, p: Position, for_good: bool) {
        let a = self.of(p);
        if for_good {
            a.hard += 1;
        } else {
            a.soft += 1;
        }
    }

    /// The relay learns what became of a publish.
    pub(super) fn told(&mut self, p: Position, relay: u64, ticket: Ticket, told: Told) {
        if let Some(b) = self.of(p).publishes.iter_mut().find(|b| b.relay == relay && b.ticket == ticket) {
            b.told = told;
        }
    }

    /// A receipt is written.
    pub(super) fn sent(&mut self, p: Position, relay: u64, evidence: Option<&str>) -> Verdict {
        let known = self
            .of(p)
            .publishes
            .iter()
            .any(|b| b.relay == relay && b.accepted && evidence == Some(b.ticket.0.to_string().as_str()));
        if known {
            return Ok(());
        }
        broken("no receipt without an acceptance", format!("relay {relay} settled {p} as sent, {evidence:?}"))
    }

    pub(super) fn retried(&mut self, p: Position, before: u32, attempts: u32) -> Verdict {
        let soft = self.of(p).soft;
        if attempts > soft {
            let text = format!("{p} has {attempts} attempts, and the sink refused it {soft} times");
            return broken("only refusals of the message count", text);
        }
        if attempts <= before {
            return broken("attempts grow", format!("{p} went from {before} attempts to {attempts}"));
        }
        Ok(())
    }

    pub(super) fn died(&mut self, p: Position, reason: DeadReason, attempts: u32) -> Verdict {
        let a = self.of(p);
        a.was_dead = true;
        let proof = match reason {
            DeadReason::Permanent => a.hard >= 2,
            DeadReason::Attempts => a.soft >= attempts,
            DeadReason::Quarantined => false,
        };
        if proof {
            return Ok(());
        }
        let text = format!("{p} died of {reason:?} after {} soft and {} hard refusals", a.soft, a.hard);
        broken("dead only with proof", text)
    }

    pub(super) fn redriven(&mut self, p: Position) {
        let a = self.of(p);
        a.redrives += 1;
        a.soft = 0;
        a.hard = 0;
    }

    /// A relay gives a shard back: nothing of it may be undecided.
    pub(super) fn given_back(&self, store: &Store, owned: Owned) -> Verdict {
        for row in store.rows.iter().filter(|r| r.shard == owned.shard && r.place.pending()) {
            let Some(a) = self.get(row.position) else { continue };
            let open = a.publishes.iter().find(|b| {
                b.token == owned.token
                    && b.round == a.redrives
                    && matches!(b.told, Told::Nothing | Told::Accepted)
            });
            if let Some(b) = open {
                let text = format!("shard {} was given back while {}: {b:?}", owned.shard.0, row.position);
                return broken("a graceful stop leaves nothing undecided", text);
            }
        }
        Ok(())
    }

    /// At the end: everything committed has arrived or is dead or cancelled.
    pub(super) fn complete(&self, store: &Store) -> Verdict {
        for row in &store.rows {
            let copies = self.get(row.position).map_or(0, |a| a.copies);
            let fine = match row.place {
                Place::Sent => copies > 0,
                Place::RolledBack => copies == 0,
                Place::Dead { .. } | Place::Cancelled => true,
                Place::Open | Place::Queue | Place::Waiting { .. } => false,
            };
            if !fine {
                let text = format!("{} ended as {:?} with {copies} copies", row.position, row.place);
                return broken("everything committed arrives", text);
            }
        }
        Ok(())
    }
}
