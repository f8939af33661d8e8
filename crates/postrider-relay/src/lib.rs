#![doc = include_str!("../README.md")]

pub mod config;
pub mod core;
pub mod message;
pub mod sink;
pub mod sinks;
pub mod source;
