//! Health and metrics over HTTP, on a loopback port: `/livez`, `/readyz`, `/metrics`.
//!
//! Readiness looks at progress, not at "the process runs". Nothing here asks the database: scraping costs it nothing.

mod metrics;
mod server;

pub use metrics::Metrics;
pub use server::{AdminServer, serve};

/// Why health and metrics cannot be offered.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Only loopback addresses are allowed in this version.
    #[error(
        "{0} can be reached by other machines, and this version has no access control: use 127.0.0.1 or [::1]"
    )]
    NotLoopback(std::net::SocketAddr),
    /// The port cannot be opened.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address asked for.
        address: std::net::SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// Another recorder of metrics is installed in this process.
    #[error("metrics cannot be recorded: {0}")]
    Recorder(String),
}
