//! The brokers: one file each, and the table that finds them by the scheme of an address.

mod address;
mod file;
mod line;
#[cfg(feature = "nats")]
mod nats;
mod stdout;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

pub use address::{Address, redact};
pub use stdout::StdoutSink;

use crate::sink::{Capabilities, Sink, SinkError};

/// What every sink is told when it is opened.
#[derive(Clone, Debug)]
pub struct SinkOptions {
    /// Deadline of one publish; what has no verdict then is reported as unknown. Default 5 s.
    pub publish_timeout: Duration,
    /// How long opening may take before it fails as unavailable. Default 10 s.
    pub connect_timeout: Duration,
    /// Name of this relay; locks and broker connections carry it, for people.
    pub instance: String,
    /// A broker that does not answer while opening is no error: the sink refuses messages and goes on trying. Wrong
    /// credentials, a missing stream and wrong options still are errors. Default false.
    pub start_offline: bool,
}

impl Default for SinkOptions {
    fn default() -> Self {
        Self {
            publish_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(10),
            instance: "postrider".to_owned(),
            start_offline: false,
        }
    }
}

/// Opens a sink of one kind.
pub type Connect =
    for<'a> fn(&'a Address, &'a SinkOptions) -> BoxFuture<'a, Result<Arc<dyn Sink>, SinkError>>;

/// One line of the table: a kind of sink.
#[derive(Clone, Copy, Debug)]
pub struct SinkKind {
    /// Its name.
    pub name: &'static str,
    /// The schemes of its addresses.
    pub schemes: &'static [&'static str],
    /// What it can do, unless options change it: the opened sink says what is true for it.
    pub capabilities: Capabilities,
    /// What it is, in a line.
    pub help: &'static str,
    /// The options an address may carry, each with its meaning.
    pub options: &'static [(&'static str, &'static str)],
    /// Opens it.
    pub connect: Connect,
}

/// Every kind of sink this build knows.
pub const SINKS: &[SinkKind] = &[
    file::KIND,
    stdout::KIND,
    #[cfg(feature = "nats")]
    nats::KIND,
];

/// The kind an address belongs to, after a look at its options. Opens nothing.
///
/// # Errors
/// An unknown scheme (the text lists the known ones) or an unknown option (the text names it and lists the known ones).
pub fn kind(address: &Address) -> Result<&'static SinkKind, SinkError> {
    let Some(kind) = SINKS.iter().find(|kind| kind.schemes.contains(&address.scheme.as_str())) else {
        let known: Vec<&str> = SINKS.iter().flat_map(|kind| kind.schemes).copied().collect();
        return Err(SinkError::Config(format!(
            "no sink has the scheme '{}'; known are: {}",
            address.scheme,
            known.join(", ")
        )));
    };
    for (name, _) in &address.options {
        if !kind.options.iter().any(|(known, _)| known == name) {
            let known: Vec<&str> = kind.options.iter().map(|(known, _)| *known).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return Err(SinkError::Config(format!(
                "the {} sink has no option '{name}'; it has: {known}",
                kind.name
            )));
        }
    }
    Ok(kind)
}

/// Opens the sink that `url` names.
///
/// # Errors
/// [`SinkError::Config`] for a wrong address or option, [`SinkError::Unavailable`] when it does not answer in time,
/// [`SinkError::Operator`] when it refuses: credentials, a missing stream, a lock. Texts carry no secrets.
pub async fn connect(url: &str, options: &SinkOptions) -> Result<Arc<dyn Sink>, SinkError> {
    let address = Address::parse(url)?;
    let kind = kind(&address)?;
    (kind.connect)(&address, options).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_unknown_scheme_lists_the_known_ones() {
        let error = connect("kafka://secret@h", &SinkOptions::default()).await.err().unwrap().to_string();
        assert!(error.contains("'kafka'") && error.contains("file") && error.contains("stdout"), "{error}");
        assert!(!error.contains("secret"));
    }

    #[tokio::test]
    async fn an_unknown_option_is_refused_by_name() {
        let error =
            connect("file:a.jsonl?fsnyc=false", &SinkOptions::default()).await.err().unwrap().to_string();
        assert!(error.contains("'fsnyc'"), "{error}");
    }

    #[test]
    fn names_and_schemes_are_unique() {
        let mut names: Vec<&str> = SINKS.iter().flat_map(|kind| kind.schemes).copied().collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
