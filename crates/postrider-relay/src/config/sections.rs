//! The sections of the file as types, and how they become the configuration.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use super::document::Origins;
use super::values::{Bytes, Time};
use super::{
    Config, ConfigError, DEFAULT_CONNECTIONS, DEFAULT_DATABASE, DEFAULT_DRAIN, DEFAULT_SINK, LogConfig,
    LogFormat, LogLevel, SinkConfig, SourceConfig,
};
use crate::core::settings::{OnDead, Settings};

/// The file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Sections {
    instance: Option<String>,
    source: Source,
    sink: Sink,
    relay: Relay,
    http: Http,
    log: Log,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Source {
    database: Option<SecretString>,
    database_url_file: Option<PathBuf>,
    password: Option<SecretString>,
    password_file: Option<PathBuf>,
    connections: Option<std::num::NonZeroU32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Sink {
    url: Option<SecretString>,
    url_file: Option<PathBuf>,
    password: Option<SecretString>,
    password_file: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Relay {
    lease: Option<Time>,
    renew_every: Option<Time>,
    margin: Option<Time>,
    publish_timeout: Option<Time>,
    idle_poll: Option<Time>,
    sweep_every: Option<Time>,
    late_margin: Option<Time>,
    head_batch: Option<u32>,
    load_batch: Option<u32>,
    settle_batch: Option<u32>,
    in_flight: Option<u32>,
    buffer_bytes: Option<Bytes>,
    buffer_heads: Option<u32>,
    held_lanes: Option<u32>,
    lane_heads: Option<u32>,
    max_attempts: Option<u32>,
    on_dead: Option<WhenDead>,
    confirm_delay: Option<Time>,
    drain: Option<Time>,
    backoff: BackoffSection,
    breaker: BreakerSection,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WhenDead {
    Skip,
    Block,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BackoffSection {
    first: Option<Time>,
    factor: Option<f64>,
    cap: Option<Time>,
    jitter: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct BreakerSection {
    failures: Option<u32>,
    first_probe: Option<Time>,
    probe_cap: Option<Time>,
    auth_probe: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Http {
    listen: Option<SocketAddr>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Log {
    format: Option<LogFormat>,
    level: Option<LogLevel>,
}

/// Puts defaults in, reads secret files, and checks what serde cannot.
pub(super) fn resolve(file: Sections, origins: &Origins) -> Result<Config, ConfigError> {
    let s = &file.source;
    let database = address(
        origins,
        "source",
        ("database", "database_url_file"),
        (s.database.as_ref(), s.database_url_file.as_deref()),
        (s.password.as_ref(), s.password_file.as_deref()),
        DEFAULT_DATABASE,
    )?;
    let k = &file.sink;
    let sink = address(
        origins,
        "sink",
        ("url", "url_file"),
        (k.url.as_ref(), k.url_file.as_deref()),
        (k.password.as_ref(), k.password_file.as_deref()),
        DEFAULT_SINK,
    )?;
    let from = |a: &str, b: &str| {
        if origins.of(a) == super::Origin::Default { origins.of(b) } else { origins.of(a) }
    };
    let connections = file.source.connections.map_or(DEFAULT_CONNECTIONS, std::num::NonZeroU32::get);
    if connections < 2 {
        return Err(origins.error(
            "source.connections",
            "`source.connections` must be at least 2: one is kept for renewing leases",
        ));
    }
    let settings = settings(&file.relay);
    check(&settings, origins)?;
    let listen = loopback(file.http.listen, origins)?;
    Ok(Config {
        instance: instance(file.instance, origins)?,
        source: SourceConfig {
            database,
            connections,
            from: from("source.database", "source.database_url_file"),
        },
        sink: SinkConfig { url: sink, from: from("sink.url", "sink.url_file") },
        relay: settings,
        drain: file.relay.drain.map_or(DEFAULT_DRAIN, |t| t.0),
        listen,
        log: LogConfig {
            format: file.log.format.unwrap_or_default(),
            level: file.log.level.unwrap_or_default(),
        },
        file: None,
    })
}

/// An address given as text or by file, with a password given as text or by file.
fn address(
    origins: &Origins,
    section: &str,
    (field, file_field): (&str, &str),
    (text, file): (Option<&SecretString>, Option<&Path>),
    (password, password_file): (Option<&SecretString>, Option<&Path>),
    default: &str,
) -> Result<SecretString, ConfigError> {
    let path = |name: &str| format!("{section}.{name}");
    let address = either(origins, &path(field), &path(file_field), text, file)?
        .unwrap_or_else(|| SecretString::from(default));
    let secret = either(origins, &path("password"), &path("password_file"), password, password_file)?;
    let Some(secret) = secret else { return Ok(address) };
    let place = if password.is_some() { path("password") } else { path("password_file") };
    let refuse = || {
        origins
            .error(
                &place,
                format!("`{place}` is set, but the address in `{}` takes no password", path(field)),
            )
            .cure(format!("remove `{place}`, or give `{}` as scheme://user@host/…", path(field)))
    };
    let mut url = url::Url::parse(address.expose_secret()).map_err(|_| refuse())?;
    if url.password().is_some() {
        return Err(origins
            .error(
                &place,
                format!("`{place}` is set, and the address in `{}` has a password, too", path(field)),
            )
            .cure("remove one of the two"));
    }
    url.set_password(Some(secret.expose_secret())).map_err(|()| refuse())?;
    Ok(SecretString::from(String::from(url)))
}

/// The value of a field, or the contents of the file that another field names. Both at once is an error.
fn either(
    origins: &Origins,
    field: &str,
    file_field: &str,
    text: Option<&SecretString>,
    file: Option<&Path>,
) -> Result<Option<SecretString>, ConfigError> {
    match (text, file) {
        (None, None) => Ok(None),
        (Some(text), None) => Ok(Some(text.clone())),
        (Some(_), Some(_)) => Err(origins
            .error(file_field, format!("`{field}` and `{file_field}` are both set"))
            .cure("remove one of the two")),
        (None, Some(path)) => {
            let read = std::fs::read_to_string(path).map_err(|e| {
                origins
                    .error(
                        file_field,
                        format!("`{file_field}` names {}, which cannot be read: {e}", path.display()),
                    )
                    .cure("name a readable file that holds the value and nothing else")
            })?;
            let value = read.trim_end_matches(['\r', '\n']);
            if value.is_empty() {
                return Err(origins
                    .error(file_field, format!("`{file_field}` names {}, which is empty", path.display())));
            }
            Ok(Some(SecretString::from(value)))
        }
    }
}

fn settings(relay: &Relay) -> Settings {
    let mut s = Settings::default();
    let times = [
        (&mut s.lease, relay.lease),
        (&mut s.renew_every, relay.renew_every),
        (&mut s.margin, relay.margin),
        (&mut s.publish_timeout, relay.publish_timeout),
        (&mut s.idle_poll, relay.idle_poll),
        (&mut s.sweep_every, relay.sweep_every),
        (&mut s.late_margin, relay.late_margin),
        (&mut s.confirm_delay, relay.confirm_delay),
        (&mut s.backoff.first, relay.backoff.first),
        (&mut s.backoff.cap, relay.backoff.cap),
        (&mut s.breaker.first_probe, relay.breaker.first_probe),
        (&mut s.breaker.probe_cap, relay.breaker.probe_cap),
        (&mut s.breaker.auth_probe, relay.breaker.auth_probe),
    ];
    for (to, from) in times {
        if let Some(Time(value)) = from {
            *to = value;
        }
    }
    let counts = [
        (&mut s.head_batch, relay.head_batch),
        (&mut s.load_batch, relay.load_batch),
        (&mut s.settle_batch, relay.settle_batch),
        (&mut s.in_flight, relay.in_flight),
        (&mut s.buffer_heads, relay.buffer_heads),
        (&mut s.held_lanes, relay.held_lanes),
        (&mut s.lane_heads, relay.lane_heads),
        (&mut s.max_attempts, relay.max_attempts),
        (&mut s.breaker.failures, relay.breaker.failures),
    ];
    for (to, from) in counts {
        if let Some(value) = from {
            *to = value;
        }
    }
    for (to, from) in
        [(&mut s.backoff.factor, relay.backoff.factor), (&mut s.backoff.jitter, relay.backoff.jitter)]
    {
        if let Some(value) = from {
            *to = value;
        }
    }
    if let Some(Bytes(value)) = relay.buffer_bytes {
        s.buffer_bytes = value;
    }
    if let Some(value) = relay.on_dead {
        s.on_dead = match value {
            WhenDead::Skip => OnDead::Skip,
            WhenDead::Block => OnDead::Block,
        };
    }
    s
}

/// The settings against each other; the error stands at the field it names first.
fn check(settings: &Settings, origins: &Origins) -> Result<(), ConfigError> {
    let b = &settings.backoff;
    let wrong = if !(b.factor >= 1.0 && b.factor <= 100.0) {
        Err("backoff.factor must be from 1 to 100".to_owned())
    } else if !(0.0..=1.0).contains(&b.jitter) {
        Err("backoff.jitter must be from 0 to 1".to_owned())
    } else if settings.breaker.failures == 0 {
        Err("breaker.failures must be at least 1".to_owned())
    } else {
        settings.check()
    };
    wrong.map_err(|why| {
        let name = why.split(' ').next().unwrap_or_default();
        let path = format!("relay.{name}");
        origins.error(&path, format!("`{path}`{}", why.strip_prefix(name).unwrap_or(&why)))
    })
}

fn loopback(listen: Option<SocketAddr>, origins: &Origins) -> Result<Option<SocketAddr>, ConfigError> {
    match listen {
        Some(address) if !address.ip().is_loopback() => Err(origins
            .error("http.listen", format!("`http.listen` is {address}, which other machines can reach"))
            .cure("use 127.0.0.1 or [::1]: this version has no access control for health and metrics; put a proxy that has one in front")),
        other => Ok(other),
    }
}

fn instance(given: Option<String>, origins: &Origins) -> Result<String, ConfigError> {
    let Some(name) = given else {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        return Ok(if host.trim().is_empty() { "postrider".to_owned() } else { host.trim().to_owned() });
    };
    if name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) {
        return Err(origins
            .error("instance", "`instance` must be a name of 1 to 255 bytes without control characters"));
    }
    Ok(name)
}
