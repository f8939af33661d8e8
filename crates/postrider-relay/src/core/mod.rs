//! Everything that decides, as one pure state machine: events and a time go in, actions come out.
//!
//! No clock, no socket, no task, no randomness but the seed passed in. The tokio driver ([`crate::engine`]) and the
//! simulation run this same code. The path of a message through it:
//!
//! | file | what it decides |
//! |---|---|
//! | [`ownership`](self) | which shards are ours, until when we may send |
//! | `reading` | what to read next, and when late commits are excluded |
//! | `lanes` | which message of a key may go |
//! | `publishing` | what is loaded and handed to which sink |
//! | `outcomes` | what an answer of the sink means |
//! | `settling` | what is recorded, and which lanes go on after it |

pub mod backoff;
mod blocked;
pub mod breaker;
mod lanes;
mod machine;
mod outcomes;
mod ownership;
mod protocol;
mod publishing;
mod reading;
#[cfg(test)]
mod scenarios;
pub mod settings;
mod settling;
mod stopping;

pub use machine::{Core, Counters, OpenBreaker};
pub use protocol::{
    Action, Answer, CallId, Event, Flight, Mono, Notice, Request, Route, SinkId, SinkSpec, Ticket,
};
