//! What the end-to-end tests stand on: a database per test, a bank of producers, sinks that remember and misbehave.

mod business;
pub mod costs;
mod memory_sink;
mod metered;
mod postgres;
mod tables;

pub use business::{Business, Load};
pub use memory_sink::{Behaviour, MemorySink};
pub use metered::{Look, Looks, Meter, Purpose};
pub use postgres::{TestDatabase, postgres_url};
pub use tables::{Bulk, History, Statistics};

use std::time::Duration;

use postrider_relay::core::settings::Settings;

/// Short leases for tests: lease 1 s, renewed every 0.3 s, margin 0.1 s.
#[must_use]
pub fn quick_settings() -> Settings {
    Settings {
        lease: Duration::from_secs(1),
        renew_every: Duration::from_millis(300),
        margin: Duration::from_millis(100),
        publish_timeout: Duration::from_millis(500),
        idle_poll: Duration::from_millis(20),
        sweep_every: Duration::from_millis(200),
        confirm_delay: Duration::from_millis(50),
        ..Settings::default()
    }
}
