//! The SQL of this crate, one file per database. [`Insert`] is free of any client library's types.

use std::borrow::Cow;

use crate::limits::{Limits, MessageError};
use crate::message::Message;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) mod client;
mod postgres;
mod sqlite;

/// A kind of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// PostgreSQL 13 or newer.
    Postgres,
    /// SQLite 3.37 or newer.
    Sqlite,
}

/// One value of a statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bind<'m> {
    /// Text or NULL.
    Text(Option<Cow<'m, str>>),
    /// Bytes or NULL.
    Bytes(Option<&'m [u8]>),
    /// A 64-bit integer or NULL.
    Int(Option<i64>),
    /// An array of texts, some of them NULL. Only in batches for PostgreSQL.
    TextArray(Vec<Option<Cow<'m, str>>>),
}

/// A statement that writes messages, and its values in the order of its placeholders (`$1` … on PostgreSQL, `?1` … on
/// SQLite).
///
/// Every cast stands inside the SQL, so that any client library can run it. It returns the ids of the messages that were
/// written; ids that it does not return were there before. Run it inside the transaction of the business change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insert<'m> {
    /// The statement.
    pub sql: Cow<'static, str>,
    /// Its values.
    pub binds: Vec<Bind<'m>>,
}

impl<'m> Insert<'m> {
    /// The statement that writes `message`, after checking it.
    ///
    /// # Errors
    /// The message is outside the limits.
    pub fn new(dialect: Dialect, message: &'m Message, limits: &Limits) -> Result<Self, MessageError> {
        message.check(limits)?;
        Ok(Self::one(dialect, message))
    }

    pub(crate) fn one(dialect: Dialect, message: &'m Message) -> Self {
        match dialect {
            Dialect::Postgres => postgres::insert(message),
            Dialect::Sqlite => sqlite::insert(message),
        }
    }

    /// The statement that writes `messages`, after checking each: at least one, at most [`Dialect::batch`] of them, and
    /// their ids rise in the order given. An id that occurs twice is written once, with the first one's content.
    ///
    /// # Errors
    /// A message is outside the limits.
    pub fn many(dialect: Dialect, messages: &[&'m Message], limits: &Limits) -> Result<Self, MessageError> {
        messages.iter().try_for_each(|message| message.check(limits))?;
        Ok(Self::batch(dialect, messages))
    }

    pub(crate) fn batch(dialect: Dialect, messages: &[&'m Message]) -> Self {
        match dialect {
            Dialect::Postgres => postgres::insert_many(messages),
            Dialect::Sqlite => sqlite::insert_many(messages),
        }
    }
}

impl Dialect {
    /// Most messages that one statement takes.
    #[must_use]
    pub const fn batch(self) -> usize {
        match self {
            Self::Postgres => 10_000,
            Self::Sqlite => sqlite::BATCH,
        }
    }
}

fn text(value: Option<&str>) -> Bind<'_> {
    Bind::Text(value.map(Cow::Borrowed))
}
