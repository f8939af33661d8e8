//! The suites, the faulty wrappers and the simulation of Postrider.

pub mod database;
pub mod ledger;
pub mod measure;
pub mod process;
pub mod simulation;
pub mod sink;
pub mod testbed;
