//! STUB
use crate::core::settings::Settings;
use crate::sink::NamedSink;
use crate::source::Source;
use std::sync::Arc;
use std::time::Duration;
#[derive(Debug, Clone)]
pub struct Health {
    pub live: bool,
    pub ready: bool,
    pub reasons: Vec<String>,
}
#[derive(Debug, Clone)]
pub struct RelayHandle;
impl RelayHandle {
    pub fn health(&self) -> Health {
        Health { live: true, ready: true, reasons: vec![] }
    }
}
#[derive(Debug)]
pub struct Relay;
#[derive(Debug)]
pub struct Builder;
impl Relay {
    pub fn builder(_: Source) -> Builder {
        Builder
    }
}
impl Builder {
    pub fn sink(self, _: NamedSink) -> Self {
        self
    }
    pub fn route(self, _: &str, _: &str) -> Self {
        self
    }
    pub fn settings(self, _: Settings) -> Self {
        self
    }
    pub fn seed(self, _: u64) -> Self {
        self
    }
    pub async fn start(self) -> Result<RunningRelay, EngineError> {
        Ok(RunningRelay(Arc::new(())))
    }
}
#[derive(Debug, thiserror::Error)]
#[error("stub")]
pub struct EngineError;
#[derive(Debug)]
pub struct RunningRelay(Arc<()>);
impl RunningRelay {
    pub fn handle(&self) -> RelayHandle {
        RelayHandle
    }
    pub async fn wait(&self) {
        std::future::pending().await
    }
    pub async fn stop(self, _: Duration) -> StopReport {
        StopReport
    }
}
#[derive(Debug)]
pub struct StopReport;
