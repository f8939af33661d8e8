//! Addresses as they may be shown: without passwords.

/// `address` without anything that may be a secret: password, token, and every query value but harmless ones.
///
/// What cannot be read as a URL is cut after its scheme, unless it is the path of a file.
#[must_use]
pub fn shown(address: &str) -> String {
    let scheme = address.split(':').next().unwrap_or_default();
    if matches!(scheme, "sqlite" | "file" | "stdout") {
        return address.split('?').next().unwrap_or_default().to_owned();
    }
    let Ok(mut url) = url::Url::parse(address) else {
        return match address.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://…"),
            None => "…".to_owned(),
        };
    };
    if url.cannot_be_a_base() {
        return format!("{}:…", url.scheme());
    }
    // A token in place of a user name ("nats://s3cret@host") looks like a user name: it goes as well.
    let name_is_secret = url.password().is_none()
        && !url.username().is_empty()
        && url.scheme() != "postgres"
        && url.scheme() != "postgresql";
    let cleared = [
        url.password().is_some() && url.set_password(Some("…")).is_err(),
        name_is_secret && url.set_username("…").is_err(),
    ];
    if cleared.contains(&true) {
        return format!("{}://…", url.scheme());
    }
    let kept: Vec<(String, String)> = url
        .query_pairs()
        .filter(|(name, _)| matches!(&**name, "sslmode" | "host" | "port" | "stream" | "application_name"))
        .map(|(n, v)| (n.into_owned(), v.into_owned()))
        .collect();
    url.set_query(None);
    if !kept.is_empty() {
        url.query_pairs_mut().extend_pairs(kept);
    }
    url.set_fragment(None);
    url.to_string().replace("%E2%80%A6", "…")
}

#[cfg(test)]
mod tests {
    use super::shown;

    #[test]
    fn secrets_go_and_the_rest_stays() {
        assert_eq!(
            shown("postgres://bob:s3cret@db:5432/app?sslmode=require"),
            "postgres://bob:…@db:5432/app?sslmode=require"
        );
        assert_eq!(shown("postgres://bob@db/app?password=s3cret"), "postgres://bob@db/app");
        assert_eq!(shown("nats://s3cret@broker:4222"), "nats://…@broker:4222");
        assert_eq!(shown("sqlite:postrider.db"), "sqlite:postrider.db");
        assert_eq!(shown("file:out.jsonl"), "file:out.jsonl");
        assert_eq!(shown("postgres://bob:s3cret@[oops/app"), "postgres://…");
        assert_eq!(shown("s3cret"), "…");
    }
}
