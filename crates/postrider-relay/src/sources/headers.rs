//! The headers column: a JSON object of strings, its order kept.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

struct Ordered(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Ordered {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Ordered;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Ordered, A::Error> {
                let mut headers: Vec<(String, String)> = Vec::new();
                let mut places: HashMap<String, usize> = HashMap::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    let value = match value {
                        Value::String(text) => text,
                        other => other.to_string(),
                    };
                    match places.get(&name) {
                        Some(&place) => headers[place].1 = value,
                        None => {
                            places.insert(name.clone(), headers.len());
                            headers.push((name, value));
                        }
                    }
                }
                Ok(Ordered(headers))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

/// Reads the headers column. Order kept; of a repeated name the last value counts; a value that is no string is taken as its JSON text.
///
/// The tables refuse anything but an object of strings, so a text that is no object means that somebody removed the
/// constraint: the message then goes out without headers rather than holding back its key for ever, and a warning says so.
pub(super) fn read(position: i64, text: Option<&str>) -> Vec<(String, String)> {
    let Some(text) = text else { return Vec::new() };
    match serde_json::from_str::<Ordered>(text) {
        Ok(Ordered(headers)) => headers,
        Err(_) => {
            tracing::warn!(position, "headers of a message are not a JSON object; it is sent without them");
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::read;

    fn pairs(text: &str) -> Vec<(String, String)> {
        read(1, Some(text))
    }

    #[test]
    fn keeps_the_producers_order() {
        let names: Vec<String> =
            pairs(r#"{"z":"1","a":"2","m":"3"}"#).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["z", "a", "m"]);
    }

    #[test]
    fn the_last_of_a_repeated_name_counts() {
        assert_eq!(
            pairs(r#"{"a":"1","b":"2","a":"3"}"#),
            [("a".into(), "3".into()), ("b".into(), "2".into())]
        );
    }

    #[test]
    fn what_is_no_object_gives_no_headers() {
        assert!(pairs("[1]").is_empty());
        assert!(pairs("nonsense").is_empty());
        assert!(read(1, None).is_empty());
    }
}
