//! What a process was about to publish, written down before it did.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use postrider_relay::message::Outgoing;
use postrider_relay::sink::{Capabilities, DurabilityTier, Outcomes, Sink, SinkError};
use serde::{Deserialize, Serialize};

/// One publish of one message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Who published.
    pub relay: i64,
    /// The name people see.
    pub instance: String,
    /// The message's id in the outbox.
    pub position: i64,
    /// The business's id of the message.
    pub message_id: String,
}

/// A file of [`Entry`]s, a line of JSON each. A batch is one append, which a killed process leaves behind in the page
/// cache: whatever reached the sink is in it.
#[derive(Debug)]
pub struct Journal {
    file: File,
    relay: i64,
    instance: String,
}

impl Journal {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(path: &Path, relay: i64, instance: &str) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, relay, instance: instance.to_owned() })
    }

    fn append(&self, batch: &[Outgoing]) -> std::io::Result<()> {
        let mut lines = Vec::new();
        for outgoing in batch {
            let entry = Entry {
                relay: self.relay,
                instance: self.instance.clone(),
                position: outgoing.message.position.0,
                message_id: outgoing.message.message_id.clone(),
            };
            serde_json::to_writer(&mut lines, &entry)?;
            lines.push(b'\n');
        }
        (&self.file).write_all(&lines)
    }
}

/// The complete lines of a journal; none if the file is not there. A last line without its end was never followed by
/// a publish.
///
/// # Panics
/// If the file cannot be read or holds something else.
#[must_use]
pub fn read_journal(path: &Path) -> Vec<Entry> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete.lines().map(|line| serde_json::from_str(line).expect("a line of a journal")).collect()
}

/// A sink that writes each batch to the journal before it hands it on.
pub struct JournalSink {
    /// The sink.
    pub sink: Arc<dyn Sink>,
    /// The journal.
    pub journal: Journal,
}

impl fmt::Debug for JournalSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournalSink").field("journal", &self.journal).finish_non_exhaustive()
    }
}

#[async_trait]
impl Sink for JournalSink {
    /// # Panics
    /// If the journal cannot be written: a witness that is not there must not go unnoticed.
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        self.journal.append(&batch).expect("the journal is written");
        self.sink.publish(batch, outcomes).await;
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        self.sink.check().await
    }

    fn capabilities(&self) -> Capabilities {
        self.sink.capabilities()
    }

    fn destination(&self, topic: &str) -> String {
        self.sink.destination(topic)
    }

    async fn close(&self) {
        self.sink.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_last_line_does_not_count() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("journal");
        assert!(read_journal(&path).is_empty());
        let entry = Entry { relay: 1, instance: "a".into(), position: 7, message_id: "m".into() };
        let line = serde_json::to_string(&entry).expect("json");
        std::fs::write(&path, format!("{line}\n{}", &line[..9])).expect("write");
        assert_eq!(read_journal(&path), [entry]);
    }
}
