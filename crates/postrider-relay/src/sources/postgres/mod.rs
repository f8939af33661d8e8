//! PostgreSQL 13 or newer, by polling.

mod admin;
mod check;
mod errors;
mod inspect;
mod ownership;
mod poll;
mod settle;
pub mod statements;

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use sqlx::postgres::{PgConnectOptions, PgConnection};

use super::pool::{Answer, Failure, Pool};
use super::{SourceKind, SourceOptions, redact, secret};
use crate::inspect::Admin;
use crate::source::{Identity, Source, SourceError};

pub(super) const KIND: SourceKind = SourceKind {
    name: "postgres",
    schemes: &["postgres", "postgresql"],
    example: "postgres://user@host/database",
    open: |url, identity, options| Box::pin(open(secret(url), identity, options)),
    admin: |url| Box::pin(admin(secret(url))),
};

/// How long an operator's query may take.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(30);

async fn open(url: SecretString, identity: Identity, options: SourceOptions) -> Result<Source, SourceError> {
    let name = identity.instance.clone();
    let working = Server::new(
        &url,
        &format!("postrider {name}"),
        options.connections.saturating_sub(1),
        options.statement_timeout,
        statements::RELAY_SESSION,
    )?;
    let leasing = Server::new(
        &url,
        &format!("postrider {name} lease"),
        1,
        options.statement_timeout,
        statements::RELAY_SESSION,
    )?;
    working.check(check::Needs::Relay).await?;
    let (working, leasing) = (Arc::new(working), Arc::new(leasing));
    Ok(Source {
        name: Arc::from(working.place.as_str()),
        reader: Arc::new(poll::PostgresReader(Arc::clone(&working))),
        settler: Arc::new(settle::PostgresSettler { server: Arc::clone(&working), relay: identity.relay }),
        ownership: Arc::new(ownership::PostgresOwnership { server: leasing, identity }),
        inspect: Arc::new(inspect::PostgresInspect(working)),
    })
}

async fn admin(url: SecretString) -> Result<Arc<dyn Admin>, SourceError> {
    let server = Server::new(&url, "postrider admin", 2, ADMIN_TIMEOUT, ADMIN_SESSION)?;
    server.check(check::Needs::Admin).await?;
    Ok(Arc::new(admin::PostgresAdmin(inspect::PostgresInspect(Arc::new(server)))))
}

/// As [`statements::RELAY_SESSION`], for queries that join a few rows of one table to others by id.
const ADMIN_SESSION: &str = "
select set_config('default_transaction_isolation', 'read committed', false),
       set_config('timezone', 'UTC', false),
       set_config('statement_timeout', $1, false),
       set_config('lock_timeout', $2, false),
       set_config('idle_in_transaction_session_timeout', $1, false),
       set_config('enable_seqscan', 'off', false),
       set_config('jit', 'off', false)";

/// Connections to one server, and its address as it may be shown.
#[derive(Debug)]
struct Server {
    pool: Pool<PgConnection>,
    place: String,
}

impl Server {
    fn new(
        url: &SecretString,
        application: &str,
        size: u32,
        timeout: Duration,
        session: &'static str,
    ) -> Result<Self, SourceError> {
        let place = redact(url.expose_secret());
        let options = PgConnectOptions::from_str(url.expose_secret())
            .map_err(|error| errors::explain(&place, "use the address", Failure::Sqlx(error)))?
            .application_name(&application.chars().take(63).collect::<String>());
        let timeout = timeout.max(Duration::from_millis(100));
        let (statement, lock) = (timeout.as_millis().to_string(), (timeout / 2).as_millis().to_string());
        let pool = Pool::new(options, size, timeout + Duration::from_secs(1), move |connection| {
            let query = sqlx::query(session).bind(statement.clone()).bind(lock.clone()).persistent(false);
            Box::pin(async move { query.execute(connection).await.map(drop) })
        });
        Ok(Self { pool, place })
    }

    /// `doing` is the end of "cannot …", such as "read the ready queue".
    async fn run<T>(
        &self,
        doing: &str,
        work: impl for<'c> FnOnce(&'c mut PgConnection) -> Answer<'c, T> + Send,
    ) -> Result<T, SourceError> {
        self.pool.run(work).await.map_err(|failure| errors::explain(&self.place, doing, failure))
    }
}

/// A count in a column that holds no negative ones.
fn unsigned(count: i32) -> u32 {
    u32::try_from(count).unwrap_or(0)
}

/// A count as the columns take it.
fn signed(count: u32) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// A duration as the statements take it.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 2)
}
