//! Stopping in good order: nothing new, every message in flight decided and recorded, shards given back.

use super::machine::Core;
use super::protocol::{Action, Mono, Request};

#[derive(Debug)]
pub(super) struct Stop {
    /// Nothing is waited for after this time.
    deadline: Mono,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Draining,
    Leaving,
    Ended,
}

impl Core {
    pub(super) fn begin_stop(&mut self, deadline: Mono) {
        match &mut self.stop {
            Some(stop) => stop.deadline = stop.deadline.min(deadline),
            None => {
                self.stop = Some(Stop { deadline, stage: Stage::Draining });
                self.drain_all();
            }
        }
    }

    pub(super) fn pump_stop(&mut self, now: Mono) {
        let Some(stop) = &self.stop else { return };
        let (deadline, stage) = (stop.deadline, stop.stage);
        if stage == Stage::Ended {
            return;
        }
        if now >= deadline {
            return self.end_stop();
        }
        self.wake_at(deadline);
        // Shards that an acquisition under way brings now are not worked; they are drained like the others.
        self.drain_new();
        let pending_acquire = self.calls.values().any(|r| matches!(r, Request::Acquire { .. }));
        let done = self.flights.is_empty()
            && self.settling.is_idle()
            && self.ownership.is_empty()
            && !pending_acquire;
        if stage == Stage::Draining && done {
            if let Some(stop) = &mut self.stop {
                stop.stage = Stage::Leaving;
            }
            self.call(Request::Leave);
        }
    }

    /// The relay's row is gone, or could not be removed; it expires by itself then.
    pub(super) fn left(&mut self) {
        self.end_stop();
    }

    fn end_stop(&mut self) {
        if let Some(stop) = &mut self.stop
            && stop.stage != Stage::Ended
        {
            stop.stage = Stage::Ended;
            let undecided = self.flights.len() + self.settling.sent_unsettled();
            self.actions.push(Action::Stopped { undecided });
        }
    }
}
