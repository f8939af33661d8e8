//! What PostgreSQL and the driver say, in words an operator can act on.

use std::time::Duration;

use sqlx::postgres::PgDatabaseError;

use crate::source::SourceError;
use crate::sources::pool::Failure;

/// `place` is the address without its secrets, `doing` the end of "cannot …".
pub(super) fn explain(place: &str, doing: &str, failure: Failure) -> SourceError {
    match failure {
        Failure::Deadline(limit) => deadline(place, doing, limit),
        Failure::Sqlx(sqlx::Error::Database(error)) => match error.try_downcast_ref::<PgDatabaseError>() {
            Some(error) => server(place, doing, error),
            None => SourceError::Temporary(format!("cannot {doing} of {place}: {error}")),
        },
        Failure::Sqlx(error) => driver(place, doing, &error),
    }
}

fn deadline(place: &str, doing: &str, limit: Duration) -> SourceError {
    SourceError::Temporary(format!(
        "cannot {doing} of {place}: no answer within {limit:?}; the connection was given up, what was asked for may have happened"
    ))
}

fn driver(place: &str, doing: &str, error: &sqlx::Error) -> SourceError {
    use sqlx::Error::{ColumnDecode, ColumnIndexOutOfBounds, ColumnNotFound, Configuration, Decode, Tls};
    let text = format!("cannot {doing} of {place}: {error}");
    match error {
        Configuration(_) => SourceError::Operator(format!("{text}; check the address")),
        Tls(_) => SourceError::Operator(format!("{text}; check sslmode and the certificates")),
        ColumnDecode { .. } | ColumnIndexOutOfBounds { .. } | ColumnNotFound(_) | Decode(_) => {
            SourceError::Operator(format!("{text}; the tables are not those of schema version 1"))
        }
        _ => SourceError::Temporary(text),
    }
}

fn server(place: &str, doing: &str, error: &PgDatabaseError) -> SourceError {
    let code = error.code();
    let text = format!("cannot {doing} of {place}: {} ({code})", error.message());
    let mend = match code {
        "28P01" | "28000" => "check user and password of the address, and pg_hba.conf",
        "3D000" => "create the database, or mend its name in the address",
        "42P01" | "42703" | "42883" | "3F000" => {
            "run `postrider init --database …` for this database and schema"
        }
        "42501" => {
            "make the user a member of postrider_relay; `postrider init --grants` prints the statements that make this role"
        }
        "25006" => "this server is read-only: give the address of the primary",
        "0A000" | "42601" | "42804" => "PostgreSQL 13 or newer is needed",
        "XX001" | "XX002" => "the server reports damaged data: stop and restore",
        // Also for what only time or another setting mends: connections, disk, locks, restarts, cancelled statements.
        _ => return SourceError::Temporary(text),
    };
    SourceError::Operator(format!("{text}; {mend}"))
}
