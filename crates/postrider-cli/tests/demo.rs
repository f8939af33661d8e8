//! `demo`: ok with every protection on, and the right number turns with each one off.

mod common;

use common::{Place, eventually};
use serde_json::Value;

/// Runs the demo; exit code and report.
fn demo(args: &[&str]) -> (i32, Value, String) {
    let said = Place::new().run(&[&["demo", "--json"], args].concat());
    let last = said.stdout.lines().last().unwrap_or_else(|| panic!("no report: {said:?}"));
    assert_eq!(said.stdout.lines().count(), 1, "one document on standard output: {}", said.stdout);
    let report = serde_json::from_str(last).expect("the last line is JSON");
    (said.code, report, said.stderr)
}

fn number(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field} is missing: {report}"))
}

#[test]
fn the_demo_is_ok_with_any_seed() {
    for seed in ["1", "2", "3"] {
        let (code, report, story) = demo(&["--seed", seed]);
        assert_eq!((code, report["verdict"].as_str()), (0, Some("ok")), "{report}\n{story}");
        for field in ["lost", "invented", "reordered", "applied_twice", "dead"] {
            assert_eq!(number(&report, field), 0, "{field}: {report}");
        }
        assert_eq!(number(&report, "applied"), number(&report, "committed"));
        assert!(number(&report, "rolled_back") >= 1 && number(&report, "duplicates") >= 1, "{report}");
        assert!(story.contains("kill -9") && story.contains("is down"), "{story}");
    }
}

#[test]
fn the_report_has_its_fields_in_order() {
    let said = Place::new().run(&["demo", "--json", "--seed", "4", "--messages", "40"]);
    let fields = [
        "committed",
        "rolled_back",
        "delivered",
        "duplicates",
        "applied",
        "dead",
        "lost",
        "invented",
        "reordered",
        "applied_twice",
        "verdict",
    ];
    let mut rest = said.stdout.as_str();
    for field in fields {
        let at = rest.find(&format!("\"{field}\":")).unwrap_or_else(|| panic!("{field} in {}", said.stdout));
        rest = &rest[at..];
    }
}

#[test]
fn a_kept_folder_holds_the_books() {
    let place = Place::new();
    let said = place.run(&["demo", "--keep", "books", "--messages", "40"]);
    assert!(said.stdout.contains("Verdict: ok"), "{said:?}");
    for file in ["bank.db", "consumer.db", "messages.jsonl"] {
        assert!(place.path("books").join(file).exists(), "{file}");
    }
    let again = place.run(&["demo", "--keep", "books"]).error();
    assert!(again.contains("not empty"), "{again}");
}

/// Runs the demo without one protection and asserts that the verdict is "failed".
fn without(protection: &str) -> Value {
    let (code, report, story) = demo(&["--seed", "5", "--without", protection]);
    assert_eq!((code, report["verdict"].as_str()), (4, Some("failed")), "{report}\n{story}");
    report
}

#[test]
fn without_lanes_messages_are_reordered() {
    let report = without("lanes");
    assert!(number(&report, "reordered") > 0, "{report}");
    assert_eq!((number(&report, "lost"), number(&report, "invented")), (0, 0), "{report}");
}

#[test]
fn settling_before_the_acknowledgement_loses_messages() {
    let report = without("ack");
    assert!(number(&report, "lost") > 0, "{report}");
    assert_eq!(number(&report, "invented"), 0, "{report}");
}

#[test]
fn without_the_inbox_messages_are_applied_twice() {
    let report = without("inbox");
    assert!(number(&report, "applied_twice") > 0, "{report}");
    assert_eq!((number(&report, "lost"), number(&report, "invented")), (0, 0), "{report}");
}

#[test]
fn without_the_common_transaction_messages_are_lost_and_invented() {
    let report = without("transaction");
    assert!(number(&report, "lost") > 0 && number(&report, "invented") > 0, "{report}");
}

/// The processes that a process has started.
fn children(of: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).unwrap_or_default();
    let all = std::fs::read_dir(format!("/proc/{of}/task")).into_iter().flatten().flatten();
    let of_tasks = all.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let mut found: Vec<u32> = of_tasks
        .chain([text])
        .flat_map(|t| t.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect();
    found.dedup();
    found
}

/// Whether a process still runs; a dead one that nobody has waited for does not.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']) && !rest.is_empty())
}

#[test]
fn the_relay_ends_when_the_demo_is_killed() {
    let place = Place::new();
    let mut command = place.command(&["demo", "--keep", "books", "--messages", "100000"]);
    let mut demo = command.stdout(std::process::Stdio::null()).spawn().expect("the program starts");
    let mut relays = Vec::new();
    eventually("the relay's process has opened the sink", || {
        relays = children(demo.id());
        !relays.is_empty() && place.path("books/messages.jsonl").exists()
    });
    demo.kill().expect("killed");
    demo.wait().expect("ended");
    eventually("the relay has ended, too", || relays.iter().all(|pid| !runs(*pid)));
}
