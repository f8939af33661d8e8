//! A relay process, seen from outside.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use postrider_relay::engine::Snapshot;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use super::{Point, read_journal};
use crate::testbed::TestDatabase;

/// A process that says nothing for so long, although it is waited for, has failed.
const SILENCE: Duration = Duration::from_secs(60);

/// How a relay process is started.
#[derive(Clone, Debug)]
pub struct Start {
    /// The program `drill-relay`.
    pub program: PathBuf,
    /// Where journals and logs go.
    pub folder: PathBuf,
    /// Address of the sink.
    pub sink: String,
    /// The lease; it is renewed four times within it, and half of it is the longest publish.
    pub lease: Duration,
    /// Most messages published and undecided.
    pub in_flight: u32,
    /// Where it stands still, after how many messages have passed.
    pub hold: Option<(Point, u64)>,
}

/// What a process counted; its last word after SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Its id in the database.
    pub relay: i64,
    /// Outcomes still open when it stopped.
    pub undecided: usize,
    /// Messages with a committed receipt.
    pub sent: u64,
    /// Publishes handed out.
    pub published: u64,
    /// Publishes without a verdict.
    pub unknown: u64,
    /// Results dropped because their shard had passed on.
    pub fenced: u64,
    /// Failed attempts recorded.
    pub retried: u64,
    /// Messages recorded as dead.
    pub dead: u64,
    /// Outcomes that found no row.
    pub vanished: u64,
    /// Highest number of messages published and not settled at one time.
    pub most_in_flight: u64,
    /// Shards worked now.
    pub shards: usize,
}

impl Counted {
    /// The numbers of a relay at work.
    #[must_use]
    pub fn new(relay: i64, undecided: usize, snapshot: &Snapshot) -> Self {
        let c = snapshot.counters;
        Self {
            relay,
            undecided,
            sent: c.sent,
            published: c.published,
            unknown: c.unknown,
            fenced: c.fenced,
            retried: c.retried,
            dead: c.dead,
            vanished: c.vanished,
            most_in_flight: c.most_in_flight,
            shards: snapshot.shards,
        }
    }
}

/// A relay process. Killed when dropped; its log is shown if a test fails meanwhile.
#[derive(Debug)]
pub struct RelayProcess {
    /// Its id in the database.
    pub relay: i64,
    /// Its name; the database shows it as `postrider NAME`.
    pub instance: String,
    /// Its journal.
    pub journal: PathBuf,
    log: PathBuf,
    child: Child,
    stdin: ChildStdin,
    lines: mpsc::UnboundedReceiver<String>,
}

impl RelayProcess {
    /// Starts a relay on `db` and waits until it runs.
    ///
    /// # Panics
    /// If it does not start.
    pub async fn start(db: &TestDatabase, instance: &str, start: &Start) -> Self {
        let journal = start.folder.join(format!("{instance}.journal"));
        let log = start.folder.join(format!("{instance}.log"));
        let ms = |d: Duration| d.as_millis().to_string();
        let mut command = Command::new(&start.program);
        command
            .args(["--database", &db.url, "--sink", &start.sink, "--instance", instance])
            .args(["--lease-ms", &ms(start.lease), "--renew-ms", &ms(start.lease / 4)])
            .args(["--margin-ms", &ms(start.lease / 10), "--publish-timeout-ms", &ms(start.lease / 2)])
            .args(["--in-flight", &start.in_flight.to_string()])
            .arg("--journal")
            .arg(&journal);
        if let Some((point, after)) = start.hold {
            command.args(["--hold", &point.to_string(), "--hold-after", &after.to_string()]);
        }
        let stderr = std::fs::File::create(&log).expect("a log");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .expect("drill-relay starts");
        let stdin = child.stdin.take().expect("piped");
        let lines = collect(&mut child);
        let mut this = Self { relay: 0, instance: instance.to_owned(), journal, log, child, stdin, lines };
        let line = this.line("relay ").await;
        this.relay = line["relay ".len()..].parse().expect("an id");
        this
    }

    /// The next line that begins like this; others are passed over.
    ///
    /// # Panics
    /// If the process ends or is silent for a minute.
    pub async fn line(&mut self, begin: &str) -> String {
        loop {
            match tokio::time::timeout(SILENCE, self.lines.recv()).await {
                Ok(Some(line)) if line.starts_with(begin) => return line,
                Ok(Some(_)) => {}
                Ok(None) => panic!("{} has ended without a line '{begin}…'", self.instance),
                Err(_) => panic!("{} has said nothing for {SILENCE:?}; waited for '{begin}…'", self.instance),
            }
        }
    }

    /// Waits until it stands at its point.
    ///
    /// # Panics
    /// As [`RelayProcess::line`].
    pub async fn held(&mut self) {
        self.line("held ").await;
    }

    async fn say(&mut self, command: &str) {
        self.stdin.write_all(format!("{command}\n").as_bytes()).await.expect("it listens");
    }

    /// Lets it go on from its point.
    ///
    /// # Panics
    /// If it does not listen.
    pub async fn release(&mut self) {
        self.say("release").await;
    }

    /// What it has counted until now.
    ///
    /// # Panics
    /// If it does not answer.
    pub async fn counters(&mut self) -> Counted {
        self.say("counters").await;
        serde_json::from_str(&self.line("{").await).expect("counters")
    }

    /// Asks for its counters until they are as wanted. Fails after a minute.
    ///
    /// # Panics
    /// If they do not become so.
    pub async fn counters_until(&mut self, done: impl Fn(&Counted) -> bool) -> Counted {
        let until = tokio::time::Instant::now() + SILENCE;
        loop {
            let counted = self.counters().await;
            if done(&counted) {
                return counted;
            }
            assert!(tokio::time::Instant::now() < until, "{} still counts {counted:?}", self.instance);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// `kill -9`, and waits until it is gone.
    ///
    /// # Panics
    /// If it cannot be killed.
    pub async fn kill(&mut self) {
        self.child.kill().await.expect("it is ours to kill");
    }

    /// SIGSTOP, and waits until every thread stands still and the database has finished what it had been asked before.
    ///
    /// # Panics
    /// If it does not stand still.
    pub async fn pause(&self, db: &TestDatabase) {
        self.signal("STOP");
        let status = PathBuf::from(format!("/proc/{}/status", self.pid()));
        while !std::fs::read_to_string(&status).expect("its status").contains("State:\tT") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.quiet(db).await;
    }

    /// Waits until no statement of it runs in the database.
    ///
    /// # Panics
    /// If one never ends.
    pub async fn quiet(&self, db: &TestDatabase) {
        let sql = format!(
            "select count(*) from pg_stat_activity where datname = current_database() and state <> 'idle'
             and application_name in ('postrider {0}', 'postrider {0} lease')",
            self.instance
        );
        let until = tokio::time::Instant::now() + SILENCE;
        while db.count(&sql).await > 0 {
            assert!(
                tokio::time::Instant::now() < until,
                "{} has a statement that does not end",
                self.instance
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// SIGCONT.
    ///
    /// # Panics
    /// If it is gone.
    pub fn wake(&self) {
        self.signal("CONT");
    }

    /// SIGTERM; returns its last word when it has ended in good order.
    ///
    /// # Panics
    /// If it does not end, or ends with an error.
    pub async fn stop(mut self) -> Counted {
        self.signal("TERM");
        let counted = serde_json::from_str(&self.line("{").await).expect("counters");
        let ended =
            tokio::time::timeout(SILENCE, self.child.wait()).await.expect("it ends").expect("it ends");
        assert!(ended.success(), "{} ended with {ended}", self.instance);
        counted
    }

    fn pid(&self) -> u32 {
        self.child.id().expect("it has not been waited for")
    }

    fn signal(&self, name: &str) {
        // The shell's own kill: no package has to be there for it.
        let sent =
            std::process::Command::new("sh").args(["-c", &format!("kill -{name} {}", self.pid())]).status();
        assert!(sent.expect("sh").success(), "{} takes no signal", self.instance);
    }
}

impl Drop for RelayProcess {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(30)..];
        eprintln!("--- log of {}, its end\n{}", self.instance, last.join("\n"));
    }
}

fn collect(child: &mut Child) -> mpsc::UnboundedReceiver<String> {
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The messages a relay had published, by its journal, and has no receipt for, by the database: the only ones that may
/// arrive once more because it ended. To be asked when it is dead or stands still, and its sessions are quiet.
///
/// # Panics
/// If the database refuses.
pub async fn in_flight_when_it_ended(db: &TestDatabase, relay: i64, journal: &Path) -> BTreeSet<i64> {
    let receipts: Vec<i64> = sqlx::query_scalar("select unnest(ids) from outbox_sent where relay = $1")
        .bind(relay)
        .fetch_all(&db.pool)
        .await
        .expect("receipts");
    let receipts: BTreeSet<i64> = receipts.into_iter().collect();
    read_journal(journal).into_iter().map(|e| e.position).filter(|p| !receipts.contains(p)).collect()
}
