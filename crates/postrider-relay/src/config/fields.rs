//! The fields there are: their names, what they take, and the nearest one to a misspelt name.

/// What a field takes, for the error that says so. The value itself is never quoted: it may be a secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    /// Any text.
    Text,
    /// Text that must not be shown.
    Secret,
    /// Path of a file.
    Path,
    /// A whole number from 1 to 4,294,967,295.
    Count,
    /// A number of bytes, plain or with a unit.
    Bytes,
    /// A length of time.
    Time,
    /// Any number.
    Number,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A loopback address with port.
    Address,
}

impl Takes {
    /// The constraint in words.
    pub(super) fn words(self) -> String {
        match self {
            Self::Text | Self::Secret => "a text in quotes".to_owned(),
            Self::Path => "the path of a file, in quotes".to_owned(),
            Self::Count => "a whole number from 1 to 4294967295".to_owned(),
            Self::Bytes => "a number of bytes, as 67108864 or \"64MiB\" (units KiB, MiB, GiB)".to_owned(),
            Self::Time => {
                "a length of time in quotes, as \"200ms\", \"15s\", \"10m\" or \"1h30m\"".to_owned()
            }
            Self::Number => "a number".to_owned(),
            Self::Word(words) => format!("one of {}", quoted(words)),
            Self::Address => {
                "an address with port in quotes, as \"127.0.0.1:9464\" or \"[::1]:9464\"".to_owned()
            }
        }
    }

    /// Whether a value of this kind is written in quotes (environment variables are text and need to know).
    pub(super) fn is_text(self) -> bool {
        !matches!(self, Self::Count | Self::Number)
    }
}

/// One field.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    /// Its place: `section.name`.
    pub(super) path: &'static str,
    /// What it takes.
    pub(super) takes: Takes,
}

const fn field(path: &'static str, takes: Takes) -> Field {
    Field { path, takes }
}

/// Every field of the configuration.
pub(super) const FIELDS: &[Field] = &[
    field("instance", Takes::Text),
    field("source.database", Takes::Secret),
    field("source.database_url_file", Takes::Path),
    field("source.password", Takes::Secret),
    field("source.password_file", Takes::Path),
    field("source.connections", Takes::Count),
    field("sink.url", Takes::Secret),
    field("sink.url_file", Takes::Path),
    field("sink.password", Takes::Secret),
    field("sink.password_file", Takes::Path),
    field("relay.lease", Takes::Time),
    field("relay.renew_every", Takes::Time),
    field("relay.margin", Takes::Time),
    field("relay.publish_timeout", Takes::Time),
    field("relay.idle_poll", Takes::Time),
    field("relay.sweep_every", Takes::Time),
    field("relay.late_margin", Takes::Time),
    field("relay.head_batch", Takes::Count),
    field("relay.load_batch", Takes::Count),
    field("relay.settle_batch", Takes::Count),
    field("relay.in_flight", Takes::Count),
    field("relay.buffer_bytes", Takes::Bytes),
    field("relay.buffer_heads", Takes::Count),
    field("relay.held_lanes", Takes::Count),
    field("relay.lane_heads", Takes::Count),
    field("relay.max_attempts", Takes::Count),
    field("relay.on_dead", Takes::Word(&["skip", "block"])),
    field("relay.confirm_delay", Takes::Time),
    field("relay.drain", Takes::Time),
    field("relay.backoff.first", Takes::Time),
    field("relay.backoff.factor", Takes::Number),
    field("relay.backoff.cap", Takes::Time),
    field("relay.backoff.jitter", Takes::Number),
    field("relay.breaker.failures", Takes::Count),
    field("relay.breaker.first_probe", Takes::Time),
    field("relay.breaker.probe_cap", Takes::Time),
    field("relay.breaker.auth_probe", Takes::Time),
    field("http.listen", Takes::Address),
    field("log.format", Takes::Word(&["text", "json"])),
    field("log.level", Takes::Word(&["error", "warn", "info", "debug", "trace"])),
];

/// The field at `path`.
pub(super) fn find(path: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|f| f.path == path)
}

/// Whether `path` is a section, that is, the beginning of a field's path.
pub(super) fn is_section(path: &str) -> bool {
    FIELDS.iter().any(|f| f.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

/// The environment variable of a field. The two addresses have short names, as the flags have.
pub(super) fn variable(path: &str) -> String {
    match path {
        "source.database" => "POSTRIDER_DATABASE".to_owned(),
        "sink.url" => "POSTRIDER_SINK".to_owned(),
        _ => format!("POSTRIDER_{}", path.replace('.', "_").to_uppercase()),
    }
}

/// The names that may stand in `section` ("" = the top), sorted.
pub(super) fn names_in(section: &str) -> Vec<&'static str> {
    let mut names: Vec<&str> = FIELDS
        .iter()
        .filter_map(|f| match section {
            "" => Some(f.path),
            _ => f.path.strip_prefix(section)?.strip_prefix('.'),
        })
        .map(|rest| rest.split('.').next().unwrap_or(rest))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// What the user may have meant by the unknown `name` in `section`: a name of that section that is nearly the same, or the
/// same name in another section.
pub(super) fn nearest(section: &str, name: &str) -> Option<String> {
    let close = nearest_of(name, names_in(section).into_iter());
    let elsewhere =
        || FIELDS.iter().find(|f| f.path.rsplit('.').next() == Some(name)).map(|f| f.path.to_owned());
    close.map(str::to_owned).or_else(elsewhere)
}

/// The candidate with the fewest edits from `name`, if these are few.
pub(super) fn nearest_of<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = (name.chars().count() / 3).clamp(1, 3);
    candidates
        .map(|c| (distance(name, c), c))
        .filter(|(d, c)| *d <= allowed || c.replace('_', "") == name.replace(['_', '-'], ""))
        .min()
        .map(|(_, c)| c)
}

/// Edits (insert, delete, replace) from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The words in backticks, separated by commas.
pub(super) fn quoted(words: &[&str]) -> String {
    words.iter().map(|w| format!("`{w}`")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_name_finds_its_neighbour() {
        assert_eq!(nearest("relay", "inflight").as_deref(), Some("in_flight"));
        assert_eq!(nearest("relay", "leese").as_deref(), Some("lease"));
        assert_eq!(nearest("", "sorce").as_deref(), Some("source"));
    }

    #[test]
    fn a_name_of_another_section_is_found_there() {
        assert_eq!(nearest("", "listen").as_deref(), Some("http.listen"));
    }

    #[test]
    fn nothing_near_is_no_suggestion() {
        assert_eq!(nearest("relay", "colour"), None);
    }
}
