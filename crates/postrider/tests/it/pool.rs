//! A cancelled `begin()` of sqlx 0.9.0 can give a connection with an open transaction back to the pool; the README shows
//! what to do. This keeps that advice true.

use std::time::Duration;

use sqlx::postgres::PgPoolOptions;

use crate::common::{Postgres, Store};

#[tokio::test]
async fn with_the_rollback_on_release_a_cancelled_begin_swallows_no_write() {
    let db = Postgres::empty().await;
    db.exec("create table t (n int)").await.expect("create");
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .after_release(|conn, _| {
            Box::pin(async move {
                sqlx::query("ROLLBACK").execute(conn).await?;
                Ok(true)
            })
        })
        .connect(&db.url)
        .await
        .expect("connect");
    for n in 0..60_u32 {
        let cancelled = tokio::time::timeout(Duration::from_micros(u64::from(n) * 20), pool.begin()).await;
        drop(cancelled);
        sqlx::query("insert into t values ($1)")
            .bind(i64::from(n))
            .execute(&pool)
            .await
            .expect("an innocent write");
    }
    assert_eq!(db.number("select count(*) from t").await, 60);
    pool.close().await;
}
