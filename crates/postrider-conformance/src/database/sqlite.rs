//! SQLite: a file per test.

use async_trait::async_trait;
use postrider_relay::message::Position;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Row};
use tempfile::TempDir;
use tokio::sync::Mutex;

use super::{DatabaseUnderTest, NewMessage};

const MIGRATION: &str = include_str!("../../../postrider/migrations/sqlite/0001_outbox.sql");

const SCHEMA_TABLE: &str = "
create table postrider_schema (version integer primary key, name text not null, applied_at integer not null default 0);
insert into postrider_schema (version, name) values (1, 'outbox')";

/// The database's now.
const NOW: &str = "cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000";

/// A file in a directory of its own.
#[derive(Debug)]
pub struct Sqlite {
    directory: TempDir,
    connection: Mutex<SqliteConnection>,
}

#[async_trait]
impl DatabaseUnderTest for Sqlite {
    async fn fresh() -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let mut connection = SqliteConnectOptions::new()
            .filename(directory.path().join("outbox.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .connect()
            .await
            .expect("create the file");
        sqlx::raw_sql(MIGRATION).execute(&mut connection).await.expect("migrate");
        sqlx::raw_sql(SCHEMA_TABLE).execute(&mut connection).await.expect("migrate");
        Self { directory, connection: Mutex::new(connection) }
    }

    fn url(&self) -> String {
        format!("sqlite:{}", self.directory.path().join("outbox.db").display())
    }

    fn shards(&self) -> u32 {
        1
    }

    async fn execute(&self, sql: &str) {
        let mut connection = self.connection.lock().await;
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *connection).await.expect(sql);
    }

    async fn number(&self, sql: &str) -> i64 {
        let mut connection = self.connection.lock().await;
        let sql = format!("select ({sql})");
        sqlx::query(AssertSqlSafe(sql.clone())).fetch_one(&mut *connection).await.expect(&sql).get(0)
    }

    async fn insert_in_transaction(&self, message: &NewMessage, commit: bool) -> Position {
        let due = message.due_in.map(|due| i64::try_from(due.as_micros()).expect("a short delay"));
        let (kind, aggregate) = message.aggregate.clone().unzip();
        let mut connection = self.connection.lock().await;
        let mut transaction = connection.begin_with("begin immediate").await.expect("begin");
        let sql = format!(
            "insert into outbox (message_id, topic, message_key, aggregate_type, aggregate_id, headers, payload,
                                 payload_bytes, due_at)
             values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, {NOW} + ?9) returning id"
        );
        let id: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .bind(&message.message_id)
            .bind(&message.topic)
            .bind(&message.key)
            .bind(kind)
            .bind(aggregate)
            .bind(&message.headers)
            .bind(&message.text)
            .bind(&message.bytes)
            .bind(due)
            .fetch_one(&mut *transaction)
            .await
            .expect("insert a message");
        if commit {
            transaction.commit().await.expect("commit");
        } else {
            transaction.rollback().await.expect("roll back");
        }
        Position(id)
    }

    async fn expire(&self, relay: i64) {
        self.execute(&format!("update outbox_relay set expires_at = {NOW} - 1000000 where relay = {relay}"))
            .await;
    }

    async fn make_due(&self, position: Position) {
        self.execute(&format!("update outbox_waiting set due_at = {NOW} - 1000000 where id = {position}"))
            .await;
    }

    async fn due_in_us(&self, position: Position) -> i64 {
        self.number(&format!("select due_at - {NOW} from outbox_waiting where id = {position}")).await
    }

    async fn skip_ids(&self, last: i64) {
        self.execute(&format!("update sqlite_sequence set seq = {last} where name = 'outbox'")).await;
    }

    async fn finish(self) {
        self.connection.into_inner().close().await.expect("close");
        self.directory.close().expect("remove the file");
    }
}
