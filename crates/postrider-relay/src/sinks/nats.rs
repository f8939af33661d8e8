//! `nats://` publishes to NATS JetStream and reports each message when its stream has acknowledged it.
//!
//! Acknowledgements are pipelined: a batch is sent in its order, and every answer is awaited by itself. An acknowledgement
//! means what the stream's storage makes of it ([`Sink::check`] tells): one server keeps it in the page cache of its
//! machine, since by default NATS writes to disk every two minutes; three or more replicas keep it in the memory of a
//! majority. The server drops repeats of a message id within the stream's duplicate window (2 minutes by default).

mod classify;
mod mapping;
mod session;
mod settings;

use std::collections::HashMap;
use std::error::Error as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::context::{
    GetStreamErrorKind, PublishAckFuture, PublishError, PublishErrorKind, RequestError,
};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::publish::PublishAck;
use async_nats::jetstream::response::Response;
use async_nats::jetstream::stream::{Config, StorageType};
use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::sync::{OnceCell, mpsc};
use tokio::time::{Instant, sleep_until, timeout_at};

use self::classify::{Lookup, Reply, classify};
use self::session::{Dialer, Link, Session, Times};
use self::settings::Settings;
use super::{Address, SinkKind, SinkOptions};
use crate::message::{Message, Outgoing};
use crate::sink::{Capabilities, DurabilityTier, Outcome, Outcomes, Sink, SinkError};

pub(super) const KIND: SinkKind = SinkKind {
    name: "nats",
    schemes: &["nats", "tls"],
    capabilities: Capabilities { ordered: false, deduplicates: true, max_bytes: None },
    help: "NATS JetStream, each message acknowledged by its stream",
    options: settings::OPTIONS,
    connect: |address, options| open(address, options).boxed(),
};

/// How long an acknowledgement may still come after the server has refused a publish to the same subject: rights may have
/// been taken away between two messages, and the first of them is being stored.
const GRACE: Duration = Duration::from_millis(250);

/// Payload bytes that may wait inside the client. More is handed over only when these have gone to the system, so that
/// a connection that does not move holds little that could still leave after the deadline.
const UNWRITTEN: usize = 256 << 10;

async fn open(address: &Address, options: &SinkOptions) -> Result<Arc<dyn Sink>, SinkError> {
    let settings = Arc::new(Settings::parse(address)?);
    let dialer = Dialer {
        settings: Arc::clone(&settings),
        name: format!("postrider {}", options.instance),
        times: Times {
            connect: options.connect_timeout.min(Duration::from_secs(5)),
            publish: options.publish_timeout,
        },
    };
    let deadline = Instant::now() + options.connect_timeout;
    let late = |_| {
        SinkError::Unavailable(format!(
            "NATS does not answer within {:?}; is it running?",
            options.connect_timeout
        ))
    };
    let first = timeout_at(deadline, dialer.dial()).await.map_err(late).and_then(|dialed| dialed);
    let looked = match &first {
        Ok(session) => {
            timeout_at(deadline, inspect(session, &settings)).await.map_err(late).and_then(|tier| tier).err()
        }
        Err(_) => None,
    };
    for error in first.as_ref().err().into_iter().chain(&looked) {
        match error {
            SinkError::Unavailable(text) if options.start_offline => {
                tracing::warn!("{text}; starting without it, and trying again");
            }
            SinkError::Unavailable(text) => return Err(SinkError::Unavailable(text.clone())),
            SinkError::Operator(text) => return Err(SinkError::Operator(text.clone())),
            SinkError::Config(text) => return Err(SinkError::Config(text.clone())),
        }
    }
    Ok(Arc::new(NatsSink {
        link: Link::start(dialer, first),
        settings,
        publish_timeout: options.publish_timeout,
    }))
}

struct NatsSink {
    link: Link,
    settings: Arc<Settings>,
    publish_timeout: Duration,
}

/// A message that was handed to the connection.
struct Pending {
    index: usize,
    message: Arc<Message>,
    subject: String,
    ack: PublishAckFuture,
    /// Refusals for lack of rights before it was sent.
    denials: u64,
}

#[async_trait]
impl Sink for NatsSink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        let deadline = Instant::now() + self.publish_timeout;
        let session = match self.link.session() {
            Ok(session) => session,
            Err(refusal) => {
                return (0..batch.len())
                    .for_each(|index| outcomes.report(index, Outcome::Refused(refusal.clone())));
            }
        };
        let (sent, pending) = mpsc::unbounded_channel();
        let sending = self.send_all(&session, batch, deadline, &outcomes, sent);
        tokio::join!(sending, self.receive(&session, pending, deadline, &outcomes));
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        let session = self.link.session().map_err(|refusal| SinkError::Unavailable(refusal.text))?;
        inspect(&session, &self.settings).await
    }

    fn capabilities(&self) -> Capabilities {
        let max_payload =
            self.link.session().ok().and_then(|session| u64::try_from(session.client.max_payload()).ok());
        Capabilities { ordered: false, deduplicates: self.settings.dedupe, max_bytes: max_payload }
    }

    /// The subject.
    fn destination(&self, topic: &str) -> String {
        self.settings.subject.fill(topic)
    }

    async fn close(&self) {
        self.link.close();
    }
}

impl NatsSink {
    /// Hands the batch to the connection in its order; what never left is reported at once.
    async fn send_all(
        &self,
        session: &Session,
        batch: Vec<Outgoing>,
        deadline: Instant,
        outcomes: &Outcomes,
        sent: mpsc::UnboundedSender<Pending>,
    ) {
        let mut unwritten = 0;
        for (index, outgoing) in batch.into_iter().enumerate() {
            match self.send(session, index, &outgoing, deadline).await {
                Ok(pending) => {
                    // The other end lives as long as this one: both are halves of one publish.
                    if sent.send(pending).is_err() {
                        outcomes.report(
                            index,
                            Outcome::Unknown { why: "nobody waited for the answer".to_owned() },
                        );
                    }
                }
                Err(outcome) => outcomes.report(index, outcome),
            }
            unwritten += outgoing.message.payload.bytes().len();
            if unwritten >= UNWRITTEN {
                unwritten = 0;
                // When this fails or takes too long, the next message is not handed over either, and says so.
                if !matches!(timeout_at(deadline, session.client.flush()).await, Ok(Ok(()))) {
                    tracing::debug!(server = %session.server, "the connection does not take more now");
                }
            }
        }
    }

    /// Hands one message to the connection, or says why it never left.
    async fn send(
        &self,
        session: &Session,
        index: usize,
        outgoing: &Outgoing,
        deadline: Instant,
    ) -> Result<Pending, Outcome> {
        let (subject, headers) = mapping::map(outgoing, &self.settings)?;
        let stream = self.settings.stream.as_deref();
        let refuse = |reply| Err(classify(reply, &subject, stream));
        if session.is_gone() {
            return refuse(Reply::NotSent(format!(
                "the connection to NATS at {} was lost before sending",
                session.server
            )));
        }
        if Instant::now() >= deadline {
            return refuse(Reply::NotSent("the deadline passed before it could be sent".to_owned()));
        }
        let message = PublishMessage::build().payload(outgoing.message.payload.bytes()).headers(headers);
        let denials = session.denials();
        match timeout_at(deadline, session.context.send_publish(subject.clone(), message)).await {
            Ok(Ok(ack)) => {
                Ok(Pending { index, message: Arc::clone(&outgoing.message), subject, ack, denials })
            }
            Ok(Err(error)) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
                let size = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                refuse(Reply::TooLarge(size))
            }
            // The queue to the connection took it not at all: full until the deadline, or its end has gone.
            Ok(Err(error)) => refuse(Reply::NotSent(format!("not handed to the connection: {error}"))),
            Err(_) => refuse(Reply::NotSent("the connection did not take it until the deadline".to_owned())),
        }
    }

    /// Awaits every answer by itself and reports it at once.
    async fn receive(
        &self,
        session: &Session,
        mut sent: mpsc::UnboundedReceiver<Pending>,
        deadline: Instant,
        outcomes: &Outcomes,
    ) {
        let stream = self.settings.stream.as_deref();
        let lookups = Lookups::default();
        let mut waiting = FuturesUnordered::new();
        let mut more = true;
        while more || !waiting.is_empty() {
            tokio::select! {
                pending = sent.recv(), if more => match pending {
                    Some(Pending { index, message, subject, ack, denials }) => {
                        let lookups = &lookups;
                        waiting.push(async move {
                            let mut reply = reply(session, &subject, ack, denials, deadline, lookups).await;
                            if let Reply::Ack { stream, sequence, duplicate: true } = &reply
                                && let Some(other) = another(session, &message, stream, *sequence, deadline).await
                            {
                                reply = other;
                            }
                            (index, classify(reply, &subject, stream))
                        });
                    }
                    None => more = false,
                },
                Some((index, outcome)) = waiting.next() => outcomes.report(index, outcome),
            }
        }
    }
}

/// What becomes of one sent message until the deadline.
async fn reply(
    session: &Session,
    subject: &str,
    ack: PublishAckFuture,
    denials: u64,
    deadline: Instant,
    lookups: &Lookups,
) -> Reply {
    let mut ack = ack.into_future();
    let answered = tokio::select! {
        biased;
        answer = &mut ack => Some(answer),
        () = session.denied(subject, denials) => None,
        () = sleep_until(deadline) => return Reply::TimedOut,
    };
    let answer = match answered {
        Some(answer) => answer,
        None => match timeout_at(deadline.min(Instant::now() + GRACE), ack).await {
            Ok(answer) => answer,
            Err(_) => return Reply::Denied,
        },
    };
    match answer {
        Ok(PublishAck { stream, .. }) if stream.is_empty() => Reply::Malformed,
        Ok(PublishAck { stream, sequence, duplicate, .. }) => Reply::Ack { stream, sequence, duplicate },
        Err(error) if error.kind() == PublishErrorKind::StreamNotFound => {
            Reply::NoResponders(lookups.stream_of(session, subject, deadline).await)
        }
        Err(error) => failure(&error),
    }
}

/// The server dropped the message as a repeat of the one at `sequence`. Returns what to make of it if that is *another*
/// message: ids are unique within one outbox, but several may share a stream. Where it cannot be looked at (no right, or
/// consumed since) it is taken for ours.
async fn another(
    session: &Session,
    message: &Message,
    stream: &str,
    sequence: u64,
    deadline: Instant,
) -> Option<Reply> {
    let kept = session.context.get_stream_no_info(stream).await.ok()?;
    let asked = timeout_at(deadline, kept.get_raw_message(sequence));
    let kept = match allowed(session, &format!("STREAM.MSG.GET.{stream}"), asked).await? {
        Ok(answer) => answer.ok()?,
        Err(_) => return Some(Reply::TimedOut),
    };
    let ours = mapping::origin(message)
        .into_iter()
        .all(|(name, value)| kept.headers.get(name).is_some_and(|kept| kept.as_str() == value));
    (!ours).then(|| Reply::Taken { stream: stream.to_owned(), sequence })
}

fn failure(error: &PublishError) -> Reply {
    match error.kind() {
        PublishErrorKind::TimedOut => return Reply::TimedOut,
        PublishErrorKind::BrokenPipe => return Reply::Disconnected,
        _ => {}
    }
    match error.source().and_then(|source| source.downcast_ref::<async_nats::jetstream::Error>()) {
        Some(error) => {
            Reply::Error { code: error.error_code().0, status: error.code(), text: error.to_string() }
        }
        None => Reply::Malformed,
    }
}

/// Which stream takes a subject, asked once per batch and subject.
#[derive(Default)]
struct Lookups(Mutex<HashMap<String, Arc<OnceCell<Lookup>>>>);

impl Lookups {
    async fn stream_of(&self, session: &Session, subject: &str, deadline: Instant) -> Lookup {
        let cell = {
            let mut cells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(cells.entry(subject.to_owned()).or_default())
        };
        let ask = async {
            let asked = timeout_at(deadline, session.context.stream_by_subject(subject));
            match allowed(session, "STREAM.NAMES", asked).await {
                None => Lookup::Failed("this user may not ask which stream takes a subject".to_owned()),
                Some(Ok(Ok(stream))) => Lookup::Found(stream),
                Some(Ok(Err(error))) => match error.kind() {
                    async_nats::jetstream::context::GetStreamByNameErrorKind::NotFound => Lookup::NotFound,
                    _ => Lookup::Failed(error.to_string()),
                },
                Some(Err(_)) => Lookup::Failed("no answer in time".to_owned()),
            }
        };
        cell.get_or_init(|| ask).await.clone()
    }
}

/// The answer to a question to JetStream's API, or `None` when this user may not ask it.
async fn allowed<T>(session: &Session, api: &str, asked: impl Future<Output = T>) -> Option<T> {
    let before = session.denials();
    let subject = format!("{}.{api}", session.api_prefix);
    tokio::select! {
        biased;
        answer = asked => Some(answer),
        () = session.denied(&subject, before) => None,
    }
}

/// Whether JetStream would take messages now, and how durably.
async fn inspect(session: &Session, settings: &Settings) -> Result<DurabilityTier, SinkError> {
    let server = &session.server;
    if !session.client.server_info().jetstream {
        return Err(SinkError::Operator(format!(
            "NATS at {server} runs without JetStream: start it with -js or a jetstream block"
        )));
    }
    let Some(name) = &settings.stream else {
        account(session).await?;
        // Which streams the topics lead to is known only when they are used; this is the least of them.
        return Ok(DurabilityTier::LocalMemory);
    };
    match allowed(session, &format!("STREAM.INFO.{name}"), session.context.get_stream(name)).await {
        Some(Ok(stream)) => Ok(tier(&stream.cached_info().config)),
        Some(Err(error)) => Err(match error.kind() {
            GetStreamErrorKind::JetStream(error) if error.error_code().0 == 10059 => {
                SinkError::Operator(format!(
                    "NATS at {server} has no stream {name}: create it, for example with: nats stream add {name} --subjects '…'"
                ))
            }
            GetStreamErrorKind::JetStream(error) => {
                SinkError::Operator(format!("NATS at {server}, stream {name}: {error}"))
            }
            _ => silent(session, error.source().and_then(|source| source.downcast_ref::<RequestError>())),
        }),
        None => {
            tracing::warn!(%server, stream = %name, "this user may not look at the stream; it is not checked");
            Ok(DurabilityTier::LocalMemory)
        }
    }
}

/// Whether the account may use JetStream at all.
///
/// Only whether there is an answer counts: its fields differ between versions of the server (2.9 lacks some that the
/// client's own type wants).
async fn account(session: &Session) -> Result<(), SinkError> {
    let server = &session.server;
    match allowed(session, "INFO", session.context.request::<_, _, Response<serde_json::Value>>("INFO", &()))
        .await
    {
        Some(Ok(Response::Ok(_))) => Ok(()),
        Some(Ok(Response::Err { error })) => Err(SinkError::Operator(format!("NATS at {server}: {error}"))),
        Some(Err(error)) => Err(silent(session, Some(&error))),
        None => {
            tracing::warn!(%server, "this user may not ask JetStream about the account; it is not checked");
            Ok(())
        }
    }
}

/// JetStream did not answer a question. When the server has complained meanwhile, that is the reason.
fn silent(session: &Session, error: Option<&RequestError>) -> SinkError {
    let server = &session.server;
    match session.last_error() {
        Some(complaint) if complaint.to_ascii_lowercase().contains("permissions violation") => {
            SinkError::Operator(format!(
                "NATS at {server} says: {complaint}; grant this user to publish its subjects and to subscribe to _INBOX.>"
            ))
        }
        _ => SinkError::Unavailable(format!(
            "JetStream at {server} does not answer{}",
            error.map(|error| format!(": {error}")).unwrap_or_default()
        )),
    }
}

/// What an acknowledgement of a stream is worth. The client cannot see whether the server syncs every write, so files count
/// as memory that outlives the process.
fn tier(config: &Config) -> DurabilityTier {
    if config.storage == StorageType::Memory {
        tracing::warn!(stream = %config.name, "this stream keeps messages in memory only: a restart of the servers loses them");
    }
    if config.num_replicas >= 3 { DurabilityTier::ReplicatedMemory } else { DurabilityTier::LocalMemory }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_make_the_tier() {
        let tier_of = |num_replicas, storage| tier(&Config { num_replicas, storage, ..Config::default() });
        assert_eq!(tier_of(1, StorageType::File), DurabilityTier::LocalMemory);
        assert_eq!(tier_of(2, StorageType::File), DurabilityTier::LocalMemory);
        assert_eq!(tier_of(3, StorageType::File), DurabilityTier::ReplicatedMemory);
        assert_eq!(tier_of(5, StorageType::Memory), DurabilityTier::ReplicatedMemory);
    }

    #[tokio::test]
    async fn nobody_there_is_unavailable_and_says_where() {
        let options = SinkOptions { connect_timeout: Duration::from_secs(2), ..SinkOptions::default() };
        // Port 1 of the loopback address has no listener.
        let error = super::super::connect("nats://user:geheim@127.0.0.1:1", &options).await.err().unwrap();
        assert!(matches!(error, SinkError::Unavailable(_)), "{error}");
        assert!(
            error.to_string().contains("127.0.0.1:1") && !error.to_string().contains("geheim"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn started_offline_it_refuses_promptly() {
        let options = SinkOptions { start_offline: true, ..SinkOptions::default() };
        let sink = super::super::connect("nats://127.0.0.1:1", &options).await.unwrap();
        assert!(matches!(sink.check().await, Err(SinkError::Unavailable(_))));
    }
}
