//! The books compared: the bank's table, the sink's file, the consumer's table. The relay's own tables are not asked.

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::Result;
use postrider::consumer::{Received, read};
use postrider_relay::sources;
use serde::Serialize;
use sqlx::Row;
use sqlx::sqlite::SqliteConnection;

use super::consumer::Content;
use super::{Counted, Places, bank};

/// The last line of `demo --json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Report {
    committed: usize,
    rolled_back: u32,
    delivered: usize,
    duplicates: usize,
    applied: usize,
    /// Informative: the only number that is asked of the outbox.
    dead: u64,
    lost: usize,
    invented: usize,
    reordered: usize,
    applied_twice: usize,
    verdict: &'static str,
}

/// The report, and where the money is.
#[derive(Clone, Debug, Default)]
pub(super) struct Compared {
    pub(super) report: Report,
    pub(super) money_at_start: i64,
    pub(super) money_at_bank: i64,
    pub(super) money_in_books: i64,
    pub(super) books_agree: bool,
}

impl Report {
    pub(super) fn is_ok(&self) -> bool {
        self.verdict == "ok"
    }

    /// Name, number and meaning, in the order of the line.
    pub(super) fn lines(&self) -> Vec<(&'static str, usize, &'static str)> {
        let small = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        vec![
            ("committed", self.committed, "transfers in the bank's table"),
            (
                "rolled back",
                small(self.rolled_back),
                "transfers that did not happen; their messages must not exist",
            ),
            ("delivered", self.delivered, "lines in the sink's file"),
            ("duplicates", self.duplicates, "of these, repeats of the same message id"),
            ("applied", self.applied, "messages in the consumer's table"),
            ("dead", usize::try_from(self.dead).unwrap_or(usize::MAX), "messages given up"),
            ("lost", self.lost, "committed, but not delivered and applied"),
            ("invented", self.invented, "delivered or applied, but not committed like this"),
            ("reordered", self.reordered, "arrived after a later transfer of the same payer"),
            ("applied twice", self.applied_twice, "messages whose effect happened more than once"),
        ]
    }

    /// Whether a number is one that must be zero.
    pub(super) fn must_be_zero(name: &str) -> bool {
        matches!(name, "lost" | "invented" | "reordered" | "applied twice")
    }
}

/// Compares the books.
pub(super) async fn compute(places: &Places, counted: &Counted) -> Result<Compared> {
    let mut at_bank = bank::open(&places.bank(), "").await?;
    let mut at_consumer = bank::open(&places.consumer(), "").await?;
    let committed = transfers(&mut at_bank).await?;
    let delivered = lines(places)?;
    let effects = effects(&mut at_consumer).await?;
    let balances = balances(&mut at_bank, "select name, balance from account").await?;
    let books = balances_of_books(&mut at_consumer).await?;

    let mut report = compare(&committed, &delivered, &effects);
    report.rolled_back = counted.rolled_back;
    report.dead = dead(places).await?;
    let start = bank::AT_THE_START * i64::try_from(balances.len())?;
    let compared = Compared {
        money_at_start: start,
        money_at_bank: balances.values().sum(),
        money_in_books: books.values().sum(),
        books_agree: balances == books,
        report,
    };
    Ok(judge(compared, counted))
}

fn judge(mut compared: Compared, counted: &Counted) -> Compared {
    let r = &mut compared.report;
    let clean = r.lost + r.invented + r.reordered + r.applied_twice == 0;
    let complete = r.applied == r.committed && !counted.stuck;
    let tested = counted.killed && counted.outages >= 1 && r.rolled_back >= 1 && r.duplicates >= 1;
    let money = compared.money_at_bank == compared.money_at_start && compared.books_agree;
    r.verdict = if clean && complete && tested && money { "ok" } else { "failed" };
    compared
}

/// Everything but what is counted elsewhere.
fn compare(
    committed: &HashMap<String, Content>,
    delivered: &[Received],
    effects: &HashMap<String, usize>,
) -> Report {
    let ids: HashSet<&str> = delivered.iter().map(|r| r.message_id.as_str()).collect();
    let arrived = |id: &str| ids.contains(id) && effects.contains_key(id);
    let mut invented: HashSet<&str> =
        effects.keys().map(String::as_str).filter(|id| !committed.contains_key(*id)).collect();
    let mut first = HashSet::new();
    let mut latest: HashMap<String, i64> = HashMap::new();
    let mut reordered = 0;
    for received in delivered {
        let content = Content::of(received).ok();
        if content.is_none() || committed.get(&received.message_id) != content.as_ref() {
            invented.insert(&received.message_id);
        }
        let Some(content) = content else { continue };
        if !first.insert(&received.message_id) {
            continue;
        }
        let latest = latest.entry(content.from).or_insert(i64::MIN);
        if content.number < *latest {
            reordered += 1;
        }
        *latest = content.number.max(*latest);
    }
    Report {
        committed: committed.len(),
        delivered: delivered.len(),
        duplicates: delivered.len() - ids.len(),
        applied: effects.len(),
        lost: committed.keys().filter(|id| !arrived(id)).count(),
        invented: invented.len(),
        reordered,
        applied_twice: effects.values().filter(|count| **count > 1).count(),
        ..Report::default()
    }
}

async fn transfers(connection: &mut SqliteConnection) -> Result<HashMap<String, Content>> {
    let rows =
        sqlx::query("select id, payer, payee, amount, number from transfer").fetch_all(connection).await?;
    rows.iter()
        .map(|row| {
            let transfer: u32 = row.try_get(0)?;
            let content = Content {
                transfer,
                from: row.try_get(1)?,
                to: row.try_get(2)?,
                amount: row.try_get(3)?,
                number: row.try_get(4)?,
            };
            Ok((bank::message_id(transfer), content))
        })
        .collect()
}

async fn effects(connection: &mut SqliteConnection) -> Result<HashMap<String, usize>> {
    let mut effects = HashMap::new();
    for row in sqlx::query("select message_id from applied").fetch_all(connection).await? {
        *effects.entry(row.try_get(0)?).or_insert(0) += 1;
    }
    Ok(effects)
}

async fn balances(connection: &mut SqliteConnection, sql: &'static str) -> Result<BTreeMap<String, i64>> {
    let rows = sqlx::query(sql).fetch_all(connection).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

async fn balances_of_books(connection: &mut SqliteConnection) -> Result<BTreeMap<String, i64>> {
    balances(connection, "select name, balance from book").await
}

fn lines(places: &Places) -> Result<Vec<Received>> {
    let (mut all, mut offset) = (Vec::new(), 0);
    loop {
        let batch = read(places.sink(), offset)?;
        if batch.next_offset == offset {
            return Ok(all);
        }
        all.extend(batch.received);
        offset = batch.next_offset;
    }
}

async fn dead(places: &Places) -> Result<u64> {
    let admin = sources::admin(&format!("sqlite:{}", places.bank().display())).await?;
    Ok(admin.summary(1_000_000).await?.dead)
}
