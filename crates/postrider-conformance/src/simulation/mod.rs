//! The deterministic simulation: relays with the real core, a store, sinks, producers and an operator in virtual time.
//!
//! One seed decides everything: how large things are, which faults there are, who acts when. After every event the
//! promises are checked against what really happened; when the faults have stopped, everything must arrive within a
//! bounded time and the relays must stop in good order. The same seed always gives the same schedule.
//!
//! | file | what |
//! |---|---|
//! | `options` | what a seed stands for |
//! | `world` | time, faults, the operator, the end |
//! | `relays` | processes around the core |
//! | `store`, `producers` | the database and the business |
//! | `sink` | brokers |
//! | `ledger` | what really happened, and the promises |

mod agenda;
mod ledger;
mod options;
mod producers;
mod relays;
mod sink;
mod store;
mod world;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use ledger::Violation;
pub use options::{Mutant, Options};
use world::World;

/// How a schedule went.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its seed.
    pub seed: u64,
    /// What the seed stands for.
    pub options: Options,
    /// The first broken promise.
    pub violation: Option<Violation>,
    /// Events.
    pub events: usize,
    /// Virtual time it took, in microseconds.
    pub virtual_us: u64,
    /// Equal for equal schedules.
    pub hash: u64,
    /// How often interesting things happened.
    pub seen: BTreeMap<&'static str, u64>,
    /// Every event, for people; empty unless recorded.
    pub log: Vec<String>,
}

/// Runs the schedule of `seed`, with a protection switched off if `mutant` says so. A panic of the core is a violation.
#[must_use]
pub fn run(seed: u64, mutant: Option<Mutant>, record: bool) -> Report {
    let mut world = World::new(seed, mutant, record);
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| world.run())) {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no text");
        world.violation = Some(Violation { promise: "no panic", text: text.to_owned() });
    }
    Report {
        seed,
        options: world.options,
        violation: world.violation,
        events: world.events,
        virtual_us: world.now,
        hash: world.hash,
        seen: world.seen,
        log: world.log.unwrap_or_default(),
    }
}
