//! A relay process for tests: the engine of production, with a journal of what it publishes and a point to be held at.
//!
//! It says `relay ID` when it runs and `held POINT N` when it stands at its point. On stdin it takes `release` and
//! `counters`, and ends when stdin does. SIGTERM stops it in good order. Counters come as one line of JSON.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Parser;
use postrider_conformance::process::{Counted, Gate, HoldSettler, HoldSink, Journal, JournalSink, Point};
use postrider_relay::core::settings::{BreakerSettings, Settings};
use postrider_relay::engine::{Relay, RelayHandle};
use postrider_relay::sink::NamedSink;
use postrider_relay::sinks::{self, SinkOptions};
use postrider_relay::source::Identity;
use postrider_relay::sources::{self, SourceOptions};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

#[derive(Debug, Parser)]
struct Args {
    /// Address of the database.
    #[arg(long)]
    database: String,
    /// Address of the sink.
    #[arg(long)]
    sink: String,
    /// The name people see.
    #[arg(long)]
    instance: String,
    #[arg(long, default_value_t = 1_000)]
    lease_ms: u64,
    #[arg(long, default_value_t = 300)]
    renew_ms: u64,
    #[arg(long, default_value_t = 100)]
    margin_ms: u64,
    #[arg(long, default_value_t = 500)]
    publish_timeout_ms: u64,
    /// Most messages published and undecided.
    #[arg(long, default_value_t = 100)]
    in_flight: u32,
    /// Where each message is noted before it is handed to the sink.
    #[arg(long)]
    journal: PathBuf,
    /// Where to stand still: before-send, after-ack, before-settle or in-settle.
    #[arg(long)]
    hold: Option<Point>,
    /// Only after so many messages have passed the point.
    #[arg(long, default_value_t = 0)]
    hold_after: u64,
}

impl Args {
    fn settings(&self) -> Settings {
        Settings {
            lease: Duration::from_millis(self.lease_ms),
            renew_every: Duration::from_millis(self.renew_ms),
            margin: Duration::from_millis(self.margin_ms),
            publish_timeout: Duration::from_millis(self.publish_timeout_ms),
            in_flight: self.in_flight,
            idle_poll: Duration::from_millis(20),
            sweep_every: Duration::from_millis(200),
            // A sink that was away for a moment must not be waited for longer than a test.
            breaker: BreakerSettings { probe_cap: Duration::from_millis(500), ..BreakerSettings::default() },
            ..Settings::default()
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_env_filter(tracing_subscriber::EnvFilter::new("info,sqlx=warn"))
        .init();
    let code = match run(Args::parse()).await {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("drill-relay: {error:#}");
            1
        }
    };
    // Not by returning: a thread that waits for stdin would keep the process alive.
    std::process::exit(code)
}

async fn run(args: Args) -> Result<()> {
    let gate = Gate::new(args.hold, args.hold_after, |point, messages| println!("held {point} {messages}"));
    let settings = args.settings();
    let relay = fastrand::i64(1..);
    let identity = Identity {
        relay,
        instance: args.instance.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        lease: settings.lease,
    };
    let mut source =
        sources::open(&args.database, identity, &SourceOptions::default()).await.context("the database")?;
    source.settler = Arc::new(HoldSettler { settler: source.settler, gate: gate.clone() });
    let options = SinkOptions {
        publish_timeout: settings.publish_timeout,
        instance: args.instance.clone(),
        ..SinkOptions::default()
    };
    let sink = sinks::connect(&args.sink, &options).await.context("the sink")?;
    let journal = Journal::open(&args.journal, relay, &args.instance).context("the journal")?;
    let sink = Arc::new(JournalSink { sink, journal });
    let sink = NamedSink { name: "sink".into(), sink: Arc::new(HoldSink { sink, gate: gate.clone() }) };

    let mut terminated = signal(SignalKind::terminate())?;
    let running = Relay::builder(source).sink(sink).settings(settings).start()?;
    let handle = running.handle();
    println!("relay {relay}");
    tokio::select! {
        _ = terminated.recv() => {}
        end = obey(&gate, &handle, relay) => return end,
    }
    // A relay that is held lets go first: a clean stop needs its answers.
    gate.release();
    let report = running.stop(Duration::from_secs(30)).await;
    tell(&handle, relay, report.undecided)
}

/// Does what stdin says until it ends.
async fn obey(gate: &Gate, handle: &RelayHandle, relay: i64) -> Result<()> {
    let (said, mut lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            if said.send(line).is_err() {
                return;
            }
        }
    });
    while let Some(line) = lines.recv().await {
        match line.as_str() {
            "release" => gate.release(),
            "counters" => tell(handle, relay, 0)?,
            other => anyhow::bail!("'{other}' is no command"),
        }
    }
    Ok(())
}

fn tell(handle: &RelayHandle, relay: i64, undecided: usize) -> Result<()> {
    let counted = Counted::new(relay, undecided, &handle.snapshot());
    println!("{}", serde_json::to_string(&counted)?);
    Ok(())
}
