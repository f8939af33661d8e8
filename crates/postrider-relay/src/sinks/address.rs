//! The address of a sink, taken apart: `scheme:rest?option=value&…`.

use crate::sink::SinkError;

/// A sink's address in its parts.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    /// What stands before the first colon, in lower case.
    pub scheme: String,
    /// What stands between the colon and the question mark, without leading `//`, as written.
    pub rest: String,
    /// The address was written with `//` after the colon.
    pub slashes: bool,
    /// The options after the question mark, percent-decoded, in their order.
    pub options: Vec<(String, String)>,
}

impl std::fmt::Debug for Address {
    /// The scheme only: the rest may hold a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Address").field("scheme", &self.scheme).finish_non_exhaustive()
    }
}

impl Address {
    /// Takes an address apart.
    ///
    /// # Errors
    /// No scheme, an option without a name, an option given twice, or broken percent encoding; the text says which.
    pub fn parse(url: &str) -> Result<Self, SinkError> {
        let Some((scheme, rest)) = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme)) else {
            return Err(SinkError::Config(
                "the sink's address has no scheme; write for example file:out.jsonl or nats://127.0.0.1:4222"
                    .to_owned(),
            ));
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let slashes = rest.starts_with("//");
        let mut options: Vec<(String, String)> = Vec::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decode(name)?, decode(value)?);
            if name.is_empty() {
                return Err(SinkError::Config(format!(
                    "the address of the {scheme} sink has an option without a name"
                )));
            }
            if options.iter().any(|(n, _)| *n == name) {
                return Err(SinkError::Config(format!(
                    "option '{name}' of the {scheme} sink is given twice"
                )));
            }
            options.push((name, value));
        }
        Ok(Self {
            scheme: scheme.to_ascii_lowercase(),
            rest: rest.strip_prefix("//").unwrap_or(rest).to_owned(),
            slashes,
            options,
        })
    }

    /// The value of an option, if it is given.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The value of an option that is `true` or `false`.
    ///
    /// # Errors
    /// Anything else than `true`, `false` or nothing.
    pub fn flag(&self, name: &str, default: bool) -> Result<bool, SinkError> {
        match self.option(name) {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(_) => Err(SinkError::Config(format!(
                "option '{name}' of the {} sink must be true or false",
                self.scheme
            ))),
        }
    }
}

/// Two letters at least: a single one is a drive.
fn is_scheme(text: &str) -> bool {
    text.len() >= 2
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'))
}

/// Undoes percent encoding. A plus stays a plus.
///
/// # Errors
/// A `%` without two hexadecimal digits, or bytes that are no UTF-8.
pub(super) fn decode(text: &str) -> Result<String, SinkError> {
    let broken =
        || SinkError::Config("broken percent encoding in the sink's address: write % as %25".to_owned());
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|d| char::from(d).to_digit(16)).ok_or_else(broken);
        let value = digit()? * 16 + digit()?;
        bytes.push(u8::try_from(value).map_err(|_| broken())?);
    }
    String::from_utf8(bytes).map_err(|_| broken())
}

/// Options whose value is a secret.
const SECRET_OPTIONS: [&str; 3] = ["token", "password", "secret"];

/// The address without its secrets, for logs and errors: user, password and token become `***`.
///
/// The whole part before `@` goes, since a lone user name is a token for some brokers. Never fails: what cannot be
/// understood is shown as `***` altogether.
#[must_use]
pub fn redact(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme)) else {
        return if url.contains('@') { "***".to_owned() } else { url.to_owned() };
    };
    let (rest, query) = rest.split_once('?').map_or((rest, None), |(rest, query)| (rest, Some(query)));
    let rest = match (rest.strip_prefix("//"), rest.rsplit_once('@')) {
        (Some(_), Some((_, host))) => format!("//***@{host}"),
        _ => rest.to_owned(),
    };
    let query = query.map_or_else(String::new, |query| {
        let pairs: Vec<String> = query
            .split('&')
            .map(|pair| match pair.split_once('=') {
                Some((name, _)) if SECRET_OPTIONS.contains(&name.to_ascii_lowercase().as_str()) => {
                    format!("{name}=***")
                }
                _ => pair.to_owned(),
            })
            .collect();
        format!("?{}", pairs.join("&"))
    });
    format!("{scheme}:{rest}{query}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_taken_apart() {
        let address = Address::parse("NATS://u:p@a:1,b?stream=S&subject=a.%7Btopic%7D").unwrap();
        assert_eq!(
            (address.scheme.as_str(), address.rest.as_str(), address.slashes),
            ("nats", "u:p@a:1,b", true)
        );
        assert_eq!(address.option("stream"), Some("S"));
        assert_eq!(address.option("subject"), Some("a.{topic}"));
        assert!(address.flag("dedupe", true).unwrap());
    }

    #[test]
    fn a_path_without_scheme_is_refused_with_an_example() {
        for url in ["out.jsonl", "/tmp/out.jsonl", "", ":x", "C:\\out.jsonl"] {
            assert!(Address::parse(url).unwrap_err().to_string().contains("file:out.jsonl"), "{url}");
        }
    }

    #[test]
    fn broken_options_are_refused() {
        for url in ["nats://a?=x", "nats://a?s=1&s=2", "nats://a?s=%g0", "nats://a?s=%2", "nats://a?s=%ff"] {
            assert!(matches!(Address::parse(url), Err(SinkError::Config(_))), "{url}");
        }
        assert!(Address::parse("nats://a?dedupe=yes").unwrap().flag("dedupe", true).is_err());
    }

    #[test]
    fn secrets_do_not_survive_redaction() {
        for (url, shown) in [
            ("nats://user:geheim@h:1,h2?stream=S", "nats://***@h:1,h2?stream=S"),
            ("nats://geheim@h", "nats://***@h"),
            ("nats://us:ge@heim@h", "nats://***@h"),
            ("nats://h?token=geheim&stream=S", "nats://h?token=***&stream=S"),
            ("nats://h?stream=S&Token=geheim", "nats://h?stream=S&Token=***"),
            ("file:a@b.jsonl", "file:a@b.jsonl"),
            ("u:geheim@h", "***"),
        ] {
            assert_eq!(redact(url), shown);
        }
    }
}
