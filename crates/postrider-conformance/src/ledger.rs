//! The ledger check: what was committed against what arrived, without a word from the product's own bookkeeping.

use std::collections::{BTreeMap, BTreeSet};

/// A message that the business says it committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its id.
    pub message_id: String,
    /// Its key; `None` = unordered.
    pub key: Option<String>,
    /// Its place within the key, given by the business under the key's row lock.
    pub version: i64,
}

/// A message as a consumer finds it in the sink, in the sink's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its id.
    pub message_id: String,
    /// Its id in the outbox, as the sink's copy says.
    pub position: i64,
}

/// What the comparison says. Empty lists everywhere but in `duplicates` = all promises kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Committed, neither in the sink nor visibly kept back.
    pub lost: BTreeSet<String>,
    /// In the sink, never committed.
    pub invented: BTreeSet<String>,
    /// Pairs of one key whose first arrivals are in the wrong order: (earlier message, later message that came first).
    pub reordered: Vec<(String, String)>,
    /// Copies beyond the first, by message.
    pub duplicates: BTreeMap<String, usize>,
}

impl Verdict {
    /// Compares. `kept_back` are ids that are visibly pending, dead or cancelled.
    #[must_use]
    pub fn of(committed: &[Committed], arrivals: &[Arrival], kept_back: &BTreeSet<String>) -> Self {
        let mut v = Self::default();
        let known: BTreeMap<&str, &Committed> =
            committed.iter().map(|c| (c.message_id.as_str(), c)).collect();
        let mut first: BTreeMap<&str, usize> = BTreeMap::new();
        for (i, a) in arrivals.iter().enumerate() {
            if !known.contains_key(a.message_id.as_str()) {
                v.invented.insert(a.message_id.clone());
            } else if first.contains_key(a.message_id.as_str()) {
                *v.duplicates.entry(a.message_id.clone()).or_default() += 1;
            } else {
                first.insert(&a.message_id, i);
            }
        }
        for c in committed {
            if !first.contains_key(c.message_id.as_str()) && !kept_back.contains(&c.message_id) {
                v.lost.insert(c.message_id.clone());
            }
        }
        v.reordered = reordered(&known, &first);
        v
    }

    /// Panics with the findings unless nothing is lost, invented or out of order.
    ///
    /// # Panics
    /// If a promise is broken.
    pub fn assert_kept(&self) {
        assert!(self.lost.is_empty(), "{} lost, e.g. {:?}", self.lost.len(), self.lost.first());
        assert!(
            self.invented.is_empty(),
            "{} invented, e.g. {:?}",
            self.invented.len(),
            self.invented.first()
        );
        assert!(
            self.reordered.is_empty(),
            "{} out of order, e.g. {:?}",
            self.reordered.len(),
            self.reordered.first()
        );
    }
}

fn reordered(known: &BTreeMap<&str, &Committed>, first: &BTreeMap<&str, usize>) -> Vec<(String, String)> {
    let mut by_arrival: Vec<(&usize, &&Committed)> =
        first.iter().filter_map(|(id, at)| Some((at, known.get(id)?))).collect();
    by_arrival.sort_unstable_by_key(|(at, _)| **at);
    let mut highest: BTreeMap<&str, &Committed> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (_, c) in by_arrival {
        let Some(key) = c.key.as_deref() else { continue };
        match highest.get(key) {
            Some(h) if h.version > c.version => wrong.push((c.message_id.clone(), h.message_id.clone())),
            _ => {
                highest.insert(key, c);
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(ids: &[(&str, i64)]) -> Vec<Committed> {
        ids.iter()
            .map(|(id, version)| Committed {
                message_id: (*id).into(),
                key: Some("k".into()),
                version: *version,
            })
            .collect()
    }

    fn arrivals(ids: &[&str]) -> Vec<Arrival> {
        ids.iter().map(|id| Arrival { message_id: (*id).into(), position: 0 }).collect()
    }

    #[test]
    fn a_good_history_with_repeats_passes() {
        let v = Verdict::of(
            &committed(&[("a", 1), ("b", 2)]),
            &arrivals(&["a", "b", "a", "a"]),
            &BTreeSet::new(),
        );
        v.assert_kept();
        assert_eq!(v.duplicates.get("a"), Some(&2));
    }

    #[test]
    fn each_bad_history_is_seen() {
        let c = committed(&[("a", 1), ("b", 2), ("c", 3)]);
        let none = BTreeSet::new();
        assert_eq!(Verdict::of(&c, &arrivals(&["a", "c"]), &none).lost, BTreeSet::from(["b".to_owned()]));
        assert_eq!(Verdict::of(&c, &arrivals(&["a", "x"]), &none).invented, BTreeSet::from(["x".to_owned()]));
        let v = Verdict::of(&c, &arrivals(&["a", "c", "b"]), &none);
        assert_eq!(v.reordered, [("b".to_owned(), "c".to_owned())]);
        let kept = BTreeSet::from(["b".to_owned()]);
        assert!(Verdict::of(&c, &arrivals(&["a", "c"]), &kept).lost.is_empty());
    }

    #[test]
    #[should_panic(expected = "1 lost")]
    fn a_broken_promise_panics() {
        Verdict::of(&committed(&[("a", 1)]), &[], &BTreeSet::new()).assert_kept();
    }
}
