//! Exponential backoff with cap and jitter, sane for any attempt number.

use std::time::Duration;

use super::settings::Backoff;

impl Backoff {
    /// The delay after attempt number `attempts` (1 = first): between (1 − jitter) × d and d, where
    /// d = min(cap, first × factor^(attempts − 1)). `random` lies in 0..1. Never above the cap, whatever the numbers are.
    #[must_use]
    pub fn delay(&self, attempts: u32, random: f64) -> Duration {
        let cap = self.cap.as_secs_f64();
        let exponent = f64::from(attempts.saturating_sub(1));
        let raw = self.first.as_secs_f64() * self.factor.max(1.0).powf(exponent);
        // `min` also takes care of infinity; a NaN (0 × ∞) becomes the cap.
        let full = if raw.is_nan() { cap } else { raw.min(cap) };
        let part = 1.0 - self.jitter.clamp(0.0, 1.0) * random.clamp(0.0, 1.0);
        Duration::try_from_secs_f64(full * part).unwrap_or(self.cap).min(self.cap)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_doubles_and_stops_at_the_cap() {
        let b = Backoff { jitter: 0.0, ..Backoff::default() };
        let secs: Vec<u64> = (1..=12).map(|n| b.delay(n, 0.5).as_secs()).collect();
        assert_eq!(secs, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
    }

    proptest! {
        #[test]
        fn it_stays_between_zero_and_the_cap(
            attempts in 0u32..=u32::MAX, first_ms in 0u64..=3_600_000, cap_s in 0u64..=2_592_000,
            factor in 0.0f64..1e9, jitter in -1.0f64..2.0, random in 0.0f64..1.0,
        ) {
            let b = Backoff { first: Duration::from_millis(first_ms), factor, cap: Duration::from_secs(cap_s), jitter };
            prop_assert!(b.delay(attempts, random) <= b.cap);
        }

        #[test]
        fn it_never_shrinks_by_more_than_the_jitter(attempts in 1u32..10_000, random in 0.0f64..1.0) {
            let b = Backoff::default();
            let full = Backoff { jitter: 0.0, ..b }.delay(attempts, 0.0);
            prop_assert!(b.delay(attempts, random) >= full.mul_f64(1.0 - b.jitter - 1e-9));
        }
    }
}
