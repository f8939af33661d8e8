//! PostgreSQL: a database per test on the server at `POSTGRES_URL`.

use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use postrider_relay::message::Position;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row};
use tokio::sync::Mutex;

use super::{DatabaseUnderTest, NewMessage};

const MIGRATION: &str = include_str!("../../../postrider/migrations/postgres/0001_outbox.sql");

const SCHEMA_TABLE: &str = "
create table postrider_schema (version int primary key, name text not null, applied_at timestamptz not null default now());
insert into postrider_schema (version, name) values (1, 'outbox')";

/// A database of its own.
#[derive(Debug)]
pub struct Postgres {
    server: String,
    /// Its name.
    pub name: String,
    connection: Mutex<PgConnection>,
}

/// The address of the server.
#[must_use]
pub fn server() -> String {
    std::env::var("POSTGRES_URL").unwrap_or_else(|_| {
        panic!("POSTGRES_URL is not set: start the servers with `scripts/services up` and set what `scripts/services env` prints")
    })
}

impl Postgres {
    /// A connection of its own.
    pub async fn connect(&self) -> PgConnection {
        PgConnectOptions::from_str(&self.url())
            .expect("a good address")
            .connect()
            .await
            .expect("PostgreSQL answers")
    }

    /// The address with another user, whose password is its name.
    #[must_use]
    pub fn url_of(&self, user: &str) -> String {
        let mut url = url::Url::parse(&self.url()).expect("a good address");
        url.set_username(user).expect("a server has users");
        url.set_password(Some(user)).expect("a server has passwords");
        url.into()
    }

    /// Inserts on `connection`, in whatever transaction it is.
    pub async fn insert_on(connection: &mut PgConnection, message: &NewMessage) -> Position {
        let due = message.due_in.map(|due| i64::try_from(due.as_micros()).expect("a short delay"));
        let (kind, aggregate) = message.aggregate.clone().unzip();
        let id: i64 = sqlx::query_scalar(
            "insert into outbox (message_id, topic, message_key, aggregate_type, aggregate_id, headers, payload,
                                 payload_bytes, due_at)
             values ($1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp() + $9 * interval '1 microsecond') returning id",
        )
        .bind(&message.message_id)
        .bind(&message.topic)
        .bind(&message.key)
        .bind(kind)
        .bind(aggregate)
        .bind(&message.headers)
        .bind(&message.text)
        .bind(&message.bytes)
        .bind(due)
        .fetch_one(connection)
        .await
        .expect("insert a message");
        Position(id)
    }
}

#[async_trait]
impl DatabaseUnderTest for Postgres {
    async fn fresh() -> Self {
        let server = server();
        let name = format!("postrider_test_{:016x}", fastrand::u64(..));
        let mut admin = PgConnection::connect(&server)
            .await
            .expect("PostgreSQL at POSTGRES_URL answers; see `scripts/services up`");
        sqlx::raw_sql(AssertSqlSafe(format!("create database {name}")))
            .execute(&mut admin)
            .await
            .expect("create");
        admin.close().await.expect("close");
        let mut url = url::Url::parse(&server).expect("POSTGRES_URL is an address");
        url.set_path(&name);
        let mut connection = PgConnection::connect(url.as_str()).await.expect("the new database answers");
        let mut transaction = connection.begin().await.expect("begin");
        sqlx::raw_sql(MIGRATION).execute(&mut *transaction).await.expect("migrate");
        sqlx::raw_sql(SCHEMA_TABLE).execute(&mut *transaction).await.expect("migrate");
        transaction.commit().await.expect("commit");
        Self { server, name, connection: Mutex::new(connection) }
    }

    fn url(&self) -> String {
        let mut url = url::Url::parse(&self.server).expect("POSTGRES_URL is an address");
        url.set_path(&self.name);
        url.into()
    }

    fn shards(&self) -> u32 {
        64
    }

    async fn execute(&self, sql: &str) {
        let mut connection = self.connection.lock().await;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *connection).await.expect(sql);
    }

    async fn number(&self, sql: &str) -> i64 {
        let mut connection = self.connection.lock().await;
        let sql = format!("select ({sql})::bigint");
        sqlx::query(AssertSqlSafe(sql.clone())).fetch_one(&mut *connection).await.expect(&sql).get(0)
    }

    async fn insert_in_transaction(&self, message: &NewMessage, commit: bool) -> Position {
        let mut connection = self.connection.lock().await;
        let mut transaction = connection.begin().await.expect("begin");
        let position = Self::insert_on(&mut transaction, message).await;
        if commit {
            transaction.commit().await.expect("commit");
        } else {
            transaction.rollback().await.expect("roll back");
        }
        position
    }

    async fn expire(&self, relay: i64) {
        self.execute(&format!(
            "update outbox_relay set expires_at = clock_timestamp() - interval '1 second' where relay = {relay}"
        ))
        .await;
    }

    async fn make_due(&self, position: Position) {
        self.execute(&format!(
            "update outbox_waiting set due_at = clock_timestamp() - interval '1 second' where id = {position}"
        ))
        .await;
    }

    async fn due_in_us(&self, position: Position) -> i64 {
        self.number(&format!(
            "select extract(epoch from due_at - clock_timestamp()) * 1000000 from outbox_waiting where id = {position}"
        ))
        .await
    }

    async fn skip_ids(&self, last: i64) {
        self.execute(&format!("select setval(pg_get_serial_sequence('outbox', 'id'), {last})")).await;
    }

    async fn finish(self) {
        self.connection.into_inner().close().await.expect("close");
        let mut admin = PgConnection::connect(&self.server).await.expect("PostgreSQL answers");
        let sql = format!("drop database {} with (force)", self.name);
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await.expect("drop");
    }
}

/// Waits until some session waits for a lock in this database: the sign that the statement of `task` has reached it.
///
/// # Panics
/// When `task` ends without having waited.
pub async fn until_it_waits<T>(database: &Postgres, task: &tokio::task::JoinHandle<T>) {
    let waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    while database.number(waiting).await == 0 {
        assert!(!task.is_finished(), "it did not wait for the open transaction");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
