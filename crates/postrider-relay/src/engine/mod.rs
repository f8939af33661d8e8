//! The tokio driver around the core. It knows the traits only: no database, no broker.

mod audit;
mod driver;
mod health;
mod notices;
mod publish;
mod routes;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use self::driver::{Control, Driver};
use self::health::Shared;
pub use self::health::{BreakerInfo, Health, LastError, Snapshot};
use self::routes::Routes;
use crate::core::settings::Settings;
use crate::sink::NamedSink;
use crate::source::Source;

/// Why a relay cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No sink was given.
    #[error("a relay needs at least one sink")]
    NoSink,
    /// Two sinks have the same name.
    #[error("two sinks are named `{0}`; receipts could not tell them apart")]
    SinkNamedTwice(String),
    /// A route names a sink that does not exist.
    #[error("route `{pattern}` leads to sink `{sink}`, which does not exist")]
    UnknownSink {
        /// The route's pattern.
        pattern: String,
        /// The sink it names.
        sink: String,
    },
    /// A setting contradicts another.
    #[error("{0}")]
    Settings(String),
}

/// A relay that is not running yet. See [`Relay::builder`].
#[derive(Debug)]
pub struct Relay {
    source: Source,
    sinks: Vec<NamedSink>,
    routes: Vec<(String, String)>,
    settings: Settings,
    seed: u64,
}

impl Relay {
    /// A relay that reads from `source`. It needs at least one sink before it can start.
    #[must_use]
    pub fn builder(source: Source) -> Self {
        Self {
            source,
            sinks: Vec::new(),
            routes: Vec::new(),
            settings: Settings::default(),
            seed: fastrand::u64(..),
        }
    }

    /// Adds a sink. The first one takes every topic that no route names.
    #[must_use]
    pub fn sink(mut self, sink: NamedSink) -> Self {
        self.sinks.push(sink);
        self
    }

    /// Sends topics that match `pattern` (exact, or a prefix followed by `*`) to the sink of that name. The first match wins.
    #[must_use]
    pub fn route(mut self, pattern: &str, sink_name: &str) -> Self {
        self.routes.push((pattern.to_owned(), sink_name.to_owned()));
        self
    }

    /// Replaces the settings.
    #[must_use]
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// Seeds jitter; by default it is random.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Starts the relay on the current tokio runtime.
    ///
    /// Drop the result without [`RunningRelay::stop`] and it goes on until the runtime ends.
    ///
    /// # Errors
    /// If sinks, routes or settings contradict each other. Databases and brokers that do not answer are no error here:
    /// the relay waits for them.
    pub fn start(self) -> Result<RunningRelay, EngineError> {
        self.settings.check().map_err(EngineError::Settings)?;
        let routes = Routes::new(&self.sinks, &self.routes)?;
        let shared = Arc::new(Shared::new(&self.settings));
        let (control, commands) = mpsc::unbounded_channel();
        let driver = Driver {
            source: self.source.clone(),
            sinks: self.sinks,
            routes,
            settings: self.settings.clone(),
            seed: self.seed,
            shared: shared.clone(),
        };
        let beside = vec![
            tokio::spawn(audit::run(self.source, shared.clone())),
            tokio::spawn(forward_hints(control.clone())),
        ];
        let task = tokio::spawn(driver.supervise(commands));
        Ok(RunningRelay { handle: RelayHandle { control, shared }, task, beside })
    }
}

/// An application in this process that fires the hint of its enqueue wakes this relay at once.
async fn forward_hints(control: mpsc::UnboundedSender<Control>) {
    let mut hints = postrider::hints();
    loop {
        hints.wait().await;
        if control.send(Control::Hint).is_err() {
            return;
        }
    }
}

/// A relay at work.
#[derive(Debug)]
pub struct RunningRelay {
    handle: RelayHandle,
    task: JoinHandle<StopReport>,
    /// Loops beside the path: they end with the relay.
    beside: Vec<JoinHandle<()>>,
}

/// How a relay ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StopReport {
    /// Messages whose outcome was still open when the drain limit passed. They are sent again by whoever takes over
    /// their shards, once the lease has run out.
    pub undecided: usize,
}

impl RunningRelay {
    /// A handle for hints, health and numbers. Cheap to clone.
    #[must_use]
    pub fn handle(&self) -> RelayHandle {
        self.handle.clone()
    }

    /// Stops in good order: takes nothing new, waits at most `drain` for what is in flight, records it, gives the shards
    /// back, closes the sinks.
    pub async fn stop(self, drain: Duration) -> StopReport {
        self.handle.send(Control::Stop { drain });
        self.wait().await
    }

    /// Waits until the relay has ended (because somebody asked it to through a handle).
    pub async fn wait(self) -> StopReport {
        let report = match self.task.await {
            Ok(report) => report,
            Err(error) => {
                tracing::error!(%error, "the relay's supervisor ended unexpectedly");
                StopReport::default()
            }
        };
        for task in self.beside {
            task.abort();
        }
        report
    }
}

/// Talks to a running relay.
#[derive(Clone, Debug)]
pub struct RelayHandle {
    control: mpsc::UnboundedSender<Control>,
    shared: Arc<Shared>,
}

impl RelayHandle {
    /// Says that something was committed: the relay looks at once. Losing a hint costs latency, never a message.
    pub fn hint(&self) {
        self.send(Control::Hint);
    }

    /// Asks the relay to stop; see [`RunningRelay::stop`]. Asking again can only shorten the drain limit.
    pub fn stop(&self, drain: Duration) {
        self.send(Control::Stop { drain });
    }

    /// Whether the relay makes progress, and if not, why.
    #[must_use]
    pub fn health(&self) -> Health {
        self.shared.health()
    }

    /// Numbers of this process.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot()
    }

    fn send(&self, control: Control) {
        if self.control.send(control).is_err() {
            tracing::debug!("the relay has ended already");
        }
    }
}
