//! A database per test, gone afterwards, also when the test fails.

use std::path::PathBuf;
use std::process::Command;
use std::str::FromStr;

use postrider::{Database, schema};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, PgPool, Row, SqlitePool};
use tempfile::TempDir;

/// A database of its own on the PostgreSQL server.
pub(crate) struct Postgres {
    pub(crate) pool: PgPool,
    pub(crate) url: String,
    name: String,
}

fn server() -> String {
    std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `scripts/services up postgres`, then `eval \"$(scripts/services env)\"`",
    )
}

fn options(url: &str) -> PgConnectOptions {
    PgConnectOptions::from_str(url).expect("POSTGRES_URL is an address").disable_statement_logging()
}

/// The address with another database in it.
fn with_database(url: &str, name: &str) -> String {
    let (address, query) = url.split_once('?').unwrap_or((url, ""));
    let (scheme, rest) = address.split_once("://").expect("POSTGRES_URL has a scheme");
    let host = rest.split('/').next().unwrap_or(rest);
    if query.is_empty() {
        format!("{scheme}://{host}/{name}")
    } else {
        format!("{scheme}://{host}/{name}?{query}")
    }
}

async fn at_server(sql: String) {
    let mut conn = options(&server()).connect().await.expect("connect to POSTGRES_URL");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.expect("create or drop a test database");
}

impl Postgres {
    /// An empty database.
    pub(crate) async fn empty() -> Self {
        let name = format!("postrider_test_{}", uuid::Uuid::now_v7().simple());
        at_server(format!("create database {name} template template0 encoding 'UTF8'")).await;
        let url = with_database(&server(), &name);
        let pool = PgPoolOptions::new().max_connections(6).connect_lazy_with(options(&url));
        Self { pool, url, name }
    }

    /// With the schema in it.
    pub(crate) async fn new() -> Self {
        let db = Self::empty().await;
        schema::migrate(&mut db.connect().await).await.expect("migrate");
        db
    }

    /// A connection outside the pool.
    pub(crate) async fn connect(&self) -> PgConnection {
        options(&self.url).connect().await.expect("connect to the test database")
    }

    /// Runs psql; its standard output.
    pub(crate) fn psql(&self, sql: &str) -> String {
        let args = ["-X", "-v", "ON_ERROR_STOP=1", "-At", "-q", "-d", &self.url, "-c", sql];
        run(Command::new("psql").args(args))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let sql = format!("drop database {} with (force)", self.name);
        // A runtime of its own: this one may be unwinding.
        let dropped = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
            runtime.block_on(at_server(sql));
        })
        .join();
        if dropped.is_err() {
            eprintln!("the database {} was not dropped", self.name);
        }
    }
}

/// An SQLite file of its own.
pub(crate) struct Sqlite {
    pub(crate) pool: SqlitePool,
    pub(crate) path: PathBuf,
    _folder: TempDir,
}

impl Sqlite {
    /// A file that does not exist yet.
    pub(crate) fn empty() -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("test.db");
        let options =
            SqliteConnectOptions::new().filename(&path).create_if_missing(true).disable_statement_logging();
        let pool = SqlitePoolOptions::new().max_connections(4).connect_lazy_with(options);
        Self { pool, path, _folder: folder }
    }

    /// With the schema in it.
    pub(crate) async fn new() -> Self {
        let db = Self::empty();
        schema::migrate(&mut *db.pool.acquire().await.expect("open")).await.expect("migrate");
        db
    }

    /// Runs the program sqlite3; its standard output.
    pub(crate) fn sqlite3(&self, sql: &str) -> String {
        run(Command::new("sqlite3").arg("-bail").arg(&self.path).arg(sql))
    }
}

/// Runs a program that must succeed.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {stderr}");
    String::from_utf8(output.stdout).expect("output in UTF-8").trim_end().to_owned()
}

/// What tests ask any of the databases, so that one test body serves both.
pub(crate) trait Store {
    type Db: Database;
    async fn begin(&self) -> sqlx::Transaction<'static, Self::Db>;
    /// The first column of all rows, as texts.
    async fn texts(&self, sql: &str) -> Vec<String>;
    /// Runs statements.
    async fn exec(&self, sql: &str) -> sqlx::Result<()>;

    /// Ids of the messages, by id.
    async fn ids(&self) -> Vec<String> {
        self.texts("select message_id from outbox order by id").await
    }

    async fn number(&self, sql: &str) -> i64 {
        self.texts(sql).await[0].parse().expect("a number")
    }
}

impl Store for Postgres {
    type Db = sqlx::Postgres;

    async fn begin(&self) -> sqlx::Transaction<'static, sqlx::Postgres> {
        self.pool.begin().await.expect("begin")
    }

    async fn texts(&self, sql: &str) -> Vec<String> {
        let sql = format!("select v::text from ({sql}) q (v)");
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&self.pool).await.expect("select");
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn exec(&self, sql: &str) -> sqlx::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.map(|_| ())
    }
}

impl Store for Sqlite {
    type Db = sqlx::Sqlite;

    async fn begin(&self) -> sqlx::Transaction<'static, sqlx::Sqlite> {
        self.pool.begin_with("BEGIN IMMEDIATE").await.expect("begin")
    }

    async fn texts(&self, sql: &str) -> Vec<String> {
        let sql = format!("with q (v) as ({sql}) select cast(v as text) from q");
        let rows = sqlx::query(AssertSqlSafe(sql)).fetch_all(&self.pool).await.expect("select");
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn exec(&self, sql: &str) -> sqlx::Result<()> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.map(|_| ())
    }
}

/// Makes two tests out of one body: the same on PostgreSQL and on SQLite.
macro_rules! on_both {
    ($($(#[$meta:meta])* $name:ident)*) => {
        mod postgres {
            $($(#[$meta])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(&$crate::common::Postgres::new().await).await; })*
        }
        mod sqlite {
            $($(#[$meta])* #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(&$crate::common::Sqlite::new().await).await; })*
        }
    };
}
pub(crate) use on_both;
