//! A message as subject, headers and payload of NATS.
//!
//! | header | holds |
//! |---|---|
//! | `Nats-Msg-Id` | the message id, unless `dedupe=false` |
//! | `Nats-Expected-Stream` | the stream, where one is named |
//! | `Postrider-Message-Id`, `Postrider-Topic`, `Postrider-Position`, `Postrider-Try`, `Postrider-Created-At` | always |
//! | `Postrider-Key`, `Postrider-Tag`, `Postrider-Event-Type`, `Postrider-Aggregate-Type`, `Postrider-Aggregate-Id`, `Postrider-Schema-Version` | where the message has one |
//! | `Postrider-Payload: absent` | a message without payload, as opposed to an empty one |
//! | `Content-Type`, `traceparent`, `tracestate` | where the message has one |
//! | anything else | the message's own headers, as they are |

use async_nats::HeaderMap;

use super::super::line::timestamp;
use super::classify::never;
use super::settings::{Settings, subject_fault};
use crate::message::{Message, Outgoing, Payload};
use crate::sink::Outcome;

/// Prefixes of headers that are ours or the server's: `Nats-Rollup: all`, for one, would empty the stream.
const RESERVED: [&str; 2] = ["nats-", "postrider-"];

/// The subject and headers of a message, or the refusal of one that NATS cannot carry.
pub(super) fn map(outgoing: &Outgoing, settings: &Settings) -> Result<(String, HeaderMap), Outcome> {
    let message = &*outgoing.message;
    let subject = settings.subject.fill(&message.topic);
    if let Some(fault) = subject_fault(&subject) {
        return Err(never(
            "subject",
            format!("topic '{}' makes no subject of NATS: it {fault}", message.topic),
        ));
    }
    let mut headers = Headers(HeaderMap::new());
    headers.own("Postrider-Message-Id", Some(&message.message_id))?;
    for (name, value) in origin(message) {
        headers.own(name, Some(&value))?;
    }
    headers.own("Postrider-Try", Some(&outgoing.try_number.to_string()))?;
    headers.own("Postrider-Key", message.key.as_deref())?;
    headers.own("Postrider-Tag", message.tag.as_deref())?;
    headers.own("Postrider-Event-Type", message.event_type.as_deref())?;
    headers.own("Postrider-Aggregate-Type", message.aggregate_type.as_deref())?;
    headers.own("Postrider-Aggregate-Id", message.aggregate_id.as_deref())?;
    headers.own("Postrider-Schema-Version", message.schema_version.map(|v| v.to_string()).as_deref())?;
    headers.own("Postrider-Payload", matches!(message.payload, Payload::Absent).then_some("absent"))?;
    headers.own("Content-Type", message.content_type.as_deref())?;
    headers.own("traceparent", message.trace.as_deref())?;
    headers.own("tracestate", message.trace_state.as_deref())?;
    headers.own("Nats-Msg-Id", settings.dedupe.then_some(message.message_id.as_str()))?;
    headers.own("Nats-Expected-Stream", settings.stream.as_deref())?;
    let ours: Vec<String> = headers.0.iter().map(|(name, _)| name.to_string().to_ascii_lowercase()).collect();
    for (name, value) in &message.headers {
        let lower = name.to_ascii_lowercase();
        if RESERVED.iter().any(|prefix| lower.starts_with(prefix)) || ours.contains(&lower) {
            return Err(never(
                "header",
                format!("header '{name}' clashes with one that NATS or the relay sets: rename it"),
            ));
        }
        headers.put(name, value)?;
    }
    Ok((subject, headers.0))
}

/// The headers by which a message is told from one of another outbox that happens to have its id.
pub(super) fn origin(message: &Message) -> [(&'static str, String); 3] {
    [
        ("Postrider-Topic", message.topic.clone()),
        ("Postrider-Position", message.position.to_string()),
        ("Postrider-Created-At", timestamp(message.created_at_us)),
    ]
}

struct Headers(HeaderMap);

impl Headers {
    fn own(&mut self, name: &str, value: Option<&str>) -> Result<(), Outcome> {
        value.map_or(Ok(()), |value| self.put(name, value))
    }

    /// Sets a header after a look at both halves: the client would panic on some and the server would cut others.
    fn put(&mut self, name: &str, value: &str) -> Result<(), Outcome> {
        if !is_token(name) {
            return Err(never(
                "header",
                format!("header '{}' has a name that NATS cannot carry", name.escape_debug()),
            ));
        }
        if value.chars().any(char::is_control) {
            return Err(never(
                "header",
                format!("the value of header '{name}' has control characters, which NATS cannot carry"),
            ));
        }
        if value.trim() != value {
            return Err(never(
                "header",
                format!(
                    "the value of header '{name}' begins or ends with white space, which NATS would cut off"
                ),
            ));
        }
        self.0.insert(name, value);
        Ok(())
    }
}

/// A token as in HTTP.
fn is_token(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::message::Position;
    use crate::sink::{Retry, Scope};
    use crate::sinks::Address;

    fn settings(query: &str) -> Settings {
        Settings::parse(&Address::parse(&format!("nats://h?{query}")).unwrap()).unwrap()
    }

    fn outgoing(change: impl FnOnce(&mut Message)) -> Outgoing {
        let mut message = Message {
            position: Position(7),
            message_id: "order:1:paid".into(),
            topic: "orders.paid".into(),
            tag: None,
            key: Some("order:1".into()),
            aggregate_type: None,
            aggregate_id: None,
            event_type: Some("Paid".into()),
            schema_version: Some(3),
            headers: vec![("X-Tenant".into(), "å".into())],
            content_type: Some("application/json".into()),
            payload: Payload::Absent,
            max_attempts: None,
            trace: Some("00-1-2-01".into()),
            trace_state: None,
            created_at_us: 0,
        };
        change(&mut message);
        Outgoing { message: Arc::new(message), try_number: 2 }
    }

    #[test]
    fn every_field_has_a_header() {
        let (subject, headers) = map(&outgoing(|_| {}), &settings("stream=S&subject=shop.{topic}")).unwrap();
        assert_eq!(subject, "shop.orders.paid");
        for (name, value) in [
            ("Nats-Msg-Id", "order:1:paid"),
            ("Nats-Expected-Stream", "S"),
            ("Postrider-Message-Id", "order:1:paid"),
            ("Postrider-Topic", "orders.paid"),
            ("Postrider-Key", "order:1"),
            ("Postrider-Position", "7"),
            ("Postrider-Try", "2"),
            ("Postrider-Event-Type", "Paid"),
            ("Postrider-Schema-Version", "3"),
            ("Postrider-Created-At", "1970-01-01T00:00:00.000000Z"),
            ("Postrider-Payload", "absent"),
            ("Content-Type", "application/json"),
            ("traceparent", "00-1-2-01"),
            ("X-Tenant", "å"),
        ] {
            assert_eq!(headers.get(name).map(async_nats::HeaderValue::as_str), Some(value), "{name}");
        }
        assert!(headers.get("tracestate").is_none());
        let (_, headers) = map(&outgoing(|_| {}), &settings("dedupe=false")).unwrap();
        assert!(headers.get("Nats-Msg-Id").is_none() && headers.get("Nats-Expected-Stream").is_none());
    }

    #[track_caller]
    fn refused(code: &str, names: &str, change: impl FnOnce(&mut Message)) {
        let Err(Outcome::Refused(refusal)) = map(&outgoing(change), &settings("")) else {
            panic!("not refused")
        };
        assert_eq!(
            (refusal.scope, refusal.retry, refusal.code.as_str()),
            (Scope::Message, Retry::Never, code)
        );
        assert!(refusal.text.contains(names), "{}", refusal.text);
    }

    #[test]
    fn what_nats_cannot_carry_is_refused_by_name() {
        for topic in ["a b", "a.*", ">", ".a", "a.", "a..b", "a\u{7}", "a\r\nb", "", "$JS.API.x", "a\u{a0}b"]
        {
            refused("subject", topic.trim_matches(char::is_control), |m| m.topic = topic.into());
        }
        for (name, value) in [
            ("Nats-Rollup", "all"),
            ("nats-expected-last-sequence", "1"),
            ("Postrider-Try", "1"),
            ("content-type", "x"),
            ("TraceParent", "x"),
            ("a b", "x"),
            ("a:b", "x"),
            ("ü", "x"),
            ("", "x"),
            ("x", "a\r\nNats-Rollup: all"),
            ("x", " a"),
            ("x", "a\0"),
        ] {
            refused("header", name, |m| m.headers = vec![(name.into(), value.into())]);
        }
        refused("header", "Postrider-Message-Id", |m| m.message_id = "a\nb".into());
        refused("header", "Postrider-Key", |m| m.key = Some("a\nb".into()));
    }

    #[test]
    fn a_header_of_ours_that_the_message_does_not_set_is_free() {
        let (_, headers) = map(
            &outgoing(|m| {
                m.trace = None;
                m.headers = vec![("traceparent".into(), "mine".into())];
            }),
            &settings(""),
        )
        .unwrap();
        assert_eq!(headers.get("traceparent").map(async_nats::HeaderValue::as_str), Some("mine"));
        assert!(map(&outgoing(|m| m.topic = "订单.已付".into()), &settings("")).is_ok());
    }
}
