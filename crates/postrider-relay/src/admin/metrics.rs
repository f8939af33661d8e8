//! The Prometheus text of everything recorded in this process, and gauges about the outbox, sampled at a fixed pace.

use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

use super::AdminError;
use crate::engine::Snapshot;
use crate::source::Inspect;

/// Buckets of every histogram in seconds: from a local fsync to a publish deadline.
const SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Pause between two samples of the outbox. Counting is capped, so a sample costs little; more often tells nobody more.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Counting stops here: the gauge then says "at least".
const COUNT_CAP: u64 = 100_000;

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

    /// Frees what histograms gather between scrapes. To be called every few seconds.
    fn upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn describe() {
    metrics::describe_gauge!(
        "postrider_backlog_messages",
        "messages by state: ready, waiting, dead; 100000 means at least"
    );
    metrics::describe_gauge!(
        "postrider_lag_seconds",
        "age of the oldest message that could be sent now; 0 = nothing waits"
    );
    metrics::describe_gauge!(
        "postrider_sent_last_5m_messages",
        "messages sent in the last five minutes, by all relays"
    );
    metrics::describe_gauge!("postrider_in_flight_messages", "messages published by this relay and not settled");
    metrics::describe_gauge!("postrider_owned_shards", "shards this relay works on");
    metrics::describe_gauge!("postrider_held_keys", "keys held back by a retry, a block or a destination that is down");
    metrics::describe_gauge!("postrider_breakers_open", "open breakers by scope, and whether time or an operator mends them");
    metrics::describe_counter!("postrider_sent_total", "messages acknowledged by a sink and recorded as sent");
    metrics::describe_counter!("postrider_retried_total", "failed attempts that are tried again");
    metrics::describe_counter!("postrider_dead_total", "messages given up, by reason");
    metrics::describe_counter!("postrider_unknown_total", "publishes without a verdict, published again with the same id");
    metrics::describe_counter!("postrider_fenced_total", "results that came after their shard had passed on");
    metrics::describe_counter!("postrider_takeovers_total", "shards taken over from a relay that ended without releasing them");
    metrics::describe_counter!("postrider_source_errors_total", "failed calls to the database, by call");
    metrics::describe_gauge!("postrider_sample_ok", "1 when the last look at the outbox worked");
}

/// Looks at the outbox at a fixed pace and records what it sees, until `stop`.
pub async fn sample(metrics: Metrics, source: Arc<str>, inspect: Arc<dyn Inspect>, stop: CancellationToken) {
    loop {
        record(&source, inspect.as_ref()).await;
        metrics.upkeep();
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(SAMPLE_EVERY) => {}
        }
    }
}

async fn record(source: &Arc<str>, inspect: &dyn Inspect) {
    let labels = |state: &'static str| [("source", source.to_string()), ("state", state.to_owned())];
    match inspect.summary(COUNT_CAP).await {
        Ok(summary) => {
            for (state, count) in
                [("ready", summary.ready), ("waiting", summary.waiting), ("dead", summary.dead)]
            {
                metrics::gauge!("postrider_backlog_messages", &labels(state)).set(as_f64(count));
            }
            let lag = summary.lag.unwrap_or_default().as_secs_f64();
            metrics::gauge!("postrider_lag_seconds", "source" => source.to_string()).set(lag);
            metrics::gauge!("postrider_sent_last_5m_messages", "source" => source.to_string())
                .set(as_f64(summary.sent_5m));
            metrics::gauge!("postrider_sample_ok", "source" => source.to_string()).set(1.0);
        }
        Err(error) => {
            // The last values stay: a scraper must not read an outage as an empty outbox.
            tracing::debug!(%error, "the outbox could not be looked at for the metrics");
            metrics::gauge!("postrider_sample_ok", "source" => source.to_string()).set(0.0);
        }
    }
}

/// What the relay itself knows, at this moment. Breakers are counted per sink and scope: destinations are as many as
/// topics, and a label each would have no bound.
pub(super) fn record_snapshot(source: &Arc<str>, snapshot: &Snapshot) {
    let of_source = [("source", source.to_string())];
    for (name, value) in [
        ("postrider_in_flight_messages", snapshot.in_flight),
        ("postrider_owned_shards", snapshot.shards),
        ("postrider_held_keys", snapshot.held_keys),
    ] {
        metrics::gauge!(name, &of_source).set(as_f64(value as u64));
    }
    for (scope, whole) in [("sink", true), ("destination", false)] {
        let open = snapshot.breakers.iter().filter(|b| b.destination.is_none() == whole);
        let (mut waiting, mut operator) = (0, 0);
        for breaker in open {
            if breaker.needs_operator { operator += 1 } else { waiting += 1 }
        }
        for (needs, count) in [("time", waiting), ("operator", operator)] {
            let labels = [("source", source.to_string()), ("scope", scope.to_owned()), ("needs", needs.to_owned())];
            metrics::gauge!("postrider_breakers_open", &labels).set(as_f64(count));
        }
    }
}

fn as_f64(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}
