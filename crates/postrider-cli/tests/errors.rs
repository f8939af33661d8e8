//! Every error names what, where and the cure, and no secret.

mod common;

use std::process::Command;

use common::{CANARY, PgDatabase, Place, Running, eventually, sqlite};

/// An address of a server that is not there.
fn nowhere() -> String {
    format!("postgres://bob:{CANARY}@127.0.0.1:1/app")
}

#[test]
fn a_wrong_address_of_the_database() {
    for command in [&["run"][..], &["status"], &["list"], &["init"], &["send", "--topic", "t", "x"]] {
        let place = Place::new().database(&nowhere());
        let error = place.run(command).error();
        assert!(error.contains("127.0.0.1:1/app"), "{command:?}: {error}");
        assert!(error.contains("flag --database"), "{command:?}: {error}");
        let place = Place::new().database(&format!("mysql://bob:{CANARY}@db/app"));
        let error = place.run(command).error();
        assert!(error.contains("postgres://USER@HOST:PORT/NAME"), "{command:?}: {error}");
    }
}

#[test]
fn an_address_that_cannot_be_read() {
    let place = Place::new().database(&format!("postgres://bob:{CANARY}@[oops/app"));
    for command in [&["run"][..], &["init"]] {
        place.run(command).error();
    }
}

#[test]
fn a_wrong_address_of_the_sink() {
    for (sink, part) in [
        (format!("kafka://bob:{CANARY}@broker/t"), "kafka"),
        (format!("nats://bob:{CANARY}@127.0.0.1:1?stream=S"), "127.0.0.1:1"),
        ("file:/no/such/folder/x.jsonl".to_owned(), "/no/such/folder"),
    ] {
        let place = Place::new().variable("POSTRIDER_SINK", &sink);
        let error = place.run(&["run"]).error();
        assert!(error.contains(part) && error.contains("environment variable POSTRIDER_SINK"), "{error}");
    }
}

#[test]
fn a_wrong_password() {
    let database = PgDatabase::create("password");
    let user = format!("{}_user", database.name);
    database.sql(&format!("create role {user} login password 'another'"));
    let place = Place::new().database(&database.url_as(Some(&format!("{user}:{CANARY}"))));
    let said: Vec<String> = [&["run"][..], &["status"], &["init"], &["send", "--topic", "t", "x"]]
        .iter()
        .map(|command| place.run(command).error())
        .collect();
    database.sql(&format!("drop role {user}"));
    for error in said {
        assert!(error.contains("password"), "{error}");
        assert!(error.contains(&user), "names the user, without its password: {error}");
    }
}

#[test]
fn a_missing_table() {
    let database = PgDatabase::create("missing");
    let place = Place::new().database(&database.url());
    for command in [&["run"][..], &["status"], &["send", "--topic", "t", "x"]] {
        let error = place.run(command).error();
        assert!(error.contains("postrider init"), "{command:?}: {error}");
    }
    let empty = Place::new();
    let error = empty.run(&["status"]).error();
    assert!(error.contains("postrider init"), "{error}");
}

#[test]
fn another_version_of_the_tables() {
    let database = PgDatabase::create("version");
    let place = Place::new().database(&database.url());
    place.run(&["init"]).ok();
    database.sql("update postrider_schema set version = 9");
    for command in [&["run"][..], &["status"], &["init"]] {
        let error = place.run(command).error();
        assert!(error.contains("version 9"), "{command:?}: {error}");
    }
    database.sql("update postrider_schema set version = 0");
    for command in [&["run"][..], &["status"]] {
        let error = place.run(command).error();
        assert!(error.contains("version 0") && error.contains("postrider init"), "{command:?}: {error}");
    }
    let file = Place::new();
    file.run(&["init"]).ok();
    sqlite(&file.path("postrider.db"), "update postrider_schema set version = 9");
    for command in [&["run"][..], &["status"], &["send", "--topic", "t", "x"]] {
        let error = file.run(command).error();
        assert!(error.contains("version 9"), "{command:?}: {error}");
    }
}

#[test]
fn a_missing_grant() {
    let database = PgDatabase::create("grant");
    Place::new().database(&database.url()).run(&["init"]).ok();
    let user = format!("{}_user", database.name);
    database.sql(&format!("create role {user} login password '{CANARY}'"));
    let place = Place::new().database(&database.url_as(Some(&format!("{user}:{CANARY}"))));
    let said: Vec<String> = [&["run"][..], &["status"], &["send", "--topic", "t", "x"]]
        .iter()
        .map(|command| place.run(command).error())
        .collect();
    database.sql(&format!("drop owned by {user}; drop role {user}"));
    for error in said {
        assert!(error.to_lowercase().contains("grant"), "{error}");
    }
}

#[test]
fn an_unknown_field_of_the_configuration() {
    let place = Place::new();
    place.write("relay.toml", &format!("[sink]\nurl = \"nats://{CANARY}@h\"\n[relay]\ninflight = 5\n"));
    let error = place.run(&["run", "--config", "relay.toml"]).error();
    assert!(error.contains("`inflight`") && error.contains("relay.toml, line 4"), "{error}");
    assert!(error.contains("`in_flight`"), "{error}");
    let missing = place.run(&["run", "--config", "nothing.toml"]).error();
    assert!(missing.contains("nothing.toml"), "{missing}");
}

#[test]
fn the_usual_file_is_read_and_its_variables_are_expanded() {
    let place = Place::new();
    place.write("postrider.toml", "[source]\ndatabase = \"postgres://bob:${DB_PASSWORD}@127.0.0.1:1/app\"\n");
    let error = place.run(&["status"]).error();
    assert!(error.contains("DB_PASSWORD"), "{error}");
    let place = place.variable("DB_PASSWORD", CANARY);
    let error = place.run(&["status"]).error();
    assert!(error.contains("postrider.toml, line 2"), "{error}");
}

#[test]
fn a_public_port_is_refused() {
    let error = Place::new().run(&["run", "--listen", "0.0.0.0:0"]).error();
    assert!(error.contains("access control"), "{error}");
}

#[test]
fn an_oversize_payload_and_a_bad_topic() {
    let place = Place::new();
    let error = place.run_with(&["send", "--topic", "t", "-"], &vec![b'a'; (1 << 20) + 1]).error();
    assert!(error.contains("1048577") && error.contains("1048576"), "{error}");
    let error = place.run(&["send", "--topic", "a b", "x"]).error();
    assert!(error.contains("topic"), "{error}");
    let error = place.run(&["send", "--topic", "", "x"]).error();
    assert!(error.contains("topic"), "{error}");
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    assert_eq!(Place::new().run(&["send"]).code, 2);
    assert_eq!(Place::new().run(&["frobnicate"]).code, 2);
    let help = Place::new().run(&["--help"]).ok();
    assert!(help.contains("EXAMPLES") && help.contains("EXIT CODES"), "{help}");
}

/// A file system of 64 KiB, in a mount namespace of its own. Needs root, or user namespaces.
fn relay_on_a_small_disk(place: &Place) -> Running {
    let small = place.path("small");
    std::fs::create_dir(&small).expect("a folder");
    let script = format!(
        "mount -t tmpfs -o size=64k tmpfs {small} && exec {program} run --sink file:{small}/out.jsonl --listen 127.0.0.1:0",
        small = small.display(),
        program = env!("CARGO_BIN_EXE_postrider"),
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--map-root-user", "sh", "-c", &script]).current_dir(place.path(""));
    Running::start(command)
}

#[test]
fn a_full_disk_of_the_file_sink() {
    let place = Place::new();
    let relay = relay_on_a_small_disk(&place);
    let big = "x".repeat(20_000);
    for id in ["1", "2", "3", "4", "5"] {
        place.run(&["send", "--topic", "t", "--id", id, &big]).ok();
    }
    let mut status = String::new();
    eventually("the status names the full disk", || {
        status = place.run(&["status"]).ok();
        status.contains("disk is full")
    });
    assert!(status.contains("free space"), "names the cure: {status}");
    assert!(status.contains("Dead         0"), "an outage makes nothing dead: {status}");
    let (code, ready) = common::get(&relay.http(), "/readyz");
    assert!(code == 503 && ready.contains("disk is full"), "not ready, and why: {code} {ready}");
    assert_eq!(common::get(&relay.http(), "/livez").0, 200, "a restart would not help");
    let said = relay.stop();
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.stderr.contains("disk is full"), "the log says it, too: {}", said.stderr);
}
