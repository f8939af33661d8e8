//! What is recorded, and which lanes go on after it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::lanes::Stage;
use super::machine::{CallBackoff, Core};
use super::protocol::{Mono, Notice, Request, SinkId};
use crate::message::{Position, Shard};
use crate::source::{Owned, SettleReport, Settled, Verdict};

/// While other messages are in flight an outcome waits this long for company: one statement then settles many.
const LINGER: Duration = Duration::from_millis(25);

#[derive(Debug, Default)]
pub(super) struct Settling {
    queue: VecDeque<Item>,
    /// Accepted messages that have left their lane and whose receipt is not committed yet.
    sent: BTreeMap<Position, (Shard, SinkId)>,
    /// Messages whose last settle ended without an answer: it may have been committed.
    ambiguous: BTreeMap<Position, Shard>,
    calling: bool,
    backoff: CallBackoff,
    pub(super) last: Option<Mono>,
}

#[derive(Debug)]
struct Item {
    settled: Settled,
    since: Mono,
}

impl Settling {
    pub(super) fn push(&mut self, settled: Settled, sink: SinkId, now: Mono) {
        if is_sent(&settled) {
            self.sent.insert(settled.position, (settled.shard, sink));
        }
        self.queue.push_back(Item { settled, since: now });
    }

    /// Whether the message is decided and has left its lane.
    pub(super) fn knows(&self, position: Position) -> bool {
        self.sent.contains_key(&position)
    }

    pub(super) fn sent_unsettled(&self) -> usize {
        self.sent.len()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && !self.calling
    }

    /// Drops what is to be recorded for a shard that has passed on; returns how many accepted messages per sink, those
    /// being recorded now included, and how many other verdicts waited to be recorded.
    pub(super) fn drop_shard(&mut self, shard: Shard) -> (BTreeMap<SinkId, usize>, usize) {
        let mut verdicts = 0;
        self.queue.retain(|i| {
            let gone = i.settled.shard == shard;
            verdicts += usize::from(gone && !is_sent(&i.settled));
            !gone
        });
        self.ambiguous.retain(|_, s| *s != shard);
        let mut dropped = BTreeMap::new();
        self.sent.retain(|_, (s, sink)| {
            if *s == shard {
                *dropped.entry(*sink).or_insert(0) += 1;
            }
            *s != shard
        });
        (dropped, verdicts)
    }
}

fn is_sent(settled: &Settled) -> bool {
    matches!(settled.verdict, Verdict::Sent { .. })
}

impl Core {
    pub(super) fn pump_settle(&mut self, now: Mono) {
        let s = &self.settling;
        let Some(oldest) = s.queue.front() else { return };
        if s.calling {
            return;
        }
        if now < s.backoff.until() {
            let at = s.backoff.until();
            return self.wake_at(at);
        }
        let enough = (self.settings.settle_batch.min(self.settings.in_flight / 2).max(1)) as usize;
        let due = oldest.since.plus(LINGER);
        if s.queue.len() < enough && !self.flights.is_empty() && now < due {
            return self.wake_at(due);
        }
        let n = s.queue.len().min(self.settings.settle_batch as usize);
        let settled: Vec<Settled> = self.settling.queue.drain(..n).map(|i| i.settled).collect();
        let shards: BTreeSet<Shard> = settled.iter().map(|s| s.shard).collect();
        let owned = self.ownership.owned(shards);
        self.settling.calling = true;
        self.call(Request::Settle { owned, settled });
    }

    pub(super) fn settled(&mut self, owned: &[Owned], settled: Vec<Settled>, r: &SettleReport, now: Mono) {
        self.settling.calling = false;
        self.settling.backoff.worked();
        self.settling.last = Some(now);
        let current: BTreeSet<Shard> =
            owned.iter().filter(|o| self.ownership.holds(**o)).map(|o| o.shard).collect();
        let mine: BTreeSet<Shard> = r.mine.iter().copied().filter(|s| current.contains(s)).collect();
        let found: BTreeSet<Position> = r.settled.iter().copied().collect();
        let next = self.upcoming_call();
        // Not what was fenced: that stands where it stood, and if its shard is ours anew a read under way must bring it.
        let recorded = settled.iter().filter(|s| r.mine.contains(&s.shard)).map(|s| s.position).collect();
        self.reading.note_settled(recorded, next);
        let mut sent: BTreeMap<SinkId, usize> = BTreeMap::new();
        let mut fenced = 0;
        for s in settled {
            if !mine.contains(&s.shard) {
                // What was known of it goes with its shard, which counts accepted messages.
                fenced += usize::from(!is_sent(&s) && !r.mine.contains(&s.shard));
                continue;
            }
            let ambiguous = self.settling.ambiguous.remove(&s.position).is_some();
            let recorded = found.contains(&s.position) || ambiguous;
            if !recorded {
                self.counters.vanished += 1;
                self.notice(Notice::Vanished { position: s.position });
            }
            if let Some(sink) = self.conclude(s, recorded) {
                *sent.entry(sink).or_default() += 1;
            }
        }
        for (sink, count) in sent {
            self.counters.sent += count as u64;
            let sink = self.sinks[sink.0].name.clone();
            self.notice(Notice::Sent { sink, count });
        }
        self.count_fenced(fenced);
        self.lose_missing(owned, &r.mine);
    }

    pub(super) fn count_fenced(&mut self, count: usize) {
        if count > 0 {
            self.counters.fenced += count as u64;
            self.notice(Notice::Fenced { count });
        }
    }

    /// The verdict is recorded: the lane may go on. Returns the sink of a message that is SENT now.
    fn conclude(&mut self, s: Settled, recorded: bool) -> Option<SinkId> {
        let position = s.position;
        self.ownership.busy(s.shard, -1);
        match s.verdict {
            Verdict::Sent { .. } => {
                let (_, sink) = self.settling.sent.remove(&position)?;
                self.sink(sink).in_flight -= 1;
                return recorded.then_some(sink);
            }
            Verdict::Retry { backoff, attempts, error, holds_key, .. } => {
                if recorded {
                    self.counters.retried += 1;
                    self.notice(Notice::Retried { position, attempts, backoff, error });
                }
                self.go_on(position, (recorded && holds_key).then_some(Stage::Held));
            }
            Verdict::Dead { reason, error, holds_key, .. } => {
                if recorded {
                    self.counters.dead += 1;
                    self.notice(Notice::Dead { position, reason, error });
                }
                self.go_on(position, (recorded && holds_key).then_some(Stage::Blocked));
            }
        }
        None
    }

    fn go_on(&mut self, position: Position, holding: Option<Stage>) {
        match holding {
            Some(stage) => {
                if stage == Stage::Blocked {
                    self.blocked.note(position);
                }
                if let Some(entry) = self.lanes.entry_mut(position) {
                    entry.stage = stage;
                }
                self.review_of(position);
            }
            None => self.forget_message(position),
        }
    }

    /// Without an answer the settle may have been committed: the same again, and rows not found then were it.
    pub(super) fn settle_failed(&mut self, owned: &[Owned], settled: Vec<Settled>, now: Mono) {
        let s = &mut self.settling;
        s.calling = false;
        s.backoff.failed(now);
        let mut fenced = 0;
        for settled in settled.into_iter().rev() {
            // What was decided under an earlier ownership went with it.
            let held = owned.iter().any(|o| o.shard == settled.shard && self.ownership.holds(*o));
            if held {
                self.counters.ambiguous += 1;
                s.ambiguous.insert(settled.position, settled.shard);
                s.queue.push_front(Item { settled, since: now });
            } else {
                fenced += usize::from(!is_sent(&settled));
            }
        }
        self.count_fenced(fenced);
    }
}
