//! The whole path on a real PostgreSQL, in one process: business transactions, relays, a sink that misbehaves, and the
//! ledger check at the end of each.

mod fencing;
mod late_commits;
mod outages;
mod retries;
mod takeovers;

use std::sync::Arc;

use postrider_conformance::testbed::{MemorySink, TestDatabase, quick_settings};
use postrider_relay::core::settings::Settings;
use postrider_relay::engine::{Relay, RunningRelay};
use postrider_relay::sink::NamedSink;

/// A relay on the test database with one sink.
async fn relay(db: &TestDatabase, name: &str, sink: &MemorySink, settings: Settings) -> RunningRelay {
    let source = db.source(name, settings.lease).await;
    Relay::builder(source).sink(named("memory", sink)).settings(settings).start().expect("start")
}

fn named(name: &str, sink: &MemorySink) -> NamedSink {
    NamedSink { name: name.into(), sink: Arc::new(sink.clone()) }
}

fn settings() -> Settings {
    quick_settings()
}

/// How long a clean stop may drain; it ends as soon as it can.
const DRAIN: std::time::Duration = std::time::Duration::from_secs(10);
