#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

#[cfg(feature = "admin")]
pub mod admin;
pub mod config;
pub mod core;
pub mod engine;
pub mod inspect;
pub mod message;
pub mod sink;
pub mod sinks;
pub mod source;
pub mod sources;
