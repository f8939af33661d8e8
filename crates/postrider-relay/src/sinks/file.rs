//! `file:` appends one line of JSON per message and reports it once the disk has it.
//!
//! Readers must take only lines that end in a newline: the last line may be in the making.

mod lock;
mod store;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::store::{Store, Written};
use super::{Address, SinkKind, SinkOptions, address, line};
use crate::message::Outgoing;
use crate::sink::{Capabilities, DurabilityTier, Outcome, Outcomes, Refusal, Retry, Scope, Sink, SinkError};

// Within a batch the order holds and nothing follows a refusal, but the next batch may succeed where one has failed.
const CAPABILITIES: Capabilities = Capabilities { ordered: false, deduplicates: false, max_bytes: None };

pub(super) const KIND: SinkKind = SinkKind {
    name: "file",
    schemes: &["file"],
    capabilities: CAPABILITIES,
    help: "a local file, one line of JSON per message, on disk before it counts as sent",
    options: &[],
    connect: |address, options| open(address, options).boxed(),
};

/// `file:out.jsonl`, `file:/abs/out.jsonl`, `file:///abs/out.jsonl`. Only the last form is percent-decoded.
fn path(address: &Address) -> Result<PathBuf, SinkError> {
    let path = if address.slashes {
        let path = address.rest.strip_prefix("localhost").unwrap_or(&address.rest);
        if !path.starts_with('/') {
            return Err(SinkError::Config(format!(
                "file://{path} names a host; write file:{path} for a relative path or file:///{path} for an absolute one"
            )));
        }
        address::decode(path)?
    } else {
        address.rest.clone()
    };
    if path.is_empty() || path.ends_with('/') || path.contains('\0') {
        return Err(SinkError::Config(
            "the file sink needs the name of a file, for example file:out.jsonl".to_owned(),
        ));
    }
    Ok(PathBuf::from(path))
}

async fn open(address: &Address, options: &SinkOptions) -> Result<Arc<dyn Sink>, SinkError> {
    let path = path(address)?;
    let instance = options.instance.clone();
    let opening = tokio::task::spawn_blocking(move || Store::open(&path, &instance));
    match tokio::time::timeout(options.connect_timeout, opening).await {
        Ok(Ok(opened)) => {
            let store = opened?;
            Ok(Arc::new(FileSink {
                path: store.path().to_owned(),
                store: Arc::new(Mutex::new(Some(store))),
                publish_timeout: options.publish_timeout,
            }))
        }
        Ok(Err(_)) => Err(SinkError::Unavailable("opening the file was interrupted".to_owned())),
        Err(_) => Err(SinkError::Unavailable(format!(
            "the file did not open within {:?}; is its file system mounted and answering?",
            options.connect_timeout
        ))),
    }
}

struct FileSink {
    path: PathBuf,
    /// `None` once it is closed.
    store: Arc<Mutex<Option<Store>>>,
    publish_timeout: Duration,
}

/// The right to report a batch: whoever takes it, the writer or the deadline, reports every message of it.
type Report = Arc<StdMutex<Option<Outcomes>>>;

#[async_trait]
impl Sink for FileSink {
    async fn publish(&self, batch: Vec<Outgoing>, outcomes: Outcomes) {
        if batch.is_empty() {
            return;
        }
        let messages = batch.len();
        let deadline = Instant::now() + self.publish_timeout;
        let Ok(mut store) = tokio::time::timeout_at(deadline, Arc::clone(&self.store).lock_owned()).await
        else {
            let text = format!(
                "{}: an earlier batch is still being written; is the disk stuck?",
                self.path.display()
            );
            let blocked = refused(Scope::Sink, "blocked", text);
            return (0..messages).for_each(|index| outcomes.report(index, blocked.clone()));
        };
        let report: Report = Arc::new(StdMutex::new(Some(outcomes)));
        let writing = {
            let (report, path) = (Arc::clone(&report), self.path.clone());
            tokio::task::spawn_blocking(move || write(store.as_mut(), &path, &batch, &report))
        };
        let why = match tokio::time::timeout_at(deadline, writing).await {
            Ok(Ok(())) => return,
            Ok(Err(_)) => "writing was interrupted",
            Err(_) => "the disk did not answer in time",
        };
        if let Some(outcomes) = take(&report) {
            let why = format!("{}: {why}; the lines may be in the file", self.path.display());
            (0..messages).for_each(|index| outcomes.report(index, Outcome::Unknown { why: why.clone() }));
        }
    }

    async fn check(&self) -> Result<DurabilityTier, SinkError> {
        let looking = async {
            let mut store = Arc::clone(&self.store).lock_owned().await;
            tokio::task::spawn_blocking(move || store.as_mut().map(Store::check)).await
        };
        match tokio::time::timeout(self.publish_timeout, looking).await {
            Ok(Ok(Some(Ok(())))) => Ok(DurabilityTier::LocalFsync),
            Ok(Ok(Some(Err(error)))) => Err(unavailable(&self.path, &error)),
            Ok(Ok(None)) => {
                Err(SinkError::Unavailable(format!("{}: the sink is closed", self.path.display())))
            }
            Ok(Err(_)) | Err(_) => {
                Err(SinkError::Unavailable(format!("{}: the disk does not answer", self.path.display())))
            }
        }
    }

    fn capabilities(&self) -> Capabilities {
        CAPABILITIES
    }

    /// One destination for all topics.
    fn destination(&self, _topic: &str) -> String {
        self.path.display().to_string()
    }

    async fn close(&self) {
        self.store.lock().await.take();
    }
}

fn take(report: &Report) -> Option<Outcomes> {
    report.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn write(store: Option<&mut Store>, path: &Path, batch: &[Outgoing], report: &Report) {
    let outcomes = write_batch(store, path, batch);
    if let Some(report) = take(report) {
        for (index, outcome) in outcomes.into_iter().enumerate() {
            report.report(index, outcome);
        }
    }
}

/// Writes what can be written, in order, and says of each message what became of it.
fn write_batch(store: Option<&mut Store>, path: &Path, batch: &[Outgoing]) -> Vec<Outcome> {
    let Some(store) = store else {
        let closed = refused(Scope::Sink, "closed", format!("{}: the sink is closed", path.display()));
        return vec![closed; batch.len()];
    };
    let mut lines = Vec::new();
    let mut ends = Vec::with_capacity(batch.len());
    for outgoing in batch {
        if let Err(error) = line::append(&mut lines, outgoing) {
            tracing::error!(position = outgoing.message.position.0, %error, "a message has no JSON form");
        }
        ends.push(lines.len());
    }
    let written = store.append(&lines);
    let mut start = 0;
    ends.iter()
        .map(|&end| {
            let outcome = if start == end { unwritable() } else { outcome(path, &written, start, end) };
            start = end;
            outcome
        })
        .collect()
}

fn unwritable() -> Outcome {
    Outcome::Refused(Refusal {
        scope: Scope::Message,
        retry: Retry::Never,
        code: "json".to_owned(),
        text: "the message has no JSON form".to_owned(),
    })
}

/// What became of the line at `start..end` of the batch.
fn outcome(path: &Path, written: &Written, start: usize, end: usize) -> Outcome {
    match written {
        Written::Durable { offset, bytes, failed } => match failed {
            None => accepted(*offset, start),
            Some(_) if end <= *bytes => accepted(*offset, start),
            Some(error) => refusal(path, error),
        },
        Written::Unknown { error } => Outcome::Unknown {
            why: format!("{}: not known to be on disk: {error}; it will be written again", path.display()),
        },
    }
}

fn accepted(offset: u64, start: usize) -> Outcome {
    Outcome::Accepted { evidence: Some((offset + start as u64).to_string()) }
}

fn refused(scope: Scope, code: &str, text: String) -> Outcome {
    Outcome::Refused(Refusal { scope, retry: Retry::Backoff, code: code.to_owned(), text })
}

fn refusal(path: &Path, error: &std::io::Error) -> Outcome {
    let (code, scope, cure) = explain(error);
    refused(scope, &code, format!("{}: {error}; {cure}", path.display()))
}

fn unavailable(path: &Path, error: &std::io::Error) -> SinkError {
    let (_, scope, cure) = explain(error);
    let text = format!("{}: {error}; {cure}", path.display());
    if scope == Scope::SinkAuth { SinkError::Operator(text) } else { SinkError::Unavailable(text) }
}

/// The code, whose fault it is, and what to do.
fn explain(error: &std::io::Error) -> (String, Scope, &'static str) {
    use std::io::ErrorKind as Kind;
    let (code, scope, cure) = match error.kind() {
        Kind::StorageFull => {
            ("ENOSPC", Scope::Sink, "the disk is full: free space on the file system of this file")
        }
        Kind::QuotaExceeded => ("EDQUOT", Scope::Sink, "the quota is used up: raise it or remove files"),
        Kind::FileTooLarge => {
            ("EFBIG", Scope::Sink, "the file is too large: move it away, a new one is begun")
        }
        Kind::PermissionDenied => {
            ("EACCES", Scope::SinkAuth, "give this user the right to write the file and its folder")
        }
        Kind::ReadOnlyFilesystem => ("EROFS", Scope::SinkAuth, "mount the file system for writing"),
        Kind::NotFound => ("ENOENT", Scope::Sink, "create the folder of this file"),
        Kind::InvalidData => ("foreign", Scope::SinkAuth, "move the file away or name another one"),
        _ => ("io", Scope::Sink, "look at the disk and the system's log"),
    };
    let code = match error.raw_os_error() {
        Some(number) if code == "io" => format!("os{number}"),
        _ => code.to_owned(),
    };
    (code, scope, cure)
}

#[cfg(test)]
mod tests;
