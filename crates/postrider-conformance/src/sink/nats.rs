//! A NATS server of its own for a test, and the rig on it.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use async_nats::jetstream;
use async_nats::jetstream::stream::Config;
use async_trait::async_trait;
use bytes::Bytes;
use postrider_relay::message::Message;
use postrider_relay::sink::Sink;
use postrider_relay::sinks::{SinkOptions, connect};
use tempfile::TempDir;

use super::{Received, Rig};

/// The name of the stream that rigs use.
pub const STREAM: &str = "ORDERS";

/// A `nats-server` process with JetStream on files, on a loopback port of its own. Ends with the test.
#[derive(Debug)]
pub struct NatsServer {
    dir: TempDir,
    port: u16,
    child: Option<Child>,
}

/// The value of an environment variable that `scripts/services env` prints.
///
/// # Panics
/// When it is missing; the text says how to mend it.
#[must_use]
pub fn required(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: run scripts/services up, then export $(scripts/services env), or use scripts/test")
    })
}

impl NatsServer {
    /// Starts a server with `extra` lines of configuration.
    ///
    /// # Panics
    /// When `NATS_SERVER` is missing or the server does not start.
    #[must_use]
    pub fn start(extra: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut server = Self { dir, port: 0, child: None };
        server.configure(extra);
        server.run();
        server
    }

    /// Writes the configuration that the next start reads.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn configure(&self, extra: &str) {
        let store = self.dir.path().join("store");
        let text = format!("jetstream {{ store_dir: \"{}\" }}\n{extra}\n", store.display());
        std::fs::write(self.dir.path().join("server.conf"), text).expect("the configuration is written");
    }

    /// Starts it again, on the same port, with what it has kept.
    ///
    /// # Panics
    /// When it does not start.
    pub fn run(&mut self) {
        self.run_with(&self.dir.path().join("server.conf"));
    }

    /// Starts one without JetStream.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn plain() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let config = dir.path().join("server.conf");
        std::fs::write(&config, "").expect("the configuration is written");
        let mut server = Self { dir, port: 0, child: None };
        server.run_with(&config);
        server
    }

    fn run_with(&mut self, config: &Path) {
        let port = if self.port == 0 { "-1".to_owned() } else { self.port.to_string() };
        let mut child = Command::new(required("NATS_SERVER"))
            .arg("-c")
            .arg(config)
            .args(["-a", "127.0.0.1", "-p", &port])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nats-server starts");
        let log = child.stderr.take().expect("its log is piped");
        self.child = Some(child);
        // The log tells port and readiness; it is read on to the end, so that the pipe never fills.
        let (ready, told) = mpsc::channel();
        std::thread::spawn(move || {
            let mut port = None;
            let mut lines = Vec::new();
            for line in BufReader::new(log).lines().map_while(Result::ok) {
                if let Some((_, address)) = line.split_once("Listening for client connections on ") {
                    port = address.rsplit(':').next().and_then(|port| port.trim().parse().ok());
                }
                let done = line.contains("Server is ready");
                lines.push(line);
                if done && ready.send(Ok(port.take())).is_err() {
                    return;
                }
            }
            // Only read by a start that is still waiting.
            ready.send(Err(lines.join("\n"))).ok();
        });
        match told.recv_timeout(Duration::from_secs(60)) {
            Ok(Ok(Some(port))) => self.port = port,
            other => panic!("nats-server did not start: {other:?}"),
        }
    }

    /// Ends it as `kill -9` does, and waits until it has gone.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("the server is ours to kill");
            child.wait().expect("the server ends");
        }
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// A plain client of it, and JetStream through it.
    ///
    /// # Panics
    /// When it cannot connect.
    pub async fn client(&self) -> (async_nats::Client, jetstream::Context) {
        let client = async_nats::connect(self.address()).await.expect("the server answers");
        let context = jetstream::new(client.clone());
        (client, context)
    }

    /// Where files of the test may be put.
    #[must_use]
    pub fn folder(&self) -> PathBuf {
        self.dir.path().to_owned()
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A server, a stream for `shop.>`, and a sink that publishes into it.
#[derive(Debug)]
pub struct NatsRig {
    server: Mutex<NatsServer>,
    address: String,
    query: String,
}

impl NatsRig {
    /// A stream with the defaults of the server.
    ///
    /// # Panics
    /// When the server or the stream cannot be made.
    pub async fn new() -> Self {
        Self::with(Config::default(), "").await
    }

    /// A stream with `config` (name and subjects are set here), and `query` behind the address of the sink.
    ///
    /// # Panics
    /// When the server or the stream cannot be made.
    pub async fn with(config: Config, query: &str) -> Self {
        let server = NatsServer::start("");
        let (_, context) = server.client().await;
        let config = Config { name: STREAM.to_owned(), subjects: vec!["shop.>".to_owned()], ..config };
        context.create_stream(config).await.expect("the stream is made");
        Self { address: server.address(), server: Mutex::new(server), query: query.to_owned() }
    }

    /// The address of the sink.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}?stream={STREAM}&subject=shop.{{topic}}{}", self.address, self.query)
    }

    /// `host:port` of the server.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Options for tests: a short deadline.
    #[must_use]
    pub fn options() -> SinkOptions {
        SinkOptions {
            publish_timeout: Duration::from_secs(2),
            instance: "test".to_owned(),
            ..SinkOptions::default()
        }
    }

    /// JetStream through a plain client.
    ///
    /// # Panics
    /// When it cannot connect.
    pub async fn jetstream(&self) -> jetstream::Context {
        jetstream::new(async_nats::connect(&self.address).await.expect("the server answers"))
    }
}

#[async_trait]
impl Rig for NatsRig {
    async fn open(&self) -> Arc<dyn Sink> {
        connect(&self.url(), &Self::options()).await.expect("the sink opens")
    }

    async fn received(&self) -> Vec<Received> {
        read(&self.jetstream().await, STREAM).await
    }

    async fn stop(&self) {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).kill();
    }

    async fn start(&self) {
        self.server.lock().unwrap_or_else(PoisonError::into_inner).run();
    }

    fn poison(&self, message: &mut Message) -> bool {
        message.topic = "no subject".to_owned();
        true
    }
}

/// Everything in a stream, by sequence.
///
/// # Panics
/// When it cannot be read or a message is not in the documented form.
pub async fn read(context: &jetstream::Context, stream: &str) -> Vec<Received> {
    let mut stream = context.get_stream(stream).await.expect("the stream is there");
    let state = stream.info().await.expect("the stream answers").state.clone();
    let mut received = Vec::new();
    for sequence in state.first_sequence..=state.last_sequence {
        if state.messages == 0 {
            break;
        }
        let message = stream.get_raw_message(sequence).await.expect("the message is there");
        let header = |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
        received.push(Received {
            message_id: header("Postrider-Message-Id").expect("an id"),
            topic: header("Postrider-Topic").expect("a topic"),
            key: header("Postrider-Key"),
            position: header("Postrider-Position").and_then(|p| p.parse().ok()).expect("a position"),
            try_number: header("Postrider-Try").and_then(|t| t.parse().ok()).expect("a try"),
            content_type: header("Content-Type"),
            trace: header("traceparent"),
            headers: message
                .headers
                .iter()
                .map(|(name, values)| (name.to_string(), values[0].as_str().to_owned()))
                .filter(|(name, _)| !is_ours(name))
                .collect(),
            payload: header("Postrider-Payload").is_none().then(|| Bytes::from(message.payload.to_vec())),
        });
    }
    received
}

fn is_ours(name: &str) -> bool {
    name.starts_with("Nats-")
        || name.starts_with("Postrider-")
        || ["Content-Type", "traceparent", "tracestate"].contains(&name)
}
