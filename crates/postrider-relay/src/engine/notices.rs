//! What the core has to say, as log lines and metrics. Nothing here decides anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::counter;

use super::health::Shared;
use crate::core::Notice;
use crate::source::DeadReason;

/// The same complaint is repeated at most this often, with the number of times it was left out.
const REPEAT_EVERY: Duration = Duration::from_secs(5);
/// Counters that exist from the start: `increase()` does not see the step of a series that begins at one, so an alarm would
/// miss the first event.
const FROM_ZERO: &[&str] = &[
    "postrider_retried_total",
    "postrider_unknown_total",
    "postrider_fenced_total",
    "postrider_vanished_total",
    "postrider_swept_total",
    "postrider_shards_acquired_total",
    "postrider_shards_lost_total",
    "postrider_takeovers_total",
];

pub(super) struct Notices {
    source: Arc<str>,
    told: BTreeMap<&'static str, (Instant, u64)>,
    open: BTreeSet<(Arc<str>, Option<Arc<str>>)>,
}

impl Notices {
    pub(super) fn new(source: Arc<str>) -> Self {
        for name in FROM_ZERO {
            counter!(*name, "source" => source.clone()).increment(0);
        }
        for reason in [DeadReason::Permanent, DeadReason::Attempts] {
            counter!("postrider_dead_total", "source" => source.clone(), "reason" => reason.as_str())
                .increment(0);
        }
        Self { source, told: BTreeMap::new(), open: BTreeSet::new() }
    }

    pub(super) fn tell(&mut self, notice: &Notice, shared: &Shared) {
        let source = &*self.source;
        match notice {
            Notice::Acquired { shards, unclean } => {
                shared.lease_lost(false);
                counter!("postrider_shards_acquired_total", "source" => self.source.clone())
                    .increment(*shards as u64);
                counter!("postrider_takeovers_total", "source" => self.source.clone())
                    .increment(*unclean as u64);
                tracing::info!(source, shards, taken_over = unclean, "shards acquired");
            }
            Notice::Released { shards } => tracing::info!(source, shards, "shards given back"),
            Notice::Lost { shard } => {
                counter!("postrider_shards_lost_total", "source" => self.source.clone()).increment(1);
                tracing::warn!(source, shard = shard.0, "shard has passed on to another relay");
            }
            Notice::Fenced { count } => {
                counter!("postrider_fenced_total", "source" => self.source.clone()).increment(*count as u64);
                tracing::warn!(
                    source,
                    count,
                    "results came after their shard had passed on; they are dropped"
                );
            }
            Notice::Sent { sink, count } => {
                counter!("postrider_sent_total", "source" => self.source.clone(), "sink" => sink.clone())
                    .increment(*count as u64);
            }
            Notice::Retried { position, attempts, backoff, error } => {
                counter!("postrider_retried_total", "source" => self.source.clone()).increment(1);
                tracing::info!(source, id = position.0, attempts, retry_in = ?backoff, error, "attempt failed");
            }
            Notice::Dead { position, reason, error } => {
                counter!("postrider_dead_total", "source" => self.source.clone(), "reason" => reason.as_str())
                    .increment(1);
                tracing::error!(source, id = position.0, reason = reason.as_str(), error, "message is dead");
            }
            Notice::Unknown { position, why } => {
                counter!("postrider_unknown_total", "source" => self.source.clone()).increment(1);
                if let Some(left_out) = self.may_tell("unknown") {
                    tracing::warn!(
                        source = &*self.source,
                        id = position.0,
                        why,
                        left_out,
                        "no verdict; it is published again, same id"
                    );
                }
            }
            Notice::CallFailed { kind, operator, error } => self.call_failed(kind, *operator, error, shared),
            Notice::BreakerOpened { .. } | Notice::BreakerClosed { .. } => self.breaker(notice),
            Notice::LeaseExpired => {
                shared.lease_lost(true);
                tracing::warn!(
                    source,
                    "the lease has run out without a renewal; nothing is sent until one succeeds"
                );
            }
            Notice::Vanished { .. } | Notice::Missing { .. } | Notice::SweepFound { .. } => {
                self.damage(notice);
            }
        }
    }

    fn call_failed(&mut self, kind: &'static str, operator: bool, error: &str, shared: &Shared) {
        counter!("postrider_source_errors_total", "source" => self.source.clone(), "call" => kind)
            .increment(1);
        shared.error(error.to_owned());
        if let Some(left_out) = self.may_tell(kind) {
            let source = &*self.source;
            if operator {
                tracing::error!(
                    source,
                    call = kind,
                    error,
                    left_out,
                    "the database refuses; it is tried again"
                );
            } else {
                tracing::warn!(
                    source,
                    call = kind,
                    error,
                    left_out,
                    "the database did not answer; it is tried again"
                );
            }
        }
    }

    fn breaker(&mut self, notice: &Notice) {
        let source = &*self.source;
        match notice {
            Notice::BreakerOpened { sink, destination, operator, reason } => {
                if !self.open.insert((sink.clone(), destination.clone())) {
                    tracing::debug!(source, sink = &**sink, reason, "probe failed");
                } else if *operator {
                    tracing::error!(
                        source,
                        sink = &**sink,
                        destination = destination.as_deref(),
                        reason,
                        "an operator is needed: nothing is sent there and no message loses an attempt"
                    );
                } else {
                    tracing::warn!(
                        source,
                        sink = &**sink,
                        destination = destination.as_deref(),
                        reason,
                        "down: nothing is sent there but probes, and no message loses an attempt"
                    );
                }
            }
            Notice::BreakerClosed { sink, destination } => {
                self.open.remove(&(sink.clone(), destination.clone()));
                tracing::info!(source, sink = &**sink, destination = destination.as_deref(), "works again");
            }
            _ => {}
        }
    }

    fn damage(&mut self, notice: &Notice) {
        let source = self.source.clone();
        match notice {
            Notice::Vanished { position } => {
                counter!("postrider_vanished_total", "source" => source.clone()).increment(1);
                tracing::error!(
                    source = &*source,
                    id = position.0,
                    "the row of this message was gone when its outcome was recorded, although nobody else owns it; \
                     it is not counted as sent. Who deletes from the outbox tables?"
                );
            }
            Notice::Missing { position } => {
                if let Some(left_out) = self.may_tell("missing") {
                    tracing::error!(
                        source = &*source,
                        id = position.0,
                        left_out,
                        "queued, but not in the outbox: its row was deleted by hand"
                    );
                }
            }
            Notice::SweepFound { count } => {
                counter!("postrider_swept_total", "source" => source.clone()).increment(*count as u64);
                tracing::warn!(
                    source = &*source,
                    count,
                    "messages appeared far below ids already read: a sequence cache, or ids handed out long before the insert; \
                     order within their keys is not certain"
                );
            }
            _ => {}
        }
    }

    /// Whether a complaint of this kind may be made now, and how many were left out before it.
    fn may_tell(&mut self, kind: &'static str) -> Option<u64> {
        let now = Instant::now();
        match self.told.get_mut(kind) {
            Some((last, left_out)) if now.duration_since(*last) < REPEAT_EVERY => {
                *left_out += 1;
                None
            }
            Some(entry) => {
                let left_out = entry.1;
                *entry = (now, 0);
                Some(left_out)
            }
            None => {
                self.told.insert(kind, (now, 0));
                Some(0)
            }
        }
    }
}
