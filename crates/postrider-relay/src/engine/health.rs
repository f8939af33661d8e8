//! Whether the relay makes progress, for probes, metrics and people.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::core::settings::Settings;
use crate::core::{Core, Counters, Mono};

/// The loop steps at least this often when all is well (it wakes once a second to look for free shards).
const LOOP_STALLED: Duration = Duration::from_secs(10);
/// A call that is still wanted is repeated within this time; a failure longer ago is one that nobody repeats.
const STILL_FAILING: Duration = Duration::from_secs(20);
/// Time between two looks at the open breakers.
const BREAKERS_EVERY: Duration = Duration::from_millis(50);

/// An open breaker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BreakerInfo {
    /// The sink.
    pub sink: String,
    /// The destination within it; `None` = the whole sink.
    pub destination: Option<String>,
    /// How long it has been open.
    pub open_for: Duration,
    /// Why.
    pub reason: String,
    /// Whether waiting does not help: credentials, rights, configuration.
    pub needs_operator: bool,
}

/// Whether the relay makes progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The process works; restart it if not.
    pub live: bool,
    /// Messages can flow now.
    pub ready: bool,
    /// Why not.
    pub reasons: Vec<String>,
}

/// Numbers of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Totals since the start.
    pub counters: Counters,
    /// Messages published and not settled.
    pub in_flight: usize,
    /// Shards worked by this relay.
    pub shards: usize,
    /// Keys held back by a retry, a block, or a destination that is down.
    pub held_keys: usize,
    /// Open breakers.
    pub breakers: Vec<BreakerInfo>,
    /// The last error of the source or the loop, and how long ago it was, for people.
    pub last_error: Option<LastError>,
}

/// An error that may be over by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError {
    /// What it said.
    pub text: String,
    /// When.
    pub at: Instant,
}

impl std::fmt::Display for LastError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} s ago)", self.text, self.at.elapsed().as_secs())
    }
}

/// A kind of call that has not worked for a while.
#[derive(Debug)]
struct Failing {
    since: Instant,
    last: Instant,
    error: String,
}

/// What the loop tells the others.
#[derive(Debug)]
pub(super) struct Shared {
    started: Instant,
    /// Milliseconds since `started`.
    loop_ms: AtomicU64,
    source_ms: AtomicU64,
    /// Kinds of calls whose last one failed: since when, and what it said last.
    failing: Mutex<BTreeMap<&'static str, Failing>>,
    /// When the open breakers were looked at last.
    breakers_at: Mutex<Option<Instant>>,
    source_patience: Duration,
    lease_lost: AtomicBool,
    ended: AtomicBool,
    snapshot: Mutex<Snapshot>,
}

impl Shared {
    pub(super) fn new(settings: &Settings) -> Self {
        Self {
            started: Instant::now(),
            loop_ms: AtomicU64::new(0),
            source_ms: AtomicU64::new(0),
            failing: Mutex::default(),
            breakers_at: Mutex::default(),
            source_patience: (settings.renew_every * 2).max(Duration::from_secs(3)),
            lease_lost: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            snapshot: Mutex::new(Snapshot::default()),
        }
    }

    fn ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// A call of this kind ended, with this error or well.
    pub(super) fn source_answered(&self, kind: &'static str, error: Option<&str>) {
        let mut failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        match error {
            None => {
                failing.remove(kind);
                self.source_ms.store(self.ms().max(1), Ordering::Relaxed);
            }
            Some(text) => {
                let now = Instant::now();
                let entry = failing.entry(kind).or_insert_with(|| Failing {
                    since: now,
                    last: now,
                    error: String::new(),
                });
                entry.last = now;
                text.clone_into(&mut entry.error);
            }
        }
    }

    /// Kinds of calls that have failed for longer than patience allows: nothing flows, although others work.
    fn stuck(&self) -> Vec<String> {
        let failing = self.failing.lock().unwrap_or_else(PoisonError::into_inner);
        failing
            .iter()
            .filter(|(_, f)| f.since.elapsed() > self.source_patience && f.last.elapsed() < STILL_FAILING)
            .map(|(kind, f)| {
                format!("each call to {kind} has failed for {} s: {}", f.since.elapsed().as_secs(), f.error)
            })
            .collect()
    }

    pub(super) fn lease_lost(&self, lost: bool) {
        self.lease_lost.store(lost, Ordering::Relaxed);
    }

    pub(super) fn ended(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    pub(super) fn error(&self, text: String) {
        self.with(|s| s.last_error = Some(LastError { text, at: Instant::now() }));
    }

    pub(super) fn report(&self, core: &Core, now: Mono) {
        let breakers = self.breakers_due();
        self.loop_ms.store(self.ms().max(1), Ordering::Relaxed);
        self.with(|s| {
            s.counters = core.counters();
            s.in_flight = core.in_flight();
            s.shards = core.shards();
            s.held_keys = core.held_lanes();
            if !breakers {
                return;
            }
            s.breakers = core
                .open_breakers()
                .into_iter()
                .map(|b| BreakerInfo {
                    sink: b.sink.to_string(),
                    destination: b.destination.map(|d| d.to_string()),
                    open_for: now.since(b.since),
                    reason: b.reason,
                    needs_operator: b.needs_operator,
                })
                .collect();
        });
    }

    /// Whether the open breakers are to be copied again: with thousands of destinations that is not done at every step.
    fn breakers_due(&self) -> bool {
        let mut at = self.breakers_at.lock().unwrap_or_else(PoisonError::into_inner);
        let due = at.is_none_or(|at| at.elapsed() >= BREAKERS_EVERY);
        if due {
            *at = Some(Instant::now());
        }
        due
    }

    fn with<R>(&self, f: impl FnOnce(&mut Snapshot) -> R) -> R {
        // A panic while the lock was held leaves numbers behind, nothing that must agree.
        f(&mut self.snapshot.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        self.with(|s| s.clone())
    }

    pub(super) fn health(&self) -> Health {
        let now = self.ms();
        let age = |stamp: u64| Duration::from_millis(now.saturating_sub(stamp));
        let loop_age = age(self.loop_ms.load(Ordering::Relaxed));
        let ended = self.ended.load(Ordering::Relaxed);
        let live = !ended && loop_age < LOOP_STALLED;
        let mut reasons = Vec::new();
        if ended {
            reasons.push("the relay has stopped".to_owned());
        } else if !live {
            reasons.push(format!("the relay's loop has not moved for {} s", loop_age.as_secs()));
        }
        let s = self.snapshot();
        let source = self.source_ms.load(Ordering::Relaxed);
        if source == 0 || age(source) > self.source_patience {
            let since = if source == 0 {
                "since the start".to_owned()
            } else {
                format!("for {} s", age(source).as_secs())
            };
            let error = s.last_error.as_ref().map_or("no answer yet", |e| e.text.as_str());
            reasons.push(format!("the database has not answered {since}: {error}"));
        }
        reasons.extend(self.stuck());
        if self.lease_lost.load(Ordering::Relaxed) {
            reasons.push(
                "the lease has run out and could not be renewed; nothing is sent until it is".to_owned(),
            );
        }
        for b in s.breakers.iter().filter(|b| b.destination.is_none()) {
            reasons.push(format!(
                "sink {} has been down for {} s: {}",
                b.sink,
                b.open_for.as_secs(),
                b.reason
            ));
        }
        Health { live, ready: reasons.is_empty(), reasons }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_kind_of_call_that_keeps_failing_is_not_ready_although_others_work() {
        let mut shared = Shared::new(&Settings::default());
        shared.source_patience = Duration::ZERO;
        shared.source_answered("settle", Some("permission denied"));
        shared.source_answered("renew", None);
        assert!(shared.stuck().iter().any(|r| r.contains("settle") && r.contains("permission denied")));
        shared.source_answered("settle", None);
        assert!(shared.stuck().is_empty());
    }
}
