//! A business change and its message, in one SQLite transaction.
//!
//! Run it beside a relay, both in the same folder:
//!
//! ```text
//! postrider run
//! cargo run -p example-enqueue-sqlite -- postrider.db
//! ```

use anyhow::{Result, bail};
use postrider::{Message, enqueue, schema};
use serde_json::json;
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

#[tokio::main]
async fn main() -> Result<()> {
    let file = std::env::args().nth(1).unwrap_or_else(|| "postrider.db".to_owned());
    let shop = open(&file).await?;
    transfer(&shop, "alice", "bob", 30).await?;
    println!("alice paid bob 30; the message is in the outbox");
    if let Err(refused) = transfer(&shop, "alice", "bob", 1_000_000).await {
        println!("alice did not pay bob 1000000: {refused}; there is no message either");
    }
    Ok(())
}

/// The application's own tables and the outbox stand in the same file: that is what makes one transaction possible.
async fn open(file: &str) -> Result<SqlitePool> {
    let options = SqliteConnectOptions::new().filename(file).create_if_missing(true);
    let shop = SqlitePoolOptions::new().connect_with(options).await?;
    schema::migrate(&mut *shop.acquire().await?).await?;
    sqlx::raw_sql(
        "create table if not exists account (id text primary key, balance integer not null) strict;
         insert into account values ('alice', 100), ('bob', 100) on conflict do nothing;",
    )
    .execute(&shop)
    .await?;
    Ok(shop)
}

async fn transfer(shop: &SqlitePool, from: &str, to: &str, amount: i64) -> Result<()> {
    // The write lock from the start: the order of the ids is then the order of the changes, and no transaction that has
    // read something fails at its first write because another writer was faster.
    let mut tx = shop.begin_with("BEGIN IMMEDIATE").await?;
    let paid = sqlx::query("update account set balance = balance - ?1 where id = ?2 and balance >= ?1")
        .bind(amount)
        .bind(from)
        .execute(&mut *tx)
        .await?;
    sqlx::query("update account set balance = balance + ?1 where id = ?2")
        .bind(amount)
        .bind(to)
        .execute(&mut *tx)
        .await?;
    // In a real transfer this is its own id, for example "transfer:17".
    let message = Message::new("transfers", json!({"from": from, "to": to, "amount": amount})).key(from);
    let enqueued = enqueue(&mut tx, &message).await?;
    if paid.rows_affected() == 0 {
        // Dropping the transaction rolls it back, and the message with it.
        bail!("{from} has less than {amount}");
    }
    tx.commit().await?;
    // Wakes a relay in this very process; does nothing here.
    enqueued.hint.fire();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_message_stands_in_the_outbox_for_each_transfer_that_happened() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let shop = open(&folder.path().join("shop.db").display().to_string()).await?;
        transfer(&shop, "alice", "bob", 30).await?;
        assert!(transfer(&shop, "alice", "bob", 1_000_000).await.is_err());
        transfer(&shop, "bob", "alice", 5).await?;
        let states: Vec<(String, String)> =
            sqlx::query_as("select message_key, state from outbox_status order by id")
                .fetch_all(&shop)
                .await?;
        let pending = |key: &str| (key.to_owned(), "PENDING".to_owned());
        assert_eq!(states, [pending("alice"), pending("bob")]);
        Ok(())
    }
}
