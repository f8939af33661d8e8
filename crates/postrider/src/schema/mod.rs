//! The schema: embedded migrations, a small migrator with a table of its own, and the schema as one page of SQL.

use crate::db::Dialect;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod migrate;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod sqlite;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use migrate::{Connection, Migrated, SchemaError, ensure, migrate, version};

/// The version that this release works with.
pub const VERSION: u32 = 1;

/// One step from a version to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Migration {
    pub(crate) version: u32,
    pub(crate) name: &'static str,
    pub(crate) sql: &'static str,
}

const POSTGRES: &[Migration] = &[Migration {
    version: 1,
    name: "outbox",
    sql: include_str!("../../migrations/postgres/0001_outbox.sql"),
}];

const SQLITE: &[Migration] =
    &[Migration { version: 1, name: "outbox", sql: include_str!("../../migrations/sqlite/0001_outbox.sql") }];

/// The migrator's own table. It stands in the schema of the installation, next to the outbox.
const POSTGRES_TABLE: &str = "\
create table if not exists postrider_schema (
  version     int primary key,
  name        text not null,
  applied_at  timestamptz not null default clock_timestamp()
);
";

const SQLITE_TABLE: &str = "\
create table if not exists postrider_schema (
  version     integer primary key,
  name        text not null,
  applied_at  integer not null default (cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000)
) strict;
";

pub(crate) const fn migrations(dialect: Dialect) -> &'static [Migration] {
    match dialect {
        Dialect::Postgres => POSTGRES,
        Dialect::Sqlite => SQLITE,
    }
}

pub(crate) const fn table(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Postgres => POSTGRES_TABLE,
        Dialect::Sqlite => SQLITE_TABLE,
    }
}

/// The row that says a migration has been applied. Texts of our own: nothing to quote.
pub(crate) fn record(migration: &Migration) -> String {
    format!(
        "insert into postrider_schema (version, name) values ({}, '{}');\n",
        migration.version, migration.name
    )
}

/// The whole schema on one page of SQL, for an empty database: one transaction, with the migrator's table and its rows, so
/// that an installation by hand and [`migrate`] agree. `migrations/<database>/schema.sql` holds the same text.
///
/// Run it with `psql -v ON_ERROR_STOP=1 -f` or `sqlite3 -bail FILE`.
#[must_use]
pub fn sql(dialect: Dialect) -> String {
    let mut page = String::from(match dialect {
        Dialect::Postgres => "begin;\n\n",
        Dialect::Sqlite => "pragma journal_mode = wal;\nbegin immediate;\n\n",
    });
    page.push_str("-- Which migrations this database has; \"postrider init\" goes on from here.\n");
    page.push_str(table(dialect));
    for migration in migrations(dialect) {
        page.push('\n');
        page.push_str(migration.sql);
        page.push('\n');
        page.push_str(&record(migration));
    }
    page.push_str("\ncommit;\n");
    page
}

/// The grants script: roles for producers, relays, clean-up and consumers, each with the rights of its job. Can be run
/// again. SQLite has no roles: a comment says so.
#[must_use]
pub const fn grants(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Postgres => include_str!("../../migrations/postgres/grants.sql"),
        Dialect::Sqlite => "-- SQLite has no roles: whoever can write the file can do everything.\n",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_from_one_without_gaps() {
        for dialect in [Dialect::Postgres, Dialect::Sqlite] {
            let versions: Vec<u32> = migrations(dialect).iter().map(|m| m.version).collect();
            assert_eq!(versions, (1..=VERSION).collect::<Vec<_>>(), "{dialect:?}");
        }
    }

    /// `POSTRIDER_WRITE_SCHEMA=1 cargo test -p postrider the_page_in_the_repository` writes the pages anew.
    #[test]
    fn the_page_in_the_repository_is_what_the_migrations_give() {
        for (dialect, folder) in [(Dialect::Postgres, "postgres"), (Dialect::Sqlite, "sqlite")] {
            let path = format!("{}/migrations/{folder}/schema.sql", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("POSTRIDER_WRITE_SCHEMA").is_some() {
                std::fs::write(&path, sql(dialect)).expect("write the page");
            }
            let page = std::fs::read_to_string(&path).expect("the page exists");
            assert!(
                page == sql(dialect),
                "{path} is out of date: run this test with POSTRIDER_WRITE_SCHEMA=1"
            );
        }
    }
}
