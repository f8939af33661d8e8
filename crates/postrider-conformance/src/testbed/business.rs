//! A business that writes its own rows and the message in one transaction; its table is the ground truth.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use postrider::Message;
use sqlx::{PgPool, Row};

use super::TestDatabase;
use crate::ledger::{Arrival, Committed, Verdict};

/// How much is written, and how.
#[derive(Clone, Debug)]
pub struct Load {
    /// Transactions, over all writers.
    pub transactions: u64,
    /// Writers at a time.
    pub writers: usize,
    /// Keys; a transaction takes the row lock of one before it writes.
    pub keys: u64,
    /// One transaction in this many rolls back; 0 = none.
    pub rollback_every: u64,
    /// Longest pause before commit.
    pub commit_pause: Duration,
    /// Where the messages go, in turn.
    pub topics: Vec<String>,
    /// Payload characters.
    pub payload: usize,
    /// Drives everything random.
    pub seed: u64,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            transactions: 1_000,
            writers: 8,
            keys: 50,
            rollback_every: 10,
            commit_pause: Duration::ZERO,
            topics: vec!["orders".to_owned()],
            payload: 100,
            seed: 1,
        }
    }
}

/// The business tables in a test database.
#[derive(Clone, Debug)]
pub struct Business {
    pool: PgPool,
}

impl Business {
    /// Creates the tables.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn create(db: &TestDatabase) -> Self {
        db.run(
            "create table account (key text primary key, version bigint not null default 0);
             create table operation (message_id text primary key, key text not null, version bigint not null);",
        )
        .await;
        Self { pool: db.pool.clone() }
    }

    /// Runs `load` to its end. May be called more than once with different seeds.
    ///
    /// # Panics
    /// If a transaction fails that should not.
    pub async fn run(&self, load: Load) {
        for key in 0..load.keys {
            sqlx::query("insert into account (key) values ($1) on conflict do nothing")
                .bind(format!("key-{key}"))
                .execute(&self.pool)
                .await
                .expect("account");
        }
        let next = Arc::new(AtomicU64::new(0));
        let writers: Vec<_> = (0..load.writers)
            .map(|w| {
                let (this, load, next) = (self.clone(), load.clone(), next.clone());
                tokio::spawn(async move {
                    let mut rng = fastrand::Rng::with_seed(load.seed ^ (w as u64) << 32);
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed);
                        if n >= load.transactions {
                            return;
                        }
                        this.transaction(&load, n, &mut rng).await;
                    }
                })
            })
            .collect();
        for w in writers {
            w.await.expect("writer");
        }
    }

    /// One business transaction: lock the key, write the operation, enqueue, pause, commit or roll back.
    async fn transaction(&self, load: &Load, n: u64, rng: &mut fastrand::Rng) {
        let key = format!("key-{}", rng.u64(0..load.keys));
        let message_id = format!("op-{}-{n}", load.seed);
        let mut tx = self.pool.begin().await.expect("begin");
        let version: i64 =
            sqlx::query_scalar("update account set version = version + 1 where key = $1 returning version")
                .bind(&key)
                .fetch_one(&mut *tx)
                .await
                .expect("lock the key");
        sqlx::query("insert into operation values ($1, $2, $3)")
            .bind(&message_id)
            .bind(&key)
            .bind(version)
            .execute(&mut *tx)
            .await
            .expect("operation");
        let topic = &load.topics[(n % load.topics.len() as u64) as usize];
        let message = Message::new(topic, "x".repeat(load.payload)).id(&message_id).key(&key);
        postrider::enqueue(&mut tx, &message).await.expect("enqueue");
        if !load.commit_pause.is_zero() {
            tokio::time::sleep(load.commit_pause.mul_f64(rng.f64())).await;
        }
        if load.rollback_every > 0 && rng.u64(0..load.rollback_every) == 0 {
            tx.rollback().await.expect("rollback");
        } else {
            tx.commit().await.expect("commit");
        }
    }

    /// One transaction that writes many operations over `keys` keys, with their messages, by plain SQL: a backlog that is
    /// there at once. Their ids begin with `name`.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn burst(&self, name: &str, messages: u64, keys: u64) {
        let (messages, keys) =
            (i64::try_from(messages).expect("a count"), i64::try_from(keys).expect("a count"));
        let mut tx = self.pool.begin().await.expect("begin");
        for sql in [
            "insert into account (key) select 'key-' || k from generate_series(0, $3 - 1) k where $1 <> '' and $2 > 0
             on conflict do nothing",
            "select key from account where $1 <> '' and $2 > 0 and $3 > 0 order by key for update",
            "insert into operation
             select $1 || '-' || n, a.key, a.version + n / $3 + 1
             from generate_series(0, $2 - 1) n join account a on a.key = 'key-' || (n % $3)",
            "update account a set version = a.version + written.n
             from (select key, count(*) as n from operation where message_id like $1 || '-%' and $2 > 0 and $3 > 0
                   group by key) written
             where written.key = a.key",
            "insert into outbox (message_id, topic, message_key, payload)
             select $1 || '-' || n, 'orders', 'key-' || (n % $3), repeat('x', 100)
             from generate_series(0, $2 - 1) n order by n",
        ] {
            let query = sqlx::query(sql).bind(name).bind(messages).bind(keys);
            query.execute(&mut *tx).await.expect("a burst");
        }
        tx.commit().await.expect("commit");
    }

    /// What was committed.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn committed(&self) -> Vec<Committed> {
        sqlx::query("select message_id, key, version from operation")
            .fetch_all(&self.pool)
            .await
            .expect("operations")
            .iter()
            .map(|r| Committed { message_id: r.get(0), key: Some(r.get(1)), version: r.get(2) })
            .collect()
    }

    /// The ledger check against what arrived. What the outbox shows as dead counts as visibly kept back.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn verdict(&self, arrivals: &[Arrival]) -> Verdict {
        let dead: Vec<String> =
            sqlx::query_scalar("select o.message_id from outbox o join outbox_dead d on d.id = o.id")
                .fetch_all(&self.pool)
                .await
                .expect("dead");
        Verdict::of(&self.committed().await, arrivals, &dead.into_iter().collect::<BTreeSet<_>>())
    }

    /// Waits until nothing is ready or waiting any more. Fails when nothing has moved for a minute.
    ///
    /// # Panics
    /// If messages are stuck.
    pub async fn drained(&self) {
        let mut last = (i64::MAX, tokio::time::Instant::now());
        loop {
            let left: i64 = sqlx::query_scalar(
                "select (select count(*) from outbox_queue) + (select count(*) from outbox_waiting)",
            )
            .fetch_one(&self.pool)
            .await
            .expect("count");
            if left == 0 {
                return;
            }
            if left != last.0 {
                last = (left, tokio::time::Instant::now());
            }
            assert!(
                last.1.elapsed() < Duration::from_secs(60),
                "{left} messages have not moved for a minute"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Every committed message is in exactly one receipt, or dead; nothing is unaccounted.
    ///
    /// # Panics
    /// If the books of the outbox do not agree.
    pub async fn assert_receipts(&self) {
        let wrong: Vec<(String, i64)> = sqlx::query_as(
            "select o.message_id, count(r.id) from outbox o
             left join (select unnest(ids) as id from outbox_sent) r on r.id = o.id
             left join outbox_dead d on d.id = o.id
             group by o.id, o.message_id, d.id
             having count(r.id) + (d.id is not null)::int <> 1",
        )
        .fetch_all(&self.pool)
        .await
        .expect("receipts");
        assert!(
            wrong.is_empty(),
            "{} messages are not in exactly one receipt, e.g. {:?}",
            wrong.len(),
            wrong.first()
        );
    }
}
