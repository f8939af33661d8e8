//! The relay of the demo: a process of its own, so that it can be killed.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use postrider_relay::core::settings::{Backoff, BreakerSettings, Settings};
use postrider_relay::engine::Relay;
use postrider_relay::sink::NamedSink;
use postrider_relay::sinks::{self, SinkOptions};
use postrider_relay::source::{Identity, Source};
use postrider_relay::sources::{self, SourceOptions};
use tokio_util::sync::CancellationToken;

use super::faults::{FaultySink, HoldingSettler};
use super::{Event, Places};
use crate::args::{DemoRelay, Without};

/// How long a stopping relay of the demo waits for what is in flight.
const DRAIN: Duration = Duration::from_secs(5);

/// Which faults a relay process of the demo meets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Faults {
    pub(super) hold_after: Option<u32>,
    pub(super) down_after: Option<u32>,
}

/// Runs until standard input ends: the parent closes it, or has died.
pub(crate) async fn run(args: &DemoRelay) -> Result<()> {
    crate::setup::demo_logs();
    let places = Places::new(&args.folder);
    let settings = settings(args.without);
    let identity = Identity {
        relay: sources::relay_id()?,
        instance: "demo".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        lease: settings.lease,
    };
    let options = SourceOptions { statement_timeout: Duration::from_secs(2), ..SourceOptions::default() };
    let source = sources::open(&format!("sqlite:{}", places.bank().display()), identity, &options).await?;
    let source = match args.hold_after {
        None => source,
        Some(after) => {
            let settler = Arc::new(HoldingSettler::new(Arc::clone(&source.settler), after, tell));
            Source { settler, ..source }
        }
    };
    let options = SinkOptions { publish_timeout: settings.publish_timeout, ..SinkOptions::default() };
    let file = sinks::connect(&format!("file:{}", places.sink().display()), &options).await?;
    let sink = Arc::new(FaultySink::new(file, args.seed, args.down_after, tell));
    let sink = NamedSink { name: Arc::from("demo"), sink };
    let relay = Relay::builder(source).sink(sink).settings(settings).seed(args.seed).start()?;
    tell(&Event::RelayStarted);
    let handle = relay.handle();
    let mut ended = Box::pin(relay.wait());
    tokio::select! {
        () = when_input_ends().cancelled_owned() => handle.stop(DRAIN),
        _ = &mut ended => return Ok(()),
    }
    ended.await;
    Ok(())
}

/// Short leases and pauses, so that a takeover takes a second and not fifteen. One message per account is under way at a time.
fn settings(without: Option<Without>) -> Settings {
    let mut settings = Settings {
        lease: Duration::from_secs(1),
        renew_every: Duration::from_millis(300),
        margin: Duration::from_millis(100),
        publish_timeout: Duration::from_millis(500),
        idle_poll: Duration::from_millis(20),
        sweep_every: Duration::from_millis(200),
        late_margin: Duration::from_millis(10),
        in_flight: 16,
        settle_batch: 16,
        backoff: Backoff {
            first: Duration::from_millis(100),
            cap: Duration::from_millis(500),
            ..Backoff::default()
        },
        breaker: BreakerSettings {
            first_probe: Duration::from_millis(100),
            probe_cap: Duration::from_millis(300),
            ..BreakerSettings::default()
        },
        ..Settings::default()
    };
    settings.protections.lanes = without != Some(Without::Lanes);
    settings.protections.settle_after_ack = without != Some(Without::Ack);
    settings
}

/// Tells the parent, a line of JSON each. When nobody listens any more, the end of standard input says so, too.
fn tell(event: &Event) {
    let Ok(line) = serde_json::to_string(event) else { return };
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush()) {
        tracing::debug!(%error, "nobody listens");
    }
}

fn when_input_ends() -> CancellationToken {
    let ended = CancellationToken::new();
    let token = ended.clone();
    // A thread of its own: reading standard input cannot be cancelled.
    std::thread::spawn(move || {
        let mut rest = Vec::new();
        if let Err(error) = std::io::stdin().lock().read_to_end(&mut rest) {
            tracing::debug!(%error, "standard input is gone");
        }
        token.cancel();
    });
    ended
}
