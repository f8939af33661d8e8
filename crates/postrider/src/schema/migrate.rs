//! Bringing a database to the current version, and asking which one it has.

use super::VERSION;
use crate::errors::{Class, classify};

/// A connection that the schema can be looked at and migrated on: `sqlx::PgConnection` and `sqlx::SqliteConnection`.
/// From a pool: `&mut *pool.acquire().await?`.
#[expect(private_bounds, reason = "sealed: what a connection must do stays private")]
pub trait Connection: Migrator {}

pub(super) trait Migrator: Send {
    /// The version, 0 without any. Changes nothing.
    fn found(&mut self) -> impl Future<Output = sqlx::Result<u32>> + Send;

    /// Applies what is missing in one transaction, alone among all processes; the version it found.
    fn apply(&mut self) -> impl Future<Output = Result<u32, SchemaError>> + Send;
}

/// What a migration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The version before; 0 = nothing was there.
    pub from: u32,
    /// The version now.
    pub to: u32,
}

/// Why a program cannot work with this database.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SchemaError {
    /// No schema of ours, or not in the search_path.
    #[error("this database has no Postrider schema (or it is not in the search_path): run `postrider init`")]
    Missing,
    /// An older version than this program needs.
    #[error(
        "the Postrider schema has version {found}, this program needs {needed}: run `postrider init` of this release"
    )]
    Older {
        /// The database's version.
        found: u32,
        /// The program's.
        needed: u32,
    },
    /// A newer version than this program knows.
    #[error(
        "the Postrider schema has version {found}, this program knows {known}: use a newer release of this program"
    )]
    Newer {
        /// The database's version.
        found: u32,
        /// The program's.
        known: u32,
    },
    /// Tables of our names exist, but not the table that says which version they have.
    #[error(
        "a table of this name exists without a row in postrider_schema that accounts for it: {0}; install into another \
         schema, or add the row if the migration was run by hand"
    )]
    Occupied(#[source] sqlx::Error),
    /// The search_path names no schema that exists.
    #[error(
        "the search_path names no existing schema to create the tables in: run `create schema …` first: {0}"
    )]
    NoSchema(#[source] sqlx::Error),
    /// The role may not create or read the tables.
    #[error(
        "the database role may not do this: run `postrider init` as the owner of the schema, and grant the program's role \
         its rights with the grants script (migrations/postgres/grants.sql): {0}"
    )]
    Denied(#[source] sqlx::Error),
    /// Other processes hold the database.
    #[error("the database stayed locked by other processes; try again: {0}")]
    Busy(#[source] sqlx::Error),
    /// Anything else.
    #[error("the database refused: {0}")]
    Database(#[source] sqlx::Error),
}

impl From<sqlx::Error> for SchemaError {
    fn from(error: sqlx::Error) -> Self {
        let code = match &error {
            sqlx::Error::Database(error) => error.code().unwrap_or_default().into_owned(),
            _ => String::new(),
        };
        let exists = || error.to_string().contains("already exists");
        match (code.as_str(), classify(&error)) {
            ("42P07" | "42723" | "42710", _) => Self::Occupied(error),
            ("1", _) if exists() => Self::Occupied(error),
            ("3F000", _) => Self::NoSchema(error),
            (_, Class::Denied) => Self::Denied(error),
            (_, Class::Retryable) => Self::Busy(error),
            _ => Self::Database(error),
        }
    }
}

/// Brings the schema to [`VERSION`]: in one transaction, under a lock, so that any number of processes may call it at once
/// and a crash leaves the version before. Does nothing when it is current.
///
/// PostgreSQL: in the schema that stands first in the search_path. SQLite: sets WAL mode first, and waits up to 30 seconds
/// for other writers.
///
/// # Errors
/// See [`SchemaError`]. `Newer` when the database is ahead of this program: nothing is changed then.
pub async fn migrate<C: Connection>(conn: &mut C) -> Result<Migrated, SchemaError> {
    let before = found(conn).await?;
    let from = if before < VERSION { conn.apply().await? } else { before };
    judge(from.max(VERSION), VERSION)?;
    if from < VERSION {
        tracing::info!(from, to = VERSION, "the Postrider schema has been migrated");
    }
    Ok(Migrated { from, to: VERSION })
}

/// The version of the schema; `None` without any. Changes nothing.
///
/// # Errors
/// See [`SchemaError`].
pub async fn version<C: Connection>(conn: &mut C) -> Result<Option<u32>, SchemaError> {
    Ok(Some(found(conn).await?).filter(|&version| version > 0))
}

/// Checks that a program of this release can work with the database. Changes nothing.
///
/// # Errors
/// [`SchemaError::Missing`], [`Older`](SchemaError::Older) or [`Newer`](SchemaError::Newer), each saying what to run; or
/// an error of the database.
pub async fn ensure<C: Connection>(conn: &mut C) -> Result<(), SchemaError> {
    judge(found(conn).await?, VERSION)
}

fn judge(found: u32, program: u32) -> Result<(), SchemaError> {
    match found {
        0 => Err(SchemaError::Missing),
        found if found < program => Err(SchemaError::Older { found, needed: program }),
        found if found > program => Err(SchemaError::Newer { found, known: program }),
        _ => Ok(()),
    }
}

async fn found<C: Connection>(conn: &mut C) -> Result<u32, SchemaError> {
    match conn.found().await {
        Ok(version) => Ok(version),
        Err(error) if classify(&error) == Class::SchemaMissing => Ok(0),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_both_versions_and_what_to_do() {
        let text = |found| judge(found, 3).map_err(|error| error.to_string()).expect_err("another version");
        assert!(text(0).contains("run `postrider init`"));
        let older = text(2);
        assert!(
            older.contains("version 2") && older.contains("needs 3") && older.contains("`postrider init`"),
            "{older}"
        );
        let newer = text(4);
        assert!(
            newer.contains("version 4") && newer.contains("knows 3") && newer.contains("newer release"),
            "{newer}"
        );
        assert!(judge(3, 3).is_ok());
    }
}
