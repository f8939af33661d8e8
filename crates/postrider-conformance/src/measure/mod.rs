//! What the relay costs a server, measured on a running relay. The tests run these measurements small and compare them
//! with the bounds; `scripts/measure` runs them at full size and prints them.

pub mod blocked;
pub mod idle;
pub mod pages;
pub mod rates;
pub mod settle;

use std::sync::Arc;
use std::time::{Duration, Instant};

use postrider_relay::core::settings::Settings;
use postrider_relay::engine::{Relay, RunningRelay};
use postrider_relay::sink::{NamedSink, Sink};
use postrider_relay::source::Source;

use crate::testbed::{Bulk, TestDatabase};

/// How long a clean stop may drain; it ends as soon as it can.
pub const DRAIN: Duration = Duration::from_secs(20);

/// A source with the settings' lease.
async fn source(db: &TestDatabase, settings: &Settings) -> Source {
    db.source("measured", settings.lease).await
}

/// A relay from `source` to one sink.
fn start(source: Source, sink: impl Sink + 'static, settings: Settings) -> RunningRelay {
    Relay::builder(source).sink(named("memory", sink)).settings(settings).start().expect("start")
}

fn named(name: &str, sink: impl Sink + 'static) -> NamedSink {
    NamedSink { name: name.into(), sink: Arc::new(sink) }
}

/// Messages whose receipt is committed.
fn sent(relay: &RunningRelay) -> u64 {
    relay.handle().snapshot().counters.sent
}

/// Waits until `relay` has sent `count` messages. No statement is run for it: that would be counted.
///
/// # Panics
/// If nothing has moved for a minute.
async fn until_sent(relay: &RunningRelay, count: u64) {
    let mut last = (0, Instant::now());
    loop {
        let now = sent(relay);
        if now >= count {
            return;
        }
        if now != last.0 {
            last = (now, Instant::now());
        }
        assert!(
            last.1.elapsed() < Duration::from_secs(60),
            "{now} of {count} were sent, and none for a minute"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Waits until `done`.
///
/// # Panics
/// If it takes longer than a minute.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < Duration::from_secs(60), "{what} has not happened for a minute");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// `messages` of 1 kB over `keys` keys.
fn bulk<'a>(prefix: &'a str, topic: &'a str, messages: i64, keys: i64) -> Bulk<'a> {
    Bulk { first: 1, messages, keys, prefix, topic, payload: 1_000 }
}
