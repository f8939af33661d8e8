//! Looks beside the path: backlog and lag for the metrics, and the conservation count that finds messages which are in
//! no small table and in no receipt (a disabled trigger, a restore, a row deleted by hand).

use std::sync::Arc;
use std::time::Duration;

use metrics::gauge;

use super::health::Shared;
use crate::source::{Source, SourceError};

/// Time between two looks.
const EVERY: Duration = Duration::from_secs(10);
/// Counts stop here: a metric need not know more, and its cost must not grow with the table.
const COUNT_CAP: u64 = 100_000;
/// Slices of 4,096 ids per look, about 100,000 messages.
const BUCKETS: u32 = 25;
/// Unaccounted messages named per look.
const NAMED: u32 = 20;

/// Runs until aborted. An error costs one look, never the loop.
pub(super) async fn run(source: Source, shared: Arc<Shared>) {
    let mut bucket = 0;
    let mut found_in_pass = 0;
    loop {
        gauges(&source, &shared);
        match look(&source, &mut bucket, &mut found_in_pass).await {
            Ok(()) => {}
            Err(error) => {
                tracing::debug!(source = &*source.name, %error, "counting failed; it is tried again");
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn gauges(source: &Source, shared: &Shared) {
    let s = shared.snapshot();
    let name = || source.name.clone();
    gauge!("postrider_in_flight", "source" => name()).set(s.in_flight as f64);
    gauge!("postrider_shards", "source" => name()).set(s.shards as f64);
    gauge!("postrider_held_keys", "source" => name()).set(s.held_keys as f64);
    gauge!("postrider_breakers_open", "source" => name()).set(s.breakers.len() as f64);
    gauge!("postrider_ready", "source" => name()).set(if shared.health().ready { 1.0 } else { 0.0 });
}

async fn look(source: &Source, bucket: &mut i64, found_in_pass: &mut usize) -> Result<(), SourceError> {
    let s = source.inspect.summary(COUNT_CAP).await?;
    let name = || source.name.clone();
    gauge!("postrider_backlog", "source" => name(), "kind" => "ready").set(s.ready as f64);
    gauge!("postrider_backlog", "source" => name(), "kind" => "waiting").set(s.waiting as f64);
    gauge!("postrider_dead", "source" => name()).set(s.dead as f64);
    gauge!("postrider_lag_seconds", "source" => name()).set(s.lag.unwrap_or_default().as_secs_f64());
    let c = source.inspect.unaccounted(*bucket, BUCKETS, NAMED).await?;
    if !c.unaccounted.is_empty() {
        let ids: Vec<i64> = c.unaccounted.iter().map(|p| p.0).collect();
        tracing::error!(
            source = &*source.name,
            ?ids,
            "messages are in no small table and in no receipt, so nobody will send them: was the trigger disabled, or a row deleted?"
        );
    }
    *found_in_pass += c.unaccounted.len();
    if c.next_bucket == 0 {
        gauge!("postrider_unaccounted", "source" => name()).set(*found_in_pass as f64);
        *found_in_pass = 0;
    }
    *bucket = c.next_bucket;
    Ok(())
}
