//! The relay's process, seen from the demo.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc::UnboundedSender;
use tokio::task::JoinHandle;

use super::relay::Faults;
use super::{Event, Places};
use crate::args::Without;

/// A relay that was asked to stop and has not after this long is killed.
const STOP_WITHIN: Duration = Duration::from_secs(10);

pub(super) struct RelayProcess {
    child: Child,
    telling: JoinHandle<()>,
}

impl RelayProcess {
    /// Starts this very program as a relay.
    pub(super) fn start(
        places: &Places,
        seed: u64,
        without: Option<Without>,
        faults: &Faults,
        events: UnboundedSender<Event>,
    ) -> Result<Self> {
        let program = std::env::current_exe().context("this program does not find itself")?;
        let log = std::fs::OpenOptions::new().create(true).append(true).open(places.log())?;
        let mut command = Command::new(program);
        command.arg("__demo-relay").arg("--folder").arg(&places.folder).arg("--seed").arg(seed.to_string());
        for (flag, value) in [("--hold-after", faults.hold_after), ("--down-after", faults.down_after)] {
            if let Some(value) = value {
                command.arg(flag).arg(value.to_string());
            }
        }
        if let Some(without) = without {
            command.arg("--without").arg(word(without));
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::from(log))
            .kill_on_drop(true)
            .spawn()
            .context("the relay's process cannot be started")?;
        let output = child.stdout.take().context("the relay's process has no output")?;
        let telling = tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(event) = serde_json::from_str::<Event>(&line)
                    && events.send(event).is_err()
                {
                    return;
                }
            }
            // Told at a stop that was asked for, too: then nobody looks at it any more.
            let how = "its output ended".to_owned();
            if events.send(Event::RelayEnded { how }).is_err() {
                tracing::debug!("nobody follows the demo any more");
            }
        });
        Ok(Self { child, telling })
    }

    /// SIGKILL: no chance to say or write anything.
    pub(super) async fn kill(self) -> Result<()> {
        let Self { mut child, telling } = self;
        // Its task must have ended before the process does: it would report an end that nobody asked for.
        telling.abort();
        if telling.await.is_ok() {
            tracing::debug!("the relay's output had ended before the kill");
        }
        child.kill().await.context("the relay's process cannot be killed")
    }

    /// Asks it to stop by closing its input, and waits.
    pub(super) async fn stop(self) -> Result<()> {
        let Self { mut child, telling } = self;
        drop(child.stdin.take());
        if tokio::time::timeout(STOP_WITHIN, child.wait()).await.is_err() {
            child.kill().await.context("the relay's process cannot be killed")?;
        }
        telling.await.context("the relay's output could not be read")
    }
}

fn word(without: Without) -> &'static str {
    match without {
        Without::Lanes => "lanes",
        Without::Ack => "ack",
        Without::Inbox => "inbox",
        Without::Transaction => "transaction",
    }
}
