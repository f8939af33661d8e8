//! A breaker per sink and per destination: while it is open nothing is counted and nothing is sent but one real
//! message per probe.

use std::time::Duration;

use super::protocol::{Mono, Ticket};
use super::settings::BreakerSettings;

/// Closed, or open until the next probe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Breaker {
    /// Unknown outcomes in a row.
    failures: u32,
    open: Option<Open>,
}

#[derive(Clone, Debug, PartialEq)]
struct Open {
    since: Mono,
    probe_at: Mono,
    interval: Duration,
    probing: Option<Ticket>,
    operator: bool,
    reason: String,
}

/// What a breaker lets pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Everything.
    All,
    /// One message, as a probe.
    Probe,
    /// Nothing now.
    Nothing,
}

impl Breaker {
    /// What may pass now.
    #[must_use]
    pub fn pass(&self, now: Mono) -> Pass {
        match &self.open {
            None => Pass::All,
            Some(o) if o.probing.is_none() && now >= o.probe_at => Pass::Probe,
            Some(_) => Pass::Nothing,
        }
    }

    /// Whether it is open, a probe under way or not.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether it is closed and nothing has failed since the last success.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        *self == Self::default()
    }

    /// Since when and why it is open, and whether an operator is needed.
    #[must_use]
    pub fn why(&self) -> Option<(Mono, &str, bool)> {
        self.open.as_ref().map(|o| (o.since, o.reason.as_str(), o.operator))
    }

    /// When the next probe may go, if none is under way.
    #[must_use]
    pub fn probe_at(&self) -> Option<Mono> {
        self.open.as_ref().filter(|o| o.probing.is_none()).map(|o| o.probe_at)
    }

    /// A probe is on its way.
    pub fn probing(&mut self, ticket: Ticket) {
        if let Some(o) = &mut self.open {
            o.probing = Some(ticket);
        }
    }

    /// The sink answered for `ticket` in a way that shows it works. Returns whether that closed the breaker: only a
    /// probe does, not a message that was sent before it opened.
    pub fn worked(&mut self, ticket: Ticket) -> bool {
        self.failures = 0;
        let closes = self.open.as_ref().is_some_and(|o| o.probing == Some(ticket));
        if closes {
            self.open = None;
        }
        closes
    }

    /// The probe `ticket` ended without a verdict about the sink (it was never handed over): another may go at once.
    pub fn probe_returned(&mut self, ticket: Ticket) {
        if let Some(o) = &mut self.open
            && o.probing == Some(ticket)
        {
            o.probing = None;
        }
    }

    /// No verdict for `ticket`. Opens after `settings.failures` in a row, or again if it was the probe. Returns whether it
    /// opened (again).
    pub fn unknown(
        &mut self,
        ticket: Ticket,
        why: &str,
        now: Mono,
        random: f64,
        settings: &BreakerSettings,
    ) -> bool {
        self.failures = self.failures.saturating_add(1);
        let probe = self.open.as_ref().is_some_and(|o| o.probing == Some(ticket));
        if probe || (self.open.is_none() && self.failures >= settings.failures) {
            self.refused(ticket, why, None, false, now, random, settings);
            return true;
        }
        false
    }

    /// Destination or sink refused `ticket`. Opens, or stays open with a longer interval if it was the probe; a straggler
    /// that was sent before it opened changes nothing. Returns whether it opened (again).
    #[expect(clippy::too_many_arguments, reason = "a refusal has that many facts")]
    pub fn refused(
        &mut self,
        ticket: Ticket,
        why: &str,
        after: Option<Duration>,
        operator: bool,
        now: Mono,
        random: f64,
        settings: &BreakerSettings,
    ) -> bool {
        let (since, last) = match &self.open {
            Some(o) if o.probing != Some(ticket) => return false,
            Some(o) => (o.since, Some(o.interval)),
            None => (now, None),
        };
        let interval = if operator {
            settings.auth_probe
        } else {
            last.map_or(settings.first_probe, |d| d.saturating_mul(2)).min(settings.probe_cap)
        };
        // Up to a quarter earlier, so that relays do not probe in step; what the sink asked for is a lower bound.
        let jittered = interval.mul_f64(1.0 - 0.25 * random.clamp(0.0, 1.0));
        let wait = jittered.max(after.unwrap_or_default().min(Duration::from_secs(86_400)));
        self.open = Some(Open {
            since,
            probe_at: now.plus(wait),
            interval,
            probing: None,
            operator,
            reason: why.to_owned(),
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: BreakerSettings = BreakerSettings {
        failures: 3,
        first_probe: Duration::from_millis(200),
        probe_cap: Duration::from_secs(1),
        auth_probe: Duration::from_secs(30),
    };

    #[test]
    fn unknowns_in_a_row_open_it_and_a_success_between_them_does_not() {
        let mut b = Breaker::default();
        for n in 0..2 {
            assert!(!b.unknown(Ticket(n), "timeout", Mono(0), 0.0, &S));
        }
        b.worked(Ticket(9));
        assert!(!b.unknown(Ticket(3), "timeout", Mono(0), 0.0, &S));
        assert!(!b.unknown(Ticket(4), "timeout", Mono(0), 0.0, &S));
        assert!(b.unknown(Ticket(5), "timeout", Mono(0), 0.0, &S));
        assert_eq!(b.pass(Mono(0)), Pass::Nothing);
    }

    #[test]
    fn one_probe_at_a_time_and_only_it_closes() {
        let mut b = Breaker::default();
        assert!(b.refused(Ticket(1), "down", None, false, Mono(0), 0.0, &S));
        assert!(!b.refused(Ticket(2), "down", None, false, Mono(1), 0.0, &S), "a straggler changes nothing");
        assert_eq!(b.pass(Mono(199_999)), Pass::Nothing);
        assert_eq!(b.pass(Mono(200_000)), Pass::Probe);
        b.probing(Ticket(7));
        assert_eq!(b.pass(Mono(900_000)), Pass::Nothing);
        assert!(!b.worked(Ticket(3)), "sent before it opened");
        assert!(b.is_open());
        assert!(b.worked(Ticket(7)));
        assert_eq!(b.pass(Mono(900_000)), Pass::All);
    }

    #[test]
    fn the_interval_doubles_up_to_the_cap_and_retry_after_is_a_lower_bound() {
        let mut b = Breaker::default();
        b.refused(Ticket(1), "down", None, false, Mono(0), 0.0, &S);
        let mut seen = vec![];
        for n in 2..6 {
            let at = b.probe_at().expect("open");
            b.probing(Ticket(n));
            b.refused(Ticket(n), "down", None, false, at, 0.0, &S);
            seen.push(b.probe_at().expect("open").since(at).as_millis());
        }
        assert_eq!(seen, [400, 800, 1000, 1000]);
        let at = b.probe_at().expect("open");
        b.probing(Ticket(9));
        b.refused(Ticket(9), "busy", Some(Duration::from_secs(60)), false, at, 0.0, &S);
        assert_eq!(b.probe_at().expect("open").since(at).as_secs(), 60);
    }
}
