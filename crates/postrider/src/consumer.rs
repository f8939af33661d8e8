//! Reads the JSON lines that the relay's file sink writes: the smallest consumer there is.
//!
//! The loop of an application: [`read`] from the offset it has stored → for each message [`Inbox::begin`](crate::Inbox),
//! the effect, commit → store [`Batch::next_offset`]. After a crash the lines since the stored offset come again, and the
//! inbox knows them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Map, Value};

use crate::content::ContentHash;
use crate::message::Payload;

/// A read stops at the end of the line that reaches this many bytes.
const READ_BYTES: usize = 8 << 20;

/// A message as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The business's id; repeats carry the same.
    pub message_id: String,
    /// Its topic.
    pub topic: String,
    /// What it is kept in order by.
    pub key: Option<String>,
    /// Its id in the outbox.
    pub position: Option<i64>,
    /// The number of this try, from 1, as far as the relay that sent it knew. Above 1 a repeat is likely.
    pub try_number: Option<u32>,
    /// Its headers, by name.
    pub headers: Vec<(String, String)>,
    /// Media type of the payload.
    pub content_type: Option<String>,
    /// Kind of the event.
    pub event_type: Option<String>,
    /// Kind of the aggregate.
    pub aggregate_type: Option<String>,
    /// Id of the aggregate.
    pub aggregate_id: Option<String>,
    /// Version of the payload's schema.
    pub schema_version: Option<i32>,
    /// W3C traceparent.
    pub trace: Option<String>,
    /// When it was written, as the line says it.
    pub created_at: Option<String>,
    /// The payload: `Text`, `Bytes` or `Absent`.
    pub payload: Payload,
}

impl Received {
    /// The hash of its content, for [`Inbox::begin`](crate::Inbox::begin). Equal to the one that `enqueue` stored, as long
    /// as nothing on the way changed topic, key, headers, content type or payload.
    #[must_use]
    pub fn content_hash(&self) -> ContentHash {
        ContentHash::of(
            &self.topic,
            self.key.as_deref(),
            &self.headers,
            self.content_type.as_deref(),
            self.payload.as_bytes(),
        )
    }
}

/// What one read found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The messages of the complete lines, in order.
    pub received: Vec<Received>,
    /// Where the next read goes on, in bytes from the start of the file. Store it when the effects are committed.
    pub next_offset: u64,
}

/// Why the file cannot be read on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is shorter than the offset: another file, or it was cut off.
    #[error(
        "{path} has {length} bytes, less than the offset {offset}: it was replaced or cut off; start again at 0"
    )]
    Shorter {
        /// The file.
        path: PathBuf,
        /// The offset that was asked for.
        offset: u64,
        /// Its length.
        length: u64,
    },
    /// A complete line is no message. It is the first line at `offset`: the ones before it were returned by earlier reads.
    #[error(
        "{path}: the line at byte {offset} is no message: {why}; to skip it, go on at byte {next_offset}"
    )]
    Line {
        /// The file.
        path: PathBuf,
        /// Where the line starts.
        offset: u64,
        /// Where the next line starts.
        next_offset: u64,
        /// What is wrong, without any content.
        why: String,
    },
}

/// Reads the complete lines of `path` from `offset` on, about 8 MiB of them at most.
///
/// A last line without its end is left for a later read. A file that does not exist yet is empty. Empty lines are skipped.
/// Blocks on the file: a few milliseconds; use `spawn_blocking` where that matters.
///
/// # Errors
/// See [`ConsumerError`]. A line that is no message ends the batch before it; only the read that starts at it fails.
pub fn read(path: impl AsRef<Path>, offset: u64) -> Result<Batch, ConsumerError> {
    let path = path.as_ref();
    let text = match complete_lines(path, offset) {
        Ok(text) => text,
        Err(ConsumerError::Io { source, .. }) if offset == 0 && source.kind() == io::ErrorKind::NotFound => {
            Vec::new()
        }
        Err(error) => return Err(error),
    };
    let mut batch = Batch { received: Vec::new(), next_offset: offset };
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        let next_offset = batch.next_offset + line.len() as u64;
        if !line.trim_ascii().is_empty() {
            match parse(line) {
                Ok(received) => batch.received.push(received),
                Err(_) if !batch.received.is_empty() => return Ok(batch),
                Err(why) => {
                    let path = path.to_owned();
                    return Err(ConsumerError::Line { path, offset: batch.next_offset, next_offset, why });
                }
            }
        }
        batch.next_offset = next_offset;
    }
    Ok(batch)
}

/// The bytes from `offset` up to the last line end within [`READ_BYTES`], or up to the first one after that.
fn complete_lines(path: &Path, offset: u64) -> Result<Vec<u8>, ConsumerError> {
    let failed = |source| ConsumerError::Io { path: path.to_owned(), source };
    let mut file = File::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    if length < offset {
        return Err(ConsumerError::Shorter { path: path.to_owned(), offset, length });
    }
    file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    let mut text = Vec::new();
    loop {
        let before = text.len();
        file.by_ref().take(READ_BYTES as u64).read_to_end(&mut text).map_err(failed)?;
        let end = text[before..].iter().rposition(|&byte| byte == b'\n').map(|at| before + at + 1);
        if let Some(end) = end {
            text.truncate(end);
            return Ok(text);
        }
        if text.len() == before {
            return Ok(Vec::new());
        }
    }
}

fn parse(line: &[u8]) -> Result<Received, String> {
    // The text of a JSON error names line and column, never the content.
    let value: Value = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let Value::Object(mut fields) = value else { return Err("it is no JSON object".to_owned()) };
    let fields = &mut fields;
    Ok(Received {
        message_id: text(fields, "message_id")?.ok_or("message_id is missing")?,
        topic: text(fields, "topic")?.ok_or("topic is missing")?,
        key: text(fields, "key")?,
        position: number(fields, "position")?,
        try_number: number(fields, "try")?,
        headers: headers(fields)?,
        content_type: text(fields, "content_type")?,
        event_type: text(fields, "event_type")?,
        aggregate_type: text(fields, "aggregate_type")?,
        aggregate_id: text(fields, "aggregate_id")?,
        schema_version: number(fields, "schema_version")?,
        trace: text(fields, "trace")?,
        created_at: match fields.remove("created_at") {
            None | Some(Value::Null) => None,
            Some(Value::String(text)) => Some(text),
            Some(other) => Some(other.to_string()),
        },
        payload: payload(fields)?,
    })
}

fn text(fields: &mut Map<String, Value>, name: &str) -> Result<Option<String>, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(format!("{name} is no string")),
    }
}

fn number<N: TryFrom<i64>>(fields: &mut Map<String, Value>, name: &str) -> Result<Option<N>, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_i64().map(N::try_from) {
            Some(Ok(number)) => Ok(Some(number)),
            _ => Err(format!("{name} is no whole number in its range")),
        },
    }
}

fn headers(fields: &mut Map<String, Value>) -> Result<Vec<(String, String)>, String> {
    let members = match fields.remove("headers") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(members)) => members,
        Some(_) => return Err("headers is no object".to_owned()),
    };
    let pair = |(name, value)| match value {
        Value::String(value) => Ok((name, value)),
        _ => Err("a header's value is no string".to_owned()),
    };
    members.into_iter().map(pair).collect()
}

fn payload(fields: &mut Map<String, Value>) -> Result<Payload, String> {
    match (text(fields, "payload")?, text(fields, "payload_base64")?) {
        (None, None) => Ok(Payload::Absent),
        (Some(text), None) => Ok(Payload::Text(text)),
        (None, Some(encoded)) => match BASE64.decode(encoded) {
            Ok(bytes) => Ok(Payload::Bytes(bytes)),
            Err(_) => Err("payload_base64 is no base64".to_owned()),
        },
        (Some(_), Some(_)) => Err("it has both payload and payload_base64".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    struct Written {
        _folder: tempfile::TempDir,
        path: PathBuf,
    }

    impl Written {
        fn new(text: impl AsRef<[u8]>) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let written = Self { path: folder.path().join("out.jsonl"), _folder: folder };
            written.append(text);
            written
        }

        fn append(&self, text: impl AsRef<[u8]>) {
            let mut file = File::options().create(true).append(true).open(&self.path).expect("open");
            file.write_all(text.as_ref()).expect("write");
        }

        /// The message ids of one read, and the offset after it.
        fn read(&self, offset: u64) -> (Vec<String>, u64) {
            let batch = read(&self.path, offset).expect("read");
            (batch.received.into_iter().map(|received| received.message_id).collect(), batch.next_offset)
        }
    }

    fn line(id: &str) -> String {
        format!("{{\"message_id\":\"{id}\",\"topic\":\"t\"}}\n")
    }

    #[test]
    fn every_field_is_read() {
        let file = Written::new(
            r#"{"message_id":"a","topic":"订单","key":"k","position":7,"try":2,"headers":{"b":"2","a":"1"},"content_type":"c",
"event_type":"e","aggregate_type":"o","aggregate_id":"i","schema_version":3,"trace":"00","created_at":"2026-01-01T00:00:00Z",
"payload":"{\"n\": 1.0}","later":[1]}"#
                .replace('\n', "")
                + "\n",
        );
        let expected = Received {
            message_id: "a".to_owned(),
            topic: "订单".to_owned(),
            key: Some("k".to_owned()),
            position: Some(7),
            try_number: Some(2),
            headers: vec![("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned())],
            content_type: Some("c".to_owned()),
            event_type: Some("e".to_owned()),
            aggregate_type: Some("o".to_owned()),
            aggregate_id: Some("i".to_owned()),
            schema_version: Some(3),
            trace: Some("00".to_owned()),
            created_at: Some("2026-01-01T00:00:00Z".to_owned()),
            payload: Payload::Text("{\"n\": 1.0}".to_owned()),
        };
        assert_eq!(read(&file.path, 0).expect("read").received, [expected]);
    }

    #[test]
    fn absent_empty_text_and_bytes_are_told_apart() {
        let file = Written::new(
            "{\"message_id\":\"a\",\"topic\":\"t\"}\n{\"message_id\":\"a\",\"topic\":\"t\",\"payload\":\"\"}\n\
             {\"message_id\":\"a\",\"topic\":\"t\",\"payload_base64\":\"AP8=\"}\n",
        );
        let payloads: Vec<Payload> = read(&file.path, 0)
            .expect("read")
            .received
            .into_iter()
            .map(|received| received.payload)
            .collect();
        assert_eq!(payloads, [Payload::Absent, Payload::Text(String::new()), Payload::Bytes(vec![0, 0xFF])]);
    }

    #[test]
    fn a_torn_last_line_is_read_when_it_is_complete() {
        let (one, two) = (line("1"), line("2"));
        let file = Written::new(one.clone() + &two[..9]);
        let end = one.len() as u64;
        assert_eq!(file.read(0), (vec!["1".to_owned()], end));
        assert_eq!(file.read(end), (vec![], end));
        file.append(&two[9..]);
        assert_eq!(file.read(end), (vec!["2".to_owned()], end + two.len() as u64));
        assert_eq!(file.read(end + two.len() as u64), (vec![], end + two.len() as u64));
    }

    #[test]
    fn a_missing_file_is_empty_and_a_shorter_one_is_an_error() {
        let file = Written::new(line("1"));
        assert_eq!(read(file.path.with_extension("other"), 0).expect("empty").received, []);
        let error = read(&file.path, 1_000).expect_err("shorter");
        assert!(error.to_string().contains("less than the offset 1000"), "{error}");
        let error = read(file.path.with_extension("other"), 5).expect_err("it was there before");
        assert!(matches!(error, ConsumerError::Io { .. }), "{error}");
    }

    #[test]
    fn a_bad_line_fails_alone_and_can_be_skipped() {
        let bad = [
            "geheim\n",
            "[1]\n",
            "{\"topic\":\"geheim\"}\n",
            "{\"message_id\":1,\"topic\":\"t\"}\n",
            "{\"message_id\":\"a\",\"topic\":\"t\",\"schema_version\":3000000000}\n",
            "{\"message_id\":\"a\",\"topic\":\"t\",\"headers\":{\"a\":1}}\n",
            "{\"message_id\":\"a\",\"topic\":\"t\",\"payload_base64\":\"geheim\"}\n",
            "{\"message_id\":\"a\",\"topic\":\"t\",\"payload\":\"\",\"payload_base64\":\"\"}\n",
        ];
        for bad in bad {
            let file = Written::new(line("1") + "\n" + bad + &line("2"));
            let (ids, offset) = file.read(0);
            assert_eq!(
                (ids.as_slice(), offset),
                (&["1".to_owned()][..], line("1").len() as u64 + 1),
                "{bad}"
            );
            let error = read(&file.path, offset).expect_err("a bad line");
            assert!(!format!("{error} {error:?}").contains("geheim"), "{error:?}");
            let ConsumerError::Line { next_offset, .. } = error else { panic!("{error}") };
            assert_eq!(file.read(next_offset).0, ["2"]);
        }
    }

    #[test]
    fn a_long_file_is_read_in_bounded_steps_and_a_long_line_at_once() {
        let long = format!(
            "{{\"message_id\":\"long\",\"topic\":\"t\",\"payload\":\"{}\"}}\n",
            "x".repeat(READ_BYTES + 100)
        );
        let many = line("1").repeat(READ_BYTES / line("1").len() + 10);
        let file = Written::new(many.clone() + &long + &line("2"));
        let (ids, offset) = file.read(0);
        assert!(ids.len() < many.len() / line("1").len() && offset <= READ_BYTES as u64, "{offset}");
        let (mut rest, mut offset) = (vec![], offset);
        loop {
            let (ids, next) = file.read(offset);
            if ids.is_empty() {
                break;
            }
            rest.extend(ids);
            offset = next;
        }
        assert_eq!(ids.len() + rest.len(), many.len() / line("1").len() + 2);
        assert_eq!(rest[rest.len() - 2..], ["long", "2"]);
    }
}
