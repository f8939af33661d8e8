//! The contract of the database traits, written once and run against every database.
//!
//! [`database_suite!`](crate::database_suite) makes a test of each case for one [`DatabaseUnderTest`]. Each test has a database of its own on a
//! real server, or a file of its own.

pub mod acting;
pub mod opening;
pub mod owning;
pub mod postgres;
pub mod reading;
pub mod settling;
pub mod sqlite;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider_relay::inspect::Admin;
use postrider_relay::message::{Head, Position};
use postrider_relay::source::{Heads, Identity, Owned, Range, Settled, Source, SourceError, Verdict};
use postrider_relay::sources::{self, SourceOptions};

/// A message as plain SQL inserts it. `due_in` counts from the database's now.
#[derive(Clone, Debug, Default)]
pub struct NewMessage {
    /// The business's id.
    pub message_id: String,
    /// Where it goes.
    pub topic: String,
    /// What it is kept in order by.
    pub key: Option<String>,
    /// Kind and id of the aggregate.
    pub aggregate: Option<(String, String)>,
    /// A JSON object of strings.
    pub headers: Option<String>,
    /// Payload as text.
    pub text: Option<String>,
    /// Payload as bytes.
    pub bytes: Option<Vec<u8>>,
    /// Delay from the database's now.
    pub due_in: Option<Duration>,
}

impl NewMessage {
    /// A small text message.
    #[must_use]
    pub fn of(message_id: &str, key: Option<&str>) -> Self {
        Self {
            message_id: message_id.to_owned(),
            topic: "orders".to_owned(),
            key: key.map(str::to_owned),
            text: Some("{}".to_owned()),
            ..Self::default()
        }
    }
}

/// A database with the tables of version 1, empty, its own.
#[async_trait]
pub trait DatabaseUnderTest: Send + Sync + Sized + 'static {
    /// Makes one.
    async fn fresh() -> Self;

    /// Its address.
    fn url(&self) -> String;

    /// Shards it has.
    fn shards(&self) -> u32;

    /// Runs SQL that both databases understand, outside any relay.
    async fn execute(&self, sql: &str);

    /// The one number that a query gives.
    async fn number(&self, sql: &str) -> i64;

    /// Inserts in a transaction of its own, committed or rolled back; the id it got.
    async fn insert_in_transaction(&self, message: &NewMessage, commit: bool) -> Position;

    /// Ends a relay's lease as if its time had passed.
    async fn expire(&self, relay: i64);

    /// Moves the due time of a waiting message to the past.
    async fn make_due(&self, position: Position);

    /// Time from the database's now until a waiting message is due, in microseconds.
    async fn due_in_us(&self, position: Position) -> i64;

    /// The next id will be above `last`.
    async fn skip_ids(&self, last: i64);

    /// Removes it. A failed test leaves it behind to be looked at.
    async fn finish(self);

    /// Inserts and commits.
    async fn insert(&self, message: &NewMessage) -> Position {
        self.insert_in_transaction(message, true).await
    }

    /// Inserts `count` messages of `key`, ids rising.
    async fn insert_many(&self, prefix: &str, key: Option<&str>, count: usize) -> Vec<Position> {
        let mut positions = Vec::with_capacity(count);
        for n in 0..count {
            positions.push(self.insert(&NewMessage::of(&format!("{prefix}{n}"), key)).await);
        }
        positions
    }

    /// A relay on it that owns nothing yet.
    async fn relay(&self, number: i64) -> Relay {
        Relay { number, source: self.try_relay(number).await.expect("a good database opens") }
    }

    /// Opens a relay on it, or says why not.
    async fn try_relay(&self, number: i64) -> Result<Source, SourceError> {
        sources::open(&self.url(), identity(number), &SourceOptions::default()).await
    }

    /// The operators' side.
    async fn admin(&self) -> Arc<dyn Admin> {
        sources::admin(&self.url()).await.expect("a good database opens")
    }

    /// Rows of a table.
    async fn count(&self, table: &str) -> i64 {
        self.number(&format!("select count(*) from {table}")).await
    }
}

/// How relay `number` presents itself: the lease is the default one.
#[must_use]
pub fn identity(number: i64) -> Identity {
    Identity {
        relay: number,
        instance: format!("relay-{number}"),
        version: "0.1.0".to_owned(),
        lease: Duration::from_secs(15),
    }
}

/// An opened source with short ways to do what most cases do.
#[derive(Debug)]
pub struct Relay {
    /// Its number.
    pub number: i64,
    /// Its parts.
    pub source: Source,
}

impl Relay {
    /// Takes what it may.
    pub async fn acquire(&self) -> Vec<Owned> {
        self.source.ownership.acquire(&[]).await.expect("acquire").owned
    }

    /// The whole ready queue, up to 10,000 rows.
    pub async fn heads(&self, owned: &[Owned]) -> Heads {
        self.source.reader.heads(owned, everything()).await.expect("read the ready queue")
    }

    /// What is due, from the start.
    pub async fn due(&self, owned: &[Owned]) -> Heads {
        self.source.reader.due(owned, <_>::default(), 10_000).await.expect("read what is due")
    }

    /// Settles; the positions recorded, in order.
    pub async fn settle(&self, owned: &[Owned], settled: &[Settled]) -> Vec<Position> {
        let mut report = self.source.settler.settle(owned, settled).await.expect("settle");
        report.settled.sort_unstable();
        report.settled
    }

    /// Reads the ready queue and settles each row of it with `verdict`.
    pub async fn settle_heads(&self, owned: &[Owned], verdict: &Verdict) -> Vec<Position> {
        let settled = all(&self.heads(owned).await.rows, verdict);
        self.settle(owned, &settled).await
    }
}

/// No bounds but 10,000 rows.
#[must_use]
pub const fn everything() -> Range {
    Range { after: Position(0), up_to: None, limit: 10_000 }
}

/// One outcome.
#[must_use]
pub fn one(head: &Head, verdict: Verdict) -> Settled {
    Settled { position: head.position, shard: head.shard, origin: head.origin, verdict }
}

/// The same outcome for each.
#[must_use]
pub fn all(heads: &[Head], verdict: &Verdict) -> Vec<Settled> {
    heads.iter().map(|head| one(head, verdict.clone())).collect()
}

/// Positions of heads.
#[must_use]
pub fn positions(heads: &Heads) -> Vec<Position> {
    heads.rows.iter().map(|head| head.position).collect()
}

/// Acknowledged by sink `nats`, no evidence.
#[must_use]
pub fn sent() -> Verdict {
    Verdict::Sent { sink: "nats".into(), evidence: None }
}

/// To be tried again after a minute.
#[must_use]
pub fn retry(attempts: u32, tries: u32) -> Verdict {
    retry_after(Duration::from_secs(60), attempts, tries)
}

/// To be tried again after `backoff`.
#[must_use]
pub fn retry_after(backoff: Duration, attempts: u32, tries: u32) -> Verdict {
    Verdict::Retry { backoff, attempts, tries, error: "refused: 503".to_owned(), holds_key: true }
}

/// Given up, its key goes on.
#[must_use]
pub fn dead() -> Verdict {
    dead_holding(false)
}

/// Given up; `holds_key` = its key waits for an operator.
#[must_use]
pub fn dead_holding(holds_key: bool) -> Verdict {
    Verdict::Dead {
        reason: postrider_relay::source::DeadReason::Permanent,
        attempts: 3,
        tries: 4,
        error: "refused: 422".to_owned(),
        holds_key,
    }
}

/// A test of each case of the suite for one database.
#[macro_export]
macro_rules! database_suite {
    ($database:ty) => {
        $crate::database_suite!(@cases $database;
            reading: a_rolled_back_message_is_never_read, rows_come_in_order_and_within_the_range,
                every_read_is_fenced_by_its_token, what_is_mine_is_said_even_when_nothing_matches,
                a_lane_reads_its_own_messages_alone, a_delayed_message_is_due_by_the_database_clock,
                due_rows_come_by_time_in_pages, payload_and_headers_arrive_unchanged,
                missing_messages_are_left_out;
            settling: a_sent_message_leaves_the_queue_for_a_receipt, a_settle_under_an_old_token_changes_nothing,
                a_late_settle_after_a_takeover_changes_nothing, settling_sent_twice_changes_nothing,
                settling_a_retry_twice_changes_nothing, settling_a_repeated_retry_twice_changes_nothing,
                settling_dead_twice_changes_nothing, a_retry_that_counted_no_try_is_not_repeated,
                an_acknowledgement_for_a_missing_row_is_not_settled,
                a_row_between_two_settled_ids_survives, receipts_name_ids_sinks_and_evidence,
                attempts_tries_backoff_and_error_are_kept_per_message, a_waiting_message_is_settled_where_it_stands,
                of_a_message_given_twice_the_first_verdict_counts, odd_texts_are_stored;
            owning: two_relays_never_own_the_same_shard, an_acquisition_whose_answer_was_lost_strands_nothing, an_expired_relay_is_taken_over_and_counted_unclean,
                a_clean_release_resets_the_count, a_relay_that_renews_late_keeps_what_nobody_took,
                a_relay_that_renews_late_learns_what_was_taken, renew_and_release_are_fenced_by_the_token,
                renewing_reports_the_state_and_the_live_relays, a_relay_that_leaves_frees_everything,
                held_keys_are_listed_in_pages, old_relay_rows_are_removed;
            acting: every_message_is_accounted_for, a_message_without_a_queue_row_is_found_and_nothing_else,
                the_summary_counts, dead_messages_are_redriven_once, a_redriven_message_keeps_the_hold_on_its_key,
                dead_messages_are_cancelled_once, a_selection_by_topic_and_key_takes_no_others,
                messages_are_listed_by_state_in_pages, sent_messages_are_listed_from_their_receipts,
                one_message_is_shown_with_everything_known, relays_and_shards_are_listed;
            opening: a_missing_table_names_the_cure, tables_made_by_hand_are_not_taken_for_ours,
                an_older_and_a_newer_schema_are_refused;
        );
    };
    (@cases $database:ty; $($module:ident: $($case:ident),+;)+) => {
        $($(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let database = <$database as $crate::database::DatabaseUnderTest>::fresh().await;
                $crate::database::$module::$case(&database).await;
                $crate::database::DatabaseUnderTest::finish(database).await;
            }
        )+)+
    };
}
