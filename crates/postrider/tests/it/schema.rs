//! The migrator: many processes at once, kills in the middle, the page, versions.

use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use postrider::Dialect;
use postrider::schema::{self, SchemaError};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};

use crate::common::{Postgres, Sqlite, Store, run};

/// Ends this process as a power switch would.
pub(crate) fn kill_this_process() -> ! {
    let killed = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    panic!("still alive: {killed:?}");
}

/// A process of its own that migrates the database. `die_after`: SQLite's virtual machine steps until it kills itself.
fn migrating(address: &str, die_after: Option<u32>) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this test program"));
    command.args(["schema::child_that_migrates", "--exact"]).env("POSTRIDER_TEST_MIGRATE", address);
    if let Some(steps) = die_after {
        command.env("POSTRIDER_TEST_DIE_AFTER", steps.to_string());
    }
    command.stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().expect("start a process")
}

fn all_succeed(children: Vec<Child>) {
    for (n, mut child) in children.into_iter().enumerate() {
        let status = child.wait().expect("wait for a process");
        assert!(status.success(), "process {n}: {status}");
    }
}

/// No test by itself: the process of the tests below.
#[tokio::test]
async fn child_that_migrates() {
    let Ok(address) = std::env::var("POSTRIDER_TEST_MIGRATE") else { return };
    if !address.starts_with("sqlite:") {
        let mut conn = PgConnection::connect(&address).await.expect("connect");
        schema::migrate(&mut conn).await.expect("migrate");
        return schema::ensure(&mut conn).await.expect("ensure");
    }
    // Without SQLite's own busy timeout: the migrator must be patient by itself.
    let options = SqliteConnectOptions::from_str(&address).expect("an address").busy_timeout(Duration::ZERO);
    let mut conn = options.connect().await.expect("open");
    if let Ok(steps) = std::env::var("POSTRIDER_TEST_DIE_AFTER") {
        let mut left: u32 = steps.parse().expect("a number");
        conn.lock_handle().await.expect("handle").set_progress_handler(1, move || {
            left -= 1;
            if left == 0 { kill_this_process() } else { true }
        });
    }
    schema::migrate(&mut conn).await.expect("migrate");
    schema::ensure(&mut conn).await.expect("ensure");
}

fn sqlite_address(db: &Sqlite) -> String {
    format!("sqlite://{}?mode=rwc", db.path.display())
}

#[tokio::test]
async fn twenty_processes_migrate_an_empty_postgres_at_once() {
    let db = Postgres::empty().await;
    all_succeed((0..20).map(|_| migrating(&db.url, None)).collect());
    assert_eq!(db.texts("select version || ' ' || name from postrider_schema").await, ["1 outbox"]);
    assert_eq!(db.number("select count(*) from outbox_shard").await, 64);
}

#[tokio::test]
async fn twenty_processes_migrate_an_empty_sqlite_file_at_once() {
    let db = Sqlite::empty();
    all_succeed((0..20).map(|_| migrating(&sqlite_address(&db), None)).collect());
    assert_eq!(db.texts("select version || ' ' || name from postrider_schema").await, ["1 outbox"]);
    assert_eq!(db.texts("select journal_mode from pragma_journal_mode").await, ["wal"]);
}

#[tokio::test]
async fn a_process_killed_in_the_middle_of_migrating_postgres_leaves_nothing() {
    let db = Postgres::empty().await;
    // An uncommitted table of the same name stops the migration half way, with several tables made.
    let mut other = db.begin().await;
    sqlx::raw_sql("create table outbox_sent (n int)").execute(&mut *other).await.expect("create");
    let mut child = migrating(&db.url, None);
    let blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    while db.number(blocked).await == 0 {
        tokio::task::yield_now().await;
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    other.rollback().await.expect("rollback");
    all_succeed((0..5).map(|_| migrating(&db.url, None)).collect());
    assert_eq!(db.texts("select version || ' ' || name from postrider_schema").await, ["1 outbox"]);
    assert_eq!(db.number("select count(*) from outbox_shard").await, 64);
}

#[tokio::test]
async fn a_process_killed_anywhere_in_migrating_sqlite_leaves_nothing_or_all() {
    let mut killed = 0;
    for steps in (0..).map(|n| 20 * 3_u32.pow(n) / 2_u32.pow(n)) {
        let db = Sqlite::empty();
        let mut child = migrating(&sqlite_address(&db), Some(steps));
        let survived = child.wait().expect("wait").success();
        let version = schema::version(&mut *db.pool.acquire().await.expect("open")).await.expect("version");
        assert!(version.is_none() || version == Some(schema::VERSION), "{steps}: {version:?}");
        all_succeed(vec![migrating(&sqlite_address(&db), None)]);
        assert_eq!(db.number("select count(*) from outbox_shard").await, 1, "{steps}");
        if survived {
            break;
        }
        killed += 1;
    }
    assert!(killed >= 8, "killed {killed} times");
}

#[tokio::test]
async fn the_page_gives_the_same_postgres_database_as_the_migrator() {
    let (migrated, by_hand) = (Postgres::new().await, Postgres::empty().await);
    by_hand.psql(&schema::sql(Dialect::Postgres));
    assert_eq!(dump(&by_hand), dump(&migrated));
    let mut conn = by_hand.connect().await;
    schema::ensure(&mut conn).await.expect("current");
    let again = schema::migrate(&mut conn).await.expect("nothing to do");
    assert_eq!((again.from, again.to), (schema::VERSION, schema::VERSION));
    assert_eq!(by_hand.texts("select version || name from postrider_schema").await, ["1outbox"]);
}

fn dump(db: &Postgres) -> String {
    let dump = run(Command::new("pg_dump").args(["--schema-only", "--no-owner", "-d", &db.url]));
    // Newer ones write a random token into these two lines.
    dump.lines().filter(|line| !line.contains("restrict")).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn the_page_gives_the_same_sqlite_file_as_the_migrator() {
    let (migrated, by_hand) = (Sqlite::new().await, Sqlite::empty());
    by_hand.sqlite3(&schema::sql(Dialect::Sqlite));
    let all = "select type || name || coalesce(sql, '') from sqlite_master order by type, name";
    assert_eq!(by_hand.texts(all).await, migrated.texts(all).await);
    assert_eq!(by_hand.texts("select journal_mode from pragma_journal_mode").await, ["wal"]);
    let mut conn = by_hand.pool.acquire().await.expect("open");
    assert_eq!(schema::migrate(&mut *conn).await.expect("nothing to do").from, schema::VERSION);
}

#[tokio::test]
async fn a_missing_or_newer_schema_says_what_to_do() {
    let postgres = Postgres::empty().await;
    let mut pg = postgres.connect().await;
    let sqlite = Sqlite::empty();
    let mut lite = sqlite.pool.acquire().await.expect("open");
    for error in [schema::ensure(&mut pg).await, schema::ensure(&mut *lite).await] {
        let error = error.expect_err("nothing there");
        assert!(
            matches!(error, SchemaError::Missing) && error.to_string().contains("`postrider init`"),
            "{error}"
        );
    }
    assert_eq!(schema::version(&mut pg).await.expect("version"), None);
    schema::migrate(&mut pg).await.expect("migrate");
    schema::migrate(&mut *lite).await.expect("migrate");
    assert_eq!(schema::version(&mut *lite).await.expect("version"), Some(schema::VERSION));
    let newer = "insert into postrider_schema (version, name) values (99, 'later')";
    postgres.exec(newer).await.expect("insert");
    sqlite.exec(newer).await.expect("insert");
    for error in [schema::ensure(&mut pg).await, schema::ensure(&mut *lite).await] {
        assert!(matches!(error, Err(SchemaError::Newer { found: 99, .. })), "{error:?}");
    }
    for error in [schema::migrate(&mut pg).await, schema::migrate(&mut *lite).await] {
        assert!(matches!(error, Err(SchemaError::Newer { found: 99, .. })), "{error:?}");
    }
}

#[tokio::test]
async fn tables_of_somebody_else_are_left_alone() {
    let postgres = Postgres::empty().await;
    let sqlite = Sqlite::empty();
    postgres.exec("create table outbox (n int)").await.expect("create");
    sqlite.exec("create table outbox (n int)").await.expect("create");
    let answers = [
        schema::migrate(&mut postgres.connect().await).await,
        schema::migrate(&mut *sqlite.pool.acquire().await.expect("open")).await,
    ];
    for answer in answers {
        let error = answer.expect_err("a table is in the way");
        assert!(matches!(error, SchemaError::Occupied(_)), "{error}");
        assert!(error.to_string().contains("outbox"), "{error}");
    }
    assert_eq!(postgres.number("select count(*) from pg_class where relname like 'postrider%'").await, 0);
    assert_eq!(sqlite.number("select count(*) from sqlite_master where name like 'postrider%'").await, 0);
}

#[tokio::test]
async fn a_search_path_without_a_schema_is_named() {
    let db = Postgres::empty().await;
    let mut conn = db.connect().await;
    sqlx::raw_sql("set search_path = nowhere").execute(&mut conn).await.expect("set");
    let error = schema::migrate(&mut conn).await.expect_err("no schema");
    assert!(matches!(error, SchemaError::NoSchema(_)), "{error}");
}
