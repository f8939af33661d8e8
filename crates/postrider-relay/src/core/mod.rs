//! Everything that decides, as one pure state machine: no clock, no socket, no task.

pub mod settings;
