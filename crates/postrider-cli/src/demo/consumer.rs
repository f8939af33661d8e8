//! The consumer: reads the sink's file and applies each message once, to books of its own.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use postrider::consumer::{Received, read};
use postrider::{Begin, Inbox, Payload};
use sqlx::Connection as _;
use sqlx::sqlite::SqliteConnection;
use tokio::sync::mpsc::UnboundedSender;
use tokio_util::sync::CancellationToken;

use super::{Event, Places, bank};

/// A file has nothing to wait on: it is looked at this often.
const LOOK_EVERY: Duration = Duration::from_millis(20);

const TABLES: &str = "
create table book (
  name     text primary key,
  balance  integer not null
) strict;
create table applied (                               -- one row per effect: twice the same message would be two rows
  line        integer primary key autoincrement,
  message_id  text not null,
  payer       text not null,
  payee       text not null,
  amount      integer not null
) strict;
";

/// What a message says.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
pub(super) struct Content {
    pub(super) transfer: u32,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) amount: i64,
    pub(super) number: i64,
}

impl Content {
    pub(super) fn of(received: &Received) -> Result<Self> {
        let Payload::Text(text) = &received.payload else { bail!("a message of the demo has no text") };
        serde_json::from_str(text).context("a message of the demo says something else than a transfer")
    }
}

pub(super) struct Consumer {
    connection: SqliteConnection,
    inbox: Option<Inbox>,
}

impl Consumer {
    /// Without inbox it applies whatever arrives, as often as it arrives.
    pub(super) async fn open(
        places: &Places,
        accounts: BTreeMap<&'static str, i64>,
        inbox: bool,
    ) -> Result<Self> {
        let mut connection = bank::open(&places.consumer(), TABLES).await?;
        for (name, balance) in accounts {
            let insert =
                sqlx::query("insert into book (name, balance) values (?, ?)").bind(name).bind(balance);
            insert.execute(&mut connection).await?;
        }
        let inbox = if inbox { Some(Inbox::new("books")?) } else { None };
        Ok(Self { connection, inbox })
    }

    /// Follows the file; once `finish` is given, up to its end.
    pub(super) async fn follow(
        mut self,
        file: PathBuf,
        events: UnboundedSender<Event>,
        finish: CancellationToken,
    ) -> Result<()> {
        let mut offset = 0;
        loop {
            let last = finish.is_cancelled();
            let batch = read(&file, offset)?;
            for received in &batch.received {
                let id = received.message_id.clone();
                let event =
                    if self.apply(received).await? { Event::Applied { id } } else { Event::Repeat { id } };
                events.send(event).context("nobody follows the consumer any more")?;
            }
            if last && batch.next_offset == offset {
                self.connection.close().await?;
                return Ok(());
            }
            if batch.next_offset == offset {
                tokio::select! {
                    () = finish.cancelled() => {}
                    () = tokio::time::sleep(LOOK_EVERY) => {}
                }
            }
            offset = batch.next_offset;
        }
    }

    /// The effect and the inbox row in one transaction. Returns whether there was an effect.
    async fn apply(&mut self, received: &Received) -> Result<bool> {
        let content = Content::of(received)?;
        let mut tx = self.connection.begin_with("BEGIN IMMEDIATE").await?;
        if let Some(inbox) = &self.inbox {
            let hash = Some(received.content_hash());
            match inbox.begin(&mut tx, &received.message_id, hash, received.position).await? {
                Begin::First => {}
                Begin::Repeat => {
                    tx.rollback().await?;
                    return Ok(false);
                }
                Begin::Mismatch { .. } => bail!("two messages share the id {}", received.message_id),
            }
        }
        for (name, change) in [(&content.from, -content.amount), (&content.to, content.amount)] {
            let update =
                sqlx::query("update book set balance = balance + ? where name = ?").bind(change).bind(name);
            update.execute(&mut *tx).await?;
        }
        let insert =
            sqlx::query("insert into applied (message_id, payer, payee, amount) values (?, ?, ?, ?)");
        let insert =
            insert.bind(&received.message_id).bind(&content.from).bind(&content.to).bind(content.amount);
        insert.execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(true)
    }
}
