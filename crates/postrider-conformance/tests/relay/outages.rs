//! A sink that is down costs no message anything, and nobody else much.

use std::time::Duration;

use postrider_conformance::testbed::{Behaviour, Business, Load, MemorySink, TestDatabase};
use postrider_relay::core::settings::{BreakerSettings, Settings};
use postrider_relay::sink::{Retry, Scope};

use super::{DRAIN, late_commits::until, relay, settings};

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_of_the_sink_counts_no_attempt_and_kills_nothing() {
    let db = TestDatabase::new().await;
    let business = Business::create(&db).await;
    business.run(Load { transactions: 10_000, writers: 16, keys: 2_000, ..Load::default() }).await;
    let sink = MemorySink::scripted(|_| Behaviour::Refuse(Scope::Sink, Retry::Backoff));
    let settings = Settings {
        max_attempts: 5,
        in_flight: 100,
        breaker: BreakerSettings {
            first_probe: Duration::from_millis(5),
            probe_cap: Duration::from_millis(40),
            ..BreakerSettings::default()
        },
        ..settings()
    };
    let running = relay(&db, "one", &sink, settings).await;
    // A scaled quarter of an hour: with a probe cap of 30 s that would be some 35 probes.
    until(|| sink.offered() > 135).await;
    let counters = running.handle().snapshot().counters;
    assert_eq!((counters.retried, counters.dead, counters.sent), (0, 0, 0));
    assert_eq!(running.handle().snapshot().breakers.len(), 1);
    assert!(!running.handle().health().ready);

    sink.behave(|_| Behaviour::AcceptAfter(Duration::from_millis(1)));
    business.drained().await;
    assert!(running.handle().health().ready, "{:?}", running.handle().health());
    running.stop(DRAIN).await;
    assert!(sink.most_open() <= 100, "in flight: {}", sink.most_open());
    assert_eq!(db.count("select count(*) from outbox_dead").await, 0);
    let verdict = business.verdict(&sink.arrivals()).await;
    verdict.assert_kept();
    assert!(verdict.duplicates.is_empty());
    business.assert_receipts().await;
}
