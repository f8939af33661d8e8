//! What each answer of NATS means. One function; its test is the table.

use crate::sink::{Outcome, Refusal, Retry, Scope};

/// What came back for one message, or what did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// JetStream's acknowledgement. A duplicate was taken by an earlier try.
    Ack {
        /// The stream that has it.
        stream: String,
        /// Its place there.
        sequence: u64,
        /// The server knew the message id already.
        duplicate: bool,
    },
    /// Dropped as a repeat, but what the stream has under this id is another message.
    Taken {
        /// The stream that has it.
        stream: String,
        /// Its place there.
        sequence: u64,
    },
    /// JetStream's error, by its `err_code`.
    Error {
        /// The `err_code`, 10000 and above; 0 when the server gave none.
        code: u64,
        /// The status, as in HTTP.
        status: usize,
        /// The server's words.
        text: String,
    },
    /// Status 503: nobody listens on the subject. That alone does not say whether a stream is missing or JetStream is down.
    NoResponders(Lookup),
    /// `-ERR Permissions Violation for Publish`: the server has dropped the message.
    Denied,
    /// Larger than the server takes; refused here, since the server would end the connection.
    TooLarge(String),
    /// Sent, no answer until the deadline.
    TimedOut,
    /// Sent, then the connection was lost.
    Disconnected,
    /// An answer that is no JetStream acknowledgement.
    Malformed,
    /// Never left this process: no connection, or no room until the deadline.
    NotSent(String),
}

/// What looking up the stream of a subject gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    /// This stream takes the subject, so it is not ready now.
    Found(String),
    /// No stream takes it.
    NotFound,
    /// JetStream does not answer.
    Failed(String),
}

/// The outcome of one message on `subject`, of which `expected` must be the stream where one is named.
pub(super) fn classify(reply: Reply, subject: &str, expected: Option<&str>) -> Outcome {
    match reply {
        Reply::Ack { stream, sequence, .. } => match expected {
            Some(expected) if expected != stream => refused(
                Scope::DestinationAuth,
                "10060",
                format!(
                    "stream {stream} took subject {subject}, but {expected} was expected: mend the stream's subjects"
                ),
            ),
            _ => Outcome::Accepted { evidence: Some(format!("{stream}:{sequence}")) },
        },
        // Nobody else is at fault, and once the window has passed it is taken: a counted attempt.
        Reply::Taken { stream, sequence } => refused(
            Scope::Message,
            "id_taken",
            format!(
                "stream {stream} has another message under this id, at {sequence}, and drops this one until its duplicate window has passed: ids must be unique among all that publish to a stream, or set dedupe=false"
            ),
        ),
        Reply::Error { code, status, text } => refused_by_server(code, status, &text, subject),
        Reply::NoResponders(Lookup::NotFound) => refused(
            Scope::DestinationAuth,
            "10059",
            format!(
                "no stream takes subject {subject}: add it to the subjects of a stream, or mend the sink's subject option"
            ),
        ),
        Reply::NoResponders(Lookup::Found(stream)) => refused(
            Scope::Sink,
            "503",
            format!("stream {stream} takes subject {subject}, but does not answer now"),
        ),
        Reply::NoResponders(Lookup::Failed(why)) => refused(
            Scope::Sink,
            "503",
            format!("nobody answers on subject {subject}, and JetStream does not either: {why}"),
        ),
        Reply::Denied => refused(
            Scope::DestinationAuth,
            "permissions",
            format!("this user may not publish to subject {subject}: grant it in the server's permissions"),
        ),
        Reply::TooLarge(text) => never(
            "max_payload",
            format!("{text} (headers count): raise max_payload of the server, or send less"),
        ),
        Reply::TimedOut => {
            Outcome::Unknown { why: format!("no acknowledgement in time on subject {subject}") }
        }
        Reply::Disconnected => {
            Outcome::Unknown { why: "the connection was lost before the acknowledgement".to_owned() }
        }
        Reply::Malformed => Outcome::Unknown {
            why: format!("the answer on subject {subject} is no JetStream acknowledgement"),
        },
        Reply::NotSent(why) => refused(Scope::Sink, "not_sent", why),
    }
}

fn refused_by_server(code: u64, status: usize, text: &str, subject: &str) -> Outcome {
    let scope = match code {
        // Too big for the stream, headers over 64 KiB, bad TTL, bad request: like this never.
        10054 | 10097 | 10165 | 10166 | 10003 | 10025 => Scope::Message,
        // Cluster without leader, resources of the server used up.
        10004 | 10008 | 10023 | 10028 | 10047 => Scope::Sink,
        // The account: limits, no JetStream, no account.
        10002 | 10035 | 10039 | 10076 | 10120 => Scope::SinkAuth,
        // Wrong stream, sealed stream: mapping and set-up.
        10060 | 10109 => Scope::DestinationAuth,
        // The stream: full (10077 with discard=new), offline, without leader, too many requests, this id in process. And
        // wrong last id or sequence (10070, 10071, 10164), which we never ask for.
        10077 | 10009 | 10118 | 10194 | 10158 | 10163 | 10167 | 10210 | 10211 | 10070 | 10071 | 10164 => {
            Scope::Destination
        }
        _ if status == 503 => Scope::Sink,
        // Certainly not taken, for a reason we do not know: nobody's budget pays, and a breaker shows it.
        _ => Scope::Destination,
    };
    let number = if code == 0 { status.to_string() } else { code.to_string() };
    if scope == Scope::Message {
        return never(&number, format!("subject {subject}: {text}"));
    }
    refused(scope, &number, format!("subject {subject}: {text}"))
}

fn refused(scope: Scope, code: &str, text: String) -> Outcome {
    Outcome::Refused(Refusal { scope, retry: Retry::Backoff, code: code.to_owned(), text })
}

/// A refusal of this message for good.
pub(super) fn never(code: &str, text: String) -> Outcome {
    Outcome::Refused(Refusal { scope: Scope::Message, retry: Retry::Never, code: code.to_owned(), text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u64) -> Reply {
        Reply::Error { code, status: 400, text: "words".into() }
    }

    fn ack(stream: &str, duplicate: bool) -> Reply {
        Reply::Ack { stream: stream.into(), sequence: 7, duplicate }
    }

    #[track_caller]
    fn check(reply: Reply, scope: Scope, retry: Retry, code: &str) {
        let shown = format!("{reply:?}");
        match classify(reply, "a.b", Some("S")) {
            Outcome::Refused(refusal) => {
                assert_eq!(
                    (refusal.scope, refusal.retry, refusal.code.as_str()),
                    (scope, retry, code),
                    "{shown}"
                );
                assert!(!refusal.text.is_empty());
            }
            other => panic!("{shown}: {other:?}"),
        }
    }

    #[test]
    fn acknowledgements() {
        let taken = Outcome::Accepted { evidence: Some("S:7".into()) };
        assert_eq!(classify(ack("S", false), "a", Some("S")), taken);
        assert_eq!(classify(ack("S", true), "a", Some("S")), taken);
        assert_eq!(classify(ack("S", false), "a", None), taken);
        check(ack("T", false), Scope::DestinationAuth, Retry::Backoff, "10060");
    }

    #[test]
    fn no_verdict_is_unknown() {
        for reply in [Reply::TimedOut, Reply::Disconnected, Reply::Malformed] {
            assert!(matches!(classify(reply, "a", None), Outcome::Unknown { .. }));
        }
    }

    #[test]
    fn every_line_of_the_table() {
        use Retry::{Backoff, Never};
        use Scope::{Destination, DestinationAuth, Message, Sink, SinkAuth};
        for (codes, scope, retry) in [
            (&[10054, 10097, 10165, 10166, 10003, 10025][..], Message, Never),
            (&[10060, 10109], DestinationAuth, Backoff),
            (&[10002, 10035, 10039, 10076, 10120], SinkAuth, Backoff),
            (&[10004, 10008, 10023, 10028, 10047], Sink, Backoff),
            (&[10158, 10167, 10210, 10211, 10163, 10009, 10118, 10194, 10077], Destination, Backoff),
            (&[10070, 10071, 10164], Destination, Backoff),
            (&[10999], Destination, Backoff),
        ] {
            for &code in codes {
                check(error(code), scope, retry, &code.to_string());
            }
        }
        check(Reply::Error { code: 0, status: 503, text: String::new() + "t" }, Sink, Backoff, "503");
        check(Reply::Error { code: 0, status: 500, text: String::new() + "t" }, Destination, Backoff, "500");
        check(Reply::NoResponders(Lookup::NotFound), DestinationAuth, Backoff, "10059");
        check(Reply::NoResponders(Lookup::Found("S".into())), Sink, Backoff, "503");
        check(Reply::NoResponders(Lookup::Failed("timed out".into())), Sink, Backoff, "503");
        check(Reply::Denied, DestinationAuth, Backoff, "permissions");
        check(Reply::Taken { stream: "S".into(), sequence: 7 }, Message, Backoff, "id_taken");
        check(Reply::TooLarge("2 over 1".into()), Message, Never, "max_payload");
        check(Reply::NotSent("disconnected".into()), Sink, Backoff, "not_sent");
    }
}
