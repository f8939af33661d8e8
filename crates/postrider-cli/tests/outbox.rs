//! `init`, `send`, `status`, `list`, `show`, `dead`.

mod common;

use common::{PgDatabase, Place, sqlite};

/// Makes the message at `position` dead, as a relay would.
fn kill(place: &Place, position: i64) {
    let sql = format!(
        "begin; insert into outbox_dead (id, lane, bytes, attempts, tries, reason, last_error)
           select id, lane, bytes, 1, 2, 'permanent', 'too large for the broker' from outbox_queue where id = {position};
         delete from outbox_queue where id = {position}; commit;"
    );
    sqlite(&place.path("postrider.db"), &sql);
}

#[test]
fn init_twice_changes_nothing() {
    let place = Place::new();
    assert!(place.run(&["init"]).ok().contains("tables created"));
    assert!(place.run(&["init"]).ok().contains("up to date"));
    let again = place.run(&["init", "--json"]).json();
    assert_eq!(again["changed"], false);
}

#[test]
fn init_prints_the_tables_and_the_grants_without_connecting() {
    let place = Place::new();
    let tables = place.run(&["init", "--print", "--database", "postgres://"]).ok();
    assert!(tables.contains("create table outbox ("), "{tables}");
    let grants = place.run(&["init", "--grants", "--database", "postgres://nobody@127.0.0.1:1/none"]).ok();
    assert!(grants.to_lowercase().contains("grant "), "{grants}");
    assert!(place.run(&["init", "--print"]).ok().contains("strict"), "SQLite's tables");
    assert!(!place.path("postrider.db").exists(), "printing opens nothing");
}

#[test]
fn what_init_prints_is_what_init_does() {
    let printed = PgDatabase::create("printed");
    let page = Place::new().run(&["init", "--print", "--database", "postgres://"]).ok();
    printed.sql(&page);
    let said = Place::new().database(&printed.url()).run(&["init", "--json"]).json();
    assert_eq!(said["changed"], false, "the database that was made by hand is up to date");
}

#[test]
fn send_puts_a_message_in_once() {
    let place = Place::new();
    let args = ["send", "--topic", "t", "--key", "k", "--id", "x", "--header", "a=b", r#"{"n":1}"#];
    assert!(place.run(&args).ok().contains("message x is in the outbox"));
    let again = place.run(&[&args[..], &["--json"]].concat()).json();
    assert_eq!((again["message_id"].as_str(), again["already"].as_bool()), (Some("x"), Some(true)));
    let file = place.path("postrider.db");
    assert_eq!(
        sqlite(&file, "select count(*), payload, content_type, headers from outbox"),
        r#"1|{"n":1}|application/json|{"a":"b"}"#
    );
    let other = place.run(&["send", "--topic", "t", "--id", "x", "other"]).error();
    assert!(other.contains("other content"), "{other}");
}

#[test]
fn payloads_come_from_argument_file_and_standard_input_as_text_or_bytes() {
    let place = Place::new();
    place.write("payload", "from a file");
    place.run(&["send", "--topic", "t", "--id", "file", "--file", "payload"]).ok();
    place.run_with(&["send", "--topic", "t", "--id", "input", "-"], b"from input").ok();
    place.run_with(&["send", "--topic", "t", "--id", "bytes", "--bytes", "-"], b"\xff\x00").ok();
    place.run(&["send", "--topic", "t", "--id", "none"]).ok();
    let refused = place.run_with(&["send", "--topic", "t", "-"], b"\xff\x00").error();
    assert!(refused.contains("--bytes"), "{refused}");
    let sql = "select message_id, payload, hex(payload_bytes) from outbox order by id";
    let rows = sqlite(&place.path("postrider.db"), sql);
    assert_eq!(rows, "file|from a file|\ninput|from input|\nbytes||FF00\nnone||");
}

#[test]
fn a_delayed_message_is_shown_with_its_time() {
    let place = Place::new();
    place.run(&["send", "--topic", "t", "--id", "later", "--delay", "1h", "x"]).ok();
    let shown = place.run(&["show", "later"]).ok();
    assert!(shown.contains("PENDING") && shown.contains("delayed"), "{shown}");
    let waiting = place.run(&["list", "--state", "waiting", "--json"]).json();
    assert_eq!(waiting["messages"][0]["message_id"], "later");
}

#[test]
fn list_shows_newest_first_and_filters() {
    let place = Place::new();
    for (topic, id) in [("a", "1"), ("b", "2"), ("a", "3")] {
        place.run(&["send", "--topic", topic, "--id", id, "x"]).ok();
    }
    let ids = |args: &[&str]| -> Vec<String> {
        let said = place.run(&[&["list", "--json"], args].concat()).json();
        let rows = said["messages"].as_array().expect("a list").clone();
        rows.iter().map(|row| row["message_id"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!(ids(&[]), ["3", "2", "1"]);
    assert_eq!(ids(&["--topic", "a"]), ["3", "1"]);
    assert_eq!(ids(&["--limit", "1"]), ["3"]);
    assert!(ids(&["--state", "dead"]).is_empty());
    let table = place.run(&["list"]).ok();
    assert!(table.starts_with("POSITION  STATE"), "{table}");
}

#[test]
fn show_hides_the_payload_unless_asked() {
    let place = Place::new();
    place.run(&["send", "--topic", "t", "--key", "k", "--id", "x", "hello-payload"]).ok();
    let shown = place.run(&["show", "x"]).ok();
    assert!(shown.contains("PENDING") && shown.contains("Timeline"), "{shown}");
    assert!(!shown.contains("hello-payload"), "{shown}");
    assert!(place.run(&["show", "x", "--payload"]).ok().contains("hello-payload"));
    assert_eq!(place.run(&["show", "1", "--json", "--payload"]).json()["payload"], "hello-payload");
    let missing = place.run(&["show", "nothing"]).error_code(3);
    assert!(missing.contains("\"nothing\""), "{missing}");
}

#[test]
fn dead_messages_are_listed_shown_redriven_and_cancelled() {
    let place = Place::new();
    for id in ["a", "b", "c"] {
        place.run(&["send", "--topic", "t", "--key", id, "--id", id, "x"]).ok();
    }
    kill(&place, 1);
    kill(&place, 2);
    let listed = place.run(&["dead", "list"]).ok();
    assert!(listed.contains("too large for the broker") && listed.contains("permanent"), "{listed}");
    assert!(place.run(&["dead", "show", "a"]).ok().contains("given up (permanent)"));
    place.run(&["dead", "show", "c"]).error_code(3);
    let half = place.run(&["dead", "redrive", "a", "c"]).error_code(3);
    assert!(half.contains("nothing was changed"), "{half}");
    assert_eq!(place.run(&["status", "--json"]).json()["dead"], 2);

    assert_eq!(place.run(&["dead", "redrive", "a", "--by", "anna", "--json"]).json()["redriven"], 1);
    assert_eq!(
        place.run(&["dead", "cancel", "b", "--reason", "test order", "--by", "anna", "--json"]).json()["cancelled"],
        1
    );
    let a = place.run(&["show", "a"]).ok();
    assert!(a.contains("PENDING") && a.contains("redrive by anna"), "{a}");
    let b = place.run(&["show", "b", "--json"]).json();
    assert_eq!((b["state"].as_str(), b["cancelled_by"].as_str()), (Some("CANCELLED"), Some("anna")));
    assert_eq!(b["cancel_reason"], "test order");
    assert!(place.run(&["dead", "list"]).ok().contains("no dead messages"));
}

#[test]
fn status_counts_and_says_that_no_relay_runs() {
    let place = Place::new();
    place.run(&["send", "--topic", "t", "--id", "x", "x"]).ok();
    let text = place.run(&["status"]).ok();
    assert!(text.contains("1 ready") && text.contains("No relay is running"), "{text}");
    let status = place.run(&["status", "--json"]).json();
    assert_eq!((status["ready"].as_u64(), status["unaccounted"].as_u64()), (Some(1), Some(0)));
    assert_eq!(status["shards"], 1);
}

#[test]
fn everything_works_on_postgres_too() {
    let database = PgDatabase::create("roundtrip");
    let place = Place::new().database(&database.url());
    place.run(&["init"]).ok();
    place.run(&["send", "--topic", "t", "--key", "k", "--id", "x", r#"{"n":1}"#]).ok();
    assert_eq!(place.run(&["status", "--json"]).json()["ready"], 1);
    assert_eq!(place.run(&["list", "--json"]).json()["messages"][0]["message_id"], "x");
    assert!(place.run(&["show", "x", "--payload"]).ok().contains(r#"{"n":1}"#));
}

#[test]
fn a_reader_that_has_had_enough_is_no_error() {
    let place = Place::new();
    place.run(&["send", "--topic", "t", "x"]).ok();
    for command in [&["list"][..], &["status"], &["list", "--json"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = place.command(command).stdout(writer).output().expect("the program");
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}
