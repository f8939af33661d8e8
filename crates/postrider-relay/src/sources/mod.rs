//! The databases a relay can read, one folder each. Nothing here knows a broker.

mod headers;
mod pool;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use secrecy::SecretString;

use crate::inspect::Admin;
use crate::source::{Identity, Source, SourceError};

/// The SQL that a PostgreSQL relay runs all the time, so that tests can ask the planner about the very same text.
#[cfg(feature = "postgres")]
#[doc(hidden)]
pub use postgres::statements as postgres_statements;

/// How a source is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceOptions {
    /// Most connections this relay holds, at least 2. One of them is kept for renewing leases. Default 4.
    pub connections: u32,
    /// Longest time for one statement, at least 100 ms. Each operation also has a deadline on our side, one second
    /// later, for connections that do not answer any more. Default 10 s, well below the lease of 15 s.
    pub statement_timeout: Duration,
    /// Create the file when it is not there (SQLite only; servers have no such thing). Default false.
    pub create_if_missing: bool,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self { connections: 4, statement_timeout: Duration::from_secs(10), create_if_missing: false }
    }
}

type OpenFuture = BoxFuture<'static, Result<Source, SourceError>>;
type AdminFuture = BoxFuture<'static, Result<Arc<dyn Admin>, SourceError>>;

/// One kind of database: a line of [`SOURCES`].
#[derive(Clone, Copy, Debug)]
pub struct SourceKind {
    /// Its name.
    pub name: &'static str,
    /// What its addresses begin with, before the colon.
    pub schemes: &'static [&'static str],
    /// An address as people write it.
    pub example: &'static str,
    open: fn(String, Identity, SourceOptions) -> OpenFuture,
    admin: fn(String) -> AdminFuture,
}

/// Every database this build can read.
pub const SOURCES: &[SourceKind] = &[
    #[cfg(feature = "postgres")]
    postgres::KIND,
    #[cfg(feature = "sqlite")]
    sqlite::KIND,
];

/// Opens the outbox at `url` and checks what a relay needs there: tables, version, rights, a server that can be written to.
///
/// # Errors
/// `Operator` says what to mend; `Temporary` when the database does not answer now. No text holds a password.
pub async fn open(url: &str, identity: Identity, options: &SourceOptions) -> Result<Source, SourceError> {
    (kind(url)?.open)(url.to_owned(), identity, options.clone()).await
}

/// Opens the outbox at `url` for looking and for the operators' actions, with two connections at most.
///
/// # Errors
/// As [`open`].
pub async fn admin(url: &str) -> Result<Arc<dyn Admin>, SourceError> {
    (kind(url)?.admin)(url.to_owned()).await
}

/// The kind of database an address names.
///
/// # Errors
/// `Operator`, listing the kinds there are, when the scheme is unknown.
pub fn kind(url: &str) -> Result<&'static SourceKind, SourceError> {
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    let found =
        SOURCES.iter().find(|kind| kind.schemes.iter().any(|known| known.eq_ignore_ascii_case(scheme)));
    found.ok_or_else(|| {
        let known: Vec<&str> = SOURCES.iter().map(|kind| kind.example).collect();
        SourceError::Operator(format!(
            "the database address {:?} names no database this program knows; it must look like {}",
            redact(url),
            known.join(" or ")
        ))
    })
}

/// `url` as it may be shown: user, host and database stay, the password and everything after a `?` go.
///
/// An address that does not parse, or in which a raw `@`, `/` or `?` of a password may have moved the borders, keeps its scheme only.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        let (shown, query) = url.split_once('?').map_or((url, ""), |(shown, _)| (shown, "?…"));
        return if shown.contains('@') { "…".to_owned() } else { format!("{shown}{query}") };
    };
    let Ok(parsed) = url::Url::parse(url) else { return format!("{scheme}://…") };
    let user = !parsed.username().is_empty() || parsed.password().is_some();
    if rest.matches('@').count() != usize::from(user) {
        return format!("{scheme}://…");
    }
    let user = if user { format!("{}@", parsed.username()) } else { String::new() };
    let port = parsed.port().map(|port| format!(":{port}")).unwrap_or_default();
    let query = if parsed.query().is_some() { "?…" } else { "" };
    format!("{scheme}://{user}{}{port}{}{query}", parsed.host_str().unwrap_or_default(), parsed.path())
}

/// A token that nobody else has or will have: 64 random bits from the operating system.
fn random_token() -> Result<i64, SourceError> {
    getrandom::u64().map(u64::cast_signed).map_err(|error| {
        SourceError::Temporary(format!(
            "the operating system gives no random numbers for the shard tokens: {error}"
        ))
    })
}

/// A name for a relay process that no other has, from the operating system's randomness: also not two machines that were
/// restored from one snapshot.
///
/// # Errors
/// `Temporary` when the operating system gives no random numbers.
pub fn relay_id() -> Result<i64, SourceError> {
    random_token().map(|token| (token & i64::MAX).max(1))
}

/// `text` as it may be stored: no NUL (no text column takes it), at most `most` characters.
fn storable(text: &str, most: usize) -> String {
    text.chars().filter(|c| *c != '\0').take(most).collect()
}

/// How many shards a relay may own that shares `shards` with others, who own `others` of them now.
///
/// The even share, rounded up for as many relays as the division leaves over and down for the rest: 64 shards on three
/// relays are 22, 21 and 21, whoever comes first.
fn even_share(shards: u32, others: &[u32]) -> u32 {
    let relays = u32::try_from(others.len()).unwrap_or(u32::MAX).saturating_add(1);
    let (floor, left_over) = (shards / relays, shards % relays);
    let taken = others.iter().filter(|&&count| count > floor).count();
    if u32::try_from(taken).unwrap_or(u32::MAX) < left_over { floor + 1 } else { floor }
}

/// An address, its password kept from logs and debug output.
fn secret(url: String) -> SecretString {
    SecretString::from(url)
}

#[cfg(test)]
mod tests {
    use super::{even_share, kind, redact, storable};

    #[test]
    fn no_password_survives_redaction() {
        for (url, shown) in [
            ("postgres://me:s3cret@db.example/app", "postgres://me@db.example/app"),
            ("postgres://me@db.example/app", "postgres://me@db.example/app"),
            ("postgres://me:p@ss/w:rd@db/app?sslmode=require", "postgres://…"),
            ("postgres://me:12?x@db/app", "postgres://…"),
            ("postgres://me:12/x@db/app", "postgres://…"),
            ("postgres://me:s3cret@db:5433/app?sslmode=require", "postgres://me@db:5433/app?…"),
            ("postgres://db/app?password=s3cret", "postgres://db/app?…"),
            ("sqlite:postrider.db", "sqlite:postrider.db"),
            ("me:s3cret@host", "…"),
            ("sqlite://data/postrider.db", "sqlite://data/postrider.db"),
        ] {
            assert_eq!(redact(url), shown);
        }
    }

    #[test]
    fn an_unknown_scheme_lists_the_known_ones() {
        let error = kind("mongodb://me:s3cret@host/db").unwrap_err().to_string();
        assert!(error.contains("mongodb://me@host/db"), "{error}");
        assert!(error.contains("postgres://") && error.contains("sqlite:"), "{error}");
        assert!(!error.contains("s3cret"), "{error}");
    }

    #[test]
    fn shards_are_shared_evenly() {
        assert_eq!(even_share(64, &[]), 64);
        assert_eq!(even_share(64, &[64]), 32);
        // The first has given back what is beyond its rounded-up share; two newcomers come one after the other.
        assert_eq!(even_share(64, &[22, 0]), 21);
        assert_eq!(even_share(64, &[22, 21]), 21);
        assert_eq!(even_share(64, &[21, 21]), 22);
        assert_eq!(even_share(1, &[]), 1);
        assert_eq!(even_share(1, &[0]), 1);
        assert_eq!(even_share(1, &[1]), 0);
    }

    #[test]
    fn stored_texts_have_no_nul_and_an_end() {
        assert_eq!(storable("a\0bc", 2), "ab");
    }
}
