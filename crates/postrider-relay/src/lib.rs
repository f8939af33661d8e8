#![doc = include_str!("../README.md")]

pub mod core;
pub mod inspect;
pub mod message;
pub mod sink;
pub mod source;
pub mod sources;
