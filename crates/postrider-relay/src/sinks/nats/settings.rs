//! The address of a NATS sink as settings.

use std::path::PathBuf;

use secrecy::{ExposeSecret as _, SecretString};

use super::super::address::{Address, decode};
use crate::sink::SinkError;

/// The options of the address, each with its meaning; the manual shows them.
pub(super) const OPTIONS: &[(&str, &str)] = &[
    (
        "stream",
        "the stream that must take the messages; checked at start and by the server with every message",
    ),
    ("subject", "template of the subject, {topic} stands for the topic; default {topic}"),
    (
        "dedupe",
        "send Nats-Msg-Id, so that the server drops repeats within its window (true, default) or not (false)",
    ),
    ("creds", "path of a credentials file (JWT and seed)"),
    ("nkey", "path of a file with an NKey seed"),
    ("token", "a token; better from the environment than in a file"),
    ("tls_ca", "path of a PEM file with the authorities to trust instead of the system's"),
    ("tls_cert", "path of a PEM file with our certificate"),
    ("tls_key", "path of a PEM file with its key"),
    ("domain", "JetStream domain"),
];

/// How we prove who we are.
#[derive(Clone, Debug)]
pub(super) enum Credentials {
    None,
    Password(String, SecretString),
    Token(SecretString),
    Creds(PathBuf),
    NKey(PathBuf),
}

#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// `scheme://host:port` each, without credentials.
    pub(super) servers: Vec<async_nats::ServerAddr>,
    pub(super) credentials: Credentials,
    pub(super) stream: Option<String>,
    /// The subject is `prefix + topic + suffix`, or `prefix` alone where the template has no `{topic}`.
    pub(super) subject: Template,
    pub(super) dedupe: bool,
    pub(super) tls_ca: Option<PathBuf>,
    pub(super) tls_client: Option<(PathBuf, PathBuf)>,
    pub(super) require_tls: bool,
    pub(super) domain: Option<String>,
}

/// A subject with a place for the topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    prefix: String,
    suffix: Option<String>,
}

impl Template {
    fn parse(text: &str) -> Result<Self, SinkError> {
        let template = match text.split_once("{topic}") {
            Some((prefix, suffix)) => Self { prefix: prefix.to_owned(), suffix: Some(suffix.to_owned()) },
            None => Self { prefix: text.to_owned(), suffix: None },
        };
        if let Some(fault) = subject_fault(&template.fill("t")) {
            return Err(SinkError::Config(format!("option 'subject' of the nats sink {fault}")));
        }
        if text.contains('{') && template.suffix.is_none()
            || template.suffix.as_deref().is_some_and(|s| s.contains('{'))
        {
            return Err(SinkError::Config(
                "option 'subject' of the nats sink knows {topic} only, and only once".to_owned(),
            ));
        }
        // The server refuses control lines above 4,096 bytes; topics have at most 255.
        if text.len() > 1_024 {
            return Err(SinkError::Config(
                "option 'subject' of the nats sink is longer than 1,024 bytes".to_owned(),
            ));
        }
        Ok(template)
    }

    pub(super) fn fill(&self, topic: &str) -> String {
        match &self.suffix {
            Some(suffix) => format!("{}{topic}{suffix}", self.prefix),
            None => self.prefix.clone(),
        }
    }
}

/// Why NATS could not carry a subject, or `None`.
pub(super) fn subject_fault(subject: &str) -> Option<&'static str> {
    if subject.is_empty() {
        return Some("is empty");
    }
    if subject.starts_with('.') || subject.ends_with('.') || subject.contains("..") {
        return Some("has an empty part: dots at an end or next to each other");
    }
    if subject.contains(['*', '>']) {
        return Some("has * or > in it, which are wildcards in NATS");
    }
    if subject.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Some("has white space or control characters in it");
    }
    if subject.starts_with('$') || subject.starts_with("_INBOX.") {
        return Some("begins with $ or _INBOX, which NATS keeps for itself");
    }
    None
}

impl Settings {
    pub(super) fn parse(address: &Address) -> Result<Self, SinkError> {
        let (user, hosts) = match address.rest.rsplit_once('@') {
            Some((user, hosts)) => (Some(user), hosts),
            None => (None, address.rest.as_str()),
        };
        let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
        let path = |name: &str| address.option(name).map(PathBuf::from);
        let tls_client = match (path("tls_cert"), path("tls_key")) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            _ => {
                return Err(SinkError::Config(
                    "the nats sink needs tls_cert and tls_key together".to_owned(),
                ));
            }
        };
        let stream = address.option("stream").map(str::to_owned);
        if let Some(name) = &stream
            && (name.is_empty() || name.contains(|c: char| c.is_whitespace() || ".*>/\\".contains(c)))
        {
            return Err(SinkError::Config(
                "option 'stream' of the nats sink is no name of a stream".to_owned(),
            ));
        }
        Ok(Self {
            servers: servers(&address.scheme, hosts)?,
            credentials: credentials(address, user)?,
            stream,
            subject: Template::parse(address.option("subject").unwrap_or("{topic}"))?,
            dedupe: address.flag("dedupe", true)?,
            tls_ca: path("tls_ca"),
            tls_client,
            require_tls: address.scheme == "tls",
            domain: address.option("domain").map(str::to_owned),
        })
    }
}

fn servers(scheme: &str, hosts: &str) -> Result<Vec<async_nats::ServerAddr>, SinkError> {
    let parse = |host: &str| -> Option<async_nats::ServerAddr> {
        if host.is_empty() || host.contains(['/', '#']) {
            return None;
        }
        let server: async_nats::ServerAddr = format!("{scheme}://{host}").parse().ok()?;
        (!server.host().is_empty() && server.port() != 0).then_some(server)
    };
    hosts
        .split(',')
        .map(|host| {
            parse(host.trim()).ok_or_else(|| {
                SinkError::Config(format!(
                    "the nats sink cannot read the server '{host}'; write nats://host:4222"
                ))
            })
        })
        .collect()
}

fn credentials(address: &Address, user: Option<&str>) -> Result<Credentials, SinkError> {
    let mut found = Vec::new();
    if let Some(user) = user {
        found.push(match user.split_once(':') {
            Some((name, password)) => Credentials::Password(decode(name)?, decode(password)?.into()),
            None => Credentials::Token(decode(user)?.into()),
        });
    }
    if let Some(token) = address.option("token") {
        found.push(Credentials::Token(token.to_owned().into()));
    }
    if let Some(path) = address.option("creds") {
        found.push(Credentials::Creds(path.into()));
    }
    if let Some(path) = address.option("nkey") {
        found.push(Credentials::NKey(path.into()));
    }
    match found.len() {
        0 => Ok(Credentials::None),
        1 => Ok(found.remove(0)),
        _ => Err(SinkError::Config(
            "the nats sink has more than one kind of credentials: keep one of user:password@, token@, token, creds, nkey".to_owned(),
        )),
    }
}

impl Settings {
    /// Fresh connection options; files are read each time, so that renewed credentials are taken up.
    pub(super) async fn connect_options(&self) -> Result<async_nats::ConnectOptions, SinkError> {
        let mut options = async_nats::ConnectOptions::new();
        let unreadable = |path: &std::path::Path, error: &std::io::Error| {
            SinkError::Operator(format!("the nats sink cannot read {}: {error}", path.display()))
        };
        options = match &self.credentials {
            Credentials::None => options,
            Credentials::Password(user, password) => {
                options.user_and_password(user.clone(), password.expose_secret().to_owned())
            }
            Credentials::Token(token) => options.token(token.expose_secret().to_owned()),
            Credentials::Creds(path) => {
                options.credentials_file(path).await.map_err(|error| unreadable(path, &error))?
            }
            Credentials::NKey(path) => {
                let seed = tokio::fs::read_to_string(path).await.map_err(|error| unreadable(path, &error))?;
                options.nkey(seed.trim().to_owned())
            }
        };
        if let Some(ca) = &self.tls_ca {
            options = options.add_root_certificates(ca.clone());
        }
        if let Some((cert, key)) = &self.tls_client {
            options = options.add_client_certificate(cert.clone(), key.clone());
        }
        Ok(options.require_tls(self.require_tls))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<Settings, SinkError> {
        Settings::parse(&Address::parse(url).unwrap())
    }

    #[test]
    fn servers_and_credentials_are_read() {
        let settings =
            settings("nats://us%40er:p%3Aw@a:1,b,[::1]:7?stream=S&subject=x.{topic}.y&dedupe=false").unwrap();
        let servers: Vec<(String, u16)> =
            settings.servers.iter().map(|s| (s.host().to_owned(), s.port())).collect();
        assert_eq!(servers, [("a".to_owned(), 1), ("b".to_owned(), 4222), ("::1".to_owned(), 7)]);
        let Credentials::Password(user, password) = &settings.credentials else { panic!() };
        assert_eq!((user.as_str(), password.expose_secret()), ("us@er", "p:w"));
        assert_eq!(settings.subject.fill("t"), "x.t.y");
        assert!(!settings.dedupe && !settings.require_tls);
        assert!(!format!("{settings:?}").contains("p:w"));
    }

    #[test]
    fn a_lone_user_is_a_token() {
        assert!(matches!(settings("nats://tok@a").unwrap().credentials, Credentials::Token(_)));
        assert!(settings("tls://a").unwrap().require_tls);
    }

    #[test]
    fn contradictions_and_nonsense_are_refused() {
        for url in [
            "nats:",
            "nats://",
            "nats://a,,b",
            "nats://a/path",
            "nats://a:0",
            "nats://a:x",
            "nats://u:p@a?token=t",
            "nats://a?tls_cert=c",
            "nats://a?stream=",
            "nats://a?stream=a.b",
            "nats://a?subject=",
            "nats://a?subject=a..{topic}",
            "nats://a?subject=a.>",
            "nats://a?subject={key}",
            "nats://a?subject={topic}.{topic}",
            "nats://a?subject=$JS.x",
        ] {
            assert!(matches!(settings(url), Err(SinkError::Config(_))), "{url}");
        }
    }
}
