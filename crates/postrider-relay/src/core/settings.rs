//! The numbers the core works with. Defaults are constants with their reasons.

use std::time::Duration;

/// Limits and times of one relay on one source.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// How long the right to work lasts after a renewal, by the database's clock. Default 15 s.
    pub lease: Duration,
    /// Time between renewals. Default 5 s: two may fail before the lease is in danger.
    pub renew_every: Duration,
    /// Safety margin at the end of a lease for clock rates and scheduling. Default 1 s.
    pub margin: Duration,
    /// Deadline of one publish, at most lease − renew_every − margin. Default 5 s.
    pub publish_timeout: Duration,
    /// Longest wait between two polls when there is nothing to do. Default 200 ms.
    pub idle_poll: Duration,
    /// Time between two unbounded sweeps; a sweep that takes long is followed by a longer pause. Default 1 s.
    pub sweep_every: Duration,
    /// How long an id may be known before its transaction writes (schema: "late window"). Default 100 ms.
    pub late_margin: Duration,
    /// Narrow rows per read. Default 2,000.
    pub head_batch: u32,
    /// Whole messages per read. Default 500.
    pub load_batch: u32,
    /// Most messages per settle statement. Default 1,000.
    pub settle_batch: u32,
    /// Most messages published and undecided, per sink. Default 1,000.
    pub in_flight: u32,
    /// Most payload bytes in memory. Default 64 MiB.
    pub buffer_bytes: u64,
    /// Most messages ready in memory, narrow. Default 10,000.
    pub buffer_heads: u32,
    /// Most lanes remembered as held back; beyond it reading stops until some are free. Default 250,000 (about 50 MB).
    pub held_lanes: u32,
    /// Most narrow rows kept in memory per lane; what is beyond is read again when its turn comes. Default 64.
    pub lane_heads: u32,
    /// Attempts after which a message is dead, unless it says otherwise itself. Default 10.
    pub max_attempts: u32,
    /// Backoff of counted attempts.
    pub backoff: Backoff,
    /// What happens to the messages of a key when one is dead. Default skip.
    pub on_dead: OnDead,
    /// Pause before the one confirming retry of a permanent refusal. Default 1 s.
    pub confirm_delay: Duration,
    /// Breakers.
    pub breaker: BreakerSettings,
    /// Sizes of pages.
    #[doc(hidden)]
    pub pages: Pages,
    /// Protections that a demonstration or a test switches off. All on by default.
    #[doc(hidden)]
    pub protections: Protections,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            renew_every: Duration::from_secs(5),
            margin: Duration::from_secs(1),
            publish_timeout: Duration::from_secs(5),
            idle_poll: Duration::from_millis(200),
            sweep_every: Duration::from_secs(1),
            late_margin: Duration::from_millis(100),
            head_batch: 2_000,
            load_batch: 500,
            settle_batch: 1_000,
            in_flight: 1_000,
            buffer_bytes: 64 << 20,
            buffer_heads: 10_000,
            held_lanes: 250_000,
            lane_heads: 64,
            max_attempts: 10,
            backoff: Backoff::default(),
            on_dead: OnDead::Skip,
            confirm_delay: Duration::from_secs(1),
            breaker: BreakerSettings::default(),
            pages: Pages::default(),
            protections: Protections::default(),
        }
    }
}

/// Rows per read of what is read in pages, and what decides between two ways to read. Settings only so that a test
/// reaches the second page with a handful of messages.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Held keys, at acquisition and when blocked keys are looked up again.
    pub held: u32,
    /// One lane.
    pub lane: u32,
    /// Due rows.
    pub due: u32,
    /// Above this number of lanes whose next messages are not in memory, one pass over the queue is cheaper than a read
    /// each.
    pub lanes_by_rescan: usize,
}

impl Default for Pages {
    fn default() -> Self {
        Self { held: 5_000, lane: 500, due: 500, lanes_by_rescan: 4 }
    }
}

impl Settings {
    /// Says which setting contradicts which, in words with both values, or that all is well.
    ///
    /// # Errors
    /// The text names the setting and its constraint.
    pub fn check(&self) -> Result<(), String> {
        let longest = self.lease.checked_sub(self.renew_every + self.margin).unwrap_or_default();
        if self.publish_timeout.is_zero() || self.publish_timeout > longest {
            return Err(format!(
                "publish_timeout {:?} must be above zero and at most lease − renew_every − margin = {longest:?}",
                self.publish_timeout
            ));
        }
        for (name, value) in [
            ("head_batch", self.head_batch),
            ("load_batch", self.load_batch),
            ("settle_batch", self.settle_batch),
            ("in_flight", self.in_flight),
            ("buffer_heads", self.buffer_heads),
            ("held_lanes", self.held_lanes),
            ("lane_heads", self.lane_heads),
            ("max_attempts", self.max_attempts),
        ] {
            if value == 0 {
                return Err(format!("{name} must be at least 1"));
            }
        }
        self.check_delays()?;
        if self.buffer_bytes == 0 {
            return Err("buffer_bytes must be at least 1".to_owned());
        }
        for (name, value) in [("idle_poll", self.idle_poll), ("sweep_every", self.sweep_every)] {
            if value < Duration::from_millis(1) {
                return Err(format!("{name} must be at least 1 ms"));
            }
        }
        Ok(())
    }
}

impl Settings {
    fn check_delays(&self) -> Result<(), String> {
        let (b, probes) = (&self.backoff, &self.breaker);
        if b.cap > LONGEST_BACKOFF {
            return Err(format!("backoff.cap {:?} must be at most {LONGEST_BACKOFF:?}", b.cap));
        }
        if !(b.factor >= 1.0 && b.factor.is_finite()) {
            return Err(format!("backoff.factor {} must be at least 1", b.factor));
        }
        if !(0.0..=1.0).contains(&b.jitter) {
            return Err(format!("backoff.jitter {} must lie between 0 and 1", b.jitter));
        }
        for (name, value) in [
            ("breaker.first_probe", probes.first_probe),
            ("breaker.probe_cap", probes.probe_cap),
            ("breaker.auth_probe", probes.auth_probe),
        ] {
            if value < Duration::from_millis(1) {
                return Err(format!("{name} must be at least 1 ms"));
            }
        }
        if probes.failures == 0 {
            return Err("breaker.failures must be at least 1".to_owned());
        }
        Ok(())
    }
}

/// A year: longer is a mistake, and the database's times have an end.
const LONGEST_BACKOFF: Duration = Duration::from_secs(366 * 86_400);

/// Exponential backoff with cap and jitter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Delay after the first attempt. Default 1 s.
    pub first: Duration,
    /// Factor per attempt. Default 2.
    pub factor: f64,
    /// Longest delay. Default 10 min.
    pub cap: Duration,
    /// Part of the delay that is random, 0 to 1: the delay lies between (1 − jitter) × d and d. Default 0.3.
    pub jitter: f64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), factor: 2.0, cap: Duration::from_secs(600), jitter: 0.3 }
    }
}

/// What happens to the later messages of a key when one of it is dead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnDead {
    /// They go on (default); the dead one is recorded and shown.
    Skip,
    /// They wait until an operator redrives or cancels it.
    Block,
}

/// When a breaker opens and how it probes. An open breaker lets one real message through per probe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerSettings {
    /// Unknown outcomes in a row, without an acceptance in between, that open the sink's breaker; the same number at one
    /// destination opens that one's too. Default 5.
    /// A refusal that names destination or sink opens the breaker at once.
    pub failures: u32,
    /// Time to the first probe. Default 200 ms.
    pub first_probe: Duration,
    /// Longest time between probes. Default 30 s.
    pub probe_cap: Duration,
    /// Time between probes while an operator is needed (credentials, rights). Default 30 s.
    pub auth_probe: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self {
            failures: 5,
            first_probe: Duration::from_millis(200),
            probe_cap: Duration::from_secs(30),
            auth_probe: Duration::from_secs(30),
        }
    }
}

/// What keeps the promises, each with a switch so that a test can see it fail without.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protections {
    /// One undecided message per key.
    pub lanes: bool,
    /// SENT only after the sink's acknowledgement.
    pub settle_after_ack: bool,
    /// Read again what committed late before newer rows reach the lanes.
    pub late_window: bool,
    /// Load at acquisition which keys are held.
    pub held_keys: bool,
    /// A lane goes on after a failure only when the settle has committed.
    pub wait_for_settle: bool,
    /// Outages count no attempts.
    pub outage_uncounted: bool,
}

impl Default for Protections {
    fn default() -> Self {
        Self {
            lanes: true,
            settle_after_ack: true,
            late_window: true,
            held_keys: true,
            wait_for_settle: true,
            outage_uncounted: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_that_cannot_work_are_refused_by_name() {
        assert_eq!(Settings::default().check(), Ok(()));
        let with = |change: fn(&mut Settings)| {
            let mut settings = Settings::default();
            change(&mut settings);
            settings.check().expect_err("refused")
        };
        assert!(with(|s| s.backoff.cap = Duration::from_secs(86_400 * 400)).starts_with("backoff.cap"));
        assert!(with(|s| s.backoff.factor = 0.5).starts_with("backoff.factor"));
        assert!(with(|s| s.backoff.jitter = 1.5).starts_with("backoff.jitter"));
        assert!(with(|s| s.breaker.first_probe = Duration::ZERO).starts_with("breaker.first_probe"));
        assert!(with(|s| s.breaker.failures = 0).starts_with("breaker.failures"));
    }
}
