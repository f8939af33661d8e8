//! Recording outcomes: all of a call in one write transaction, a few statements for each kind of verdict.
//!
//! The transaction holds the file's only write lock, so what was found cannot change before it is moved.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value, json};
use sqlx::sqlite::SqliteConnection;

use super::{File, SHARD, begin, commit, micros, token};
use crate::message::{Origin, Position};
use crate::source::{Owned, SettleReport, Settled, Settler, SourceError, Verdict};
use crate::sources::storable;

/// Longest error text that is kept.
const ERROR_CHARACTERS: usize = 1_000;

/// Longest evidence that is kept.
const EVIDENCE_CHARACTERS: usize = 200;

/// ?1 token.
pub(super) const OURS: &str = "select count(*) from outbox_shard s where s.shard = 0 and s.token = ?1";

/// ?1 ids.
const SENT_FROM_QUEUE: &str = "
delete from outbox_queue where id in (select j.value from json_each(?1) j) returning id";

/// ?1 [id, attempts, tries]: those that stand in waiting exactly like that.
const SAME_IN_WAITING: &str = "
select w.id
from json_each(?1) j cross join outbox_waiting w on w.id = json_extract(j.value, '$[0]')
where w.attempts = json_extract(j.value, '$[1]') and w.tries = json_extract(j.value, '$[2]')";

/// ?1 ids.
const DELETE_FROM_WAITING: &str = "
delete from outbox_waiting where id in (select j.value from json_each(?1) j) returning id";

/// ?1 bucket, ?2 relay, ?3 number, ?4 sink, ?5 ids, ?6 evidence.
const RECEIPT: &str = "
insert into outbox_sent (bucket, sent_at, relay, n, sink, ids, evidence)
values (?1, cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000, ?2, ?3, ?4, ?5, ?6)";

/// ?1 [id, attempts, tries, backoff, holds_key, error].
const RETRY_FROM_QUEUE: &str = "
insert into outbox_waiting (id, lane, due_at, bytes, attempts, tries, holds_key, last_error)
select q.id, q.lane,
       cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 + json_extract(j.value, '$[3]'), q.bytes,
       json_extract(j.value, '$[1]'), json_extract(j.value, '$[2]'), json_extract(j.value, '$[4]'),
       json_extract(j.value, '$[5]')
from json_each(?1) j cross join outbox_queue q on q.id = json_extract(j.value, '$[0]')
where true
returning id";

/// ?1 as in [`RETRY_FROM_QUEUE`], of rows found by [`SAME_IN_WAITING`].
const RETRY_IN_WAITING: &str = "
update outbox_waiting
set due_at = cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000 + json_extract(j.value, '$[3]'),
    attempts = json_extract(j.value, '$[1]'), tries = json_extract(j.value, '$[2]'),
    holds_key = json_extract(j.value, '$[4]'), last_error = json_extract(j.value, '$[5]')
from json_each(?1) j
where outbox_waiting.id = json_extract(j.value, '$[0]')
returning id";

/// ?1 [id, attempts, tries, reason, holds_key, error].
const DEAD_FROM_QUEUE: &str = "
insert into outbox_dead (id, lane, dead_at, bytes, attempts, tries, reason, holds_key, last_error)
select q.id, q.lane, cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000, q.bytes,
       json_extract(j.value, '$[1]'), json_extract(j.value, '$[2]'), json_extract(j.value, '$[3]'),
       json_extract(j.value, '$[4]'), json_extract(j.value, '$[5]')
from json_each(?1) j cross join outbox_queue q on q.id = json_extract(j.value, '$[0]')
where true
returning id";

/// ?1 as in [`DEAD_FROM_QUEUE`], of rows found by [`SAME_IN_WAITING`].
const DEAD_FROM_WAITING: &str = "
insert into outbox_dead (id, lane, dead_at, bytes, attempts, tries, reason, holds_key, last_error)
select w.id, w.lane, cast((julianday('now') - 2440587.5) * 86400000 as integer) * 1000, w.bytes,
       json_extract(j.value, '$[1]'), json_extract(j.value, '$[2]'), json_extract(j.value, '$[3]'),
       json_extract(j.value, '$[4]'), json_extract(j.value, '$[5]')
from json_each(?1) j cross join outbox_waiting w on w.id = json_extract(j.value, '$[0]')
where true
returning id";

#[derive(Debug)]
pub(super) struct SqliteSettler {
    pub(super) file: Arc<File>,
    pub(super) relay: i64,
}

#[async_trait]
impl Settler for SqliteSettler {
    async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Result<SettleReport, SourceError> {
        let Some(token) = token(owned).filter(|_| !settled.is_empty()) else {
            return Ok(SettleReport::default());
        };
        let batches = Batches::of(settled);
        let (relay, patience) = (self.relay, self.file.patience);
        self.file
            .write("record outcomes", |c| {
                Box::pin(async move {
                    begin(c, patience).await?;
                    let mut report = SettleReport::default();
                    if sqlx::query_scalar::<_, i64>(OURS).bind(token).fetch_one(&mut *c).await? == 1 {
                        report.mine.push(SHARD);
                        report.settled = batches.record(c, relay).await?.into_iter().map(Position).collect();
                    }
                    commit(c).await?;
                    Ok(report)
                })
            })
            .await
    }
}

/// The rows of one kind of verdict: where they were read from, and what is to be written of each.
#[derive(Debug, Default)]
struct Rows {
    /// Arrays that begin with the id.
    from_queue: Vec<Value>,
    from_waiting: Vec<Value>,
    /// [id, attempts, tries] of the rows in waiting as they were read.
    were: Vec<Value>,
}

impl Rows {
    fn add(&mut self, one: &Settled, row: Value) {
        match one.origin {
            Origin::Queue => self.from_queue.push(row),
            Origin::Waiting { attempts, tries } => {
                self.from_waiting.push(row);
                self.were.push(json!([one.position.0, attempts, tries]));
            }
        }
    }

    /// Those of `from_waiting` that still stand there as they were read.
    async fn same(&self, c: &mut SqliteConnection) -> Result<Vec<Value>, sqlx::Error> {
        if self.were.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<i64> = ids(c, SAME_IN_WAITING, &self.were).await?;
        let ids: HashSet<i64> = ids.into_iter().collect();
        let same = |row: &&Value| row.get(0).and_then(Value::as_i64).is_some_and(|id| ids.contains(&id));
        Ok(self.from_waiting.iter().filter(same).cloned().collect())
    }
}

/// The messages of one call by kind of verdict. Of a message given twice the first verdict counts.
#[derive(Debug, Default)]
struct Batches {
    sent: Rows,
    retry: Rows,
    dead: Rows,
    receipts: HashMap<i64, (String, Option<String>)>,
}

impl Batches {
    fn of(settled: &[Settled]) -> Self {
        let mut batches = Self::default();
        let mut seen = HashSet::with_capacity(settled.len());
        for one in settled.iter().filter(|one| one.shard == SHARD && seen.insert(one.position)) {
            batches.add(one);
        }
        batches
    }

    fn add(&mut self, one: &Settled) {
        let id = one.position.0;
        match &one.verdict {
            Verdict::Sent { sink, evidence } => {
                let evidence = evidence.as_deref().map(|text| storable(text, EVIDENCE_CHARACTERS));
                self.receipts.insert(id, (sink.to_string(), evidence));
                self.sent.add(one, json!([id]));
            }
            Verdict::Retry { backoff, attempts, tries, error, holds_key } => {
                let error = storable(error, ERROR_CHARACTERS);
                self.retry.add(one, json!([id, attempts, tries, micros(*backoff), holds_key, error]));
            }
            Verdict::Dead { reason, attempts, tries, error, holds_key } => {
                let error = storable(error, ERROR_CHARACTERS);
                self.dead.add(one, json!([id, attempts, tries, reason.as_str(), holds_key, error]));
            }
        }
    }

    /// Writes everything whose row is found; returns those ids.
    async fn record(&self, c: &mut SqliteConnection, relay: i64) -> Result<Vec<i64>, sqlx::Error> {
        let mut settled = self.record_sent(c, relay).await?;

        let moved = ids(c, RETRY_FROM_QUEUE, &self.retry.from_queue).await?;
        ids(c, SENT_FROM_QUEUE, &values(&moved)).await?;
        settled.extend(moved);
        let same = self.retry.same(c).await?;
        settled.extend(ids(c, RETRY_IN_WAITING, &same).await?);

        let moved = ids(c, DEAD_FROM_QUEUE, &self.dead.from_queue).await?;
        ids(c, SENT_FROM_QUEUE, &values(&moved)).await?;
        settled.extend(moved);
        let same = self.dead.same(c).await?;
        let moved = ids(c, DEAD_FROM_WAITING, &same).await?;
        ids(c, DELETE_FROM_WAITING, &values(&moved)).await?;
        settled.extend(moved);
        Ok(settled)
    }

    async fn record_sent(&self, c: &mut SqliteConnection, relay: i64) -> Result<Vec<i64>, sqlx::Error> {
        let first =
            |rows: &[Value]| rows.iter().filter_map(|row| row.get(0).cloned()).collect::<Vec<Value>>();
        let mut gone = ids(c, SENT_FROM_QUEUE, &first(&self.sent.from_queue)).await?;
        let same = self.sent.same(c).await?;
        gone.extend(ids(c, DELETE_FROM_WAITING, &first(&same)).await?);
        gone.sort_unstable();

        // By bucket and sink: the ids, and beside each what the sink answered.
        let mut receipts = BTreeMap::<(i64, &str), Receipt<'_>>::new();
        for id in &gone {
            if let Some((sink, evidence)) = self.receipts.get(id) {
                let receipt = receipts.entry((id >> 12, sink)).or_default();
                receipt.0.push(*id);
                receipt.1.push(evidence.as_deref());
            }
        }
        for ((bucket, sink), (ids, evidence)) in receipts {
            sqlx::query(RECEIPT)
                .bind(bucket)
                .bind(relay)
                .bind(i64::try_from(ids.len()).unwrap_or(i64::MAX))
                .bind(sink.to_owned())
                .bind(super::json(&ids))
                .bind(evidence.iter().any(Option::is_some).then(|| json!(evidence).to_string()))
                .execute(&mut *c)
                .await?;
        }
        Ok(gone)
    }
}

type Receipt<'a> = (Vec<i64>, Vec<Option<&'a str>>);

fn values(ids: &[i64]) -> Vec<Value> {
    ids.iter().map(|id| json!(id)).collect()
}

/// Runs a statement that takes rows as JSON and returns ids; nothing for no rows.
async fn ids(c: &mut SqliteConnection, sql: &'static str, rows: &[Value]) -> Result<Vec<i64>, sqlx::Error> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    sqlx::query_scalar(sql).bind(json!(rows).to_string()).fetch_all(c).await
}
