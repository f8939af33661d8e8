//! Fills the tables fast: what a long life leaves behind, and messages by the thousand.

use super::TestDatabase;

/// What has become of the messages of a long life.
#[derive(Clone, Copy, Debug)]
pub struct History {
    /// Sent, with receipts.
    pub sent: i64,
    /// Waiting, due in the days to come.
    pub waiting: i64,
    /// Dead.
    pub dead: i64,
}

/// What the planner knows about the small tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistics {
    /// All of it.
    Fresh,
    /// What was true when they were empty.
    Stale,
    /// Nothing.
    None,
}

impl Statistics {
    /// The word for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::None => "none",
        }
    }
}

/// Messages to write at once.
#[derive(Clone, Debug)]
pub struct Bulk<'a> {
    /// The number of the first, from 1.
    pub first: i64,
    /// How many.
    pub messages: i64,
    /// Over how many keys, in turn.
    pub keys: i64,
    /// Before the number of the key and of the message.
    pub prefix: &'a str,
    /// Where they go.
    pub topic: &'a str,
    /// Payload characters.
    pub payload: i32,
}

const TABLES: &str = "array['outbox'::regclass, 'outbox_queue'::regclass, 'outbox_waiting'::regclass,
  'outbox_dead'::regclass, 'outbox_sent'::regclass, 'outbox_shard'::regclass, 'outbox_relay'::regclass]";

impl TestDatabase {
    /// Writes `bulk` in one transaction, as any producer would.
    ///
    /// # Panics
    /// If the database refuses, for example because the same prefix and number were used before.
    pub async fn write(&self, bulk: &Bulk<'_>) {
        let Bulk { first, messages, keys, prefix, topic, payload } = bulk;
        self.run(&format!(
            "insert into outbox (message_id, topic, message_key, payload)
             select '{prefix}' || lpad(n::text, 9, '0'), '{topic}', '{prefix}' || n % {keys}, repeat('x', {payload})
             from generate_series({first}, {first} + {messages} - 1) n"
        ))
        .await;
    }

    /// Writes the rows of a long life straight into the tables, the three kinds mixed by id. For an empty outbox.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn live_through(&self, h: History) {
        let all = h.sent + h.waiting + h.dead;
        let (w, d) = (every(all, h.waiting), every(all, h.dead));
        let hash = "('x' || substr(md5('key-' || (n % 100000)), 1, 16))::bit(64)::bigint";
        self.run(&format!(
            "set session_replication_role = replica;
             set synchronous_commit = off;
             insert into outbox (id, message_id, topic, message_key, payload) overriding system value
             select n, 'past-' || lpad(n::text, 12, '0'), 'past', 'key-' || (n % 100000), repeat('x', 60)
             from generate_series(1, {all}) n;
             insert into outbox_waiting (id, key_hash, due_at, bytes, shard)
             select n, h, clock_timestamp() + interval '1 day' + n * interval '1 millisecond', 60, (h & 63)::smallint
             from (select n, {hash} as h from generate_series({w}, {all}, {w}) n) x;
             insert into outbox_dead (id, key_hash, bytes, shard, attempts, tries, reason)
             select n, h, 60, (h & 63)::smallint, 10, 10, 'attempts'
             from (select n, {hash} as h from generate_series(1, {all}, {d}) n) x;
             insert into outbox_sent (bucket, sent_at, relay, n, sink, ids)
             select n >> 12, clock_timestamp() - interval '1 hour', 1, count(*), 'memory', array_agg(n order by n)
             from generate_series(1, {all}) n where n % {w} <> 0 and n % {d} <> 1 group by n >> 12, n >> 9;
             select setval(pg_get_serial_sequence('outbox', 'id'), {all});
             reset session_replication_role;
             reset synchronous_commit"
        ))
        .await;
    }

    /// Makes the planner know that much about the tables. Autovacuum must be off for it to last.
    ///
    /// # Panics
    /// If the database refuses.
    pub async fn statistics(&self, statistics: Statistics) {
        let forget = |tuples: i32| {
            format!(
                "delete from pg_statistic where starelid = any({TABLES});
                 update pg_class set reltuples = {tuples}, relpages = 0
                 where oid = any({TABLES}) or oid in (select indexrelid from pg_index where indrelid = any({TABLES}))"
            )
        };
        match statistics {
            Statistics::Fresh => {
                self.run("analyze outbox, outbox_queue, outbox_waiting, outbox_dead, outbox_sent, outbox_shard, outbox_relay")
                    .await;
            }
            Statistics::Stale => self.run(&forget(0)).await,
            Statistics::None => self.run(&forget(-1)).await,
        }
    }
}

/// The distance at which `part` of `all` rows stand.
fn every(all: i64, part: i64) -> i64 {
    (all / part.max(1)).max(2)
}
