//! `${NAME}` in string values.

/// Replaces every `${NAME}` in `text` by the variable `NAME`; `$${` stands for a plain `${`. A `$` before anything else stays.
///
/// # Errors
/// The text says what is wrong: an unknown variable, an empty name, a missing `}`. It never holds a value.
pub(super) fn expand(text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, from) = rest.split_at(at);
        if let Some(escaped) = before.strip_suffix('$') {
            out.push_str(escaped);
            out.push_str("${");
            rest = &from[2..];
            continue;
        }
        out.push_str(before);
        let Some(end) = from.find('}') else {
            return Err("has `${` without a closing `}`".to_owned());
        };
        let name = &from[2..end];
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
            return Err(
                "has `${…}` with something other than the name of an environment variable in it".to_owned()
            );
        }
        match variable(name) {
            Some(value) => out.push_str(&value),
            None => return Err(format!("refers to the environment variable {name}, which is not set")),
        }
        rest = &from[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(name: &str) -> Option<String> {
        match name {
            "A" => Some("one".to_owned()),
            "NESTED" => Some("${A}".to_owned()),
            _ => None,
        }
    }

    #[test]
    fn variables_are_replaced_once() {
        assert_eq!(expand("x${A}y${A}", vars).as_deref(), Ok("xoneyone"));
        assert_eq!(expand("${NESTED}", vars).as_deref(), Ok("${A}"));
    }

    #[test]
    fn escapes_and_lone_dollars_stay() {
        assert_eq!(expand("$${A} $5 $", vars).as_deref(), Ok("${A} $5 $"));
        assert_eq!(expand("$${", vars).as_deref(), Ok("${"));
    }

    #[test]
    fn an_unknown_variable_is_named() {
        assert!(expand("${B}", vars).is_err_and(|e| e.contains(" B,")));
        assert!(expand("${A", vars).is_err());
        assert!(expand("${}", vars).is_err());
    }
}
