//! Runs the built program in a folder of its own, and looks at what it says.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A secret that must appear in no output.
pub(crate) const CANARY: &str = "s3cret-canary-7f3a";

/// Far beyond anything a loaded machine needs; only a hanging program gets there.
const AT_MOST: Duration = Duration::from_secs(120);

/// What one call said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    fn of(output: &Output) -> Self {
        let said = Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert!(
            !said.stdout.contains(CANARY) && !said.stderr.contains(CANARY),
            "a secret was printed: {said:?}"
        );
        said
    }

    /// The call worked; what it printed.
    #[track_caller]
    pub(crate) fn ok(self) -> String {
        assert_eq!(self.code, 0, "{self:?}");
        self.stdout
    }

    /// The call worked; the JSON document it printed.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        let text = self.ok();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("not one JSON document ({e}): {text}"))
    }

    /// The call failed with exit code 1 and an error that has a place and a cure; the whole text.
    #[track_caller]
    pub(crate) fn error(self) -> String {
        self.error_code(1)
    }

    /// As `error`, with another exit code.
    #[track_caller]
    pub(crate) fn error_code(self, code: i32) -> String {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.stdout.is_empty(), "{self:?}");
        assert!(self.stderr.lines().any(|line| line.starts_with("error: ")), "{self:?}");
        assert!(self.stderr.contains("\n  where: "), "names no place: {self:?}");
        assert!(self.stderr.contains("\n  cure:  "), "names no cure: {self:?}");
        self.stderr
    }
}

/// A folder to run the program in.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    /// Flags before every call.
    flags: Vec<String>,
    variables: Vec<(String, String)>,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("postrider-cli-").tempdir().expect("a temporary folder");
        Self { folder, flags: Vec::new(), variables: Vec::new() }
    }

    /// Uses this database instead of the default one.
    pub(crate) fn database(mut self, url: &str) -> Self {
        self.flags.extend(["--database".to_owned(), url.to_owned()]);
        self
    }

    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).expect("written");
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        self.prepare(&mut command);
        command.args(&self.flags).args(args);
        command
    }

    fn prepare(&self, command: &mut Command) {
        command.current_dir(self.folder.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("POSTRIDER_") {
                command.env_remove(name);
            }
        }
        command.envs(self.variables.iter().map(|(n, v)| (n, v)));
    }

    /// Runs it to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Said {
        Said::of(&self.command(args).output().expect("the program starts"))
    }

    /// Runs it to its end with `input` on standard input.
    pub(crate) fn run_with(&self, args: &[&str], input: &[u8]) -> Said {
        let mut command = self.command(args);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        child.stdin.take().expect("piped").write_all(input).expect("it reads its input");
        Said::of(&child.wait_with_output().expect("it ends"))
    }

    /// Starts `postrider run` and returns when it has said what it does.
    pub(crate) fn relay(&self, args: &[&str]) -> Running {
        Running::start(self.command(&[&["run"], args].concat()))
    }

    /// The lines of the default sink's file so far.
    pub(crate) fn delivered(&self) -> Vec<Value> {
        lines(&self.path("postrider.jsonl"))
    }
}

/// The complete lines of a file of JSON lines; none when it does not exist yet.
pub(crate) fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

/// A relay in the background. Killed when dropped.
pub(crate) struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub(crate) announced: String,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut announced = String::new();
        stdout.read_line(&mut announced).expect("it says what it does");
        let mut running = Self { child, stdout, announced };
        if running.announced.is_empty() {
            let said = running.end();
            panic!("the relay did not start: {said:?}");
        }
        running
    }

    pub(crate) fn signal(&self, name: &str) {
        let sent = Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.is_ok_and(|s| s.success()), "the signal was not sent");
    }

    /// SIGTERM, then everything it said.
    pub(crate) fn stop(mut self) -> Said {
        self.signal("TERM");
        self.end()
    }

    fn end(&mut self) -> Said {
        let mut stdout = std::mem::take(&mut self.announced).into_bytes();
        self.stdout.read_to_end(&mut stdout).expect("its output");
        let mut stderr = Vec::new();
        self.child.stderr.take().expect("piped").read_to_end(&mut stderr).expect("its log");
        let status = self.child.wait().expect("it ends");
        Said::of(&Output { status, stdout, stderr })
    }

    /// Waits until its log says that it is stopping, sends a signal once more, and waits for its end.
    pub(crate) fn second_signal_when_stopping(mut self, name: &str) -> Said {
        let mut log = BufReader::new(self.child.stderr.take().expect("piped"));
        let mut stderr = String::new();
        while !stderr.contains("stopping") {
            assert!(log.read_line(&mut stderr).expect("its log") > 0, "it ended: {stderr}");
        }
        self.signal(name);
        log.read_to_string(&mut stderr).expect("its log");
        let status = self.child.wait().expect("it ends");
        Said::of(&Output { status, stdout: Vec::new(), stderr: stderr.into_bytes() })
    }

    /// Waits for its end without asking for it.
    pub(crate) fn wait(mut self) -> Said {
        self.end()
    }

    /// The address of health and metrics that it announced.
    pub(crate) fn http(&self) -> String {
        let at = self.announced.find("http://").expect("it announces its port");
        let rest = &self.announced[at + 7..];
        rest.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':'))
            .next()
            .unwrap_or_default()
            .to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            self.child.wait().expect("a killed process ends");
        }
    }
}

/// GET over plain HTTP: status and body.
pub(crate) fn get(address: &str, path: &str) -> (u16, String) {
    get_as(address, path, address)
}

/// GET with a `Host` of its own.
pub(crate) fn get_as(address: &str, path: &str, host: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).expect("the port is open");
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let status = answer.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status");
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
    (status, body)
}

/// Waits until `condition` holds; fails, naming `what`, only if it never does.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + AT_MOST;
    while !condition() {
        assert!(Instant::now() < until, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A PostgreSQL database of its own, dropped at the end.
pub(crate) struct PgDatabase {
    server: String,
    pub(crate) name: String,
}

impl PgDatabase {
    /// Creates it. Needs the address of a server in `POSTGRES_URL`.
    pub(crate) fn create(purpose: &str) -> Self {
        let server = std::env::var("POSTGRES_URL").unwrap_or_else(|_| {
            panic!("POSTGRES_URL is not set: run `scripts/services up postgres` and `export $(scripts/services env)`")
        });
        let name = format!("cli_{purpose}_{}_{}", std::process::id(), fastrand::u32(..));
        let database = Self { server, name };
        database.on_server(&format!("create database {}", database.name));
        database
    }

    /// Its address, as the server's own user.
    pub(crate) fn url(&self) -> String {
        self.url_as(None)
    }

    /// Its address for another user and password.
    pub(crate) fn url_as(&self, user: Option<&str>) -> String {
        let (scheme, rest) = self.server.split_once("://").expect("a URL");
        let (own_user, place) = rest.split_once('@').unwrap_or(("postgres", rest));
        let host = place.split(['/', '?']).next().unwrap_or_default();
        format!("{scheme}://{}@{host}/{}", user.unwrap_or(own_user), self.name)
    }

    /// Runs SQL in it, as the server's own user.
    pub(crate) fn sql(&self, sql: &str) {
        psql(&self.url(), sql);
    }

    fn on_server(&self, sql: &str) {
        psql(&self.server, sql);
    }
}

impl Drop for PgDatabase {
    fn drop(&mut self) {
        self.on_server(&format!("drop database if exists {} with (force)", self.name));
    }
}

fn psql(url: &str, sql: &str) {
    let out = Command::new("psql").args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-c", sql, url]).output();
    let out = out.expect("psql is installed: scripts/services install postgres");
    assert!(out.status.success(), "{sql}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Runs SQL in a SQLite file with Debian's program.
pub(crate) fn sqlite(file: &Path, sql: &str) -> String {
    let out = Command::new("sqlite3").args(["-bail", "-cmd", ".timeout 30000"]).arg(file).arg(sql).output();
    let out = out.expect("sqlite3 is installed: scripts/services install sqlite");
    assert!(out.status.success(), "{sql}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).trim_end().to_owned()
}

/// A `sqlite3` that holds the write lock of a file until it is dropped.
pub(crate) struct WriteLock(Child);

impl Drop for WriteLock {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            self.0.wait().expect("a killed process ends");
        }
    }
}

/// Takes the write lock of a SQLite file and keeps it.
pub(crate) fn hold_write_lock(file: &Path) -> WriteLock {
    let mut command = Command::new("sqlite3");
    command.args(["-bail", "-cmd", ".timeout 30000"]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("sqlite3 is installed: scripts/services install sqlite");
    let input = child.stdin.as_mut().expect("piped");
    input.write_all(b"begin immediate; select 'locked';\n").and_then(|()| input.flush()).expect("sent");
    let mut answer = String::new();
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut answer).expect("answered");
    assert!(answer.ends_with("locked\n"), "{answer}");
    WriteLock(child)
}
