//! What a message may look like. Checked before any statement, so that the caller's transaction stays usable.

use crate::message::{Due, Message, Payload};

/// Longest message id, topic, key and other name, in bytes. The schema checks the first three alike.
const NAME_BYTES: usize = 255;
/// Longest tracestate in bytes: the length that the W3C asks everybody to carry.
const TRACE_STATE_BYTES: usize = 512;
/// Most headers.
const HEADERS: usize = 64;
/// Most bytes of all headers as a JSON object. The schema checks the same.
const HEADERS_BYTES: usize = 16 << 10;
/// The schema's own limit of a payload.
const PAYLOAD_CEILING: usize = 64 << 20;
/// Longest delay: ten years.
const DELAY_US: i64 = 3_660 * 86_400 * 1_000_000;
/// Latest due time: the end of the year 9999.
const DUE_AT_US: i64 = 253_402_300_799_999_999;

/// Limits that an application can set. `Limits::default()` is right for most.
///
/// ```
/// let limits = postrider::Limits::default().payload_bytes(8 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    payload_bytes: usize,
}

impl Default for Limits {
    /// Payloads of at most 1 MiB: what every common broker takes without being configured.
    fn default() -> Self {
        Self { payload_bytes: 1 << 20 }
    }
}

impl Limits {
    /// Largest payload in bytes. At most 64 MiB, the schema's own limit; more counts as 64 MiB.
    #[must_use]
    pub fn payload_bytes(mut self, bytes: usize) -> Self {
        self.payload_bytes = bytes.min(PAYLOAD_CEILING);
        self
    }
}

/// Why a message cannot be enqueued. Nothing has been sent to the database. Texts never hold a payload or a value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// A name that must not be empty is.
    #[error("{field} is empty: it needs 1 to {limit} bytes")]
    Empty {
        /// Which.
        field: &'static str,
        /// Its longest length.
        limit: usize,
    },
    /// Something is too long.
    #[error("{field} has {actual} bytes, the limit is {limit}")]
    TooLong {
        /// Which.
        field: &'static str,
        /// Its longest length.
        limit: usize,
        /// Its length.
        actual: usize,
    },
    /// A character that the database or a broker could not carry unchanged.
    #[error("{field} holds {character} at byte {at}: {rule}")]
    Character {
        /// In which field.
        field: &'static str,
        /// The character as U+XXXX.
        character: String,
        /// Its place in bytes from 0.
        at: usize,
        /// What is allowed.
        rule: &'static str,
    },
    /// A NUL character in text.
    #[error("{field} holds the NUL character at byte {at}, which a text column cannot hold: {advice}")]
    Nul {
        /// In which field.
        field: &'static str,
        /// Its place in bytes from 0.
        at: usize,
        /// What to do.
        advice: &'static str,
    },
    /// Only one half of the aggregate was read from somewhere.
    #[error("aggregate_type and aggregate_id belong together: give both or neither")]
    HalfAggregate,
    /// Too many headers.
    #[error("headers: {actual} of them, the limit is {limit}")]
    TooManyHeaders {
        /// Most headers.
        limit: usize,
        /// How many there are.
        actual: usize,
    },
    /// Two headers of one name. Case is ignored, as HTTP does.
    #[error(
        "headers: number {second} repeats the name of number {first}; a name may occur once, whatever its case"
    )]
    RepeatedHeader {
        /// Number of the first one, from 1.
        first: usize,
        /// Number of the second one, from 1.
        second: usize,
    },
    /// A header value with white space around it, which transports remove.
    #[error(
        "headers: the value of number {number} has white space around it, which transports remove; trim it"
    )]
    PaddedHeader {
        /// Its number, from 1.
        number: usize,
    },
    /// A number outside its range.
    #[error("{field} is {actual}, allowed is {least} to {most}")]
    Range {
        /// Which.
        field: &'static str,
        /// Smallest value.
        least: i64,
        /// Largest value.
        most: i64,
        /// Its value.
        actual: i64,
    },
}

/// Checks `message`. At least as strict as every CHECK of the schema: a message that passes violates none of them.
pub(crate) fn check(message: &Message, limits: &Limits) -> Result<(), MessageError> {
    name("message_id", &message.message_id)?;
    topic(&message.topic)?;
    for (field, value) in [
        ("key", &message.key),
        ("tag", &message.tag),
        ("aggregate_type", &message.aggregate_type),
        ("aggregate_id", &message.aggregate_id),
        ("event_type", &message.event_type),
        ("content_type", &message.content_type),
        ("traceparent", &message.trace),
    ] {
        if let Some(value) = value {
            name(field, value)?;
        }
    }
    if let Some(state) = &message.trace_state {
        sized("tracestate", state.len(), TRACE_STATE_BYTES)?;
        no_control("tracestate", state)?;
    }
    if message.aggregate_type.is_some() != message.aggregate_id.is_some() {
        return Err(MessageError::HalfAggregate);
    }
    headers(message)?;
    payload(&message.payload, limits)?;
    numbers(message)
}

/// A message id as the inbox accepts it: 1 to 255 bytes without control characters.
pub(crate) fn name(field: &'static str, value: &str) -> Result<(), MessageError> {
    if value.is_empty() {
        return Err(MessageError::Empty { field, limit: NAME_BYTES });
    }
    sized(field, value.len(), NAME_BYTES)?;
    no_control(field, value)
}

fn topic(topic: &str) -> Result<(), MessageError> {
    name("topic", topic)?;
    forbid(
        "topic",
        topic,
        |c| c.is_whitespace() || is_format(c),
        "a topic has no white space and no invisible characters",
    )
}

fn headers(message: &Message) -> Result<(), MessageError> {
    let headers = &message.headers;
    if headers.len() > HEADERS {
        return Err(MessageError::TooManyHeaders { limit: HEADERS, actual: headers.len() });
    }
    for (at, (header, value)) in headers.iter().enumerate() {
        name("header name", header)?;
        forbid(
            "header name",
            header,
            |c| !is_token(c),
            "letters, digits and !#$%&'*+-.^_`|~ are allowed, as in HTTP",
        )?;
        no_control("header value", value)?;
        if value.trim() != value {
            return Err(MessageError::PaddedHeader { number: at + 1 });
        }
        if let Some(first) =
            headers[..at].iter().position(|(earlier, _)| earlier.eq_ignore_ascii_case(header))
        {
            return Err(MessageError::RepeatedHeader { first: first + 1, second: at + 1 });
        }
    }
    sized("headers as JSON", message.headers_json().map_or(0, |json| json.len()), HEADERS_BYTES)
}

fn payload(payload: &Payload, limits: &Limits) -> Result<(), MessageError> {
    sized("payload", payload.len(), limits.payload_bytes)?;
    match payload.as_text().and_then(|text| text.find('\0')) {
        None => Ok(()),
        Some(at) => Err(MessageError::Nul { field: "payload", at, advice: "send the payload as bytes" }),
    }
}

fn numbers(message: &Message) -> Result<(), MessageError> {
    let range = |field, actual: i64, least, most| {
        if (least..=most).contains(&actual) {
            Ok(())
        } else {
            Err(MessageError::Range { field, least, most, actual })
        }
    };
    if let Some(attempts) = message.max_attempts {
        range("max_attempts", i64::from(attempts), 1, i64::from(i32::MAX))?;
    }
    match message.due {
        Due::AtOnce => Ok(()),
        Due::AfterUs(us) => range("delay in microseconds", us, 0, DELAY_US),
        Due::AtUs(us) => range("due_at in microseconds", us, 0, DUE_AT_US),
    }
}

fn sized(field: &'static str, actual: usize, limit: usize) -> Result<(), MessageError> {
    if actual > limit { Err(MessageError::TooLong { field, limit, actual }) } else { Ok(()) }
}

fn no_control(field: &'static str, value: &str) -> Result<(), MessageError> {
    if let Some(at) = value.find('\0') {
        return Err(MessageError::Nul {
            field,
            at,
            advice: "encode the value, or send it in a payload of bytes",
        });
    }
    forbid(field, value, char::is_control, "control characters are not allowed")
}

fn forbid(
    field: &'static str,
    value: &str,
    bad: impl Fn(char) -> bool,
    rule: &'static str,
) -> Result<(), MessageError> {
    match value.char_indices().find(|&(_, c)| bad(c)) {
        None => Ok(()),
        Some((at, c)) => {
            Err(MessageError::Character { field, character: format!("U+{:04X}", u32::from(c)), at, rule })
        }
    }
}

/// A character of an HTTP token (RFC 9110 5.6.2); NATS takes all of them too.
fn is_token(c: char) -> bool {
    c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c)
}

/// Invisible format characters (Unicode category Cf, and U+180E). SQLite's check counts U+200B among them as white space,
/// and nobody can see any of them in a topic.
fn is_format(c: char) -> bool {
    matches!(u32::from(c),
        0xAD | 0x600..=0x605 | 0x61C | 0x6DD | 0x70F | 0x890..=0x891 | 0x8E2 | 0x180E | 0x200B..=0x200F
        | 0x202A..=0x202E | 0x2060..=0x206F | 0xFEFF | 0xFFF9..=0xFFFB | 0x110BD | 0x110CD | 0x13430..=0x1343F
        | 0x1BCA0..=0x1BCA3 | 0x1D173..=0x1D17A | 0xE0001 | 0xE0020..=0xE007F)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn refused(message: &Message) -> String {
        match message.check(&Limits::default()) {
            Ok(()) => panic!("{message:?} was not refused"),
            Err(error) => error.to_string(),
        }
    }

    fn message() -> Message {
        Message::new("t", ())
    }

    #[test]
    fn names_have_1_to_255_bytes() {
        assert_eq!(refused(&message().id("")), "message_id is empty: it needs 1 to 255 bytes");
        assert_eq!(refused(&message().id("é".repeat(128))), "message_id has 256 bytes, the limit is 255");
        assert_eq!(refused(&message().key("")), "key is empty: it needs 1 to 255 bytes");
        assert_eq!(refused(&Message::new("", ())), "topic is empty: it needs 1 to 255 bytes");
        assert_eq!(message().id("a".repeat(255)).key("k".repeat(255)).check(&Limits::default()), Ok(()));
    }

    #[test]
    fn topics_have_no_white_space_and_nothing_invisible() {
        assert_eq!(Message::new("订单.已支付", ()).check(&Limits::default()), Ok(()));
        for bad in ["a b", "a\u{3000}b", "a\u{200b}b", "a\u{feff}", "a\u{a0}b", "a\tb", "a\u{85}b"] {
            assert!(refused(&Message::new(bad, ())).starts_with("topic holds U+"), "{bad:?}");
        }
    }

    #[test]
    fn headers_are_what_every_transport_carries() {
        assert!(refused(&message().header("a b", "1")).starts_with("header name holds U+0020 at byte 1"));
        assert!(
            refused(&message().header("a", "1\r\nb: 2")).starts_with("header value holds U+000D at byte 1")
        );
        assert!(refused(&message().header("a", " 1")).contains("white space around it"));
        assert!(refused(&message().header("Id", "1").header("iD", "2")).contains("number 2 repeats"));
        assert_eq!(message().header("a", "").header("b", "嗨 👋").check(&Limits::default()), Ok(()));
        let many = (0..65).fold(message(), |message, n| message.header(format!("h{n}"), ""));
        assert_eq!(refused(&many), "headers: 65 of them, the limit is 64");
        let full = message().header("a", "x".repeat(HEADERS_BYTES - 8));
        assert_eq!(full.check(&Limits::default()), Ok(()));
        let over = message().header("a", "x".repeat(HEADERS_BYTES - 7));
        assert_eq!(refused(&over), "headers as JSON has 16385 bytes, the limit is 16384");
    }

    #[test]
    fn a_nul_in_text_is_refused_with_advice() {
        assert!(refused(&Message::new("t", "a\0")).ends_with("send the payload as bytes"));
        assert!(refused(&message().tag("\0")).starts_with("tag holds the NUL character at byte 0"));
        assert_eq!(Message::new("t", &b"a\0"[..]).check(&Limits::default()), Ok(()));
        assert_eq!(Message::new("t", serde_json::json!("a\0")).check(&Limits::default()), Ok(()));
    }

    #[test]
    fn payloads_are_limited_and_the_limit_can_be_set_up_to_the_ceiling() {
        let message = Message::new("t", vec![0; (1 << 20) + 1]);
        assert_eq!(refused(&message), "payload has 1048577 bytes, the limit is 1048576");
        assert_eq!(message.check(&Limits::default().payload_bytes(usize::MAX)), Ok(()));
        let huge = Message::new("t", vec![0; PAYLOAD_CEILING + 1]);
        assert!(huge.check(&Limits::default().payload_bytes(usize::MAX)).is_err());
    }

    #[test]
    fn numbers_have_a_range() {
        assert_eq!(refused(&message().max_attempts(0)), "max_attempts is 0, allowed is 1 to 2147483647");
        assert!(refused(&message().delay(Duration::MAX)).starts_with("delay in microseconds is"));
        assert!(refused(&message().due_at_us(-1)).starts_with("due_at in microseconds is -1"));
    }

    #[test]
    fn an_error_never_holds_the_value() {
        let secret = message().header("a", "geheim\u{1}");
        assert!(!refused(&secret).contains("geheim"));
        let debug = format!("{:?}", secret.check(&Limits::default()));
        assert!(!debug.contains("geheim"), "{debug}");
    }
}
