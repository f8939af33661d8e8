//! A business change and its message, in one PostgreSQL transaction, in order per account.
//!
//! ```text
//! postrider init --database postgres://…/shop
//! postrider run  --database postgres://…/shop
//! DATABASE_URL=postgres://…/shop cargo run -p example-enqueue-postgres
//! ```

use anyhow::{Context as _, Result, ensure};
use postrider::{Message, enqueue, schema};
use serde_json::json;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").context("DATABASE_URL names no database")?;
    let shop = open(&url).await?;
    transfer(&shop, "alice", "bob", 30).await?;
    println!("alice paid bob 30; the message is in the outbox");
    Ok(())
}

async fn open(url: &str) -> Result<PgPool> {
    let shop = PgPoolOptions::new()
        // A `begin()` that was cancelled half-way can leave its connection in an open transaction (see the README of
        // the crate postrider): nothing may go back into the pool like that.
        .after_release(|connection, _| {
            Box::pin(async move {
                sqlx::query("ROLLBACK").execute(connection).await?;
                Ok(true)
            })
        })
        .connect(url)
        .await?;
    // `postrider init` makes the tables; a program that needs them checks that they are there.
    schema::ensure(&mut *shop.acquire().await?).await?;
    sqlx::raw_sql(
        "create table if not exists account (id text primary key, balance bigint not null);
         insert into account values ('alice', 100), ('bob', 100) on conflict do nothing;",
    )
    .execute(&shop)
    .await?;
    Ok(shop)
}

async fn transfer(shop: &PgPool, from: &str, to: &str, amount: i64) -> Result<()> {
    let mut tx = shop.begin().await?;
    // Lock the account's row before you enqueue: then the order of its messages is the order of its changes.
    let balance: i64 = sqlx::query_scalar("select balance from account where id = $1 for update")
        .bind(from)
        .fetch_one(&mut *tx)
        .await?;
    // Leaving early drops the transaction, which rolls it back.
    ensure!(balance >= amount, "{from} has less than {amount}");
    for (id, change) in [(from, -amount), (to, amount)] {
        sqlx::query("update account set balance = balance + $1 where id = $2")
            .bind(change)
            .bind(id)
            .execute(&mut *tx)
            .await?;
    }
    // In a real transfer this has an id of its own, for example "transfer:17".
    let message = Message::new("transfers", json!({"from": from, "to": to, "amount": amount})).key(from);
    enqueue(&mut tx, &message).await?;
    tx.commit().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

    use super::*;

    #[tokio::test]
    async fn a_message_stands_in_the_outbox_for_each_transfer_that_happened() -> Result<()> {
        let server = std::env::var("POSTGRES_URL")
            .context("POSTGRES_URL is not set: run scripts/services up postgres")?;
        let name = format!("postrider_example_{}", std::process::id());
        let mut admin = PgConnection::connect(&server).await?;
        for sql in [format!("drop database if exists {name}"), format!("create database {name}")] {
            sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut admin).await?;
        }
        let (address, _) = server.rsplit_once('/').context("POSTGRES_URL names no database")?;
        let url = format!("{address}/{name}");
        schema::migrate(&mut PgConnection::connect(&url).await?).await?;

        let shop = open(&url).await?;
        transfer(&shop, "alice", "bob", 30).await?;
        assert!(transfer(&shop, "alice", "bob", 1_000_000).await.is_err());
        let states: Vec<(String, String)> =
            sqlx::query_as("select message_key, state from outbox_status").fetch_all(&shop).await?;
        assert_eq!(states, [("alice".to_owned(), "PENDING".to_owned())]);

        shop.close().await;
        sqlx::raw_sql(AssertSqlSafe(format!("drop database {name} with (force)")))
            .execute(&mut admin)
            .await?;
        Ok(())
    }
}
