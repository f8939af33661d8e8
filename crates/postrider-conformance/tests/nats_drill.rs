//! The drill on real servers: nothing is lost, and every duplicate has a witness.

use std::time::Duration;

use postrider_conformance::process::drill::Drill;
use postrider_conformance::sink::nats::required;

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_messages_survive_a_killed_and_a_paused_relay() {
    let drill = Drill {
        program: env!("CARGO_BIN_EXE_drill-relay").into(),
        nats: required("NATS_URL"),
        messages: 10_000,
        keys: 200,
        writers: 8,
        in_flight: 100,
        lease: Duration::from_secs(4),
        seed: 1,
    };
    let report = drill.run().await;
    println!("{report}");
    report.assert_kept();
}
