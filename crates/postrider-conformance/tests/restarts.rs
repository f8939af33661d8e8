//! Databases and brokers that go away under load: everything arrives, in order, in one receipt each.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use postrider_conformance::process::{RelayProcess, Start, TestStream, read_journal};
use postrider_conformance::sink::nats::{NatsServer, required};
use postrider_conformance::testbed::{Business, Load, TestDatabase};
use tempfile::TempDir;

fn start(folder: &TempDir, sink: String) -> Start {
    Start {
        program: env!("CARGO_BIN_EXE_drill-relay").into(),
        folder: folder.path().to_owned(),
        sink,
        lease: Duration::from_secs(8),
        in_flight: 100,
        hold: None,
    }
}

const MESSAGES: u64 = 4_000;

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_cut_thirty_times_lose_and_repeat_nothing() {
    let (db, folder) = (TestDatabase::new().await, tempfile::tempdir().expect("a folder"));
    let business = Business::create(&db).await;
    let stream = TestStream::create(&required("NATS_URL")).await;
    let relay = RelayProcess::start(&db, "cut", &start(&folder, stream.sink())).await;
    let writing = tokio::spawn({
        let business = business.clone();
        let load = Load { transactions: MESSAGES / 2, ..Load::default() };
        async move { business.run(load).await }
    });
    business.burst("burst", MESSAGES / 2, 50).await;
    let mut rng = fastrand::Rng::with_seed(11);
    let committed = MESSAGES * 9 / 10;
    for cut in 0..30 {
        db.sent(committed * cut / 32 + rng.u64(0..committed / 64)).await;
        tokio::time::sleep(Duration::from_micros(rng.u64(0..5_000))).await;
        db.run(
            "select pg_terminate_backend(pid) from pg_stat_activity
             where datname = current_database() and application_name like 'postrider cut%'",
        )
        .await;
    }
    writing.await.expect("producers");
    business.drained().await;
    assert_eq!(relay.stop().await.undecided, 0);
    let verdict = business.verdict(&stream.arrivals().await).await;
    verdict.assert_kept();
    assert!(verdict.duplicates.is_empty(), "the lease outlived every cut: {:?}", verdict.duplicates);
    business.assert_receipts().await;
    stream.remove().await;
}

/// A PostgreSQL of its own, by the services script; stopped and removed with the value.
struct OwnPostgres {
    folder: TempDir,
}

impl OwnPostgres {
    fn start() -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().expect("a folder");
        // PostgreSQL runs as another user where we are root, and must reach its data.
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).expect("permissions");
        let this = Self { folder };
        this.services("up");
        this
    }

    fn services(&self, command: &str) -> String {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/services");
        let output = Command::new(script)
            .arg(command)
            .args((command != "env").then_some("postgres"))
            .env("POSTRIDER_SERVICES_DIR", self.folder.path())
            .output()
            .expect("scripts/services");
        // `env` complains about the servers that were not started.
        assert!(
            command == "env" || output.status.success(),
            "scripts/services {command}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).expect("text")
    }

    fn url(&self) -> String {
        let lines = self.services("env");
        lines.lines().find_map(|line| line.strip_prefix("POSTGRES_URL=")).expect("its address").to_owned()
    }
}

impl Drop for OwnPostgres {
    fn drop(&mut self) {
        self.services("down");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_restarts_under_load_loses_nothing() {
    let server = OwnPostgres::start();
    let folder = tempfile::tempdir().expect("a folder");
    let db = TestDatabase::at(&server.url()).await;
    let business = Business::create(&db).await;
    let stream = TestStream::create(&required("NATS_URL")).await;
    let relay = RelayProcess::start(&db, "one", &start(&folder, stream.sink())).await;
    for round in 0..3 {
        business.burst(&format!("burst-{round}"), 1_000, 50).await;
        db.sent(round * 1_000 + 100).await;
        server.services("down");
        server.services("up");
        assert_eq!(server.url(), url_of_server(&db.url), "it comes back where it was");
    }
    business.drained().await;
    assert_eq!(relay.stop().await.undecided, 0);
    let verdict = business.verdict(&stream.arrivals().await).await;
    verdict.assert_kept();
    business.assert_receipts().await;
    stream.remove().await;
    drop(db);
}

fn url_of_server(database: &str) -> String {
    let mut url = url::Url::parse(database).expect("an address");
    url.set_path("postgres");
    url.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nats_server_that_restarts_under_load_loses_nothing() {
    let mut server = NatsServer::start("");
    let (db, folder) = (TestDatabase::new().await, tempfile::tempdir().expect("a folder"));
    let business = Business::create(&db).await;
    let stream = TestStream::create(&format!("nats://{}", server.address())).await;
    let relay = RelayProcess::start(&db, "one", &start(&folder, stream.sink())).await;
    let writing = tokio::spawn({
        let business = business.clone();
        async move { business.run(Load { transactions: 2_000, ..Load::default() }).await }
    });
    for round in 0..3 {
        business.burst(&format!("burst-{round}"), 500, 50).await;
        db.sent(round * 500 + 100).await;
        server.kill();
        server.run();
    }
    writing.await.expect("producers");
    business.drained().await;
    let journal = relay.journal.clone();
    let counted = relay.stop().await;
    assert_eq!((counted.undecided, counted.dead, counted.retried), (0, 0, 0), "an outage counts no attempt");
    let arrivals = stream.arrivals().await;
    let verdict = business.verdict(&arrivals).await;
    verdict.assert_kept();
    business.assert_receipts().await;
    let copies: usize = verdict.duplicates.values().sum();
    assert!(
        copies as u64 <= counted.unknown,
        "{copies} copies, {} publishes without a verdict",
        counted.unknown
    );
    assert!(read_journal(&journal).len() >= arrivals.len(), "what arrived had been published");
}
