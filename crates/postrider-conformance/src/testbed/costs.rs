//! What a relay costs the server: statements, pages, log bytes, for a phase of a test or for single calls.
//!
//! The numbers are the server's own, from pg_stat_statements, and of one database alone, so that tests beside this one
//! do not disturb them. A statement is recognised by the text of the adapter's constant. The producers' statements and
//! those of this file are left out; every other one counts as the relay's.
//!
//! **Log bytes without full-page images.** `wal_bytes` contains them, and how many there are depends on when the last
//! checkpoint was, not on the statement. A phase therefore begins with tables that were filled after a checkpoint
//! ([`Costs::checkpoint`]), whose pages need no image. If one fell into the phase all the same (dropping a database
//! forces a checkpoint), pg_walinspect tells the bytes of the images this database wrote to tables and indexes, and they
//! are subtracted from the settles; a temporary slot keeps the log that long ([`Costs::mark_log`]). Commit records (34 to
//! 46 bytes per statement) are in neither count.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use postrider_relay::sources::postgres_statements as sql;
use sqlx::{PgConnection, PgPool, Row};

use super::TestDatabase;

/// The statements of the relay that run all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names of the adapter's constants")]
pub enum Kind {
    Heads,
    Due,
    Lane,
    Messages,
    Sent,
    Retry,
    Dead,
    Renew,
    Held,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Heads,
        Self::Due,
        Self::Lane,
        Self::Messages,
        Self::Sent,
        Self::Retry,
        Self::Dead,
        Self::Renew,
        Self::Held,
    ];

    /// The adapter's text.
    #[must_use]
    pub const fn sql(self) -> &'static str {
        match self {
            Self::Heads => sql::HEADS,
            Self::Due => sql::DUE,
            Self::Lane => sql::LANE,
            Self::Messages => sql::MESSAGES,
            Self::Sent => sql::SENT,
            Self::Retry => sql::RETRY,
            Self::Dead => sql::DEAD,
            Self::Renew => sql::RENEW,
            Self::Held => sql::HELD,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Heads => "heads",
            Self::Due => "due",
            Self::Lane => "lane",
            Self::Messages => "messages",
            Self::Sent => "sent",
            Self::Retry => "retry",
            Self::Dead => "dead",
            Self::Renew => "renew",
            Self::Held => "held",
        }
    }
}

/// What calls of one statement cost together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// How often it ran.
    pub calls: u64,
    /// Shared buffers hit and read.
    pub pages: u64,
    /// Log bytes, images included.
    pub wal_bytes: u64,
    /// Full-page images.
    pub images: u64,
    /// Time in the executor.
    pub took: Duration,
}

impl Cost {
    /// Pages per call.
    #[must_use]
    pub fn pages_per_call(&self) -> f64 {
        ratio(self.pages as f64, self.calls)
    }

    fn minus(self, before: Self) -> Self {
        Self {
            calls: self.calls.saturating_sub(before.calls),
            pages: self.pages.saturating_sub(before.pages),
            wal_bytes: self.wal_bytes.saturating_sub(before.wal_bytes),
            images: self.images.saturating_sub(before.images),
            took: self.took.saturating_sub(before.took),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            calls: self.calls + other.calls,
            pages: self.pages + other.pages,
            wal_bytes: self.wal_bytes + other.wal_bytes,
            images: self.images + other.images,
            took: self.took + other.took,
        }
    }
}

/// `a / b`, 0 for nothing.
#[must_use]
pub fn ratio(a: f64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a / b as f64 }
}

/// What a phase cost.
#[derive(Clone, Debug)]
pub struct Phase {
    kinds: BTreeMap<Kind, Cost>,
    /// The relay's other statements, by their first words.
    others: BTreeMap<String, Cost>,
    /// Bytes of the full-page images that this database's tables and indexes got, after [`Costs::mark_log`].
    image_bytes: Option<u64>,
    /// How long it was.
    pub took: Duration,
    /// Rows that vacuum has to remove from the small tables, at its end.
    pub dead_tuples: u64,
}

impl Phase {
    /// One of the known statements.
    #[must_use]
    pub fn of(&self, kind: Kind) -> Cost {
        self.kinds.get(&kind).copied().unwrap_or_default()
    }

    /// All statements of the relay together.
    #[must_use]
    pub fn total(&self) -> Cost {
        self.kinds.values().chain(self.others.values()).fold(Cost::default(), |sum, c| sum.plus(*c))
    }

    /// Log bytes of recording outcomes, images apart.
    ///
    /// # Panics
    /// If there were images and the phase did not begin with [`Costs::mark_log`].
    #[must_use]
    pub fn settle_bytes(&self) -> u64 {
        let settles = [Kind::Sent, Kind::Retry, Kind::Dead].map(|k| self.of(k));
        let all = settles.iter().fold(Cost::default(), |sum, c| sum.plus(*c));
        if all.images == 0 {
            return all.wal_bytes;
        }
        all.wal_bytes.saturating_sub(self.image_bytes.expect("a phase that began with mark_log"))
    }

    /// Every statement with its numbers, busiest first.
    #[must_use]
    pub fn table(&self) -> String {
        let named = self.kinds.iter().map(|(k, c)| (k.name().to_owned(), *c));
        let others = self.others.iter().map(|(text, c)| (text.clone(), *c));
        let mut rows: Vec<(String, Cost)> = named.chain(others).filter(|(_, c)| c.calls > 0).collect();
        rows.sort_by_key(|(_, c)| std::cmp::Reverse(c.calls));
        let seconds = self.took.as_secs_f64();
        let mut text = format!(
            "{:<44} {:>8} {:>8} {:>11} {:>11} {:>9}\n",
            "statement", "calls", "per s", "pages/call", "log bytes", "ms/call"
        );
        for (name, c) in rows {
            text += &format!(
                "{name:<44} {:>8} {:>8.1} {:>11.1} {:>11} {:>9.3}\n",
                c.calls,
                c.calls as f64 / seconds,
                c.pages_per_call(),
                c.wal_bytes,
                ratio(c.took.as_secs_f64() * 1e3, c.calls),
            );
        }
        text
    }
}

/// The counters at one moment.
#[derive(Debug)]
pub struct Mark {
    statements: BTreeMap<i64, (String, Cost)>,
    log: Option<Log>,
    at: Instant,
}

/// The log from here on, kept by a slot that goes with the connection.
#[derive(Debug)]
struct Log {
    lsn: String,
    _slot: PgConnection,
}

/// Reads the counters of one database.
#[derive(Clone, Debug)]
pub struct Costs {
    pool: PgPool,
}

const SNAPSHOT: &str = "
select s.queryid, min(s.query), sum(s.calls)::bigint, sum(s.shared_blks_hit + s.shared_blks_read)::bigint,
       sum(s.wal_bytes)::bigint, sum(s.wal_fpi)::bigint, sum(s.total_exec_time)::float8
from pg_stat_statements s
where s.dbid = (select d.oid from pg_database d where d.datname = current_database()) and s.queryid is not null
group by s.queryid";

/// $1 lsn. Images of this database's tables and indexes; what reads have pruned (Heap2) is not the settles'.
const IMAGE_BYTES: &str = "
select coalesce(sum(r.fpi_length), 0)::bigint
from pg_get_wal_records_info($1::pg_lsn, pg_current_wal_flush_lsn()) r
where r.fpi_length > 0 and r.resource_manager in ('Heap', 'Btree')
  and r.block_ref like '%/' || (select d.oid from pg_database d where d.datname = current_database())::text || '/%'";

const DEAD_TUPLES: &str = "
select coalesce(sum(pg_stat_get_dead_tuples(c.oid)), 0)::bigint
from pg_class c where c.oid = any(array['outbox_queue'::regclass, 'outbox_waiting'::regclass, 'outbox_dead'::regclass])";

impl Costs {
    /// Prepares `db`: the two extensions, and no autovacuum on the outbox, which would come and go as it likes.
    ///
    /// # Panics
    /// If the server was started without pg_stat_statements.
    pub async fn new(db: &TestDatabase) -> Self {
        let loaded = db
            .count("select (current_setting('shared_preload_libraries') like '%pg_stat_statements%')::int::bigint")
            .await;
        assert_eq!(
            loaded, 1,
            "the server needs shared_preload_libraries = 'pg_stat_statements': use the one of `scripts/services up postgres`"
        );
        db.run(
            "create extension if not exists pg_stat_statements; create extension if not exists pg_walinspect",
        )
        .await;
        for table in ["outbox", "outbox_queue", "outbox_waiting", "outbox_dead", "outbox_sent"] {
            db.run(&format!("alter table {table} set (autovacuum_enabled = off)")).await;
        }
        Self { pool: db.pool.clone() }
    }

    /// A checkpoint now: pages that are created from here on need no image.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn checkpoint(&self) {
        sqlx::raw_sql("checkpoint").execute(&self.pool).await.expect("checkpoint");
    }

    /// The counters now.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn mark(&self) -> Mark {
        Mark { statements: self.statements().await, log: None, at: Instant::now() }
    }

    /// As [`Costs::mark`], and the log from here on stays until the mark goes, so that images can be told apart.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn mark_log(&self, db: &TestDatabase) -> Mark {
        let mut slot = db.connect().await;
        let lsn =
            sqlx::query_scalar("select lsn::text from pg_create_physical_replication_slot($1, true, true)")
                .bind(format!("measure_{:016x}", fastrand::u64(..)))
                .fetch_one(&mut slot)
                .await
                .expect("a slot that keeps the log");
        Mark { log: Some(Log { lsn, _slot: slot }), ..self.mark().await }
    }

    async fn statements(&self) -> BTreeMap<i64, (String, Cost)> {
        let rows = sqlx::query(SNAPSHOT).fetch_all(&self.pool).await.expect("pg_stat_statements");
        rows.iter().map(|r| (r.get(0), (r.get(1), cost(r)))).collect()
    }

    /// What has happened since `mark`.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn since(&self, mark: &Mark) -> Phase {
        let took = mark.at.elapsed();
        let (kinds, others) = (BTreeMap::new(), BTreeMap::new());
        let mut phase = Phase { kinds, others, image_bytes: None, took, dead_tuples: 0 };
        let known: BTreeMap<String, Kind> = Kind::ALL.iter().map(|k| (plain(k.sql()), *k)).collect();
        for (id, (text, now)) in self.statements().await {
            let cost = now.minus(mark.statements.get(&id).map(|(_, c)| *c).unwrap_or_default());
            let text = plain(&text);
            if cost.calls == 0 || not_the_relays(&text) {
                continue;
            }
            let sum = match known.get(&text) {
                Some(kind) => phase.kinds.entry(*kind).or_default(),
                None => phase.others.entry(text.chars().take(44).collect()).or_default(),
            };
            *sum = sum.plus(cost);
        }
        if let Some(log) = &mark.log {
            let bytes = sqlx::query_scalar::<_, i64>(IMAGE_BYTES).bind(&log.lsn).fetch_one(&self.pool).await;
            phase.image_bytes = Some(bytes.expect("pg_walinspect").unsigned_abs());
        }
        let dead: i64 = sqlx::query_scalar(DEAD_TUPLES).fetch_one(&self.pool).await.expect("dead tuples");
        phase.dead_tuples = dead.unsigned_abs();
        phase
    }

    /// The number by which pg_stat_statements knows `kind`, once it has run.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn query_id(&self, kind: Kind) -> Option<i64> {
        let wanted = plain(kind.sql());
        self.statements().await.into_iter().find(|(_, (text, _))| plain(text) == wanted).map(|(id, _)| id)
    }

    /// The counters of one statement, quickly.
    pub(super) async fn one(&self, query_id: i64) -> Cost {
        let row = sqlx::query(ONE).bind(query_id).fetch_one(&self.pool).await.expect("pg_stat_statements");
        cost(&row)
    }
}

/// $1 query id. As [`SNAPSHOT`] without reading the texts.
const ONE: &str = "
select s.queryid, null::text, s.calls, s.shared_blks_hit + s.shared_blks_read, s.wal_bytes::bigint, s.wal_fpi,
       s.total_exec_time
from pg_stat_statements(false) s
where s.queryid = $1 and s.dbid = (select d.oid from pg_database d where d.datname = current_database())";

fn cost(row: &sqlx::postgres::PgRow) -> Cost {
    let number = |i: usize| row.get::<i64, _>(i).unsigned_abs();
    Cost {
        calls: number(2),
        pages: number(3),
        wal_bytes: number(4),
        images: number(5),
        took: Duration::from_secs_f64(row.get::<f64, _>(6) / 1e3),
    }
}

/// The statements of the tests: producers, and everything that looks at the server's books.
fn not_the_relays(text: &str) -> bool {
    let theirs = [
        "pg_stat",
        "pg_wal",
        "pg_current_wal",
        "insert into outbox (",
        "generate_series",
        "checkpoint",
        "analyze",
        "update outbox_waiting",
    ];
    theirs.iter().any(|t| text.contains(t)) || ["begin", "commit", "rollback"].contains(&text)
}

/// A statement without its constants, parameters and layout: pg_stat_statements shows constants as parameters.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text.trim().chars().peekable();
    while let Some(c) = rest.next() {
        let in_word = out.ends_with(|p: char| p.is_alphanumeric() || p == '_');
        match c {
            '\'' => {
                while rest.next().is_some_and(|c| c != '\'') {}
                out.push('?');
            }
            '$' => {
                while rest.next_if(char::is_ascii_digit).is_some() {}
                out.push('?');
            }
            '0'..='9' if !in_word => {
                while rest.next_if(char::is_ascii_digit).is_some() {}
                out.push('?');
            }
            c if c.is_whitespace() => {
                if !out.ends_with(' ') {
                    out.push(' ');
                }
            }
            c => out.push(c),
        }
    }
    // Both of these are constants to the server.
    out.replace("extract(epoch ", "extract(? ").replace(" null", " ?")
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn a_statement_is_recognised_without_its_constants() {
        let ours = "\nselect x1, null::text, '{}', $2 * interval '1 microsecond'\n  from t where extract(epoch from a) >> 12 = $1";
        let theirs = "select x1, $3::text, $4, $2 * interval $5 from t where extract($7 from a) >> $6 = $1";
        assert_eq!(plain(ours), plain(theirs));
        assert_ne!(plain("select a from t"), plain("select b from t"));
    }
}
