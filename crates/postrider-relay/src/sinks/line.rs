//! A message as one line of JSON, for files and standard output.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::message::{Outgoing, Payload};

/// Every line begins like this; what does not was not written by us.
pub(super) const START: &[u8] = br#"{"message_id":"#;

/// One message. Fields without a value are left out; a message without payload has neither `payload` nor `payload_base64`.
#[derive(serde::Serialize)]
struct Line<'a> {
    message_id: &'a str,
    topic: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    position: i64,
    #[serde(rename = "try")]
    try_number: u32,
    headers: Headers<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    aggregate_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema_version: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_state: Option<&'a str>,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

/// A JSON object in the order of the message.
struct Headers<'a>(&'a [(String, String)]);

impl Serialize for Headers<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// Appends the message and a newline to `buffer`. Text that is no UTF-8 goes as base64, so that bytes stay bytes.
///
/// # Errors
/// Nothing in a message can make this fail today; a failure would be a defect and must not stop the others.
pub(super) fn append(buffer: &mut Vec<u8>, outgoing: &Outgoing) -> Result<(), serde_json::Error> {
    let message = &*outgoing.message;
    let (payload, payload_base64) = match &message.payload {
        Payload::Absent => (None, None),
        Payload::Text(bytes) => match std::str::from_utf8(bytes) {
            Ok(text) => (Some(text), None),
            Err(_) => (None, Some(STANDARD.encode(bytes))),
        },
        Payload::Binary(bytes) => (None, Some(STANDARD.encode(bytes))),
    };
    let line = Line {
        message_id: &message.message_id,
        topic: &message.topic,
        key: message.key.as_deref(),
        position: message.position.0,
        try_number: outgoing.try_number,
        headers: Headers(&message.headers),
        content_type: message.content_type.as_deref(),
        event_type: message.event_type.as_deref(),
        aggregate_type: message.aggregate_type.as_deref(),
        aggregate_id: message.aggregate_id.as_deref(),
        schema_version: message.schema_version,
        tag: message.tag.as_deref(),
        trace: message.trace.as_deref(),
        trace_state: message.trace_state.as_deref(),
        created_at: timestamp(message.created_at_us),
        payload,
        payload_base64,
    };
    let start = buffer.len();
    serde_json::to_writer(&mut *buffer, &line).inspect_err(|_| buffer.truncate(start))?;
    buffer.push(b'\n');
    Ok(())
}

/// Microseconds since 1970 as RFC 3339 in UTC, always with six digits; what no calendar can hold becomes its nearest end.
pub(super) fn timestamp(micros: i64) -> String {
    let end = if micros < 0 { jiff::Timestamp::MIN } else { jiff::Timestamp::MAX };
    format!("{:.6}", jiff::Timestamp::from_microsecond(micros).unwrap_or(end))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;

    use super::*;
    use crate::message::{Message, Position};

    fn message(payload: Payload) -> Outgoing {
        let message = Message {
            position: Position(7),
            message_id: "order:1:paid".into(),
            topic: "orders".into(),
            tag: None,
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            event_type: None,
            schema_version: None,
            headers: vec![("z".into(), "1".into()), ("a".into(), "ü\n".into())],
            content_type: None,
            payload,
            max_attempts: None,
            trace: None,
            trace_state: None,
            created_at_us: 1_700_000_000_000_001,
        };
        Outgoing { message: Arc::new(message), try_number: 2 }
    }

    fn line(payload: Payload) -> String {
        let mut buffer = Vec::new();
        append(&mut buffer, &message(payload)).unwrap();
        String::from_utf8(buffer).unwrap()
    }

    #[test]
    fn a_line_has_a_fixed_form() {
        assert_eq!(
            line(Payload::Text(Bytes::from_static(br#"{"b":1.0,  "a":1}"#))),
            concat!(
                r#"{"message_id":"order:1:paid","topic":"orders","position":7,"try":2,"headers":{"z":"1","a":"ü\n"},"#,
                r#""created_at":"2023-11-14T22:13:20.000001Z","payload":"{\"b\":1.0,  \"a\":1}"}"#,
                "\n"
            )
        );
        assert!(line(Payload::Absent).as_bytes().starts_with(START));
    }

    #[test]
    fn empty_absent_and_binary_differ() {
        assert!(!line(Payload::Absent).contains("payload"));
        assert!(line(Payload::Text(Bytes::new())).contains(r#""payload":"""#));
        assert!(line(Payload::Binary(Bytes::new())).contains(r#""payload_base64":"""#));
        assert!(line(Payload::Binary(Bytes::from_static(&[0, 255]))).contains(r#""payload_base64":"AP8=""#));
        assert!(line(Payload::Text(Bytes::from_static(&[255]))).contains(r#""payload_base64":"/w==""#));
    }

    #[test]
    fn impossible_times_do_not_fail() {
        for micros in [i64::MIN, i64::MAX, 0, -1] {
            assert!(timestamp(micros).ends_with('Z'));
        }
    }
}
