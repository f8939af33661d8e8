//! Recording outcomes: at most one statement for each kind of verdict.

use std::collections::HashSet;
use std::sync::Arc;

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::query::Query;

use super::poll::shards;
use super::{Server, micros, signed, statements};
use crate::message::{Origin, Position, Shard};
use crate::source::{Owned, SettleReport, Settled, Settler, SourceError, Verdict};
use crate::sources::storable;

/// Longest error text that is kept.
const ERROR_CHARACTERS: usize = 1_000;

/// Longest evidence that is kept.
const EVIDENCE_CHARACTERS: usize = 200;

#[derive(Debug)]
pub(super) struct PostgresSettler {
    pub(super) server: Arc<Server>,
    pub(super) relay: i64,
}

#[async_trait]
impl Settler for PostgresSettler {
    async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Result<SettleReport, SourceError> {
        let batches = Batches::of(owned, settled);
        let mut report = SettleReport::default();
        let mut fenced = HashSet::new();
        if !batches.sent.ids.is_empty() {
            let asked = batches.sent.rows.shards.clone();
            let query = batches.sent.query(self.relay);
            fenced.extend(self.record(&mut report, "record sent messages", asked, query).await?);
        }
        if !batches.retry.ids.is_empty() {
            let asked = batches.retry.rows.shards.clone();
            fenced.extend(
                self.record(&mut report, "record failed attempts", asked, batches.retry.query()).await?,
            );
        }
        if !batches.dead.ids.is_empty() {
            let asked = batches.dead.rows.shards.clone();
            fenced
                .extend(self.record(&mut report, "record dead messages", asked, batches.dead.query()).await?);
        }
        // A takeover between two of the statements: what one of them did not find ours is not ours.
        report.mine.retain(|shard| !fenced.contains(shard));
        report.mine.sort_unstable();
        report.mine.dedup();
        Ok(report)
    }
}

impl PostgresSettler {
    /// Returns the shards of `asked` that were not ours.
    async fn record(
        &self,
        report: &mut SettleReport,
        doing: &str,
        asked: Vec<Shard>,
        query: Query<'static, Postgres, PgArguments>,
    ) -> Result<Vec<Shard>, SourceError> {
        let row: PgRow = self.server.run(doing, |c| Box::pin(query.fetch_one(c))).await?;
        let (mine, ids) = answer(&row).map_err(|error| {
            super::errors::explain(&self.server.place, "understand an answer", error.into())
        })?;
        let mine = shards(mine);
        report.settled.extend(ids.into_iter().map(Position));
        let fenced = asked.into_iter().filter(|shard| !mine.contains(shard)).collect();
        report.mine.extend(mine);
        Ok(fenced)
    }
}

fn answer(row: &PgRow) -> Result<(Vec<i16>, Vec<i64>), sqlx::Error> {
    Ok((row.try_get("mine")?, row.try_get("settled")?))
}

/// What every settle needs of its messages: the tokens of the shards that occur, and where each row is.
#[derive(Debug, Default)]
struct Rows {
    shards: Vec<Shard>,
    tokens: Vec<i64>,
    from_queue: Vec<i64>,
    from_waiting: Vec<i64>,
    had_attempts: Vec<i32>,
    had_tries: Vec<i32>,
}

impl Rows {
    fn add(&mut self, owned: &[Owned], settled: &Settled) {
        for token in owned.iter().filter(|owned| owned.shard == settled.shard).map(|owned| owned.token) {
            // Messages of one shard tend to stand together; at most as many tokens as there are shards.
            if !self.tokens.contains(&token) {
                self.tokens.push(token);
                self.shards.push(settled.shard);
            }
        }
        match settled.origin {
            Origin::Queue => self.from_queue.push(settled.position.0),
            Origin::Waiting { attempts, tries } => {
                self.from_waiting.push(settled.position.0);
                self.had_attempts.push(signed(attempts));
                self.had_tries.push(signed(tries));
            }
        }
    }

    fn query(self, sql: &'static str) -> Query<'static, Postgres, PgArguments> {
        sqlx::query(sql)
            .bind(self.tokens)
            .bind(self.from_queue)
            .bind(self.from_waiting)
            .bind(self.had_attempts)
            .bind(self.had_tries)
    }
}

#[derive(Debug, Default)]
struct Sent {
    rows: Rows,
    ids: Vec<i64>,
    sinks: Vec<String>,
    evidence: Vec<Option<String>>,
}

impl Sent {
    fn query(self, relay: i64) -> Query<'static, Postgres, PgArguments> {
        self.rows.query(statements::SENT).bind(self.ids).bind(self.sinks).bind(self.evidence).bind(relay)
    }
}

#[derive(Debug, Default)]
struct Retry {
    rows: Rows,
    ids: Vec<i64>,
    attempts: Vec<i32>,
    tries: Vec<i32>,
    backoff: Vec<i64>,
    holds_key: Vec<bool>,
    errors: Vec<String>,
}

impl Retry {
    fn query(self) -> Query<'static, Postgres, PgArguments> {
        self.rows
            .query(statements::RETRY)
            .bind(self.ids)
            .bind(self.attempts)
            .bind(self.tries)
            .bind(self.backoff)
            .bind(self.holds_key)
            .bind(self.errors)
    }
}

#[derive(Debug, Default)]
struct Dead {
    rows: Rows,
    ids: Vec<i64>,
    attempts: Vec<i32>,
    tries: Vec<i32>,
    reasons: Vec<&'static str>,
    holds_key: Vec<bool>,
    errors: Vec<String>,
}

impl Dead {
    fn query(self) -> Query<'static, Postgres, PgArguments> {
        self.rows
            .query(statements::DEAD)
            .bind(self.ids)
            .bind(self.attempts)
            .bind(self.tries)
            .bind(self.reasons)
            .bind(self.holds_key)
            .bind(self.errors)
    }
}

/// The messages of one call by kind of verdict. Of a message given twice the first verdict counts.
#[derive(Debug, Default)]
struct Batches {
    sent: Sent,
    retry: Retry,
    dead: Dead,
}

impl Batches {
    fn of(owned: &[Owned], settled: &[Settled]) -> Self {
        let mut batches = Self::default();
        let mut seen = HashSet::with_capacity(settled.len());
        for one in settled.iter().filter(|one| seen.insert(one.position)) {
            batches.add(owned, one);
        }
        batches
    }

    fn add(&mut self, owned: &[Owned], one: &Settled) {
        match &one.verdict {
            Verdict::Sent { sink, evidence } => {
                self.sent.rows.add(owned, one);
                self.sent.ids.push(one.position.0);
                self.sent.sinks.push(sink.to_string());
                self.sent.evidence.push(evidence.as_deref().map(|text| storable(text, EVIDENCE_CHARACTERS)));
            }
            Verdict::Retry { backoff, attempts, tries, error, holds_key } => {
                self.retry.rows.add(owned, one);
                self.retry.ids.push(one.position.0);
                self.retry.attempts.push(signed(*attempts));
                self.retry.tries.push(signed(*tries));
                self.retry.backoff.push(micros(*backoff));
                self.retry.holds_key.push(*holds_key);
                self.retry.errors.push(storable(error, ERROR_CHARACTERS));
            }
            Verdict::Dead { reason, attempts, tries, error, holds_key } => {
                self.dead.rows.add(owned, one);
                self.dead.ids.push(one.position.0);
                self.dead.attempts.push(signed(*attempts));
                self.dead.tries.push(signed(*tries));
                self.dead.reasons.push(reason.as_str());
                self.dead.holds_key.push(*holds_key);
                self.dead.errors.push(storable(error, ERROR_CHARACTERS));
            }
        }
    }
}
