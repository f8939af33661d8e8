//! `simulate --seeds N [--from S] [--jobs J] [--mutant NAME]` runs schedules; `simulate --replay SEED` prints one.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use postrider_conformance::simulation::{Mutant, Report, run};

struct Arguments {
    from: u64,
    seeds: u64,
    jobs: u64,
    replay: Option<u64>,
    mutant: Option<Mutant>,
}

const USAGE: &str = "usage: simulate --seeds N [--from S] [--jobs J] [--mutant NAME] | simulate --replay SEED [--mutant NAME]";

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments { from: 0, seeds: 10_000, jobs: 1, replay: None, mutant: None };
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or_else(|| format!("{name} needs a value\n{USAGE}"))?;
        let number = || value.parse().map_err(|_| format!("{name} needs a number, not {value:?}"));
        match name.as_str() {
            "--seeds" => a.seeds = number()?,
            "--from" => a.from = number()?,
            "--jobs" => a.jobs = number()?.max(1),
            "--replay" => a.replay = Some(number()?),
            "--mutant" => {
                let known = Mutant::ALL.iter().find(|m| format!("{m:?}").eq_ignore_ascii_case(&value));
                a.mutant = Some(*known.ok_or_else(|| format!("mutants are {:?}", Mutant::ALL))?);
            }
            _ => return Err(format!("unknown argument {name}\n{USAGE}")),
        }
    }
    Ok(a)
}

fn main() -> Result<(), String> {
    let a = arguments()?;
    if let Some(seed) = a.replay {
        return replay(seed, a.mutant);
    }
    std::panic::set_hook(Box::new(|_| {}));
    let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let seen: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..a.jobs {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= a.seeds {
                        return;
                    }
                    let report = run(a.from + n, a.mutant, false);
                    tell(&report, &failed);
                    add(&seen, &report);
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    if done.is_multiple_of(10_000) {
                        let rate = done as f64 / start.elapsed().as_secs_f64();
                        println!(
                            "{done} schedules, {rate:.0} per second, {} failed",
                            failed.load(Ordering::Relaxed)
                        );
                    }
                }
            });
        }
    });
    for (what, count) in seen.lock().map_err(|e| e.to_string())?.iter() {
        println!("{count:>12}  {what}");
    }
    let failed = failed.load(Ordering::Relaxed);
    let rate = a.seeds as f64 / start.elapsed().as_secs_f64();
    println!("{} schedules from {}, {rate:.0} per second, {failed} failed", a.seeds, a.from);
    if failed == 0 { Ok(()) } else { Err(format!("{failed} schedules broke a promise")) }
}

fn tell(report: &Report, failed: &AtomicU64) {
    if let Some(v) = &report.violation {
        failed.fetch_add(1, Ordering::Relaxed);
        println!("seed {}: {}: {}", report.seed, v.promise, v.text);
    }
}

fn add(seen: &Mutex<BTreeMap<&'static str, u64>>, report: &Report) {
    let Ok(mut seen) = seen.lock() else { return };
    for (what, n) in &report.seen {
        *seen.entry(what).or_insert(0) += n;
    }
    *seen.entry("events").or_insert(0) += report.events as u64;
}

fn replay(seed: u64, mutant: Option<Mutant>) -> Result<(), String> {
    let report = run(seed, mutant, true);
    println!("{:#?}", report.options);
    for line in &report.log {
        println!("{line}");
    }
    println!(
        "{} events, {:.1} s of virtual time, trace {:016x}",
        report.events,
        report.virtual_us as f64 / 1e6,
        report.hash
    );
    match report.violation {
        None => Ok(()),
        Some(v) => Err(format!("seed {seed}: {}: {}", v.promise, v.text)),
    }
}
