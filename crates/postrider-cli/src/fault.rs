//! Errors as people see them: what, where, and how to mend it.

use std::fmt;
use std::process::ExitCode;

use postrider_relay::config::ConfigError;

/// An error with its place and its cure. Holds no secrets and no payloads.
#[derive(Debug)]
pub(crate) struct Fault {
    what: String,
    place: Option<String>,
    cure: Option<String>,
    code: u8,
}

impl Fault {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), place: None, cure: None, code: 1 }
    }

    /// From an error text of the libraries, which says what is wrong and, mostly, how to mend it.
    pub(crate) fn from_text(text: &str) -> Self {
        let (what, cure) = sentence_and_cure(text);
        Self { cure: cure.map(str::to_owned), ..Self::new(what) }
    }

    pub(crate) fn at(mut self, place: impl fmt::Display) -> Self {
        self.place = Some(place.to_string());
        self
    }

    pub(crate) fn cure(mut self, cure: impl Into<String>) -> Self {
        self.cure = Some(cure.into());
        self
    }

    pub(crate) fn has_cure(&self) -> bool {
        self.cure.is_some()
    }

    pub(crate) fn code(mut self, code: u8) -> Self {
        self.code = code;
        self
    }

    /// There is no such message.
    pub(crate) fn no_message(id: &str) -> Self {
        Self::new(format!("there is no message {id:?} in the outbox"))
            .cure("`postrider list` shows what there is; if the business transaction rolled back, so did its message")
            .code(3)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Fault {}

impl From<ConfigError> for Fault {
    fn from(error: ConfigError) -> Self {
        Self { what: error.what, place: error.place, cure: error.cure, code: 1 }
    }
}

/// Writes `error: what`, then where and the cure on lines of their own, and returns the exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(fault) = error.downcast_ref::<Fault>() {
        eprintln!("error: {}", fault.what);
        if let Some(place) = &fault.place {
            eprintln!("  where: {place}");
        }
        if let Some(cure) = &fault.cure {
            eprintln!("  cure:  {cure}");
        }
        return ExitCode::from(fault.code);
    }
    eprintln!("error: {error}");
    for cause in error.chain().skip(1) {
        eprintln!("  cause: {cause}");
    }
    ExitCode::FAILURE
}

/// The libraries write `what is wrong; how to mend it`, or `what is wrong: run …`.
fn sentence_and_cure(text: &str) -> (&str, Option<&str>) {
    if let Some((what, cure)) = text.rsplit_once("; ") {
        return (what, Some(cure));
    }
    let verbs = [": run ", ": grant ", ": give ", ": install ", ": use ", ": check ", ": free ", ": create "];
    let at = verbs.iter().filter_map(|verb| text.find(verb)).min();
    match at {
        Some(at) => (&text[..at], Some(&text[at + 2..])),
        None => (text, None),
    }
}

#[cfg(test)]
mod tests {
    use super::sentence_and_cure;

    #[test]
    fn the_cure_is_what_stands_after_the_semicolon_or_the_verb() {
        assert_eq!(sentence_and_cure("a: b; do c"), ("a: b", Some("do c")));
        assert_eq!(sentence_and_cure("no table: run `init`"), ("no table", Some("run `init`")));
        assert_eq!(sentence_and_cure("it broke: reset"), ("it broke: reset", None));
    }
}
