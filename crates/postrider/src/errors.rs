//! What an error of the database means for the caller.

/// A class with one cure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// The whole transaction again.
    Retryable,
    /// `postrider init`.
    SchemaMissing,
    /// The grants script.
    Denied,
    /// None that we know.
    Other,
}

pub(crate) fn classify(error: &sqlx::Error) -> Class {
    let sqlx::Error::Database(error) = error else { return Class::Other };
    let code = error.code().unwrap_or_default();
    // PostgreSQL has codes of five characters; SQLite has numbers whose lowest byte is the class.
    if code.len() == 5 {
        return match &*code {
            "40001" | "40P01" | "55P03" => Class::Retryable,
            "42P01" | "3F000" => Class::SchemaMissing,
            "42501" => Class::Denied,
            _ => Class::Other,
        };
    }
    match code.parse::<u32>().map(|code| code & 0xFF) {
        Ok(5 | 6) => Class::Retryable,
        Ok(1) if error.message().starts_with("no such table: ") => Class::SchemaMissing,
        _ => Class::Other,
    }
}
