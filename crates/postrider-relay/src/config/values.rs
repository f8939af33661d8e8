//! Values that TOML has no type for: lengths of time, sizes.

use std::time::Duration;

use serde::{Deserialize, Deserializer, de};

/// A length of time as people write it: `"200ms"`, `"15s"`, `"1h30m"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Time(pub(super) Duration);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_duration(&text).map(Self).ok_or_else(|| de::Error::custom("not a length of time"))
    }
}

/// Reads `"200ms"`, `"15s"`, `"1h30m"`. `None` for anything else, for negative times and for a number without unit.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let days = text.strip_suffix('d').and_then(|n| n.trim().parse::<u32>().ok());
    if let Some(days) = days {
        return Some(Duration::from_secs(u64::from(days) * 86_400));
    }
    if !text.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let signed: jiff::SignedDuration = text.parse().ok()?;
    Duration::try_from(signed).ok()
}

/// A number of bytes: `67108864` or `"64MiB"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) u64);

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(n) => Ok(Self(n)),
            Form::Text(t) => parse_bytes(&t).map(Self).ok_or_else(|| de::Error::custom("not a size")),
        }
    }
}

/// Reads `"64MiB"`, `"512 KiB"`, `"1000"`.
fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("15s"), Some(Duration::from_secs(15)));
        assert_eq!(parse_duration("200ms"), Some(Duration::from_millis(200)));
        assert_eq!(parse_duration("1h30m"), Some(Duration::from_secs(5400)));
        assert_eq!(parse_duration("7d"), Some(Duration::from_secs(604_800)));
        for wrong in ["15", "-1s", "", "soon", "s"] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn sizes_take_binary_units() {
        assert_eq!(parse_bytes("64MiB"), Some(64 << 20));
        assert_eq!(parse_bytes("10"), Some(10));
        assert_eq!(parse_bytes("10MB"), None);
        assert_eq!(parse_bytes("99999999999999GiB"), None);
    }
}
