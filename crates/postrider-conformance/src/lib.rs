//! The suites, the faulty wrappers and the simulation of Postrider.

pub mod ledger;
pub mod testbed;
pub mod sink;
