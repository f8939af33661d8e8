//! `run`: without configuration, health and metrics, signals.

mod common;

use common::{PgDatabase, Place, eventually, get, get_as};

#[test]
fn run_and_send_work_without_any_configuration() {
    let place = Place::new();
    let relay = place.relay(&[]);
    assert!(
        relay.announced.contains("sqlite:postrider.db") && relay.announced.contains("file:postrider.jsonl")
    );
    place.run(&["send", "--topic", "t", "--key", "k", "--id", "x", r#"{"n":1}"#]).ok();
    eventually("the message is in the file", || place.delivered().len() == 1);
    let line = &place.delivered()[0];
    assert_eq!((line["message_id"].as_str(), line["payload"].as_str()), (Some("x"), Some(r#"{"n":1}"#)));
    eventually("the receipt is written", || place.run(&["show", "x", "--json"]).json()["state"] == "SENT");
    let shown = place.run(&["show", "x"]).ok();
    assert!(shown.contains("acknowledged by the sink default"), "{shown}");
    let status = place.run(&["status"]).ok();
    assert!(status.contains("0 ready") && !status.contains("No relay"), "{status}");
    relay.stop().ok();
}

#[test]
fn a_signal_drains_and_the_next_relay_finds_nothing_left() {
    let place = Place::new();
    for n in 0..50 {
        place.run(&["send", "--topic", "t", "--id", &n.to_string(), "x"]).ok();
    }
    let relay = place.relay(&[]);
    eventually("something is delivered", || !place.delivered().is_empty());
    relay.stop().ok();
    let after = place.delivered().len();
    let status = place.run(&["status", "--json"]).json();
    assert_eq!(status["ready"].as_u64().map(|n| n + after as u64), Some(50), "what is delivered is settled");
    assert_eq!(status["shards_without_owner"], 1, "the shard was given back");
    let relay = place.relay(&[]);
    eventually("the rest is delivered", || place.delivered().len() == 50);
    relay.signal("INT");
    relay.wait().ok();
    assert_eq!(place.delivered().len(), 50, "no duplicates without a fault");
}

#[test]
fn health_and_metrics_are_offered_on_loopback() {
    let place = Place::new();
    let relay = place.relay(&["--listen", "127.0.0.1:0"]);
    let http = relay.http();
    eventually("it is ready", || get(&http, "/readyz").0 == 200);
    let (status, body) = get(&http, "/readyz");
    let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!((status, body["ready"].as_bool()), (200, Some(true)));
    assert_eq!(get(&http, "/livez").0, 200);
    place.run(&["send", "--topic", "t", "--id", "x", "x"]).ok();
    eventually("it is counted", || {
        let (status, text) = get(&http, "/metrics");
        assert_eq!(status, 200);
        text.contains("postrider_backlog{") && text.contains("postrider_lag_seconds{")
    });
    let text = get(&http, "/metrics").1;
    for counter in ["vanished", "swept", "takeovers", "fenced"] {
        let name = format!("postrider_{counter}_total{{");
        let from_zero = text.lines().any(|line| line.starts_with(&name) && line.ends_with(" 0"));
        assert!(from_zero, "an alarm on the increase of {counter} needs its zero: {text}");
    }
    assert_eq!(get(&http, "/nothing").0, 404);
    assert_eq!(get_as(&http, "/metrics", "evil.example").0, 421, "a name of somebody else is not answered");
    relay.stop().ok();
}

#[test]
fn the_announcement_is_one_json_document_on_request() {
    let place = Place::new();
    let said = place.relay(&["--json", "--instance", "r1"]).stop().json();
    assert_eq!(
        (said["instance"].as_str(), said["sink"].as_str()),
        (Some("r1"), Some("file:postrider.jsonl"))
    );
}

#[test]
fn postgres_to_a_file() {
    let database = PgDatabase::create("run");
    let place = Place::new().database(&database.url());
    place.run(&["init"]).ok();
    let relay = place.relay(&["--instance", "first"]);
    place.run(&["send", "--topic", "t", "--id", "x", "x"]).ok();
    eventually("the message is in the file", || place.delivered().len() == 1);
    let status = place.run(&["status", "--json"]).json();
    assert_eq!(status["relays"][0]["instance"], "first");
    assert_eq!(status["shards"], 64);
    relay.stop().ok();
}

#[test]
fn logs_are_json_on_request_and_hold_no_payload() {
    let place = Place::new();
    let relay = place.relay(&["--log-format", "json", "--log-level", "trace"]);
    place.run(&["send", "--topic", "t", "--id", "x", "payload-that-must-not-be-logged"]).ok();
    eventually("the message is in the file", || place.delivered().len() == 1);
    let said = relay.stop();
    assert!(!said.stderr.contains("payload-that-must-not-be-logged"), "{}", said.stderr);
    let lines: Vec<&str> = said.stderr.lines().collect();
    assert!(!lines.is_empty());
    for line in lines {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "no JSON: {line}");
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let place = Place::new();
    let relay = place.relay(&[]);
    let database = place.path("postrider.db");
    eventually("the relay owns the shard", || {
        place.run(&["status", "--json"]).json()["shards_without_owner"] == 0
    });
    // A writer that stays: the relay cannot give its shard back, and waits.
    let _writer = common::hold_write_lock(&database);
    relay.signal("TERM");
    let said = relay.second_signal_when_stopping("TERM");
    assert_eq!(said.code, 143, "{said:?}");
    assert!(said.stderr.contains("exiting at once"), "{said:?}");
}

/// A relay that is stopped for longer than its lease, and whose shards nobody took, goes on and says that it is ready again.
#[test]
fn a_relay_that_renews_late_is_ready_again() {
    let place = Place::new()
        .variable("POSTRIDER_RELAY_LEASE", "1s")
        .variable("POSTRIDER_RELAY_RENEW_EVERY", "300ms")
        .variable("POSTRIDER_RELAY_MARGIN", "100ms")
        .variable("POSTRIDER_RELAY_PUBLISH_TIMEOUT", "500ms");
    let relay = place.relay(&["--listen", "127.0.0.1:0"]);
    let http = relay.http();
    eventually("it is ready", || get(&http, "/readyz").0 == 200);
    relay.signal("STOP");
    let live = || place.run(&["status", "--json"]).json()["relays"][0]["live"] == true;
    eventually("its lease has run out", || !live());
    relay.signal("CONT");
    eventually("it has renewed", live);
    eventually("it is ready again", || get(&http, "/readyz").0 == 200);
    let said = relay.stop();
    assert!(said.stderr.contains("the lease has run out without a renewal"), "{}", said.stderr);
}
