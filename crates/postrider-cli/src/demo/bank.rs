//! The business: accounts, transfers, and a message in the same transaction as each transfer.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use postrider::{Message, schema};
use serde_json::json;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{Connection as _, Row, Sqlite, Transaction};
use tokio::sync::mpsc::UnboundedSender;

use super::{Event, Places};
use crate::args::Without;

/// The customers, and what each has at the start.
const CUSTOMERS: [&str; 6] = ["alice", "bob", "carol", "dave", "erin", "frank"];
/// Whole coins.
pub(super) const AT_THE_START: i64 = 1_000;

const TABLES: &str = "
create table account (
  name       text primary key,
  balance    integer not null check (balance >= 0),
  transfers  integer not null default 0              -- transfers paid from it so far: the business's own order
) strict;
create table transfer (
  id      integer primary key,
  payer   text not null references account (name),
  payee   text not null references account (name),
  amount  integer not null,
  number  integer not null,                          -- the payer's n-th transfer
  unique (payer, number)
) strict;
";

/// Opens a SQLite database of the demo, created if missing, with our tables in it.
pub(super) async fn open(path: &std::path::Path, tables: &'static str) -> Result<SqliteConnection> {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .busy_timeout(std::time::Duration::from_secs(30));
    let mut connection =
        SqliteConnection::connect_with(&options).await.context("a database of the demo cannot be opened")?;
    schema::migrate(&mut connection).await?;
    sqlx::raw_sql(tables).execute(&mut connection).await?;
    Ok(connection)
}

/// What becomes of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Commits,
    /// The bank changes its mind after it has written everything.
    RollsBack,
    /// The application breaks between writing the transfer and writing the message.
    Breaks,
}

/// One transfer of money.
#[derive(Clone, Debug)]
struct Transfer {
    id: u32,
    payer: &'static str,
    payee: &'static str,
    amount: i64,
}

impl Transfer {
    fn words(&self) -> String {
        format!("{} pays {} {}", self.payer, self.payee, self.amount)
    }

    fn message(&self, number: i64) -> Message {
        let payload = json!({
            "transfer": self.id, "from": self.payer, "to": self.payee, "amount": self.amount, "number": number,
        });
        Message::new("transfers", payload)
            .id(message_id(self.id))
            .key(self.payer)
            .event_type("MoneyTransferred")
    }
}

/// The message id of a transfer.
pub(super) fn message_id(transfer: u32) -> String {
    format!("transfer:{transfer}")
}

/// The bank at work.
pub(super) struct Bank {
    connection: SqliteConnection,
    random: fastrand::Rng,
    transfers: u32,
    without_transaction: bool,
    balances: BTreeMap<&'static str, i64>,
}

impl Bank {
    pub(super) async fn open(
        places: &Places,
        seed: u64,
        transfers: u32,
        without: Option<Without>,
    ) -> Result<Self> {
        let mut connection = open(&places.bank(), TABLES).await?;
        let balances: BTreeMap<&'static str, i64> =
            CUSTOMERS.iter().map(|name| (*name, AT_THE_START)).collect();
        for (name, balance) in &balances {
            let insert =
                sqlx::query("insert into account (name, balance) values (?, ?)").bind(*name).bind(*balance);
            insert.execute(&mut connection).await?;
        }
        Ok(Self {
            connection,
            random: fastrand::Rng::with_seed(seed),
            transfers,
            without_transaction: without == Some(Without::Transaction),
            balances,
        })
    }

    /// The accounts with their first balances.
    pub(super) fn accounts(&self) -> BTreeMap<&'static str, i64> {
        self.balances.clone()
    }

    /// Makes all transfers, one after the other.
    pub(super) async fn work(mut self, events: UnboundedSender<Event>) -> Result<()> {
        let (mut committed, mut rolled_back) = (0, 0);
        for id in 1..=self.transfers {
            let transfer = self.draw(id);
            let fate = self.fate(id);
            let words = transfer.words();
            let stays = if self.without_transaction {
                self.apart(&transfer, fate).await?
            } else {
                self.together(&transfer, fate).await?
            };
            if stays {
                committed += 1;
                *self.balances.entry(transfer.payer).or_default() -= transfer.amount;
                *self.balances.entry(transfer.payee).or_default() += transfer.amount;
            } else {
                rolled_back += 1;
            }
            let event = match fate {
                Fate::Commits => Event::Committed { transfer: id, words },
                Fate::RollsBack => Event::RolledBack { transfer: id, words },
                Fate::Breaks => Event::Broke { transfer: id, words },
            };
            events.send(event).context("nobody follows the bank any more")?;
        }
        self.connection.close().await?;
        events
            .send(Event::BankDone { committed, rolled_back })
            .context("nobody follows the bank any more")?;
        Ok(())
    }

    fn draw(&mut self, id: u32) -> Transfer {
        let payee = self.random.usize(..CUSTOMERS.len());
        let mut payer = self.random.usize(..CUSTOMERS.len() - 1);
        payer += usize::from(payer >= payee);
        let amount = self.random.i64(1..=50);
        let (mut payer, mut payee) = (CUSTOMERS[payer], CUSTOMERS[payee]);
        if self.balances.get(payer).is_some_and(|balance| *balance < amount) {
            // Who has most can always pay: there is twenty times the largest amount for everybody.
            let richest =
                self.balances.iter().max_by_key(|(_, balance)| **balance).map_or(payer, |(name, _)| *name);
            if richest == payee {
                payee = payer;
            }
            payer = richest;
        }
        Transfer { id, payer, payee, amount }
    }

    /// One in ten does not commit. The third and the seventh never do, so that few transfers show it, too.
    fn fate(&mut self, id: u32) -> Fate {
        match (id, self.random.u32(0..20)) {
            (3, _) => Fate::RollsBack,
            (7, _) => Fate::Breaks,
            (_, 0) => Fate::RollsBack,
            (_, 1) => Fate::Breaks,
            _ => Fate::Commits,
        }
    }

    /// The transfer and its message in one transaction. Returns whether it committed.
    async fn together(&mut self, transfer: &Transfer, fate: Fate) -> Result<bool> {
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        let number = write(&mut tx, transfer).await?;
        if fate == Fate::Breaks {
            // What a program does to its open transaction when it breaks.
            drop(tx);
            return Ok(false);
        }
        postrider::enqueue(&mut tx, &transfer.message(number)).await?;
        if fate == Fate::RollsBack {
            tx.rollback().await?;
            return Ok(false);
        }
        tx.commit().await?;
        Ok(true)
    }

    /// The dual write that the outbox replaces: the transfer and its message apart. Returns whether the transfer committed.
    async fn apart(&mut self, transfer: &Transfer, fate: Fate) -> Result<bool> {
        if fate == Fate::RollsBack {
            // "Send, then commit": the message is out when the bank changes its mind.
            let number = self.next_number(transfer.payer).await?;
            self.enqueue_alone(transfer, number).await?;
            let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
            write(&mut tx, transfer).await?;
            tx.rollback().await?;
            return Ok(false);
        }
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        let number = write(&mut tx, transfer).await?;
        tx.commit().await?;
        if fate == Fate::Commits {
            // "Commit, then send": whoever breaks in between never sends.
            self.enqueue_alone(transfer, number).await?;
        }
        Ok(true)
    }

    async fn enqueue_alone(&mut self, transfer: &Transfer, number: i64) -> Result<()> {
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        postrider::enqueue(&mut tx, &transfer.message(number)).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn next_number(&mut self, payer: &str) -> Result<i64> {
        let next = sqlx::query("select transfers + 1 from account where name = ?").bind(payer);
        Ok(next.fetch_one(&mut self.connection).await?.try_get(0)?)
    }
}

/// The rows of a transfer; returns the payer's number for it.
async fn write(tx: &mut Transaction<'_, Sqlite>, transfer: &Transfer) -> Result<i64> {
    let pay = "update account set balance = balance - ?, transfers = transfers + 1 where name = ? returning transfers";
    let row = sqlx::query(pay).bind(transfer.amount).bind(transfer.payer).fetch_one(&mut **tx).await?;
    let number: i64 = row.try_get(0)?;
    let receive = sqlx::query("update account set balance = balance + ? where name = ?");
    receive.bind(transfer.amount).bind(transfer.payee).execute(&mut **tx).await?;
    let insert =
        sqlx::query("insert into transfer (id, payer, payee, amount, number) values (?, ?, ?, ?, ?)");
    let insert =
        insert.bind(transfer.id).bind(transfer.payer).bind(transfer.payee).bind(transfer.amount).bind(number);
    insert.execute(&mut **tx).await?;
    Ok(number)
}
