//! SQLite 3.37 or newer files, by polling.
//!
//! One writer at a time: ids commit in order, there is one shard, one relay works and others wait. Writes go through one
//! connection in `begin immediate` transactions, so that they queue in this process rather than at the file's lock.

mod admin;
mod check;
mod errors;
mod inspect;
mod ownership;
mod poll;
mod settle;

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use tokio::time::{Instant, sleep};

use super::pool::{Answer, Failure, Pool};
use super::{SourceKind, SourceOptions, redact};
use crate::inspect::Admin;
use crate::message::Shard;
use crate::source::{Identity, Owned, Source, SourceError};

pub(super) const KIND: SourceKind = SourceKind {
    name: "sqlite",
    schemes: &["sqlite"],
    example: "sqlite:postrider.db",
    open: |url, identity, options| Box::pin(open(url, identity, options)),
    admin: |url| Box::pin(admin(url)),
};

/// The only shard.
const SHARD: Shard = Shard(0);

/// How long SQLite itself waits for a lock before `begin` asks again.
const BUSY: Duration = Duration::from_secs(1);

/// How long an operator's query may take.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(30);

async fn open(url: String, identity: Identity, options: SourceOptions) -> Result<Source, SourceError> {
    let file = Arc::new(File::new(&url, &options)?);
    file.check().await?;
    Ok(Source {
        name: Arc::from(file.place.as_str()),
        reader: Arc::new(poll::SqliteReader(Arc::clone(&file))),
        settler: Arc::new(settle::SqliteSettler { file: Arc::clone(&file), relay: identity.relay }),
        ownership: Arc::new(ownership::SqliteOwnership { file: Arc::clone(&file), identity }),
        inspect: Arc::new(inspect::SqliteInspect(file)),
    })
}

async fn admin(url: String) -> Result<Arc<dyn Admin>, SourceError> {
    let options =
        SourceOptions { connections: 2, statement_timeout: ADMIN_TIMEOUT, create_if_missing: false };
    let file = File::new(&url, &options)?;
    file.check().await?;
    Ok(Arc::new(admin::SqliteAdmin(inspect::SqliteInspect(Arc::new(file)))))
}

/// Connections to one file.
#[derive(Debug)]
struct File {
    readers: Pool<SqliteConnection>,
    writer: Pool<SqliteConnection>,
    patience: Duration,
    place: String,
}

impl File {
    fn new(url: &str, options: &SourceOptions) -> Result<Self, SourceError> {
        let place = redact(url);
        if url.contains(":memory:") || url.contains("mode=memory") {
            return Err(SourceError::Operator(format!(
                "{place} is in memory: no other process could write messages into it, and they would not survive; name a file"
            )));
        }
        let connect = SqliteConnectOptions::from_str(url)
            .map_err(|error| errors::explain(&place, "use the address", Failure::Sqlx(error)))?
            .busy_timeout(BUSY)
            .synchronous(SqliteSynchronous::Full);
        if connect.get_filename() == Path::new("") {
            return Err(SourceError::Operator(format!(
                "the address {place:?} names no file; write sqlite:postrider.db"
            )));
        }
        let patience = options.statement_timeout.max(Duration::from_millis(100));
        let deadline = patience + BUSY + Duration::from_secs(1);
        let writing =
            connect.clone().create_if_missing(options.create_if_missing).journal_mode(SqliteJournalMode::Wal);
        Ok(Self {
            readers: Pool::new(
                connect.pragma("query_only", "on"),
                options.connections.saturating_sub(1),
                deadline,
                ready,
            ),
            writer: Pool::new(writing, 1, deadline, ready),
            patience,
            place,
        })
    }

    /// `doing` is the end of "cannot …", such as "read the ready queue". One statement, so one snapshot.
    async fn read<T>(
        &self,
        doing: &str,
        work: impl for<'c> FnOnce(&'c mut SqliteConnection) -> Answer<'c, T> + Send,
    ) -> Result<T, SourceError> {
        self.readers.run(work).await.map_err(|failure| errors::explain(&self.place, doing, failure))
    }

    /// As [`File::read`], on the writer's connection; `work` opens a transaction with [`begin`] and ends it with [`commit`].
    async fn write<T>(
        &self,
        doing: &str,
        work: impl for<'c> FnOnce(&'c mut SqliteConnection) -> Answer<'c, T> + Send,
    ) -> Result<T, SourceError> {
        self.writer.run(work).await.map_err(|failure| errors::explain(&self.place, doing, failure))
    }
}

/// Nothing to prepare: the pragmas are part of the connect options.
fn ready(_: &mut SqliteConnection) -> Answer<'_, ()> {
    Box::pin(async { Ok(()) })
}

/// Opens a write transaction, waiting for other processes' writers up to `patience`.
///
/// SQLite's own busy handler sleeps between its attempts and can lose to a busy neighbour each time; asking again after
/// it has given up is what patience there is. Once this has returned, no statement up to [`commit`] finds the file busy.
/// There is no rollback: a connection whose work failed is closed by the pool.
async fn begin(connection: &mut SqliteConnection, patience: Duration) -> Result<(), sqlx::Error> {
    let until = Instant::now() + patience;
    loop {
        match sqlx::query("begin immediate").execute(&mut *connection).await {
            Ok(_) => return Ok(()),
            Err(error) if errors::is_busy(&error) && Instant::now() < until => {
                sleep(Duration::from_millis(fastrand::u64(1..20))).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Ends what [`begin`] opened; durable when this has returned.
async fn commit(connection: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    sqlx::query("commit").execute(connection).await.map(drop)
}

/// The token of the only shard among `owned`.
fn token(owned: &[Owned]) -> Option<i64> {
    owned.iter().find(|owned| owned.shard == SHARD).map(|owned| owned.token)
}

/// A count in a column that holds no negative ones.
fn unsigned(count: i64) -> u32 {
    u32::try_from(count).unwrap_or(if count < 0 { 0 } else { u32::MAX })
}

/// A duration as the statements take it.
fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX / 2)
}

/// Ids as `json_each` takes them.
fn json(ids: &[i64]) -> String {
    let texts: Vec<String> = ids.iter().map(i64::to_string).collect();
    format!("[{}]", texts.join(","))
}
