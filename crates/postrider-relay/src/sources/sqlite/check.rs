//! What must be true of the file before a relay or an operator works on it.

use sqlx::Row;

use super::File;
use crate::source::SourceError;

const TABLES: &str = "
select (select count(*) from sqlite_schema where type = 'table' and name = 'outbox') as outbox,
       (select count(*) from sqlite_schema where type = 'table' and name = 'postrider_schema') as versioned,
       (select coalesce(group_concat(n.value, ', '), '')
        from json_each('[\"outbox_queue\",\"outbox_waiting\",\"outbox_dead\",\"outbox_cancelled\",\"outbox_sent\",
                         \"outbox_relay\",\"outbox_shard\",\"outbox_audit\"]') n
        where not exists (select 1 from sqlite_schema where type = 'table' and name = n.value)) as missing";

const VERSION: &str = "select coalesce(max(v.version), 0) from postrider_schema v";

/// The schema version this program knows.
const KNOWN: i64 = 1;

impl File {
    /// Refuses, with the cure, a file on which this would fail later.
    pub(super) async fn check(&self) -> Result<(), SourceError> {
        let place = &self.place;
        let refuse = |text: String| Err(SourceError::Operator(text));
        // On the writer's connection: opening it also puts the file into WAL mode.
        let (mode, outbox, versioned, missing) = self
            .write("look at the file", |c| {
                Box::pin(async move {
                    let mode: String = sqlx::query_scalar("pragma journal_mode").fetch_one(&mut *c).await?;
                    let row = sqlx::query(TABLES).fetch_one(c).await?;
                    let missing: String = row.try_get("missing")?;
                    Ok((mode, row.try_get::<i64, _>("outbox")?, row.try_get::<i64, _>("versioned")?, missing))
                })
            })
            .await?;
        if !mode.eq_ignore_ascii_case("wal") {
            return refuse(format!(
                "{place} cannot be put into WAL mode (it is in mode {mode}): a file on a network share, or a read-only one, cannot be shared with a relay"
            ));
        }
        if outbox == 0 {
            return refuse(format!("{place} has no table outbox: run `postrider init --database {place}`"));
        }
        if versioned == 0 {
            return refuse(format!(
                "{place} has a table outbox but no table postrider_schema: it was not made by `postrider init`; \
                 give Postrider a file of its own and run `postrider init --database …` for it"
            ));
        }
        if !missing.is_empty() {
            return refuse(format!("{place} lacks {missing}: run `postrider init --database {place}`"));
        }
        let version = self
            .write("read the schema version", |c| {
                Box::pin(async move { sqlx::query_scalar::<_, i64>(VERSION).fetch_one(c).await })
            })
            .await?;
        match version {
            KNOWN => Ok(()),
            older if older < KNOWN => refuse(format!(
                "the tables of {place} have schema version {older}, this program needs {KNOWN}: run `postrider init --database {place}`"
            )),
            newer => refuse(format!(
                "the tables of {place} have schema version {newer}, this program knows {KNOWN}: install a newer postrider"
            )),
        }
    }
}
