#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod consumer;
mod content;
mod db;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod enqueue;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod errors;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod inbox;
mod limits;
mod message;
pub mod schema;
mod wake;

pub use content::ContentHash;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use db::client::Database;
pub use db::{Bind, Dialect, Insert};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use enqueue::{EnqueueError, Enqueued, enqueue, enqueue_all, enqueue_all_within, enqueue_within};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use inbox::{Begin, Dead, Inbox, InboxError};
pub use limits::{Limits, MessageError};
pub use message::{Message, Payload};
pub use wake::{Hint, HintReceiver, hints};
