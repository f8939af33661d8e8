//! Configuration and logs, the same for every command.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use postrider_relay::config::{self, Config, Flags, LogConfig, LogFormat, LogLevel};
use tracing_subscriber::EnvFilter;

use crate::args::{Global, Level, LogForm};
use crate::fault::Fault;

/// The file that is read when none is named and it exists.
const USUAL_FILE: &str = "postrider.toml";

/// Reads the configuration of a command that answers and ends. Its log holds what is wrong only, unless a flag asks for more.
pub(crate) fn configuration(global: &Global) -> Result<Config, Fault> {
    let quiet = global.log_level.is_none().then_some(LogLevel::Warn);
    read(global, None, quiet)
}

/// Reads the configuration of the relay.
pub(crate) fn relay_configuration(global: &Global, listen: Option<String>) -> Result<Config, Fault> {
    read(global, listen, None)
}

fn read(global: &Global, listen: Option<String>, level: Option<LogLevel>) -> Result<Config, Fault> {
    let environment: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let flags = Flags {
        database: global.database.clone(),
        sink: global.sink.clone(),
        instance: global.instance.clone(),
        listen,
        log_format: global.log_format.map(|f| match f {
            LogForm::Text => "text".to_owned(),
            LogForm::Json => "json".to_owned(),
        }),
        log_level: global.log_level.map(|l| level_word(l).to_owned()),
    };
    let usual = Path::new(USUAL_FILE);
    let file: Option<PathBuf> = global.config.clone().or_else(|| usual.exists().then(|| usual.to_owned()));
    let config = config::load(file.as_deref(), &environment, &flags)?;
    logs(LogConfig { level: level.unwrap_or(config.log.level), ..config.log });
    for (name, meant) in config::misspelt_variables(&environment) {
        tracing::warn!(variable = name, meant, "this environment variable is no setting; it was ignored");
    }
    Ok(config)
}

fn level_word(level: Level) -> &'static str {
    match level {
        Level::Error => "error",
        Level::Warn => "warn",
        Level::Info => "info",
        Level::Debug => "debug",
        Level::Trace => "trace",
    }
}

/// Sends log lines to standard error. Lines of client libraries are let through from `warn` on only: what they say at finer
/// levels may hold addresses and statements. The client of NATS says nothing that the sink does not say better, and says it anew
/// at every attempt to connect.
fn logs(config: LogConfig) {
    let level = config.level.as_str();
    let filter =
        EnvFilter::new(format!("warn,sqlx=error,async_nats=off,postrider={level},postrider_relay={level}"));
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let installed = match config.format {
        LogFormat::Text => {
            use std::io::IsTerminal;
            builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).with_target(false).try_init(),
    };
    if let Err(error) = installed {
        eprintln!("warning: logs are not written: {error}");
    }
}

/// Log lines of the demo's relay, for whoever keeps the folder.
pub(crate) fn demo_logs() {
    logs(LogConfig { format: LogFormat::Text, level: LogLevel::Info });
}
