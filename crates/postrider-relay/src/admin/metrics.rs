//! The Prometheus text of everything that is recorded in this process.

use std::time::Duration;

use metrics::{describe_counter, describe_gauge, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::AdminError;
use crate::engine::RelayHandle;

/// Buckets of every histogram of times, in seconds: from a local fsync to a publish deadline.
const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Pause between two clean-ups of what histograms gather between scrapes; the exporter's own default.
pub(super) const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// The recorder of this process.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Metrics {
    /// Installs the recorder of this process. Do it before anything is recorded: what came earlier is lost.
    ///
    /// # Errors
    /// When this process has a recorder already.
    pub fn install() -> Result<Self, AdminError> {
        let wrong = |e: metrics_exporter_prometheus::BuildError| AdminError::Recorder(e.to_string());
        let handle = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)
            .map_err(wrong)?
            .install_recorder()
            .map_err(wrong)?;
        describe();
        Ok(Self { handle })
    }

    /// Everything recorded so far, in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        self.handle.render()
    }

    pub(super) fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn describe() {
    describe_gauge!(
        "postrider_backlog",
        "messages that wait, by kind: ready or waiting; 100000 means at least"
    );
    describe_gauge!(
        "postrider_lag_seconds",
        "age of the oldest message that could be sent now; 0 = nothing waits"
    );
    describe_gauge!("postrider_dead", "messages given up and kept for a human; 100000 means at least");
    describe_gauge!("postrider_unaccounted", "messages that no small table and no receipt knows");
    describe_gauge!("postrider_in_flight", "messages published by this relay and not settled");
    describe_gauge!("postrider_shards", "shards this relay works on");
    describe_gauge!(
        "postrider_held_keys",
        "keys held back by a retry, a block or a destination that is down"
    );
    describe_gauge!("postrider_breakers_open", "open breakers");
    describe_gauge!("postrider_breakers_needing_operator", "open breakers that waiting does not close");
    describe_gauge!("postrider_ready", "1 when messages can flow, as /readyz says");
    describe_counter!("postrider_sent_total", "messages acknowledged by a sink and recorded as sent");
    describe_counter!("postrider_retried_total", "failed attempts that are tried again");
    describe_counter!("postrider_dead_total", "messages given up, by reason");
    describe_counter!(
        "postrider_unknown_total",
        "publishes without a verdict, published again with the same id"
    );
    describe_counter!("postrider_fenced_total", "results that came after their shard had passed on");
    describe_counter!(
        "postrider_takeovers_total",
        "shards taken from a relay that ended without releasing them"
    );
    describe_counter!("postrider_vanished_total", "outcomes whose row was gone although the shard was ours");
    describe_counter!("postrider_swept_total", "messages that only the sweep found");
    describe_counter!("postrider_shards_acquired_total", "shards taken");
    describe_counter!(
        "postrider_shards_lost_total",
        "shards that passed on to another relay without being given back"
    );
    describe_counter!("postrider_source_errors_total", "failed calls to the database, by call");
}

/// What the relay knows of itself at this moment: fresher than the engine's own look every few seconds, under the same names.
///
/// Breakers are counted and not named: destinations are as many as topics, and a label each would have no bound.
pub(super) fn record_now(source: &str, relay: &RelayHandle) {
    let snapshot = relay.snapshot();
    let operator = snapshot.breakers.iter().filter(|b| b.needs_operator).count();
    for (name, value) in [
        ("postrider_in_flight", snapshot.in_flight),
        ("postrider_shards", snapshot.shards),
        ("postrider_held_keys", snapshot.held_keys),
        ("postrider_breakers_open", snapshot.breakers.len()),
        ("postrider_breakers_needing_operator", operator),
        ("postrider_ready", usize::from(relay.health().ready)),
    ] {
        gauge!(name, "source" => source.to_owned()).set(value as f64);
    }
}
