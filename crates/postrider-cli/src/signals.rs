//! SIGTERM and SIGINT: the first one asks the program to stop in good order, the second one ends it at once.

use std::process;

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Listens from its creation on, so that no signal of the start-up is lost.
pub(crate) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    pub(crate) fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("signals of the operating system cannot be received");
        Ok(Self { term: listen(SignalKind::terminate())?, int: listen(SignalKind::interrupt())? })
    }

    /// Returns the name of the next signal.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.term.recv() => "SIGTERM",
            _ = self.int.recv() => "SIGINT",
        }
    }

    /// From now on a signal ends the process at once, with the exit code that shells use for it.
    pub(crate) fn next_one_exits(mut self) {
        tokio::spawn(async move {
            let name = self.next().await;
            eprintln!(
                "{name} again: exiting at once; what was in flight is sent again by the next relay, with the same id"
            );
            process::exit(if name == "SIGINT" { 130 } else { 143 });
        });
    }
}
