//! What SQLite and the driver say, in words an operator can act on.

use crate::source::SourceError;
use crate::sources::pool::Failure;

const PERM: i32 = 3;
const BUSY: i32 = 5;
const LOCKED: i32 = 6;
const READONLY: i32 = 8;
const CORRUPT: i32 = 11;
const CANTOPEN: i32 = 14;
const AUTH: i32 = 23;
const NOTADB: i32 = 26;

/// The primary result code.
fn code(error: &sqlx::Error) -> Option<i32> {
    let code: i32 = error.as_database_error()?.code()?.parse().ok()?;
    Some(code & 0xff)
}

/// True when another connection holds the lock.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(BUSY | LOCKED))
}

/// `place` is the address, `doing` the end of "cannot …".
pub(super) fn explain(place: &str, doing: &str, failure: Failure) -> SourceError {
    let error = match failure {
        Failure::Deadline(limit) => {
            return SourceError::Temporary(format!(
                "cannot {doing} of {place}: not done within {limit:?}; what was asked for may have happened"
            ));
        }
        Failure::Sqlx(error) => error,
    };
    let text = format!("cannot {doing} of {place}: {error}");
    let mend = match code(&error) {
        Some(CANTOPEN) => {
            format!(
                "there is no such file, or it or its directory cannot be opened: check the path, or run `postrider init --database {place}`"
            )
        }
        Some(READONLY | PERM | AUTH) => {
            "the file or its directory cannot be written to: check owner and rights".to_owned()
        }
        Some(NOTADB) => "this is no SQLite file".to_owned(),
        Some(CORRUPT) => "the file is damaged: stop and restore".to_owned(),
        Some(BUSY | LOCKED) => {
            return SourceError::Temporary(format!(
                "{text}; another process keeps the file locked for writing"
            ));
        }
        Some(_) if text.contains("no such table") || text.contains("no such column") => {
            format!("run `postrider init --database {place}`")
        }
        _ => match error {
            sqlx::Error::Configuration(_) => "check the address".to_owned(),
            sqlx::Error::ColumnDecode { .. } | sqlx::Error::ColumnNotFound(_) | sqlx::Error::Decode(_) => {
                "the tables are not those of schema version 1".to_owned()
            }
            // Also what only time mends: a full disk, an I/O error.
            _ => return SourceError::Temporary(text),
        },
    };
    SourceError::Operator(format!("{text}; {mend}"))
}
