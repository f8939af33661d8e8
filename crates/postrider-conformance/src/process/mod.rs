//! Relays as processes of their own, killed and paused at named points, and the witnesses that say what must come of it.
//!
//! Nothing here asks the relay what it did. The business's own table says what was committed; the sink says what
//! arrived; a [journal](Journal) that each process writes before it hands a message over says who published what; the
//! receipts say what was recorded; and a [`history`] of the shards, written by a trigger of the test, says who
//! owned them when.

pub mod drill;
pub mod history;
mod hold;
mod journal;
mod relay;
mod target;

pub use hold::{Gate, HoldSettler, HoldSink, Point};
pub use journal::{Entry, Journal, JournalSink, read_journal};
pub use relay::{Counted, RelayProcess, Start, in_flight_when_it_ended};
pub use target::{TestStream, arrivals_in_file};
