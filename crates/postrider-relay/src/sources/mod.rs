//! STUB
use crate::inspect::Admin;
use crate::source::{Identity, Source, SourceError};
use std::sync::Arc;
use std::time::Duration;
#[derive(Clone, Debug)]
pub struct SourceOptions {
    pub connections: u32,
    pub statement_timeout: Duration,
    pub create_if_missing: bool,
}
impl Default for SourceOptions {
    fn default() -> Self {
        Self { connections: 4, statement_timeout: Duration::from_secs(10), create_if_missing: false }
    }
}
pub async fn open(_: &str, _: Identity, _: &SourceOptions) -> Result<Source, SourceError> {
    Err(SourceError::Operator("stub".into()))
}
pub async fn admin(_: &str) -> Result<Arc<dyn Admin>, SourceError> {
    Err(SourceError::Operator("stub".into()))
}
