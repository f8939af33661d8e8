//! One connection, used until it breaks and never again, and the loop that makes the next one.
//!
//! The client library reconnects by itself, and then sends what had piled up meanwhile. A message could so go out long
//! after its publish was answered with "unknown", behind a newer one of its key, or under a lease that has passed. So the
//! library's reconnection is led to an address that cannot answer: with the connection everything that waits in it is
//! gone, and [`Link`] opens a new one. A connection that is silent is given up after three pings, before a publish that
//! began with the silence reaches its deadline. What the system's own send buffer holds can still arrive; those messages
//! have been reported as unknown, and come again with the same id.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::context::ContextBuilder;
use async_nats::{ConnectErrorKind, Event, ReconnectToServer, ServerAddr, ServerError};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::settings::Settings;
use crate::sink::{Refusal, Retry, Scope, SinkError};

/// Nothing listens on port 0, and no packet leaves the machine.
const NOWHERE: &str = "nats://127.0.0.1:0";
/// First pause between two attempts to connect; doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause between two attempts to connect.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Subjects remembered as forbidden; beyond it they are forgotten, and learned anew by the next refusal.
const MOST_DENIED: usize = 10_000;

/// Deadlines of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// Of opening it.
    pub(super) connect: Duration,
    /// Of a publish and of a question to JetStream.
    pub(super) publish: Duration,
}

/// What the server has told us outside of replies.
#[derive(Debug, Default)]
struct Seen {
    gone: bool,
    /// Counts refusals for lack of rights.
    denials: u64,
    /// Subject → count at its last refusal.
    denied: HashMap<String, u64>,
    last_error: Option<String>,
}

/// One connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) server: String,
    pub(super) client: async_nats::Client,
    pub(super) context: async_nats::jetstream::Context,
    /// What the subjects of JetStream's API begin with.
    pub(super) api_prefix: String,
    seen: watch::Receiver<Seen>,
}

impl Session {
    /// Connects to `server` alone.
    async fn open(
        settings: &Settings,
        server: &ServerAddr,
        name: &str,
        times: Times,
    ) -> Result<Self, SinkError> {
        let nowhere: ServerAddr = NOWHERE
            .parse()
            .map_err(|error| SinkError::Config(format!("{NOWHERE} is no address: {error}")))?;
        let (events, seen) = watch::channel(Seen::default());
        let (first, last) = (server.clone(), nowhere.clone());
        let client = settings
            .connect_options()
            .await?
            .name(name)
            .connection_timeout(times.connect)
            .request_timeout(Some(times.publish))
            .ping_interval((times.publish / 4).clamp(Duration::from_millis(50), Duration::from_secs(5)))
            .ignore_discovered_servers()
            .max_reconnects(1)
            .reconnect_to_server_callback(move |_, last_seen| {
                // Before the first connection there is no server we could have seen.
                let addr = if last_seen.server_id.is_empty() { first.clone() } else { last.clone() };
                async move { Some(ReconnectToServer { addr, delay: Some(Duration::ZERO) }) }
            })
            // When the connection's task ends, it drops the callback and with it `events`.
            .event_callback(move |event| {
                events.send_modify(|seen| seen.note(event));
                std::future::ready(())
            })
            .connect(vec![server.clone(), nowhere])
            .await
            .map_err(|error| connect_error(server, &error))?;
        let (context, api_prefix) = match &settings.domain {
            Some(domain) => {
                (ContextBuilder::new().domain(domain).timeout(times.publish), format!("$JS.{domain}.API"))
            }
            None => (ContextBuilder::new().timeout(times.publish), "$JS.API".to_owned()),
        };
        let context = context
            .ack_timeout(times.publish)
            // The relay bounds what is in flight; this limit only must not be in its way.
            .max_ack_inflight(100_000)
            .backpressure_on_inflight(true)
            .build(client.clone());
        Ok(Self { server: shown(server), client, context, api_prefix, seen })
    }

    /// The connection has broken; nothing given to it now is sent.
    pub(super) fn is_gone(&self) -> bool {
        self.seen.borrow().gone || self.seen.has_changed().is_err()
    }

    /// Returns when the connection has broken.
    async fn gone(&self) {
        // An error means that the sender, and so the connection, has gone.
        if self.seen.clone().wait_for(|seen| seen.gone).await.is_err() {
            tracing::debug!(server = %self.server, "the connection's task has ended");
        }
    }

    /// Refusals for lack of rights so far.
    pub(super) fn denials(&self) -> u64 {
        self.seen.borrow().denials
    }

    /// Returns when the server has refused a publish to `subject` after the first `before` refusals; else never.
    pub(super) async fn denied(&self, subject: &str, before: u64) {
        let denied = |seen: &Seen| seen.denied.get(subject).is_some_and(|&at| at > before);
        if self.seen.clone().wait_for(denied).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The last complaint of the server that belongs to no reply.
    pub(super) fn last_error(&self) -> Option<String> {
        self.seen.borrow().last_error.clone()
    }
}

impl Seen {
    fn note(&mut self, event: Event) {
        match event {
            Event::Disconnected | Event::Closed => self.gone = true,
            Event::ServerError(ServerError::Other(text)) => {
                if let Some(subject) = denied_subject(&text) {
                    if self.denied.len() >= MOST_DENIED {
                        self.denied.clear();
                    }
                    self.denials += 1;
                    self.denied.insert(subject.to_owned(), self.denials);
                }
                self.last_error = Some(text);
            }
            Event::ServerError(error) => self.last_error = Some(error.to_string()),
            _ => {}
        }
    }
}

/// The subject in `Permissions Violation for Publish to "orders.paid"`.
fn denied_subject(text: &str) -> Option<&str> {
    let (before, rest) = text.split_once('"')?;
    before.to_ascii_lowercase().contains("permissions violation for publish").then_some(())?;
    rest.split_once('"').map(|(subject, _)| subject)
}

fn shown(server: &ServerAddr) -> String {
    format!("{}:{}", server.host(), server.port())
}

fn connect_error(server: &ServerAddr, error: &async_nats::ConnectError) -> SinkError {
    let server = shown(server);
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation => SinkError::Operator(format!(
            "NATS at {server} refuses the credentials (authorization violation): check user and password, token or key of the sink's address"
        )),
        ConnectErrorKind::Authentication => SinkError::Operator(format!(
            "the sink's NKey or credentials file cannot sign for NATS at {server}: check that the file holds a seed"
        )),
        ConnectErrorKind::Tls => SinkError::Operator(format!(
            "no TLS connection to NATS at {server}: {error}; check the server's certificate, tls_ca, tls_cert and tls_key"
        )),
        _ => SinkError::Unavailable(format!(
            "NATS at {server} cannot be reached: {error}; is it running, and is the sink's address right?"
        )),
    }
}

/// Connected, or why not.
#[derive(Clone, Debug)]
enum State {
    Up(Arc<Session>),
    Down(Refusal),
}

/// Keeps a connection: when one breaks, it makes the next.
pub(super) struct Link {
    state: Arc<watch::Sender<State>>,
    task: AbortOnDropHandle<()>,
}

/// Everything a new connection needs.
pub(super) struct Dialer {
    pub(super) settings: Arc<Settings>,
    pub(super) name: String,
    pub(super) times: Times,
}

impl Dialer {
    /// Tries each server once, from a random one on, and returns the first connection or the most telling error.
    pub(super) async fn dial(&self) -> Result<Session, SinkError> {
        let servers = &self.settings.servers;
        let start = fastrand::usize(..servers.len().max(1));
        let mut told = None;
        for server in servers.iter().cycle().skip(start).take(servers.len()) {
            match Session::open(&self.settings, server, &self.name, self.times).await {
                Ok(session) => return Ok(session),
                Err(error) => {
                    if !matches!((&told, &error), (Some(SinkError::Operator(_)), SinkError::Unavailable(_))) {
                        told = Some(error);
                    }
                }
            }
        }
        Err(told.unwrap_or_else(|| SinkError::Config("the nats sink has no server".to_owned())))
    }
}

impl Link {
    /// Goes on from a first connection, or from the reason why there is none yet.
    pub(super) fn start(dialer: Dialer, first: Result<Session, SinkError>) -> Self {
        let first = match first {
            Ok(session) => State::Up(Arc::new(session)),
            Err(error) => State::Down(refusal(&error)),
        };
        let state = Arc::new(watch::Sender::new(first));
        let task = tokio::spawn(keep(dialer, Arc::clone(&state)));
        Self { state, task: AbortOnDropHandle::new(task) }
    }

    /// The connection, or why there is none.
    pub(super) fn session(&self) -> Result<Arc<Session>, Refusal> {
        match &*self.state.borrow() {
            State::Up(session) if session.is_gone() => Err(lost(&session.server)),
            State::Up(session) => Ok(Arc::clone(session)),
            State::Down(refusal) => Err(refusal.clone()),
        }
    }

    /// Gives up the connection for good.
    pub(super) fn close(&self) {
        self.task.abort();
        self.state.send_replace(State::Down(refused(Scope::Sink, "closed", "the sink is closed".to_owned())));
    }
}

/// Waits for the connection to break, and makes the next, for ever. Aborted when the sink goes.
async fn keep(dialer: Dialer, state: Arc<watch::Sender<State>>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let current = state.borrow().clone();
        if let State::Up(session) = current {
            let since = Instant::now();
            session.gone().await;
            tracing::warn!(server = %session.server, reason = session.last_error(), "lost the connection to NATS");
            state.send_replace(State::Down(lost(&session.server)));
            // A server that ends every connection at once must not be called in a tight loop.
            if since.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
        }
        tokio::time::sleep(pause.mul_f64(0.5 + 0.5 * fastrand::f64())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        match dialer.dial().await {
            Ok(session) => {
                tracing::info!(server = %session.server, "connected to NATS");
                state.send_replace(State::Up(Arc::new(session)));
            }
            Err(error) => {
                let refusal = refusal(&error);
                let news = !matches!(&*state.borrow(), State::Down(known) if known.text == refusal.text);
                if news {
                    tracing::warn!(%error, "no connection to NATS; trying again");
                }
                state.send_replace(State::Down(refusal));
            }
        }
    }
}

fn lost(server: &str) -> Refusal {
    refused(Scope::Sink, "disconnected", format!("no connection to NATS at {server}; connecting again"))
}

fn refusal(error: &SinkError) -> Refusal {
    let scope = if matches!(error, SinkError::Unavailable(_)) { Scope::Sink } else { Scope::SinkAuth };
    refused(scope, "disconnected", error.to_string())
}

fn refused(scope: Scope, code: &str, text: String) -> Refusal {
    Refusal { scope, retry: Retry::Backoff, code: code.to_owned(), text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_denied_subject_is_read() {
        let text = r#"Permissions Violation for Publish to "orders.paid""#;
        assert_eq!(denied_subject(text), Some("orders.paid"));
        assert_eq!(denied_subject(r#"Permissions Violation for Subscription to "_INBOX.x""#), None);
        assert_eq!(denied_subject("Permissions Violation for Publish"), None);
        assert_eq!(denied_subject("Stale Connection"), None);
    }

    #[test]
    fn a_refusal_is_remembered_by_its_number() {
        let mut seen = Seen::default();
        for subject in ["a", "b", "a"] {
            let text = format!("Permissions Violation for Publish to \"{subject}\"");
            seen.note(Event::ServerError(ServerError::Other(text)));
        }
        assert_eq!((seen.denials, seen.denied["a"], seen.denied["b"]), (3, 3, 2));
        seen.note(Event::Disconnected);
        assert!(seen.gone);
    }
}
