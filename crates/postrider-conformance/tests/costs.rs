//! What a running relay may cost the server. `cargo test --test costs -- --nocapture` prints the numbers; `scripts/measure`
//! does the same at full size, and `docs/measurements.md` keeps what came out.

use std::time::Duration;

use postrider_conformance::measure::pages::{COLUMNS, FREE_PAGES, PAGES_PER_ROW, Pages, Stage};
use postrider_conformance::measure::{blocked, idle, settle};
use postrider_conformance::testbed::costs::Kind;
use postrider_conformance::testbed::{History, Purpose, TestDatabase};
use postrider_relay::core::settings::Settings;

#[tokio::test(flavor = "multi_thread")]
async fn draining_takes_few_statements_and_few_log_bytes() {
    let default = settle::drain(30_000, 500, Settings::default()).await;
    println!("default settings: {default}");
    let by_500 = settle::drain(30_000, 500, Settings { settle_batch: 500, ..Settings::default() }).await;
    println!("at most 500 per settle: {by_500}");
    for drained in [default, by_500] {
        assert!(drained.statements_per_message() <= 0.01, "{drained}");
        assert!(drained.log_bytes_per_message() <= 100.0, "{drained}");
        assert!(drained.messages_per_settle() >= 300.0, "{drained}");
        for kind in [Kind::Heads, Kind::Due, Kind::Messages, Kind::Sent] {
            assert!(drained.phase.of(kind).calls > 0, "{kind:?} was not recognised: {drained}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_behind_a_failing_one_cost_the_others_little() {
    let compared = blocked::failing_key(20_000, 10_000, Settings::default()).await;
    println!("{compared}");
    assert!(compared.pages() <= 1.5, "{compared}");
    assert!(compared.statements() <= 1.5, "{compared}");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_for_a_sink_that_is_down_cost_the_others_little() {
    let compared = blocked::sink_down(20_000, 10_000, Settings::default()).await;
    println!("{compared}");
    assert!(compared.pages() <= 1.5, "{compared}");
    assert!(compared.statements() <= 1.5, "{compared}");
    assert!(compared.pages_once() <= 5.0, "a message that cannot go is read once: {compared}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_relay_asks_little_and_a_single_message_does_not_wait_for_company() {
    let idle = idle::idle(Duration::from_secs(5), Duration::from_millis(10)).await;
    println!("{idle}");
    for kind in [Kind::Heads, Kind::Due] {
        let cost = idle.idle.of(kind);
        assert!(cost.calls > 0 && cost.pages_per_call() <= FREE_PAGES as f64, "{kind:?}: {cost:?}");
    }
    let writes = idle.idle.total().wal_bytes;
    assert!(idle.idle.of(Kind::Sent).calls == 0 && writes < 10_000, "an idle relay wrote {writes} log bytes");
}

/// A long life in small: 200,000 sent, 50,000 waiting, 50,000 dead.
async fn long_life() -> TestDatabase {
    let db = TestDatabase::new().await;
    db.live_through(History { sent: 200_000, waiting: 50_000, dead: 50_000 }).await;
    db
}

fn within_bounds(stages: &[Stage]) {
    println!("{COLUMNS}");
    for stage in stages {
        println!("{stage}");
    }
    for stage in stages {
        for purpose in [Purpose::Head, Purpose::Due] {
            assert!(stage.looks.most_idle(purpose) <= FREE_PAGES, "{purpose:?}, idle: {}", stage.name);
            let loaded = stage.looks.most_per_row(purpose, FREE_PAGES);
            assert!(loaded <= PAGES_PER_ROW, "{purpose:?}, loaded, {loaded} pages per row: {}", stage.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_stay_flat_with_fresh_stale_and_no_statistics() {
    let db = long_life().await;
    let mut pages = Pages::new(&db).await;
    pages.statistics(5_000).await;
    within_bounds(pages.stages());
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_stay_flat_while_an_old_snapshot_holds_vacuum_back() {
    let db = long_life().await;
    let mut pages = Pages::new(&db).await;
    pages.old_snapshot(50_000).await;
    within_bounds(pages.stages());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_stays_open_costs_its_window_and_no_more() {
    let db = long_life().await;
    let mut pages = Pages::new(&db).await;
    pages.open_writer(50_000).await;
    within_bounds(pages.stages());
    let windows = pages.stages()[0].windows();
    let widest = windows.last().expect("windows while the writer was open");
    println!("widest window: {} ids, {} pages, {:?}", widest.ids, widest.pages, widest.took);
    assert!(widest.ids >= 50_000, "all that flowed lies in the window: {widest:?}");
    for w in windows {
        let bound = 30 + w.ids / 20 + 5 * w.rows;
        assert!(w.pages <= bound, "{w:?} took more than {bound} pages");
    }
    assert_eq!(pages.stages()[2].windows().len(), 0, "the window closes behind the writer");
}
