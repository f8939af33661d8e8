use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::message::{Message, Payload, Position};
use crate::sinks::connect;

fn outgoing(position: i64) -> Outgoing {
    let message = Message {
        position: Position(position),
        message_id: format!("m{position}"),
        topic: "t".into(),
        tag: None,
        key: Some("k".into()),
        aggregate_type: None,
        aggregate_id: None,
        event_type: None,
        schema_version: None,
        headers: Vec::new(),
        content_type: None,
        payload: Payload::Text(Bytes::from_static(b"{}")),
        max_attempts: None,
        trace: None,
        trace_state: None,
        created_at_us: 0,
    };
    Outgoing { message: Arc::new(message), try_number: 1 }
}

async fn open_at(path: &Path) -> Result<Arc<dyn Sink>, SinkError> {
    connect(
        &format!("file:{}", path.display()),
        &SinkOptions { instance: "relay-a".into(), ..SinkOptions::default() },
    )
    .await
}

async fn publish(sink: &dyn Sink, positions: std::ops::Range<i64>) -> Vec<Outcome> {
    let (outcomes, mut receiver) = Outcomes::channel();
    sink.publish(positions.map(outgoing).collect(), outcomes).await;
    let mut seen = Vec::new();
    while let Some((index, outcome)) = receiver.recv().await {
        assert_eq!(index as usize, seen.len(), "one outcome each, in order");
        seen.push(outcome);
    }
    seen
}

fn ids(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let id = |line: &str| {
        serde_json::from_str::<serde_json::Value>(line).unwrap()["message_id"].as_str().unwrap().to_owned()
    };
    text.lines().map(id).collect()
}

#[test]
fn addresses_name_paths() {
    let named = |url: &str| Address::parse(url).and_then(|address| path(&address));
    assert_eq!(named("file:out.jsonl").unwrap(), Path::new("out.jsonl"));
    assert_eq!(named("file:a/50%.jsonl").unwrap(), Path::new("a/50%.jsonl"));
    assert_eq!(named("file:/abs/o").unwrap(), Path::new("/abs/o"));
    assert_eq!(named("file:///abs/o%20o").unwrap(), Path::new("/abs/o o"));
    assert_eq!(named("file://localhost/abs").unwrap(), Path::new("/abs"));
    for url in ["file:", "file:dir/", "file://host/x", "file:///"] {
        assert!(matches!(named(url), Err(SinkError::Config(_))), "{url}");
    }
}

#[tokio::test]
async fn evidence_is_the_offset_of_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let sink = open_at(&path).await.unwrap();
    let outcomes = publish(&*sink, 0..3).await;
    let text = std::fs::read(&path).unwrap();
    for (index, outcome) in outcomes.iter().enumerate() {
        let Outcome::Accepted { evidence: Some(offset) } = outcome else { panic!("{outcome:?}") };
        let line = &text[offset.parse::<usize>().unwrap()..];
        assert!(line.starts_with(format!(r#"{{"message_id":"m{index}""#).as_bytes()));
    }
    assert_eq!(sink.check().await.unwrap(), DurabilityTier::LocalFsync);
}

#[tokio::test]
async fn a_second_relay_is_told_who_holds_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let link = dir.path().join("link.jsonl");
    let first = open_at(&path).await.unwrap();
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for other in [&path, &link] {
        let error = open_at(other).await.err().unwrap();
        assert!(matches!(error, SinkError::Operator(_)));
        let text = error.to_string();
        assert!(text.contains("relay-a") && text.contains(&std::process::id().to_string()), "{text}");
    }
    first.close().await;
    assert!(matches!(publish(&*first, 0..1).await[..], [Outcome::Refused(_)]));
    open_at(&path).await.unwrap();
}

#[tokio::test]
async fn a_torn_last_line_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let whole = "{\"message_id\":\"m0\"}\n";
    let long = format!("{{\"message_id\":\"{}", "x".repeat(200_000));
    for torn in ["{", "{\"message_id\":\"m1\",\"to", "\0\0\0\0", &long] {
        std::fs::write(&path, format!("{whole}{torn}")).unwrap();
        let sink = open_at(&path).await.unwrap();
        publish(&*sink, 1..2).await;
        assert_eq!(ids(&path), ["m0", "m1"], "{torn:.20}");
    }
    std::fs::write(&path, "{\"mess").unwrap();
    open_at(&path).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
}

#[tokio::test]
async fn somebody_elses_file_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notes.txt");
    std::fs::write(&path, "first\nsecond without newline").unwrap();
    let error = open_at(&path).await.err().unwrap().to_string();
    assert!(error.contains("notes.txt") && error.contains("not touched"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "first\nsecond without newline");
}

#[tokio::test]
async fn a_folder_a_missing_folder_and_a_device_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(open_at(dir.path()).await, Err(SinkError::Config(_))));
    assert!(matches!(open_at(Path::new("/dev/full")).await, Err(SinkError::Config(_))));
    let error = open_at(&dir.path().join("no/such/out.jsonl")).await.err().unwrap().to_string();
    assert!(error.contains("create the folder"), "{error}");
}

#[tokio::test]
async fn a_rotated_deleted_or_emptied_file_is_begun_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (path, old) = (dir.path().join("out.jsonl"), dir.path().join("out.jsonl.1"));
    let sink = open_at(&path).await.unwrap();
    publish(&*sink, 0..2).await;
    std::fs::rename(&path, &old).unwrap();
    publish(&*sink, 2..3).await;
    assert_eq!(ids(&old), ["m0", "m1"]);
    assert_eq!(ids(&path), ["m2"]);
    std::fs::remove_file(&path).unwrap();
    publish(&*sink, 3..4).await;
    assert_eq!(ids(&path), ["m3"]);
    std::fs::File::create(&path).unwrap();
    let outcomes = publish(&*sink, 4..5).await;
    assert_eq!(outcomes, [Outcome::Accepted { evidence: Some("0".into()) }]);
    assert_eq!(ids(&path), ["m4"]);
}

#[tokio::test]
async fn what_fdatasync_did_not_bring_to_disk_is_written_again_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.jsonl");
    let mut store = Store::open(&path, "relay-a").unwrap();
    store.append(b"{\"message_id\":1}\n");
    store.doubt(b"{\"message_id\":2}\n");
    let Written::Durable { offset, failed: None, .. } = store.append(b"{\"message_id\":3}\n") else {
        panic!()
    };
    assert_eq!(offset, 34);
    assert_eq!(
        std::fs::read_to_string(&path).unwrap(),
        "{\"message_id\":1}\n{\"message_id\":2}\n{\"message_id\":3}\n"
    );
}
