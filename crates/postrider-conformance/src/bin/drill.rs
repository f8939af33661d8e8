//! Runs the drill by hand and prints what came of it. `scripts/drill` starts the servers for it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use postrider_conformance::process::drill::Drill;
use postrider_conformance::sink::nats::required;

/// PostgreSQL to NATS with three relays: one is killed, one is paused past its lease and woken.
#[derive(Debug, Parser)]
struct Args {
    /// Messages to commit, about.
    #[arg(long, default_value_t = 10_000)]
    messages: u64,
    /// Keys.
    #[arg(long, default_value_t = 200)]
    keys: u64,
    /// Producers at a time.
    #[arg(long, default_value_t = 8)]
    writers: usize,
    /// Most messages each relay may have published and undecided.
    #[arg(long, default_value_t = 100)]
    in_flight: u32,
    /// Lease of the relays, milliseconds.
    #[arg(long, default_value_t = 4_000)]
    lease_ms: u64,
    /// Runs, each with another seed.
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Seed of the first run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let program = std::env::current_exe().expect("the path of this program").with_file_name("drill-relay");
    for run in 0..args.runs {
        let seed = args.seed + run * 2;
        println!("--- seed {seed}");
        let drill = Drill {
            program: program.clone(),
            nats: required("NATS_URL"),
            messages: args.messages,
            keys: args.keys,
            writers: args.writers,
            in_flight: args.in_flight,
            lease: Duration::from_millis(args.lease_ms),
            seed,
        };
        let report = drill.run().await;
        println!("{report}");
        report.assert_kept();
    }
    ExitCode::SUCCESS
}
