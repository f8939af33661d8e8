//! A connection of the command line's own, for `init` and `send`, and what its errors mean.

use std::str::FromStr;

use anyhow::Result;
use postrider::Dialect;
use postrider::schema::SchemaError;
use postrider_relay::config::Config;
use postrider_relay::{sinks, sources};
use secrecy::ExposeSecret;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions, Connection as _};

use crate::fault::Fault;

/// A connection to either database.
pub(crate) enum Connection {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Connection {
    pub(crate) async fn close(self) -> sqlx::Result<()> {
        match self {
            Self::Postgres(c) => c.close().await,
            Self::Sqlite(c) => c.close().await,
        }
    }
}

/// The address of the database as it may be shown. One that cannot be understood may hold a secret anywhere.
pub(crate) fn shown(config: &Config) -> String {
    let url = config.source.database.expose_secret();
    if sources::kind(url).is_ok() { sources::redact(url) } else { "…".to_owned() }
}

/// The address of the sink as it may be shown.
pub(crate) fn shown_sink(config: &Config) -> String {
    let url = config.sink.url.expose_secret();
    let known = sinks::Address::parse(url).is_ok_and(|address| sinks::kind(&address).is_ok());
    if known { sinks::redact(url) } else { "…".to_owned() }
}

/// Where the configured database is, for messages: the address without secrets, and who said so.
pub(crate) fn place(config: &Config) -> String {
    format!("database {} ({})", shown(config), config.source.from)
}

/// The kind of database that the configuration names. Connects to nothing.
pub(crate) fn dialect(config: &Config) -> Result<Dialect, Fault> {
    match config.source.database.expose_secret().split(':').next() {
        Some("postgres" | "postgresql") => Ok(Dialect::Postgres),
        Some("sqlite") => Ok(Dialect::Sqlite),
        _ => Err(Fault::new("this is not the address of a database that Postrider knows")
            .at(place(config))
            .cure("write sqlite:FILE or postgres://USER@HOST:PORT/NAME")),
    }
}

/// Connects. A SQLite file is created if it is missing and `create` says so.
pub(crate) async fn connect(config: &Config, create: bool) -> Result<Connection, Fault> {
    let url = config.source.database.expose_secret();
    let invalid = |_| {
        Fault::new("the address of the database cannot be read").at(place(config)).cure(
            "write sqlite:FILE or postgres://USER@HOST:PORT/NAME; special characters of a password as %XX",
        )
    };
    let connected = match dialect(config)? {
        Dialect::Postgres => {
            let options = PgConnectOptions::from_str(url).map_err(invalid)?;
            let options = options.application_name("postrider").disable_statement_logging();
            PgConnection::connect_with(&options).await.map(Connection::Postgres)
        }
        Dialect::Sqlite => {
            let options = SqliteConnectOptions::from_str(url).map_err(invalid)?;
            let options = options
                .create_if_missing(create)
                .busy_timeout(std::time::Duration::from_secs(30))
                .disable_statement_logging();
            SqliteConnection::connect_with(&options).await.map(Connection::Sqlite)
        }
    };
    connected.map_err(|e| connecting(config, &e))
}

/// Why a connection failed, and what to do about it.
fn connecting(config: &Config, error: &sqlx::Error) -> Fault {
    let code = match error {
        sqlx::Error::Database(e) => e.code().unwrap_or_default().into_owned(),
        _ => String::new(),
    };
    let (what, cure) = match (code.as_str(), error) {
        ("28P01" | "28000", _) => (
            "the database refuses this user or password".to_owned(),
            "check the user in the address and its password (source.password_file or ${VARIABLE} keep it out of the file)",
        ),
        ("3D000", _) => {
            ("there is no database of this name".to_owned(), "check the name, or create it: createdb NAME")
        }
        ("14", _) => (
            "the SQLite file cannot be opened".to_owned(),
            "check that its folder exists and may be written; `postrider init` creates the file",
        ),
        (_, sqlx::Error::Io(e)) => {
            (format!("the database does not answer: {e}"), "check host and port, and that the server runs")
        }
        (_, sqlx::Error::Tls(e)) => (
            format!("no encrypted connection to the database: {e}"),
            "check sslmode and the certificates in the address",
        ),
        (_, e) => (format!("cannot connect to the database: {e}"), "check the address and the server's log"),
    };
    Fault::new(what).at(place(config)).cure(cure)
}

/// What is wrong with the schema, and what to do about it.
pub(crate) fn schema(config: &Config, error: &SchemaError) -> Fault {
    let (what, cure) = match error {
        SchemaError::Missing => (
            "the tables are missing (or not in the search_path)".to_owned(),
            "create them: postrider init with the same --database",
        ),
        SchemaError::Older { found, needed } => (
            format!("the tables have version {found}, this program needs version {needed}"),
            "bring them up to date: postrider init with the same --database",
        ),
        SchemaError::Newer { found, known } => (
            format!("the tables have version {found}, this program knows version {known}"),
            "use the release of postrider that made them, or a newer one",
        ),
        SchemaError::Denied(e) => (
            format!("the database does not allow this to the user: {e}"),
            "create the tables as their owner; for the other rights: postrider init --grants",
        ),
        other => return Fault::from_text(&other.to_string()).at(place(config)),
    };
    Fault::new(what).at(place(config)).cure(cure)
}
