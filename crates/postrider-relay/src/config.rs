//! The configuration: one TOML file, every value also by environment, the common ones by flag.
//!
//! Order of precedence: flag, environment, file, default. Without any of them the database is `sqlite:postrider.db` and
//! the sink `file:postrider.jsonl`, both in the working directory.
//!
//! `${NAME}` in a string of the file stands for an environment variable. Unknown fields are refused. Errors name the
//! field, its place and its constraint, and never quote a value.

mod document;
mod expand;
mod fields;
mod sections;
mod values;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use crate::core::settings::Settings;

pub use values::parse_duration;

/// The database without any configuration.
pub const DEFAULT_DATABASE: &str = "sqlite:postrider.db";
/// The sink without any configuration.
pub const DEFAULT_SINK: &str = "file:postrider.jsonl";
/// Connections to the database. Reading, settling and renewing overlap on one each; the fourth is for looking.
pub const DEFAULT_CONNECTIONS: u32 = 4;
/// How long a stopping relay waits for messages in flight. Below the 30 s after which most supervisors kill.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(25);

/// The whole configuration, checked.
#[derive(Clone, Debug)]
pub struct Config {
    /// The name of this relay that people see. Default: the host name.
    pub instance: String,
    /// Where messages come from.
    pub source: SourceConfig,
    /// Where messages go.
    pub sink: SinkConfig,
    /// Limits and times of the relay.
    pub relay: Settings,
    /// How long a stopping relay waits for messages in flight. Default 25 s.
    pub drain: Duration,
    /// Loopback address of health and metrics. Default: none. Port 0 takes any free port.
    pub listen: Option<SocketAddr>,
    /// Form of the log.
    pub log: LogConfig,
    /// The file that was read, if any.
    pub file: Option<PathBuf>,
}

/// `[source]`.
#[derive(Clone, Debug)]
pub struct SourceConfig {
    /// Address of the database, password included.
    pub database: SecretString,
    /// Most connections to it. Default 4.
    pub connections: u32,
    /// Where the address comes from, for messages.
    pub from: Origin,
}

/// `[sink]`.
#[derive(Clone, Debug)]
pub struct SinkConfig {
    /// Address of the sink, password included.
    pub url: SecretString,
    /// Where the address comes from, for messages.
    pub from: Origin,
}

/// `[log]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogConfig {
    /// Lines for people, or one JSON object per line.
    pub format: LogFormat,
    /// Least severe level that is written. Default info.
    pub level: LogLevel,
}

/// Form of the log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Readable text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// Severity of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What an operator must mend.
    Error,
    /// What may need an operator.
    Warn,
    /// What happens.
    #[default]
    Info,
    /// Details.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A flag of the command line.
    Flag(&'static str),
    /// An environment variable.
    Variable(String),
    /// A line of the configuration file.
    Line(PathBuf, usize),
    /// Nothing set it.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "flag {flag}"),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Line(file, line) => write!(f, "{}, line {line}", file.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// Values given as flags. `None` = not given.
#[derive(Clone, Default)]
pub struct Flags {
    /// `--database`
    pub database: Option<String>,
    /// `--sink`
    pub sink: Option<String>,
    /// `--instance`
    pub instance: Option<String>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--log-format`
    pub log_format: Option<String>,
    /// `--log-level`
    pub log_level: Option<String>,
}

impl fmt::Debug for Flags {
    /// Addresses may hold passwords: they are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flags")
            .field("instance", &self.instance)
            .field("listen", &self.listen)
            .finish_non_exhaustive()
    }
}

/// What is wrong with the configuration, where, and how to mend it. Holds no values of fields.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct ConfigError {
    /// What is wrong.
    pub what: String,
    /// File and line, environment variable or flag.
    pub place: Option<String>,
    /// What to do about it.
    pub cure: Option<String>,
}

impl ConfigError {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), place: None, cure: None }
    }

    pub(crate) fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }

    pub(crate) fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }
}

/// Reads `file` (if any), lays `environment` and `flags` over it, and checks the whole.
///
/// # Errors
/// The first thing that is wrong: unreadable file, syntax, unknown field, wrong type, unknown variable, contradiction.
pub fn load(
    file: Option<&Path>,
    environment: &BTreeMap<String, String>,
    flags: &Flags,
) -> Result<Config, ConfigError> {
    let text = match file {
        None => String::new(),
        Some(path) => std::fs::read_to_string(path).map_err(|e| {
            ConfigError::new(format!("cannot read the configuration file: {e}"))
                .at(path.display())
                .cure("name an existing TOML file with --config, or leave it out to run on defaults")
        })?,
    };
    let overlays = document::overlays(environment, flags);
    let (sections, origins) = document::read(&text, file, environment, &overlays)?;
    let config = sections::resolve(sections, &origins)?;
    Ok(Config { file: file.map(Path::to_owned), ..config })
}

/// Names of set variables that look like settings but are none, each with the name that was probably meant.
///
/// Container platforms set variables of the same form for services (`POSTRIDER_RELAY_PORT_80_TCP`), so that unknown ones
/// cannot be refused.
#[must_use]
pub fn misspelt_variables(environment: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let known: Vec<String> = fields::FIELDS.iter().map(|f| fields::variable(f.path)).collect();
    environment
        .keys()
        .filter(|name| name.starts_with("POSTRIDER_") && !known.contains(name))
        .filter_map(|name| {
            let meant = fields::nearest_of(name, known.iter().map(String::as_str))?;
            Some((name.clone(), meant.to_owned()))
        })
        .collect()
}

#[cfg(test)]
mod tests;
