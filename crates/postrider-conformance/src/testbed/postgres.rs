//! A PostgreSQL database per test.

use std::str::FromStr;
use std::time::{Duration, Instant};

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
    server: String,
    kept: bool,
}

fn options(url: &str) -> PgConnectOptions {
    PgConnectOptions::from_str(url).expect("an address").disable_statement_logging()
}

async fn at_server(server: &str, sql: String) {
    let mut conn = options(server).connect().await.expect("connect to the server");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut conn).await.expect("create or drop a test database");
}

impl TestDatabase {
    /// A new database with the current schema.
    ///
    /// # Panics
    /// If the server does not answer.
    pub async fn new() -> Self {
        Self::at(&postgres_url()).await
    }

    /// As [`TestDatabase::new`], on the server at this address.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn at(server: &str) -> Self {
        let name = format!("postrider_test_{:016x}", fastrand::u64(..));
        at_server(server, format!("create database {name} template template0 encoding 'UTF8'")).await;
        let mut db = Self::on(server, &name);
        db.kept = false;
        postrider::schema::migrate(&mut db.connect().await).await.expect("migrate");
        db
    }

    fn on(server: &str, name: &str) -> Self {
        let mut url = url_of(server);
        url.set_path(name);
        let url = url.to_string();
        let pool = PgPoolOptions::new().max_connections(64).connect_lazy_with(options(&url));
        Self { url, pool, name: name.to_owned(), server: server.to_owned(), kept: true }
    }

    /// An existing database of the test server, with the outbox in it, that stays when the value goes.
    ///
    /// # Panics
    /// If `POSTGRES_URL` is no address.
    #[must_use]
    pub fn kept(name: &str) -> Self {
        Self::on(&postgres_url(), name)
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
        let server = postgres_url();
        let mut conn = options(&server).connect().await.expect("connect to POSTGRES_URL");
        let exists = sqlx::query_scalar("select exists (select from pg_database where datname = $1)");
        let exists: bool = exists.bind(name).fetch_one(&mut conn).await.expect("look for the database");
        let db = Self::kept(name);
        if !exists {
            at_server(&server, format!("create database {name} template template0 encoding 'UTF8'")).await;
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

    /// Waits until a number is as wanted. Fails when it has not changed for a minute.
    ///
    /// # Panics
    /// If the statement fails or nothing moves.
    pub async fn until(&self, sql: &str, wanted: impl Fn(i64) -> bool) {
        let mut last = (i64::MIN, Instant::now());
        loop {
            let n = self.count(sql).await;
            if wanted(n) {
                return;
            }
            if n != last.0 {
                last = (n, Instant::now());
            }
            assert!(
                last.1.elapsed() < Duration::from_secs(60),
                "{n} and no other number for a minute: {sql}"
            );
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    /// Waits until so many messages have a receipt.
    ///
    /// # Panics
    /// When there are no new ones for a minute.
    pub async fn sent(&self, wanted: u64) {
        self.until("select coalesce(sum(n), 0)::bigint from outbox_sent", |n| n >= wanted.cast_signed())
            .await;
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
    url::Url::parse(text).expect("the server's address")
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let sql = format!("drop database {} with (force)", self.name);
        let server = self.server.clone();
        // A runtime of its own: this one may be unwinding.
        let dropped = std::thread::spawn(move || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("runtime")
                .block_on(at_server(&server, sql));
        })
        .join();
        if dropped.is_err() {
            eprintln!("a test database was left behind");
        }
    }
}
