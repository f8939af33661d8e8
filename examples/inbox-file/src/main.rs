//! A consumer of the relay's file: it applies each message once, however often it stands there.
//!
//! ```text
//! cargo run -p example-inbox-file -- postrider.jsonl points.db
//! ```

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use postrider::consumer::{self, Received};
use postrider::{Begin, Inbox, schema};
use serde_json::Value;
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

#[tokio::main]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let file = PathBuf::from(args.next().unwrap_or_else(|| "postrider.jsonl".to_owned()));
    let points = open(&args.next().unwrap_or_else(|| "points.db".to_owned())).await?;
    let (applied, repeats) = consume(&points, &file).await?;
    println!("{applied} applied, {repeats} came again and changed nothing");
    Ok(())
}

/// The consumer's own database: its effects, its inbox, and how far it has read.
async fn open(file: &str) -> Result<SqlitePool> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    let points = SqlitePoolOptions::new().connect_with(options).await?;
    schema::migrate(&mut *points.acquire().await?).await?;
    sqlx::raw_sql(
        "create table if not exists points (customer text primary key, total integer not null) strict;
         create table if not exists progress (one integer primary key, next_offset integer not null) strict;",
    )
    .execute(&points)
    .await?;
    Ok(points)
}

/// Reads on from where the last run has left off, to the end of the file.
async fn consume(points: &SqlitePool, file: &Path) -> Result<(u32, u32)> {
    let inbox = Inbox::new("points")?;
    let (mut applied, mut repeats) = (0, 0);
    loop {
        let offset: Option<i64> =
            sqlx::query_scalar("select next_offset from progress").fetch_optional(points).await?;
        let batch = consumer::read(file, offset.unwrap_or_default().try_into()?)?;
        for received in &batch.received {
            let mut tx = points.begin_with("BEGIN IMMEDIATE").await?;
            let hash = Some(received.content_hash());
            match inbox.begin(&mut tx, &received.message_id, hash, received.position).await? {
                Begin::First => {
                    apply(&mut tx, received).await?;
                    // The inbox row and the effect: both or neither.
                    tx.commit().await?;
                    applied += 1;
                }
                Begin::Repeat => repeats += 1,
                Begin::Mismatch { .. } => bail!("two messages have the id {:?}", received.message_id),
            }
        }
        if batch.received.is_empty() {
            return Ok((applied, repeats));
        }
        // Only now: after a crash before this line the batch is read again, and the inbox knows what was applied.
        sqlx::query("insert into progress values (1, ?1) on conflict do update set next_offset = ?1")
            .bind(i64::try_from(batch.next_offset)?)
            .execute(points)
            .await?;
    }
}

/// A point for every coin that somebody pays.
async fn apply(tx: &mut sqlx::SqliteTransaction<'_>, received: &Received) -> Result<()> {
    let body: Value = serde_json::from_slice(received.payload.as_bytes().unwrap_or_default())?;
    let (customer, amount) = (body["from"].as_str(), body["amount"].as_i64());
    sqlx::query("insert into points values (?1, ?2) on conflict do update set total = total + ?2")
        .bind(customer.context("the message names no customer")?)
        .bind(amount.context("the message has no amount")?)
        .execute(&mut **tx)
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(id: &str, amount: i64) -> String {
        let payload = Value::from(format!(r#"{{"from":"alice","amount":{amount}}}"#));
        format!("{{\"message_id\":\"{id}\",\"topic\":\"transfers\",\"payload\":{payload}}}\n")
    }

    #[tokio::test]
    async fn a_message_that_arrives_three_times_takes_effect_once() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("out.jsonl");
        std::fs::write(&file, line("a", 5) + &line("b", 7) + &line("a", 5))?;
        let points = open(&folder.path().join("points.db").display().to_string()).await?;
        assert_eq!(consume(&points, &file).await?, (2, 1));

        std::fs::write(&file, std::fs::read_to_string(&file)? + &line("b", 7) + &line("c", 1))?;
        assert_eq!(consume(&points, &file).await?, (1, 1));
        let total: i64 = sqlx::query_scalar("select total from points").fetch_one(&points).await?;
        assert_eq!(total, 5 + 7 + 1);
        Ok(())
    }
}
