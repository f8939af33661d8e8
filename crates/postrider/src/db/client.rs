//! sqlx runs the SQL. The only file that knows it, next to the signatures of `enqueue`, the inbox and `schema`.

use std::borrow::Cow;

use sqlx::query::Query;
use sqlx::{AssertSqlSafe, Row};

use super::{Bind, Dialect, Insert};
use crate::message::Message;

/// A database that messages can be written to: `sqlx::Postgres` and `sqlx::Sqlite`, by the features of their names.
#[expect(private_bounds, reason = "sealed: what a database must do stays private")]
pub trait Database: sealed::Run {}

/// What the database knows of a message id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// No such id (any more).
    Nothing,
    /// With this content.
    Same,
    /// With other content.
    Different,
}

/// A row for the inbox.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handled<'a> {
    pub(crate) consumer: &'a str,
    pub(crate) message_id: &'a str,
    pub(crate) content_hash: Option<i64>,
    pub(crate) position: Option<i64>,
}

/// A row for the table of messages that a consumer gave up on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buried<'a> {
    pub(crate) consumer: &'a str,
    pub(crate) message_id: &'a str,
    pub(crate) topic: &'a str,
    pub(crate) body: Option<&'a [u8]>,
    pub(crate) headers: Option<&'a str>,
    pub(crate) attempts: i64,
    pub(crate) last_error: &'a str,
}

pub(crate) mod sealed {
    use super::{Buried, Handled, Insert, Message, Stored};
    use crate::db::Dialect;

    /// One statement each.
    pub(crate) trait Run: sqlx::Database {
        const DIALECT: Dialect;

        /// Runs the insert; the ids of the messages that were written.
        fn insert(
            conn: &mut Self::Connection,
            insert: Insert<'_>,
        ) -> impl Future<Output = sqlx::Result<Vec<String>>> + Send;

        /// Compares a message with what is stored under its id.
        fn stored(
            conn: &mut Self::Connection,
            message: &Message,
        ) -> impl Future<Output = sqlx::Result<Stored>> + Send;

        /// Writes the inbox row; false if it was there.
        fn inbox_insert(
            conn: &mut Self::Connection,
            row: Handled<'_>,
        ) -> impl Future<Output = sqlx::Result<bool>> + Send;

        /// The hash in the inbox row; `None` = no row.
        fn inbox_stored(
            conn: &mut Self::Connection,
            row: Handled<'_>,
        ) -> impl Future<Output = sqlx::Result<Option<Option<i64>>>> + Send;

        /// Writes or renews the row of a message that the consumer gave up on.
        fn bury(
            conn: &mut Self::Connection,
            row: Buried<'_>,
        ) -> impl Future<Output = sqlx::Result<()>> + Send;
    }
}

macro_rules! bind_all {
    ($query:expr, $binds:expr, $array:expr) => {{
        let mut query = $query;
        for bind in $binds {
            query = match bind {
                Bind::Text(value) => query.bind(value.map(Cow::into_owned)),
                Bind::Bytes(value) => query.bind(value.map(<[u8]>::to_vec)),
                Bind::Int(value) => query.bind(value),
                Bind::TextArray(values) => $array(query, values)?,
            };
        }
        query
    }};
}

/// The four statements that differ between the databases in their text alone.
macro_rules! common {
    ($db:ty, $dialect:expr, $sql:ident, $array:expr) => {
        const DIALECT: Dialect = $dialect;

        async fn insert(conn: &mut Self::Connection, insert: Insert<'_>) -> sqlx::Result<Vec<String>> {
            // Only texts that occur again and again are worth a place in the connection's statement cache.
            let again = matches!(insert.sql, Cow::Borrowed(_));
            let query = sqlx::query::<$db>(AssertSqlSafe(insert.sql)).persistent(again);
            let rows = bind_all!(query, insert.binds, $array).fetch_all(conn).await?;
            rows.iter().map(|row| row.try_get(0)).collect()
        }

        async fn inbox_insert(conn: &mut Self::Connection, row: Handled<'_>) -> sqlx::Result<bool> {
            let done = sqlx::query::<$db>($sql::INBOX_BEGIN)
                .bind(row.consumer)
                .bind(row.message_id)
                .bind(row.content_hash)
                .bind(row.position)
                .execute(conn)
                .await?;
            Ok(done.rows_affected() == 1)
        }

        async fn inbox_stored(
            conn: &mut Self::Connection,
            row: Handled<'_>,
        ) -> sqlx::Result<Option<Option<i64>>> {
            let found = sqlx::query::<$db>($sql::INBOX_STORED)
                .bind(row.consumer)
                .bind(row.message_id)
                .fetch_optional(conn)
                .await?;
            found.map(|row| row.try_get(0)).transpose()
        }

        async fn bury(conn: &mut Self::Connection, row: Buried<'_>) -> sqlx::Result<()> {
            sqlx::query::<$db>($sql::INBOX_BURY)
                .bind(row.consumer)
                .bind(row.message_id)
                .bind(row.topic)
                .bind(row.body)
                .bind(row.headers)
                .bind(row.attempts)
                .bind(row.last_error)
                .execute(conn)
                .await?;
            Ok(())
        }
    };
}

#[cfg(feature = "postgres")]
mod on_postgres {
    use sqlx::Postgres;
    use sqlx::postgres::PgArguments;

    use super::super::postgres as sql;
    use super::*;

    impl Database for Postgres {}

    impl sealed::Run for Postgres {
        common!(Postgres, Dialect::Postgres, sql, bind_array);

        async fn stored(conn: &mut Self::Connection, message: &Message) -> sqlx::Result<Stored> {
            let row = sqlx::query::<Postgres>(sql::STORED)
                .bind(&message.message_id)
                .fetch_optional(&mut *conn)
                .await?;
            let Some(row) = row else { return Ok(Stored::Nothing) };
            if let Some(hash) = row.try_get::<Option<i64>, _>(0)? {
                return Ok(verdict(hash == message.content_hash().0));
            }
            let same: Option<bool> = sqlx::query::<Postgres>(sql::SAME)
                .bind(&message.message_id)
                .bind(&message.topic)
                .bind(message.effective_key())
                .bind(message.headers_json())
                .bind(message.effective_content_type())
                .bind(message.payload.as_bytes())
                .fetch_one(conn)
                .await?
                .try_get(0)?;
            Ok(same.map_or(Stored::Nothing, verdict))
        }
    }

    fn bind_array<'q>(
        query: Query<'q, Postgres, PgArguments>,
        values: Vec<Option<Cow<'_, str>>>,
    ) -> sqlx::Result<Query<'q, Postgres, PgArguments>> {
        Ok(query.bind(values))
    }
}

#[cfg(feature = "sqlite")]
mod on_sqlite {
    use sqlx::Sqlite;
    use sqlx::sqlite::{SqliteArguments, SqliteRow};

    use super::super::sqlite as sql;
    use super::*;
    use crate::content::ContentHash;
    use crate::message::effective_key;

    impl Database for Sqlite {}

    impl sealed::Run for Sqlite {
        common!(Sqlite, Dialect::Sqlite, sql, no_array);

        async fn stored(conn: &mut Self::Connection, message: &Message) -> sqlx::Result<Stored> {
            let row =
                sqlx::query::<Sqlite>(sql::STORED).bind(&message.message_id).fetch_optional(conn).await?;
            let Some(row) = row else { return Ok(Stored::Nothing) };
            let hash = match row.try_get::<Option<i64>, _>(0)? {
                Some(hash) => hash,
                None => written_by_sql(&row)?.0,
            };
            Ok(verdict(hash == message.content_hash().0))
        }
    }

    fn no_array<'q>(
        _: Query<'q, Sqlite, SqliteArguments>,
        _: Vec<Option<Cow<'_, str>>>,
    ) -> sqlx::Result<Query<'q, Sqlite, SqliteArguments>> {
        Err(sqlx::Error::Protocol("SQLite has no arrays".to_owned()))
    }

    fn written_by_sql(row: &SqliteRow) -> sqlx::Result<ContentHash> {
        let text = |at: usize| row.try_get::<Option<String>, _>(at);
        let bytes = |at: usize| row.try_get::<Option<Vec<u8>>, _>(at);
        let headers: serde_json::Map<String, serde_json::Value> = match text(5)? {
            None => serde_json::Map::new(),
            Some(json) => serde_json::from_str(&json).map_err(|error| sqlx::Error::Decode(error.into()))?,
        };
        let headers: Vec<(&str, &str)> =
            headers.iter().map(|(name, value)| (name.as_str(), value.as_str().unwrap_or_default())).collect();
        let key = effective_key(text(2)?.as_deref(), text(3)?.as_deref(), text(4)?.as_deref());
        let payload = match bytes(7)? {
            Some(text) => Some(text),
            None => bytes(8)?,
        };
        Ok(ContentHash::of(
            &text(1)?.unwrap_or_default(),
            key.as_deref(),
            &headers,
            text(6)?.as_deref(),
            payload.as_deref(),
        ))
    }
}

fn verdict(same: bool) -> Stored {
    if same { Stored::Same } else { Stored::Different }
}
