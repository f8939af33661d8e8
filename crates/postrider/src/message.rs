//! A message, as the application makes it. No database or broker types.

use std::fmt;
use std::time::Duration;

use uuid::Uuid;

use crate::content::ContentHash;
use crate::limits::{self, Limits, MessageError};

/// What is to be sent: bytes in = bytes out. Absent and empty differ.
///
/// `Debug` shows the kind and the size only, so that payloads reach no log.
#[derive(Clone, PartialEq, Eq)]
pub enum Payload {
    /// No payload at all.
    Absent,
    /// Text; readable in the table. Cannot hold the NUL character: send such text as bytes.
    Text(String),
    /// JSON text, sent exactly as it stands here. Sets the content type `application/json` unless the message names one.
    /// The text is not parsed: its key order, spaces and numbers are kept.
    Json(String),
    /// Anything else.
    Bytes(Vec<u8>),
}

impl Payload {
    /// The bytes that are sent; `None` when absent.
    #[must_use]
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Absent => None,
            Self::Text(text) | Self::Json(text) => Some(text.as_bytes()),
            Self::Bytes(bytes) => Some(bytes),
        }
    }

    /// The text of `Text` and `Json`.
    #[must_use]
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Json(text) => Some(text),
            Self::Absent | Self::Bytes(_) => None,
        }
    }

    /// Size in bytes; 0 when absent.
    #[must_use]
    pub fn len(&self) -> usize {
        self.as_bytes().map_or(0, <[u8]>::len)
    }

    /// Nothing in it, or absent.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Self::Absent => return f.write_str("Absent"),
            Self::Text(_) => "Text",
            Self::Json(_) => "Json",
            Self::Bytes(_) => "Bytes",
        };
        write!(f, "{kind}({} bytes)", self.len())
    }
}

impl From<()> for Payload {
    fn from((): ()) -> Self {
        Self::Absent
    }
}

impl From<serde_json::Value> for Payload {
    fn from(value: serde_json::Value) -> Self {
        Self::Json(value.to_string())
    }
}

impl From<&serde_json::Value> for Payload {
    fn from(value: &serde_json::Value) -> Self {
        Self::Json(value.to_string())
    }
}

impl From<String> for Payload {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Payload {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Vec<u8>> for Payload {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<&[u8]> for Payload {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

impl<const N: usize> From<&[u8; N]> for Payload {
    fn from(bytes: &[u8; N]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

/// When a message is due. Times are by the database's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    AtOnce,
    /// The database's now plus this many microseconds.
    AfterUs(i64),
    /// Microseconds since 1970 UTC.
    AtUs(i64),
}

/// A message on its way into the outbox: made here, checked and written by [`enqueue`](crate::enqueue()).
///
/// The builder checks nothing, so that it chains; [`Message::check`] and `enqueue` do.
///
/// ```
/// use postrider::Message;
/// use serde_json::json;
///
/// let message = Message::new("orders", json!({"order": 4711, "state": "paid"}))
///     .id("order:4711:paid")
///     .aggregate("order", "4711")
///     .event_type("OrderPaid")
///     .header("tenant", "eu-1");
/// assert!(message.check(&Default::default()).is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub(crate) message_id: String,
    pub(crate) topic: String,
    pub(crate) tag: Option<String>,
    pub(crate) key: Option<String>,
    pub(crate) aggregate_type: Option<String>,
    pub(crate) aggregate_id: Option<String>,
    pub(crate) event_type: Option<String>,
    pub(crate) schema_version: Option<i32>,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) content_type: Option<String>,
    pub(crate) payload: Payload,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) due: Due,
    pub(crate) trace: Option<String>,
    pub(crate) trace_state: Option<String>,
}

impl Message {
    /// A message for `topic` (1 to 255 bytes, no white space, control or invisible characters), with a UUIDv7 as its id.
    ///
    /// The payload is text, JSON, bytes or `()` for none. At most 1 MiB unless [`Limits`] say otherwise.
    pub fn new(topic: impl Into<String>, payload: impl Into<Payload>) -> Self {
        Self {
            message_id: Uuid::now_v7().to_string(),
            topic: topic.into(),
            tag: None,
            key: None,
            aggregate_type: None,
            aggregate_id: None,
            event_type: None,
            schema_version: None,
            headers: Vec::new(),
            content_type: None,
            payload: payload.into(),
            max_attempts: None,
            due: Due::AtOnce,
            trace: None,
            trace_state: None,
        }
    }

    /// The business's own id ("order:4711:paid", 1 to 255 bytes), unique in the outbox. The consumer recognises repeats by
    /// it, and a second enqueue with the same id and content writes nothing.
    #[must_use]
    pub fn id(mut self, message_id: impl Into<String>) -> Self {
        self.message_id = message_id.into();
        self
    }

    /// What is kept in order: messages of one key arrive in the order of their ids. 1 to 255 bytes.
    /// Without it the aggregate is the key; with neither the message is unordered.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// A free label next to the topic, for brokers that know one. 1 to 255 bytes.
    #[must_use]
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// The business object it belongs to, each part 1 to 255 bytes. `type:id` is its key unless [`key`](Self::key) is set.
    #[must_use]
    pub fn aggregate(mut self, aggregate_type: impl Into<String>, aggregate_id: impl Into<String>) -> Self {
        self.aggregate_type = Some(aggregate_type.into());
        self.aggregate_id = Some(aggregate_id.into());
        self
    }

    /// Kind of the event ("OrderPaid"). 1 to 255 bytes.
    #[must_use]
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_type = Some(event_type.into());
        self
    }

    /// Version of the payload's schema.
    #[must_use]
    pub fn schema_version(mut self, version: i32) -> Self {
        self.schema_version = Some(version);
        self
    }

    /// Adds a header. At most 64, 16 KiB in all as JSON. The name is a token as in HTTP; the value is text without control
    /// characters and without white space around it. A name may occur once, whatever its case.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Media type of the payload, 1 to 255 bytes. JSON payloads have `application/json` by themselves.
    #[must_use]
    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    /// Due this long after the enqueue, by the database's clock, in whole microseconds. Zero = at once. At most ten years.
    #[must_use]
    pub fn delay(mut self, delay: Duration) -> Self {
        self.due = match i64::try_from(delay.as_micros()) {
            Ok(0) => Due::AtOnce,
            Ok(us) => Due::AfterUs(us),
            Err(_) => Due::AfterUs(i64::MAX),
        };
        self
    }

    /// Due at this time, in microseconds since 1970 UTC, by the database's clock. A time that has passed means at once.
    #[must_use]
    pub fn due_at_us(mut self, microseconds: i64) -> Self {
        self.due = Due::AtUs(microseconds);
        self
    }

    /// This message's own limit of attempts, 1 or more. Without it the relay's policy holds.
    #[must_use]
    pub fn max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }

    /// The W3C trace context it travels with: `traceparent` (at most 255 bytes) and `tracestate` (at most 512 bytes).
    #[must_use]
    pub fn trace(mut self, traceparent: impl Into<String>, tracestate: Option<&str>) -> Self {
        self.trace = Some(traceparent.into());
        self.trace_state = tracestate.map(str::to_owned);
        self
    }

    /// Its id: the one given, or the UUIDv7 made by [`Message::new`].
    #[must_use]
    pub fn message_id(&self) -> &str {
        &self.message_id
    }

    /// Its topic.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// Its payload.
    #[must_use]
    pub fn payload(&self) -> &Payload {
        &self.payload
    }

    /// What it is kept in order by: the key, else `aggregate_type:aggregate_id`, else nothing.
    #[must_use]
    pub fn effective_key(&self) -> Option<String> {
        effective_key(self.key.as_deref(), self.aggregate_type.as_deref(), self.aggregate_id.as_deref())
    }

    /// The content type it is stored with: the one given, else `application/json` for JSON payloads, else none.
    #[must_use]
    pub fn effective_content_type(&self) -> Option<&str> {
        match (&self.content_type, &self.payload) {
            (Some(given), _) => Some(given),
            (None, Payload::Json(_)) => Some("application/json"),
            (None, _) => None,
        }
    }

    /// The hash of its content; see [`ContentHash`] for what goes into it.
    #[must_use]
    pub fn content_hash(&self) -> ContentHash {
        ContentHash::of(
            &self.topic,
            self.effective_key().as_deref(),
            &self.headers,
            self.effective_content_type(),
            self.payload.as_bytes(),
        )
    }

    /// Checks everything that `enqueue` checks, without a database.
    ///
    /// # Errors
    /// The first thing that is wrong, with field, limit and actual value.
    pub fn check(&self, limits: &Limits) -> Result<(), MessageError> {
        limits::check(self, limits)
    }

    /// The headers as the JSON object that the table holds; `None` without headers.
    pub(crate) fn headers_json(&self) -> Option<String> {
        headers_json(&self.headers)
    }
}

/// Headers as a JSON object, in the order given; `None` without headers.
pub(crate) fn headers_json(headers: &[(String, String)]) -> Option<String> {
    if headers.is_empty() {
        return None;
    }
    let members: Vec<String> =
        headers.iter().map(|(name, value)| format!("{}:{}", json_string(name), json_string(value))).collect();
    Some(format!("{{{}}}", members.join(",")))
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

pub(crate) fn effective_key(
    key: Option<&str>,
    aggregate_type: Option<&str>,
    aggregate_id: Option<&str>,
) -> Option<String> {
    match (key, aggregate_type, aggregate_id) {
        (Some(key), _, _) => Some(key.to_owned()),
        (None, Some(kind), Some(id)) => Some(format!("{kind}:{id}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_id_defaults_to_a_uuid_of_version_7() {
        let id = Message::new("t", ()).message_id;
        assert_eq!(Uuid::parse_str(&id).map(|id| id.get_version_num()), Ok(7));
    }

    #[test]
    fn headers_become_a_json_object_in_the_order_given() {
        let message = Message::new("t", ()).header("z", "say \"hi\"").header("a", "嗨");
        assert_eq!(message.headers_json().as_deref(), Some(r#"{"z":"say \"hi\"","a":"嗨"}"#));
        assert_eq!(Message::new("t", ()).headers_json(), None);
    }

    #[test]
    fn json_names_its_content_type_unless_the_message_does() {
        assert_eq!(Message::new("t", json!(1)).effective_content_type(), Some("application/json"));
        assert_eq!(Message::new("t", json!(1)).content_type("a/b").effective_content_type(), Some("a/b"));
        assert_eq!(Message::new("t", "1").effective_content_type(), None);
    }

    #[test]
    fn debug_output_shows_no_payload() {
        let shown = format!("{:?}", Message::new("t", "geheim"));
        assert!(!shown.contains("geheim"), "{shown}");
        assert!(shown.contains("Text(6 bytes)"), "{shown}");
    }

    #[test]
    fn the_aggregate_is_the_key_unless_a_key_is_given() {
        let message = Message::new("t", ()).aggregate("order", "7");
        assert_eq!(message.effective_key().as_deref(), Some("order:7"));
        assert_eq!(message.key("k").effective_key().as_deref(), Some("k"));
    }
}
