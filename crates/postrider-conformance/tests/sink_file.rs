//! The sink suite on files, and what only files have.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use bytes::Bytes;
use postrider_conformance::sink::file::FileRig;
use postrider_conformance::sink::{accepted, batch, message, outgoing, parse_line, publish};
use postrider_conformance::sink_suite;
use postrider_relay::message::{Outgoing, Payload};
use postrider_relay::sink::{DurabilityTier, Outcome, Retry, Scope};
use postrider_relay::sinks::{SinkOptions, connect};

async fn rig() -> FileRig {
    FileRig::new()
}

sink_suite!(rig:
    answers_once_per_message_in_order,
    batches_at_the_same_time_keep_their_order,
    payload_bytes_arrive_unchanged,
    headers_arrive,
    an_outage_is_nobodys_fault,
    a_server_restart_in_the_middle_loses_nothing,
    a_closed_sink_accepts_nothing,
    outcomes_that_nobody_awaits_do_no_harm,
);

/// A small file system in memory; gone with the test.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(size: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let options = format!("size={size}");
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(dir.path())
            .output()
            .expect("mount runs");
        assert!(
            output.status.success(),
            "the test of the full disk mounts a tmpfs and needs the right to (run as root): {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // The folder is removed afterwards, which fails visibly when it is still mounted.
        Command::new("umount").args(["-l"]).arg(self.0.path()).status().expect("umount runs");
    }
}

fn kilobyte(n: i64) -> Outgoing {
    let mut message = message(&format!("m{n}"), n);
    message.payload = Payload::Text(Bytes::from("x".repeat(1_000)));
    outgoing(message)
}

#[tokio::test]
async fn a_full_disk_refuses_and_loses_nothing() {
    let disk = Tmpfs::mount("96k");
    let ballast = disk.path().join("ballast");
    std::fs::write(&ballast, vec![0; 32 << 10]).unwrap();
    let path = disk.path().join("out.jsonl");
    let sink = connect(&format!("file:{}", path.display()), &SinkOptions::default()).await.unwrap();

    let outcomes = publish(&*sink, (0..80).map(kilobyte).collect()).await;
    let fit = outcomes.iter().take_while(|outcome| accepted(outcome)).count();
    assert!(fit > 0 && fit < 80, "{fit} fit");
    for outcome in &outcomes[fit..] {
        let Outcome::Refused(refusal) = outcome else { panic!("{outcome:?}") };
        assert_eq!(
            (refusal.scope, refusal.retry, refusal.code.as_str()),
            (Scope::Sink, Retry::Backoff, "ENOSPC")
        );
        assert!(
            refusal.text.contains("out.jsonl") && refusal.text.contains("free space"),
            "{}",
            refusal.text
        );
    }
    let read = || {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with('\n'), "no line is cut in two");
        text.lines().map(|line| parse_line(line).position).collect::<Vec<_>>()
    };
    assert_eq!(read(), (0..fit as i64).collect::<Vec<_>>(), "what was refused is not in the file");
    let outcomes = publish(&*sink, (fit as i64..80).map(kilobyte).collect()).await;
    let more = outcomes.iter().take_while(|outcome| accepted(outcome)).count();
    assert!(outcomes[more..].iter().all(|outcome| matches!(outcome, Outcome::Refused(_))));

    std::fs::remove_file(&ballast).unwrap();
    let next = (fit + more) as i64;
    let outcomes = publish(&*sink, (next..next + 5).map(kilobyte).collect()).await;
    assert!(outcomes.iter().all(accepted), "{outcomes:?}");
    assert_eq!(read(), (0..next + 5).collect::<Vec<_>>());
}

#[tokio::test]
async fn opening_on_a_full_disk_works_or_says_why() {
    let disk = Tmpfs::mount("16k");
    let ballast = std::fs::write(disk.path().join("ballast"), vec![0; 64 << 10]);
    assert!(ballast.is_err(), "the disk is full");
    let path = disk.path().join("out.jsonl");
    match connect(&format!("file:{}", path.display()), &SinkOptions::default()).await {
        Ok(sink) => assert!(!publish(&*sink, batch(0, 1)).await.iter().any(accepted)),
        Err(error) => assert!(error.to_string().contains("out.jsonl"), "{error}"),
    }
}

#[tokio::test]
async fn a_file_that_is_rotated_while_messages_flow_loses_nothing() {
    let rig = FileRig::new();
    let path = rig.path();
    let sink = connect(&format!("file:{}", path.display()), &SinkOptions::default()).await.unwrap();
    let flow = tokio::spawn(async move {
        for first in (0..2_000).step_by(20) {
            assert!(publish(&*sink, batch(first, 20)).await.iter().all(accepted));
        }
    });
    let mut parts = Vec::new();
    for n in 0.. {
        if flow.is_finished() {
            break;
        }
        let part = path.with_extension(n.to_string());
        // Until the sink has begun the next one there is nothing to move.
        if std::fs::rename(&path, &part).is_ok() {
            parts.push(part);
        }
        tokio::task::yield_now().await;
    }
    flow.await.unwrap();
    parts.push(path);
    let mut seen = BTreeSet::new();
    for part in parts.iter().filter(|part| part.exists()) {
        seen.extend(std::fs::read_to_string(part).unwrap().lines().map(|line| parse_line(line).position));
    }
    assert_eq!(seen, (0..2_000).collect());
}

#[tokio::test]
async fn accepted_means_on_the_disk_of_one_machine() {
    let rig = FileRig::new();
    let sink = connect(&format!("file:{}", rig.path().display()), &SinkOptions::default()).await.unwrap();
    assert_eq!(sink.check().await.unwrap(), DurabilityTier::LocalFsync);
    assert_eq!(sink.destination("orders"), sink.destination("payments"));
}
