use std::io::Write;

use secrecy::ExposeSecret;

use super::*;

fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn with_file(text: &str, env: &[(&str, &str)], flags: &Flags) -> Result<Config, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(text.as_bytes()).expect("written");
    load(Some(file.path()), &environment(env), flags)
}

fn refused(text: &str, env: &[(&str, &str)]) -> ConfigError {
    with_file(text, env, &Flags::default()).expect_err("refused")
}

#[test]
fn without_anything_there_are_defaults() {
    let config = load(None, &BTreeMap::new(), &Flags::default()).expect("defaults");
    assert_eq!(config.source.database.expose_secret(), DEFAULT_DATABASE);
    assert_eq!(config.sink.url.expose_secret(), DEFAULT_SINK);
    assert_eq!(config.relay, Settings::default());
    assert_eq!(config.source.from, Origin::Default);
}

#[test]
fn flags_beat_environment_beats_file() {
    let file = "instance = \"a\"\n[source]\ndatabase = \"sqlite:file.db\"\npassword = \"x\"\n[relay]\nlease = \"20s\"\n";
    let env = [
        ("POSTRIDER_DATABASE", "sqlite:env.db"),
        ("POSTRIDER_RELAY_LEASE", "30s"),
        ("POSTRIDER_INSTANCE", "b"),
    ];
    let flags = Flags { instance: Some("c".to_owned()), ..Flags::default() };
    let config = with_file(file, &env, &flags).expect("valid");
    assert_eq!(config.source.database.expose_secret(), "sqlite:env.db");
    assert_eq!(config.source.from, Origin::Variable("POSTRIDER_DATABASE".to_owned()));
    assert_eq!(config.relay.lease, Duration::from_secs(30));
    assert_eq!(config.instance, "c");
}

#[test]
fn every_field_can_be_set_by_environment() {
    for field in fields::FIELDS {
        let value = match field.takes {
            fields::Takes::Word(words) => words[0],
            fields::Takes::Count | fields::Takes::Bytes => "700",
            fields::Takes::Number => "1.0",
            fields::Takes::Time => "2s",
            fields::Takes::Address => "127.0.0.1:0",
            _ => "x",
        };
        let env = environment(&[(&fields::variable(field.path), value)]);
        let overlays = document::overlays(&env, &Flags::default());
        assert_eq!(overlays.len(), 1, "{}", field.path);
        let read = document::read("", None, &env, &overlays);
        assert!(read.is_ok(), "{}: {:?}", field.path, read.err());
    }
}

#[test]
fn an_unknown_field_names_line_and_neighbour() {
    let error = refused("[relay]\nlease = \"15s\"\ninflight = 5\n", &[]);
    assert!(error.what.contains("`inflight` in [relay]"), "{error:?}");
    assert!(error.place.as_deref().is_some_and(|p| p.ends_with("line 3")), "{error:?}");
    assert_eq!(error.cure.as_deref(), Some("did you mean `in_flight`?"));
}

#[test]
fn an_unknown_section_lists_what_there_is() {
    let error = refused("[kafka]\nx = 1\n", &[]);
    assert!(error.what.contains("`kafka`"), "{error:?}");
    assert!(error.cure.as_deref().is_some_and(|c| c.contains("`sink`")), "{error:?}");
}

#[test]
fn a_wrong_type_names_the_constraint_and_never_the_value() {
    for (text, field) in [
        ("[relay]\nlease = 15\n", "relay.lease"),
        ("[relay]\nlease = \"s3cret\"\n", "relay.lease"),
        ("[relay]\nin_flight = \"s3cret\"\n", "relay.in_flight"),
        ("[relay]\nin_flight = -5\n", "relay.in_flight"),
        ("[relay]\nbuffer_bytes = \"s3cret\"\n", "relay.buffer_bytes"),
        ("[log]\nformat = \"s3cret\"\n", "log.format"),
        ("[http]\nlisten = \"s3cret\"\n", "http.listen"),
        ("[relay.breaker]\nfailures = true\n", "relay.breaker.failures"),
        ("[relay]\nbackoff = { first = \"1s\", cap = 5 }\n", "relay.backoff.cap"),
    ] {
        let error = refused(text, &[]);
        assert!(error.what.starts_with(&format!("`{field}` must be ")), "{error:?}");
        assert!(error.place.as_deref().is_some_and(|p| p.ends_with("line 2")), "{error:?}");
        assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    }
}

#[test]
fn a_wrong_variable_is_named() {
    for (name, value) in [("POSTRIDER_RELAY_LEASE", "s3cret"), ("POSTRIDER_RELAY_IN_FLIGHT", "s3cret")] {
        let error = refused("", &[(name, value)]);
        assert_eq!(error.place.as_deref(), Some(format!("environment variable {name}").as_str()));
        assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
    }
}

#[test]
fn variables_in_strings_are_expanded_after_parsing() {
    let text = "[source]\ndatabase = \"postgres://u:${PW}@h/d\"\n";
    let config = with_file(text, &[("PW", "a\"b")], &Flags::default()).expect("valid");
    assert_eq!(config.source.database.expose_secret(), "postgres://u:a\"b@h/d");
    let error = refused(text, &[]);
    assert!(error.what.contains("`source.database`") && error.what.contains(" PW,"), "{error:?}");
}

#[test]
fn a_password_from_a_file_is_put_into_the_address() {
    let mut secret = tempfile::NamedTempFile::new().expect("a temporary file");
    secret.write_all(b"p@ss/word\n").expect("written");
    let text = format!(
        "[source]\ndatabase = \"postgres://u@h/d\"\npassword_file = \"{}\"\n",
        secret.path().display()
    );
    let config = with_file(&text, &[], &Flags::default()).expect("valid");
    assert_eq!(config.source.database.expose_secret(), "postgres://u:p%40ss%2Fword@h/d");
    assert!(!format!("{config:?}").contains("p%40ss"), "Debug shows no secret");
}

#[test]
fn two_ways_to_say_the_same_contradict() {
    let error = refused("[sink]\nurl = \"file:a\"\nurl_file = \"b\"\n", &[]);
    assert!(error.what.contains("`sink.url` and `sink.url_file` are both set"), "{error:?}");
}

#[test]
fn settings_that_contradict_each_other_are_refused_at_their_line() {
    let error = refused("[relay]\npublish_timeout = \"20s\"\n", &[]);
    assert!(error.what.starts_with("`relay.publish_timeout`"), "{error:?}");
    assert!(error.place.as_deref().is_some_and(|p| p.ends_with("line 2")), "{error:?}");
}

#[test]
fn a_public_address_is_refused_with_the_reason() {
    let error = refused("[http]\nlisten = \"0.0.0.0:9464\"\n", &[]);
    assert!(error.cure.as_deref().is_some_and(|c| c.contains("access control")), "{error:?}");
}

#[test]
fn a_syntax_error_names_the_line_and_quotes_nothing() {
    let error = refused("instance = \"a\"\n[source]\ndatabase = \"s3cret\n", &[]);
    assert!(error.place.as_deref().is_some_and(|p| p.contains("line 3")), "{error:?}");
    assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
}

#[test]
fn misspelt_variables_are_noticed() {
    let env = environment(&[("POSTRIDER_RELAY_LEESE", "1s"), ("POSTRIDER_RELAY_PORT_80_TCP", "x")]);
    let found = misspelt_variables(&env);
    assert_eq!(found, [("POSTRIDER_RELAY_LEESE".to_owned(), "POSTRIDER_RELAY_LEASE".to_owned())]);
}

#[test]
fn the_page_about_the_configuration_names_every_field_and_variable() {
    let page = include_str!("../../../../docs/configuration.md");
    for field in fields::FIELDS {
        let name = field.path.rsplit('.').next().expect("a name");
        assert!(page.contains(&format!("| `{name}`")), "{} is missing", field.path);
        assert!(page.contains(&fields::variable(field.path)), "{} is missing", fields::variable(field.path));
    }
}

#[test]
fn the_example_on_the_page_is_valid() {
    let page = include_str!("../../../../docs/configuration.md");
    let example =
        page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).expect("an example");
    with_file(example, &[("DB_PASSWORD", "x")], &Flags::default()).expect("valid");
}
