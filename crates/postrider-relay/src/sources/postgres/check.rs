//! What must be true of the server before a relay or an operator works on it.

use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Server;
use crate::source::SourceError;

/// Which rights are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// To read, settle and own.
    Relay,
    /// To look; the operators' actions ask for more when they are used.
    Admin,
}

/// $1 table and right, "outbox_queue delete". Which tables are missing, which rights, and what kind of server it is.
const SERVER: &str = "
select pg_is_in_recovery() as replica,
       current_setting('transaction_read_only')::boolean as read_only,
       current_setting('server_version_num')::int as version,
       current_schema() as schema,
       current_user::text as role,
       to_regclass('outbox') is not null as outbox,
       to_regclass('postrider_schema') is not null as versioned,
       array(select distinct split_part(n.need, ' ', 1) from unnest($1::text[]) n (need)
             where to_regclass(split_part(n.need, ' ', 1)) is null order by 1) as missing,
       array(select upper(split_part(n.need, ' ', 2)) || ' on ' || split_part(n.need, ' ', 1)
             from unnest($1::text[]) with ordinality n (need, place)
             where not has_table_privilege(to_regclass(split_part(n.need, ' ', 1)), split_part(n.need, ' ', 2))
             order by n.place) as refused";

const VERSION: &str = "select max(v.version)::bigint from postrider_schema v";

/// The schema version this program knows.
const KNOWN: i64 = 1;

const RELAY_RIGHTS: &[&str] = &[
    "outbox select",
    "outbox_queue select",
    "outbox_queue delete",
    "outbox_waiting select",
    "outbox_waiting insert",
    "outbox_waiting delete",
    "outbox_dead select",
    "outbox_dead insert",
    "outbox_cancelled select",
    "outbox_sent select",
    "outbox_sent insert",
    "outbox_relay select",
    "outbox_relay insert",
    "outbox_relay update",
    "outbox_relay delete",
    "outbox_shard select",
    "outbox_shard update",
];

const ADMIN_RIGHTS: &[&str] = &[
    "outbox select",
    "outbox_queue select",
    "outbox_waiting select",
    "outbox_dead select",
    "outbox_cancelled select",
    "outbox_sent select",
    "outbox_relay select",
    "outbox_shard select",
    "outbox_audit select",
    "outbox_status select",
];

impl Server {
    /// Refuses, with the cure, a server on which this would fail later.
    pub(super) async fn check(&self, needs: Needs) -> Result<(), SourceError> {
        let rights = match needs {
            Needs::Relay => RELAY_RIGHTS,
            Needs::Admin => ADMIN_RIGHTS,
        };
        let query = sqlx::query(SERVER).bind(rights);
        let row = self.run("look at the server", |c| Box::pin(query.fetch_one(c))).await?;
        let found = Found::of(&row)
            .map_err(|error| super::errors::explain(&self.place, "look at the server", error.into()))?;
        self.judge(&found, needs)?;
        let version = sqlx::query_scalar::<_, Option<i64>>(VERSION);
        let version = self.run("read the schema version", |c| Box::pin(version.fetch_one(c))).await?;
        self.version(version.unwrap_or(0))
    }

    fn judge(&self, found: &Found, needs: Needs) -> Result<(), SourceError> {
        let place = &self.place;
        let refuse = |text: String| Err(SourceError::Operator(text));
        if found.version < 130_000 {
            return refuse(format!("{place} is older than PostgreSQL 13, which is the oldest that works"));
        }
        if found.replica && needs == Needs::Relay {
            return refuse(format!(
                "{place} is a read replica; a relay must write, and what it reads must not lag: give the address of the primary"
            ));
        }
        if found.read_only && needs == Needs::Relay {
            return refuse(format!(
                "sessions of {} on {place} are read-only (default_transaction_read_only); a relay must write",
                found.role
            ));
        }
        let schema = found.schema.as_deref().unwrap_or("(none of the search_path exists)");
        if !found.outbox {
            return refuse(format!(
                "{place} has no table outbox in schema {schema}: run `postrider init` with the same address, as the role that shall own the tables"
            ));
        }
        if !found.versioned {
            return refuse(format!(
                "{place} has a table outbox in schema {schema} but no table postrider_schema: it was not made by \
                 `postrider init`; give Postrider a schema or database of its own and run `postrider init` with the same address, as the role that shall own the tables"
            ));
        }
        if !found.missing.is_empty() {
            return refuse(format!(
                "{place} lacks {} in schema {schema}: run `postrider init` with the same address, as the role that shall own the tables",
                found.missing.join(", ")
            ));
        }
        if !found.refused.is_empty() {
            return refuse(format!(
                "user {} on {place} lacks the right to {}; make the user a member of postrider_relay (`postrider init --grants` prints the statements that make this role)",
                found.role,
                found.refused.join(", ")
            ));
        }
        Ok(())
    }

    fn version(&self, version: i64) -> Result<(), SourceError> {
        let place = &self.place;
        match version {
            KNOWN => Ok(()),
            older if older < KNOWN => Err(SourceError::Operator(format!(
                "the tables of {place} have schema version {older}, this program needs {KNOWN}: run `postrider init` with the same address, as the role that shall own the tables"
            ))),
            newer => Err(SourceError::Operator(format!(
                "the tables of {place} have schema version {newer}, this program knows {KNOWN}: install a newer postrider"
            ))),
        }
    }
}

/// What the server says of itself.
#[derive(Debug)]
struct Found {
    replica: bool,
    read_only: bool,
    version: i32,
    schema: Option<String>,
    role: String,
    outbox: bool,
    versioned: bool,
    missing: Vec<String>,
    refused: Vec<String>,
}

impl Found {
    fn of(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            replica: row.try_get("replica")?,
            read_only: row.try_get("read_only")?,
            version: row.try_get("version")?,
            schema: row.try_get("schema")?,
            role: row.try_get("role")?,
            outbox: row.try_get("outbox")?,
            versioned: row.try_get("versioned")?,
            missing: row.try_get("missing")?,
            refused: row.try_get("refused")?,
        })
    }
}
