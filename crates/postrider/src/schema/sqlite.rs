//! Migrating SQLite.

use std::time::Duration;

use sqlx::{Connection as _, Row, SqliteConnection};
use tokio::time::{Instant, sleep};

use super::migrate::{Connection, Migrator, SchemaError};
use super::{VERSION, migrations, record, table};
use crate::db::Dialect;
use crate::errors::{Class, classify};

/// How long other writers are waited for.
const PATIENCE: Duration = Duration::from_secs(30);

impl Connection for SqliteConnection {}

impl Migrator for SqliteConnection {
    async fn found(&mut self) -> sqlx::Result<u32> {
        patiently(self, async |conn| newest(conn).await).await
    }

    async fn apply(&mut self) -> Result<u32, SchemaError> {
        // Outside the transaction, as it must be; the change of mode does not use the busy handler.
        patiently(self, async |conn| {
            sqlx::query("pragma journal_mode = wal").fetch_all(conn).await.map(|_| ())
        })
        .await?;
        Ok(patiently(self, async |conn| apply_once(conn).await).await?)
    }
}

async fn apply_once(conn: &mut SqliteConnection) -> sqlx::Result<u32> {
    let mut tx = conn.begin_with("begin immediate").await?;
    sqlx::raw_sql(table(Dialect::Sqlite)).execute(&mut *tx).await?;
    let found = newest(&mut tx).await?;
    if found >= VERSION {
        tx.rollback().await?;
        return Ok(found);
    }
    for migration in migrations(Dialect::Sqlite).iter().filter(|m| m.version > found) {
        sqlx::raw_sql(migration.sql).execute(&mut *tx).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(record(migration))).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(found)
}

async fn newest(conn: &mut SqliteConnection) -> sqlx::Result<u32> {
    let newest: i64 = sqlx::query("select coalesce(max(version), 0) from postrider_schema")
        .fetch_one(conn)
        .await?
        .try_get(0)?;
    Ok(u32::try_from(newest).unwrap_or(0))
}

/// Repeats what finds the database locked, whatever the connection's own busy timeout.
async fn patiently<T>(
    conn: &mut SqliteConnection,
    mut step: impl AsyncFnMut(&mut SqliteConnection) -> sqlx::Result<T>,
) -> sqlx::Result<T> {
    let end = Instant::now() + PATIENCE;
    let mut pause = Duration::from_millis(2);
    loop {
        match step(conn).await {
            Err(error) if classify(&error) == Class::Retryable && Instant::now() < end => {
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(100));
            }
            done => return done,
        }
    }
}
