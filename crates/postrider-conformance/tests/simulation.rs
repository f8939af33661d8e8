//! The deterministic simulation in the test run: 5,000 fixed seeds, 5,000 fresh ones, and the proof that it notices.
//!
//! More by hand: `cargo run --release -p postrider-conformance --bin simulate -- --seeds 1000000 --jobs 2`.
//! One schedule for people: `… --bin simulate -- --replay SEED`.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use postrider_conformance::simulation::{Mutant, Report, run};

const SEEDS: u64 = 5_000;
/// Seeds within which each protection that is switched off must be missed.
const MUTANT_SEEDS: u64 = 6_000;

/// What must have happened in the fixed seeds, or they would prove little.
const INTERESTING: [&str; 30] = [
    "ambiguous settle",
    "blocked key",
    "breaker closed",
    "breaker for an operator",
    "cancelled",
    "confirming retry",
    "crash",
    "dead",
    "destination breaker",
    "effect after its call was given up",
    "fenced",
    "fenced settle",
    "found by the sweep",
    "lane page",
    "lasting outage",
    "late commit found by the window",
    "lease expired",
    "not handed over in time",
    "pause",
    "probe",
    "redriven",
    "rescan",
    "retried",
    "shard lost",
    "shard of a lost acquisition taken again",
    "sink breaker",
    "stop",
    "stop with undecided messages",
    "takeover",
    "unknown",
];

/// Runs the seeds on all processors until `enough` says so; returns the reports it was asked about and said yes to.
fn each(
    from: u64,
    count: u64,
    mutant: Option<Mutant>,
    enough: impl Fn(&Report) -> bool + Sync,
) -> Vec<Report> {
    let (next, kept) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= count || !kept.lock().expect("no panic under it").is_empty() {
                        return;
                    }
                    let report = run(from.wrapping_add(n), mutant, false);
                    if enough(&report) {
                        kept.lock().expect("no panic under it").push(report);
                    }
                }
            });
        }
    });
    kept.into_inner().expect("no panic under it")
}

fn must_hold(from: u64) -> BTreeMap<&'static str, u64> {
    let seen = Mutex::new(BTreeMap::new());
    let failed = each(from, SEEDS, None, |report| {
        let mut seen = seen.lock().expect("no panic under it");
        for (what, n) in &report.seen {
            *seen.entry(*what).or_insert(0) += n;
        }
        report.violation.is_some()
    });
    if let Some(report) = failed.first() {
        let again = run(report.seed, None, true);
        let tail = again.log.len().saturating_sub(40);
        panic!(
            "seed {} broke \"{}\": {}\n{:#?}\n…\n{}\nreplay: simulate --replay {}",
            report.seed,
            report.violation.as_ref().map_or("", |v| v.promise),
            report.violation.as_ref().map_or("", |v| &v.text),
            again.options,
            again.log[tail..].join("\n"),
            report.seed
        );
    }
    seen.into_inner().expect("no panic under it")
}

#[test]
fn fixed_seeds_keep_every_promise_and_reach_every_corner() {
    let seen = must_hold(0);
    let missing: Vec<&str> = INTERESTING.into_iter().filter(|what| !seen.contains_key(what)).collect();
    assert!(missing.is_empty(), "never happened in {SEEDS} schedules: {missing:?}; happened: {seen:#?}");
}

#[test]
fn fresh_seeds_keep_every_promise() {
    let base = std::env::var("POSTRIDER_SEED").ok().map_or_else(
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_secs() << 20),
        |text| text.parse().expect("POSTRIDER_SEED is a number"),
    );
    println!("seeds from {base}; the same again with POSTRIDER_SEED={base}");
    must_hold(base);
}

#[test]
fn a_seed_always_gives_the_same_schedule() {
    for seed in 0..60 {
        let (a, b, recorded) = (run(seed, None, false), run(seed, None, false), run(seed, None, true));
        assert_eq!((a.hash, a.events), (b.hash, b.events), "seed {seed}");
        assert_eq!((a.hash, a.events), (recorded.hash, recorded.events), "seed {seed} recorded");
    }
}

#[test]
fn every_protection_is_missed_when_it_is_off() {
    for mutant in Mutant::ALL {
        let found = each(0, MUTANT_SEEDS, Some(mutant), |report| report.violation.is_some());
        let report =
            found.first().unwrap_or_else(|| panic!("{mutant:?} went unnoticed in {MUTANT_SEEDS} schedules"));
        let v = report.violation.as_ref().expect("that is why it was kept");
        println!("{mutant:?}: seed {} broke \"{}\": {}", report.seed, v.promise, v.text);
        assert!(
            !matches!(v.promise, "no panic" | "everything ends"),
            "{mutant:?} was noticed by accident: {v:?}"
        );
    }
}
