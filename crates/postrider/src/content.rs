//! The hash that tells "the same again" from "the same id, other content".

use std::fmt;

use sha2::{Digest, Sha256};

/// The first 8 bytes (big endian) of a SHA-256 over a message's content: topic, key, headers, content type, payload.
///
/// `enqueue` stores it to tell a repeat from a mistake; the inbox stores the hash of what it received for the same reason.
/// It is a check against mistakes, not against forgery: 64 bits.
///
/// The bytes that are hashed, in this order, are: the text `postrider content 1`; the topic; the key (`message_key`, else
/// `aggregate_type:aggregate_id`); the number of headers as 8 bytes; per header, sorted by name, its name in ASCII lower
/// case and its value; the content type; the payload. Each of these texts stands as one byte 1, its length as 8 bytes and
/// its bytes; one that is absent stands as one byte 0. All numbers are big endian. Text and bytes are not told apart: what
/// is sent is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentHash(pub i64);

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl ContentHash {
    /// The hash of this content. `key` is what the message is kept in order by; `payload` is `None` when absent.
    #[must_use]
    pub fn of<N: AsRef<str>, V: AsRef<str>>(
        topic: &str,
        key: Option<&str>,
        headers: &[(N, V)],
        content_type: Option<&str>,
        payload: Option<&[u8]>,
    ) -> Self {
        let mut sorted: Vec<(String, &str)> = headers
            .iter()
            .map(|(name, value)| (name.as_ref().to_ascii_lowercase(), value.as_ref()))
            .collect();
        sorted.sort();
        let mut hasher = Sha256::new();
        part(&mut hasher, Some(b"postrider content 1"));
        part(&mut hasher, Some(topic.as_bytes()));
        part(&mut hasher, key.map(str::as_bytes));
        hasher.update((sorted.len() as u64).to_be_bytes());
        for (name, value) in &sorted {
            part(&mut hasher, Some(name.as_bytes()));
            part(&mut hasher, Some(value.as_bytes()));
        }
        part(&mut hasher, content_type.map(str::as_bytes));
        part(&mut hasher, payload);
        let digest: [u8; 32] = hasher.finalize().into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        Self(i64::from_be_bytes([a, b, c, d, e, f, g, h]))
    }
}

fn part(hasher: &mut Sha256, bytes: Option<&[u8]>) {
    match bytes {
        None => hasher.update([0]),
        Some(bytes) => {
            hasher.update([1]);
            hasher.update((bytes.len() as u64).to_be_bytes());
            hasher.update(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: &[(&str, &str)] = &[];

    #[test]
    fn the_order_and_the_case_of_header_names_do_not_matter() {
        let one = ContentHash::of("t", None, &[("B", "2"), ("a", "1")], None, None);
        let other = ContentHash::of("t", None, &[("A", "1"), ("b", "2")], None, None);
        assert_eq!(one, other);
    }

    #[test]
    fn every_part_and_every_boundary_counts() {
        let hashes = [
            ContentHash::of("t", None, NONE, None, None),
            ContentHash::of("t", None, NONE, None, Some(b"")),
            ContentHash::of("t", None, NONE, Some(""), None),
            ContentHash::of("t", Some(""), NONE, None, None),
            ContentHash::of("tk", None, NONE, None, None),
            ContentHash::of("t", Some("k"), NONE, None, None),
            ContentHash::of("t", None, &[("k", "")], None, None),
            ContentHash::of("t", None, &[("", "k")], None, None),
            ContentHash::of("t", None, NONE, Some("k"), None),
            ContentHash::of("t", None, NONE, None, Some(b"k")),
        ];
        for (i, one) in hashes.iter().enumerate() {
            for other in &hashes[i + 1..] {
                assert_ne!(one, other, "number {i}");
            }
        }
    }

    #[test]
    fn the_hash_of_a_known_message_never_changes() {
        let hash = ContentHash::of(
            "orders",
            Some("order:4711"),
            &[("Tenant", "eu-1")],
            Some("application/json"),
            Some(br#"{"a":1}"#),
        );
        assert_eq!(hash.to_string(), "077446d81cbea80a");
    }
}
