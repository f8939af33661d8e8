//! A PostgreSQL database per test.

use std::str::FromStr;
use std::time::Duration;

use postrider_relay::source::{Identity, Source};
use postrider_relay::sources::{self, SourceOptions};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection};

/// The test server's address.
///
/// # Panics
/// If `POSTGRES_URL` is not set: a missing server is a failure, never a skip.
#[must_use]
pub fn postgres_url() -> String {
    std::env::var("POSTGRES_URL").expect(
        "POSTGRES_URL is not set: run `scripts/services up postgres`, then `eval \"$(scripts/services env)\"`",
    )
}

/// A database of its own with the outbox in it; dropped with the value.
#[derive(Debug)]
pub struct TestDatabase {
    /// Its address.
    pub url: String,
    /// Connections for the test itself.
    pub pool: PgPool,
    name: String,
    kept: bool,
}

fn options(url: &str) -> PgConnectOptions {
    PgConnectOptions::from_str(url).expect("an address").disable_statement_logging()
}

async fn at_server(sql: String) {
    let mut conn = options(&postgres_url()).connect().await.expect("connect to POSTGRES_URL");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.expect("create or drop a test database");
}

impl TestDatabase {
    /// A new database with the current schema.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn new() -> Self {
        let name = format!("postrider_test_{:016x}", fastrand::u64(..));
        at_server(format!("create database {name} template template0 encoding 'UTF8'")).await;
        let mut db = Self::kept(&name);
        db.kept = false;
        postrider::schema::migrate(&mut db.connect().await).await.expect("migrate");
        db
    }

    /// An existing database of the test server, with the outbox in it, that stays when the value goes.
    ///
    /// # Panics
    /// If `POSTGRES_URL` is no address.
    #[must_use]
    pub fn kept(name: &str) -> Self {
        let mut url = url_of(&postgres_url());
        url.set_path(name);
        let url = url.to_string();
        let pool = PgPoolOptions::new().max_connections(64).connect_lazy_with(options(&url));
        Self { url, pool, name: name.to_owned(), kept: true }
    }

    /// As [`TestDatabase::kept`], made with the current schema when it does not exist.
    ///
    /// # Panics
    /// If the server does not answer, or the name needs quoting.
    pub async fn kept_or_new(name: &str) -> Self {
        assert!(
            name.chars().all(|c| c.is_ascii_lowercase() || c == '_'),
            "a database name of a-z and _, not {name:?}"
        );
        let mut conn = options(&postgres_url()).connect().await.expect("connect to POSTGRES_URL");
        let exists = sqlx::query_scalar("select exists (select from pg_database where datname = $1)");
        let exists: bool = exists.bind(name).fetch_one(&mut conn).await.expect("look for the database");
        let db = Self::kept(name);
        if !exists {
            at_server(format!("create database {name} template template0 encoding 'UTF8'")).await;
            postrider::schema::migrate(&mut db.connect().await).await.expect("migrate");
        }
        db
    }

    /// A connection outside the pool.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn connect(&self) -> PgConnection {
        options(&self.url).connect().await.expect("connect to the test database")
    }

    /// The source for a relay of that name.
    ///
    /// # Panics
    /// If it cannot be opened.
    pub async fn source(&self, instance: &str, lease: Duration) -> Source {
        let identity = Identity {
            relay: fastrand::i64(1..),
            instance: instance.to_owned(),
            version: "test".to_owned(),
            lease,
        };
        sources::open(&self.url, identity, &SourceOptions::default()).await.expect("open the source")
    }

    /// One number.
    ///
    /// # Panics
    /// If the statement fails.
    pub async fn count(&self, sql: &str) -> i64 {
        sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(&self.pool).await.expect("count")
    }

    /// Runs statements.
    ///
    /// # Panics
    /// If one fails.
    pub async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&self.pool).await.expect("run");
    }
}

fn url_of(text: &str) -> url::Url {
    url::Url::parse(text).expect("POSTGRES_URL is an address")
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let sql = format!("drop database {} with (force)", self.name);
        // A runtime of its own: this one may be unwinding.
        let dropped = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("runtime")
                .block_on(at_server(sql));
        })
        .join();
        if dropped.is_err() {
            eprintln!("a test database was left behind");
        }
    }
}
