//! The suites, the faulty wrappers and the simulation of Postrider.

pub mod database;
