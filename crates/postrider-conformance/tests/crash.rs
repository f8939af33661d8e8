//! Relay processes killed and paused at named points of a message's path: what was in flight may come again, with the
//! same id, and nothing else happens.

mod crash {
    pub(crate) mod killed;
    pub(crate) mod paused;
    pub(crate) mod stopped;
}

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use postrider_conformance::ledger::{Arrival, Verdict};
use postrider_conformance::process::{
    Point, RelayProcess, Start, TestStream, arrivals_in_file, history, read_journal,
};
use postrider_conformance::sink::nats::required;
use postrider_conformance::testbed::{Business, Load, TestDatabase};
use tempfile::TempDir;

/// Most messages a relay may have published and undecided.
const IN_FLIGHT: u32 = 16;

/// How often relays handed the message over once more without having ended in between: an answer had not come in time.
fn handed_over_again(journals: &[&Path], position: i64) -> usize {
    let times = |journal: &&Path| read_journal(journal).iter().filter(|e| e.position == position).count();
    journals.iter().map(|journal| times(journal).saturating_sub(1)).sum()
}

/// Where messages go.
enum Target {
    File(PathBuf),
    Nats(TestStream),
}

/// A database, a business, a sink, and a folder for what the processes write.
struct Bed {
    folder: TempDir,
    db: TestDatabase,
    business: Business,
    target: Target,
}

impl Bed {
    async fn on_file() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let target = Target::File(folder.path().join("out.jsonl"));
        Self::with(folder, target).await
    }

    async fn on_nats() -> Self {
        let stream = TestStream::create(&required("NATS_URL")).await;
        Self::with(tempfile::tempdir().expect("a folder"), Target::Nats(stream)).await
    }

    async fn with(folder: TempDir, target: Target) -> Self {
        let db = TestDatabase::new().await;
        let business = Business::create(&db).await;
        history::record(&db).await;
        Self { folder, db, business, target }
    }

    async fn relay(&self, instance: &str, hold: Option<Point>) -> RelayProcess {
        let start = Start {
            program: env!("CARGO_BIN_EXE_drill-relay").into(),
            folder: self.folder.path().to_owned(),
            sink: match &self.target {
                Target::File(path) => format!("file:{}", path.display()),
                Target::Nats(stream) => stream.sink(),
            },
            lease: Duration::from_secs(2),
            in_flight: IN_FLIGHT,
            hold: hold.map(|point| (point, 100)),
        };
        RelayProcess::start(&self.db, instance, &start).await
    }

    /// Producers at work.
    fn produce(&self) -> tokio::task::JoinHandle<()> {
        let business = self.business.clone();
        let load = Load { transactions: 600, writers: 4, keys: 40, ..Load::default() };
        tokio::spawn(async move { business.run(load).await })
    }

    async fn arrivals(&self) -> Vec<Arrival> {
        match &self.target {
            Target::File(path) => arrivals_in_file(path),
            Target::Nats(stream) => stream.arrivals().await,
        }
    }

    /// The ledger, the receipts and the history agree that every promise was kept.
    async fn judge(&self) -> (Verdict, Vec<Arrival>) {
        let arrivals = self.arrivals().await;
        let verdict = self.business.verdict(&arrivals).await;
        verdict.assert_kept();
        self.business.assert_receipts().await;
        history::assert_receipts_by_owners(&self.db).await;
        (verdict, arrivals)
    }

    /// As [`Bed::judge`]; and what arrived more than once had been in flight, and arrived twice, or a relay had handed it over
    /// again because it had no answer in time, as its journal says. Returns how many had been in flight and came again.
    async fn judge_with(&self, in_flight: &BTreeSet<i64>, journals: &[&Path]) -> usize {
        assert!(
            in_flight.len() <= IN_FLIGHT as usize,
            "{} in flight, the limit is {IN_FLIGHT}",
            in_flight.len()
        );
        let (verdict, arrivals) = self.judge().await;
        let mut again = 0;
        for (id, copies) in &verdict.duplicates {
            let position = arrivals.iter().find(|a| a.message_id == *id).expect("it arrived").position;
            let witnesses =
                usize::from(in_flight.contains(&position)) + handed_over_again(journals, position);
            assert!(*copies <= witnesses, "{id} came {copies} times too often, with {witnesses} witnesses");
            again += usize::from(in_flight.contains(&position));
        }
        again
    }

    async fn remove(self) {
        if let Target::Nats(stream) = self.target {
            stream.remove().await;
        }
    }

    /// Sessions of a relay that are idle in a transaction.
    async fn idle_in_transaction(&self, instance: &str) -> i64 {
        self.db
            .count(&format!(
                "select count(*) from pg_stat_activity where datname = current_database()
                 and state like 'idle in transaction%' and application_name = 'postrider {instance}'"
            ))
            .await
    }

    /// Receipts a relay has written.
    async fn receipts_of(&self, relay: i64) -> Vec<i64> {
        sqlx::query_scalar("select unnest(ids) as id from outbox_sent where relay = $1 order by id")
            .bind(relay)
            .fetch_all(&self.db.pool)
            .await
            .expect("receipts")
    }
}
