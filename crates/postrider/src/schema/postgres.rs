//! Migrating PostgreSQL.

use sqlx::{Connection as _, PgConnection, Row};

use super::migrate::{Connection, Migrator, SchemaError};
use super::{VERSION, migrations, record, table};
use crate::db::Dialect;

/// "postride" in ASCII. Held until the transaction ends; every schema of one database shares it.
const LOCK: i64 = 0x706f_7374_7269_6465;

impl Connection for PgConnection {}

impl Migrator for PgConnection {
    async fn found(&mut self) -> sqlx::Result<u32> {
        // to_regclass: a missing table is no error, so that this can run in a transaction.
        let here: bool = sqlx::query("select to_regclass('postrider_schema') is not null")
            .fetch_one(&mut *self)
            .await?
            .try_get(0)?;
        if here { newest(self).await } else { Ok(0) }
    }

    async fn apply(&mut self) -> Result<u32, SchemaError> {
        let mut tx = self.begin().await?;
        sqlx::query("select pg_advisory_xact_lock($1)").bind(LOCK).execute(&mut *tx).await?;
        sqlx::raw_sql(table(Dialect::Postgres)).execute(&mut *tx).await?;
        let found = newest(&mut tx).await?;
        if found < VERSION {
            for migration in migrations(Dialect::Postgres).iter().filter(|m| m.version > found) {
                sqlx::raw_sql(migration.sql).execute(&mut *tx).await?;
                sqlx::raw_sql(sqlx::AssertSqlSafe(record(migration))).execute(&mut *tx).await?;
            }
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
        Ok(found)
    }
}

async fn newest(conn: &mut PgConnection) -> sqlx::Result<u32> {
    let newest: i32 = sqlx::query("select coalesce(max(version), 0) from postrider_schema")
        .fetch_one(conn)
        .await?
        .try_get(0)?;
    Ok(u32::try_from(newest).unwrap_or(0))
}
