//! `run`: the relay, from the first connection to the last settle.

use std::sync::Arc;

use anyhow::Result;
use postrider::{Dialect, schema};
use postrider_relay::admin::{self, AdminServer, Metrics};
use postrider_relay::config::Config;
use postrider_relay::engine::{Relay, RelayHandle, RunningRelay};
use postrider_relay::sink::{NamedSink, SinkError};
use postrider_relay::sinks::{self, SinkOptions};
use postrider_relay::source::{Identity, Source};
use postrider_relay::sources::{self, SourceOptions};
use secrecy::ExposeSecret;
use serde_json::json;

use crate::args::{Global, Run};
use crate::database::Connection;
use crate::fault::Fault;
use crate::signals::Signals;
use crate::{database, outbox, output, setup};

/// Name of the only sink there is in this version; receipts carry it.
const SINK: &str = "default";

pub(crate) async fn run(global: &Global, args: &Run) -> Result<()> {
    let config = setup::relay_configuration(global, args.listen.clone())?;
    let mut signals = Signals::listen()?;
    // Before anything is recorded: what comes earlier would be lost.
    let metrics = config.listen.map(|_| Metrics::install()).transpose()?;
    let source = source(&config).await?;
    let sink = sink(&config).await?;
    let relay = start(&config, source.clone(), sink)?;
    let handle = relay.handle();
    let mut ended = Box::pin(relay.wait());
    let server = serve(&config, metrics, &source, handle.clone()).await?;
    announce(global, &config, server.as_ref())?;
    let signal = tokio::select! {
        name = signals.next() => name,
        _ = &mut ended => {
            return Err(Fault::new("the relay has ended by itself").at(database::place(&config)).cure("its log says why").into());
        }
    };
    signals.next_one_exits();
    tracing::info!(signal, drain = ?config.drain, "stopping: waiting for what is in flight");
    handle.stop(config.drain);
    let report = ended.await;
    if let Some(server) = server {
        server.stop().await;
    }
    match report.undecided {
        0 => tracing::info!("stopped, nothing left in flight"),
        undecided => {
            tracing::warn!(undecided, "stopped at the drain limit; these are sent again, with the same id");
        }
    }
    Ok(())
}

/// Opens the outbox. A SQLite file is created and migrated; the tables of a server are left to `init`.
async fn source(config: &Config) -> Result<Source> {
    if database::dialect(config)? == Dialect::Sqlite {
        let mut connection = database::connect(config, true).await?;
        if let Connection::Sqlite(c) = &mut connection {
            schema::migrate(c).await.map_err(|e| database::schema(config, &e))?;
        }
        connection.close().await?;
    }
    let identity = Identity {
        relay: sources::relay_id().map_err(|e| outbox::source(config, &e))?,
        instance: config.instance.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        lease: config.relay.lease,
    };
    let options = SourceOptions { connections: config.source.connections, ..SourceOptions::default() };
    let opened = sources::open(config.source.database.expose_secret(), identity, &options).await;
    opened.map_err(|e| outbox::source(config, &e).into())
}

async fn sink(config: &Config) -> Result<NamedSink> {
    let options = SinkOptions {
        publish_timeout: config.relay.publish_timeout,
        instance: config.instance.clone(),
        ..SinkOptions::default()
    };
    let opened = sinks::connect(config.sink.url.expose_secret(), &options).await;
    let sink = opened.map_err(|error| {
        let fault = Fault::new(error.to_string()).at(sink_place(config));
        match error {
            SinkError::Config(_) => {
                fault.cure("correct the address: file:FILE, stdout: or nats://HOST:PORT?stream=NAME")
            }
            SinkError::Unavailable(_) => {
                fault.cure("check host and port, and that the broker runs; then start again")
            }
            SinkError::Operator(_) => {
                fault.cure("mend what it names at the broker or in the address; then start again")
            }
        }
    })?;
    Ok(NamedSink { name: Arc::from(SINK), sink })
}

fn sink_place(config: &Config) -> String {
    format!("sink {} ({})", database::shown_sink(config), config.sink.from)
}

fn start(config: &Config, source: Source, sink: NamedSink) -> Result<RunningRelay> {
    let relay = Relay::builder(source).sink(sink).settings(config.relay.clone()).start();
    relay.map_err(|e| {
        Fault::new(format!("the relay cannot start: {e}")).at("[relay] of the configuration").into()
    })
}

async fn serve(
    config: &Config,
    metrics: Option<Metrics>,
    source: &Source,
    handle: RelayHandle,
) -> Result<Option<AdminServer>> {
    let (Some(address), Some(metrics)) = (config.listen, metrics) else { return Ok(None) };
    let server = admin::serve(address, Arc::clone(&source.name), handle, metrics).await.map_err(|e| {
        Fault::new(e.to_string())
            .at("http.listen")
            .cure("choose a free port on 127.0.0.1, or port 0 for any free one")
    })?;
    Ok(Some(server))
}

fn announce(global: &Global, config: &Config, server: Option<&AdminServer>) -> Result<()> {
    let database = database::shown(config);
    let sink = database::shown_sink(config);
    let http = server.map(|s| format!("http://{}", s.address()));
    // A sink that writes to standard output has it to itself.
    let quiet = sink.starts_with("stdout:");
    if global.json && !quiet {
        let file = config.file.as_ref().map(|f| f.display().to_string());
        return Ok(output::json(&json!({
            "instance": config.instance, "database": database, "sink": sink, "http": http, "config": file,
        }))?);
    }
    let health = http.map_or_else(String::new, |h| format!("; health and metrics on {h}"));
    let text = format!(
        "relay {} carries messages from {database} to {sink}{health}; Ctrl-C stops it",
        config.instance
    );
    if quiet {
        eprintln!("{text}");
        return Ok(());
    }
    Ok(output::line(&text)?)
}
