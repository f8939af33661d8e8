//! `demo`: a bank, a relay in a process of its own, a consumer, and faults; then the books are compared.

mod bank;
mod consumer;
mod faults;
mod process;
pub(crate) mod relay;
mod story;
mod verdict;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use self::bank::Bank;
use self::consumer::Consumer;
use self::process::RelayProcess;
use self::story::Story;
use crate::args::{Demo, Global, Without};
use crate::fault::Fault;

/// The demo has failed when nothing at all happens for this long. A loaded machine stalls for seconds, not for this.
const PATIENCE: Duration = Duration::from_secs(30);
/// Without these protections messages get lost, and waiting for them is in vain: the lease of 1 s and the longest
/// backoff of 0.5 s pass several times in this.
const PATIENCE_WITHOUT: Duration = Duration::from_secs(5);

/// Files of the demo.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    folder: PathBuf,
}

impl Places {
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The bank's database, with its outbox.
    pub(crate) fn bank(&self) -> PathBuf {
        self.folder.join("bank.db")
    }

    /// The consumer's database, with its inbox.
    pub(crate) fn consumer(&self) -> PathBuf {
        self.folder.join("consumer.db")
    }

    /// The sink's file.
    pub(crate) fn sink(&self) -> PathBuf {
        self.folder.join("messages.jsonl")
    }

    /// What the relay logs.
    pub(crate) fn log(&self) -> PathBuf {
        self.folder.join("relay.log")
    }
}

/// Something that happened, told by whoever saw it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The bank committed a transfer and its message.
    Committed { transfer: u32, words: String },
    /// The bank rolled a transfer back, and its message with it.
    RolledBack { transfer: u32, words: String },
    /// The application broke between its two writes.
    Broke { transfer: u32, words: String },
    /// The bank is through.
    BankDone { committed: u32, rolled_back: u32 },
    /// The relay works.
    RelayStarted,
    /// The sink refused a message for now.
    Refused { id: String },
    /// The sink took a message, and its answer got lost.
    AnswerLost { id: String },
    /// The sink is down.
    SinkDown,
    /// The sink is back.
    SinkUp,
    /// The relay holds the settle of messages that the sink has acknowledged, until it is killed.
    Holding { messages: u32 },
    /// The consumer applied a message for the first time.
    Applied { id: String },
    /// The consumer recognised a repeat.
    Repeat { id: String },
    /// The relay's process ended although nobody asked it to.
    RelayEnded { how: String },
}

pub(crate) async fn run(global: &Global, args: &Demo) -> Result<ExitCode> {
    let (places, temporary) = folder(args)?;
    let seed = args.seed.unwrap_or_else(|| fastrand::u64(1..1_000_000));
    let mut story = Story::new(global.json);
    story.opening(args, seed, &places);
    let counted = play(args, seed, &places, &mut story).await?;
    let verdict = verdict::compute(&places, &counted).await?;
    let ok = verdict.report.is_ok();
    // A failure that nobody asked for is to be looked into.
    let keep = args.keep.is_some() || (!ok && args.without.is_none());
    story.verdict(&verdict, &counted, keep.then_some(&*places.folder));
    if global.json {
        crate::output::line(&serde_json::to_string(&verdict.report)?)?;
    }
    match temporary {
        Some(folder) if keep => drop(folder.keep()),
        Some(folder) => folder.close().context("the temporary folder cannot be removed")?,
        None => {}
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(4) })
}

/// The folder to work in, and the guard that removes it unless it is to be kept.
fn folder(args: &Demo) -> Result<(Places, Option<tempfile::TempDir>)> {
    let Some(keep) = &args.keep else {
        let folder =
            tempfile::Builder::new().prefix("postrider-demo-").tempdir().context("no temporary folder")?;
        return Ok((Places::new(folder.path()), Some(folder)));
    };
    let refuse = |e: std::io::Error| {
        Fault::new(format!("this folder cannot be used: {e}"))
            .at(keep.display())
            .cure("name a folder that may be written")
    };
    std::fs::create_dir_all(keep).map_err(refuse)?;
    if std::fs::read_dir(keep).map_err(refuse)?.next().is_some() {
        let fault = Fault::new("the folder of --keep is not empty").at(keep.display());
        return Err(fault.cure("name a new folder, or empty this one").into());
    }
    Ok((Places::new(keep), None))
}

/// What was counted while it happened; the verdict itself is computed from the books.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) rolled_back: u32,
    pub(crate) killed: bool,
    pub(crate) refused: u32,
    pub(crate) answers_lost: u32,
    pub(crate) outages: u32,
    pub(crate) repeated_after_kill: bool,
    pub(crate) stuck: bool,
}

/// Runs everything until each committed transfer is applied and the relay has been killed once, or nothing happens any more.
async fn play(args: &Demo, seed: u64, places: &Places, story: &mut Story) -> Result<Counted> {
    let (events, mut seen) = mpsc::unbounded_channel();
    let bank = Bank::open(places, seed, args.messages, args.without).await?;
    let consumer = Consumer::open(places, bank.accounts(), args.without != Some(Without::Inbox)).await?;
    let first = relay::Faults { hold_after: Some((args.messages / 4).max(1)), down_after: None };
    let mut relay = RelayProcess::start(places, seed, args.without, &first, events.clone())?;
    let finish = CancellationToken::new();
    let consuming = tokio::spawn(consumer.follow(places.sink(), events.clone(), finish.clone()));
    let banking = tokio::spawn(bank.work(events.clone()));

    let loses = matches!(args.without, Some(Without::Ack | Without::Transaction));
    let patience = if loses { PATIENCE_WITHOUT } else { PATIENCE };
    let mut counted = Counted::default();
    let mut progress = Progress::default();
    while !(progress.complete() && counted.all_faults_met()) {
        let Ok(event) = timeout_at(Instant::now() + patience, seen.recv()).await else {
            counted.stuck = true;
            break;
        };
        let event = event.context("the demo lost track of its parts")?;
        counted.repeated_after_kill |= counted.killed && progress.is_repeat(&event);
        progress.note(&event);
        counted.note(&event);
        story.tell(&event, &progress);
        match event {
            Event::Holding { messages } => {
                relay.kill().await?;
                counted.killed = true;
                story.killed(messages);
                let next = relay::Faults { hold_after: None, down_after: Some(outage(args.messages)) };
                relay =
                    RelayProcess::start(places, seed.wrapping_add(1), args.without, &next, events.clone())?;
            }
            Event::RelayEnded { .. } => {
                counted.stuck = true;
                break;
            }
            _ => {}
        }
    }
    relay.stop().await?;
    finish.cancel();
    banking.await.context("the bank broke")??;
    consuming.await.context("the consumer broke")??;
    while let Ok(event) = seen.try_recv() {
        counted.note(&event);
    }
    Ok(counted)
}

/// After how many publishes of the second relay the sink is down. With few messages at once: there might be no more of them.
fn outage(transfers: u32) -> u32 {
    if transfers < 100 { 0 } else { transfers / 4 }
}

impl Counted {
    /// The relay was killed, what it had not recorded came again, and the sink was down and is back.
    fn all_faults_met(&self) -> bool {
        self.killed && self.repeated_after_kill && self.outages > 0
    }

    fn note(&mut self, event: &Event) {
        match event {
            Event::BankDone { rolled_back, .. } => self.rolled_back = *rolled_back,
            Event::Refused { .. } => self.refused += 1,
            Event::AnswerLost { .. } => self.answers_lost += 1,
            Event::SinkUp => self.outages += 1,
            _ => {}
        }
    }
}

/// How far things are, as far as it was seen.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    pub(crate) committed: u32,
    pub(crate) applied: std::collections::HashSet<String>,
    pub(crate) bank_done: bool,
}

impl Progress {
    fn note(&mut self, event: &Event) {
        match event {
            Event::Committed { .. } => self.committed += 1,
            Event::BankDone { committed, .. } => {
                self.bank_done = true;
                self.committed = *committed;
            }
            Event::Applied { id } => drop(self.applied.insert(id.clone())),
            _ => {}
        }
    }

    /// Whether a message arrived that was applied before; a consumer without inbox does not notice.
    fn is_repeat(&self, event: &Event) -> bool {
        match event {
            Event::Repeat { .. } => true,
            Event::Applied { id } => self.applied.contains(id),
            _ => false,
        }
    }

    fn complete(&self) -> bool {
        self.bank_done && self.applied.len() >= usize::try_from(self.committed).unwrap_or(usize::MAX)
    }
}
