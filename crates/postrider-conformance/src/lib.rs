//! The suites, the faulty wrappers and the simulation of Postrider.

pub mod ledger;
pub mod process;
pub mod sink;
pub mod testbed;
