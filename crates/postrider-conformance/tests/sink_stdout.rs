//! The sink suite on standard output, as far as it fits.

use std::io::Write;
use std::sync::mpsc;
use std::time::Duration;

use postrider_conformance::sink::stdout::StdoutRig;
use postrider_conformance::sink::{Rig, batch, publish, publish_until_accepted};
use postrider_conformance::sink_suite;
use postrider_relay::sink::{Outcome, Scope};
use postrider_relay::sinks::StdoutSink;

async fn rig() -> StdoutRig {
    StdoutRig::default()
}

sink_suite!(rig:
    answers_once_per_message_in_order,
    batches_at_the_same_time_keep_their_order,
    payload_bytes_arrive_unchanged,
    headers_arrive,
    outcomes_that_nobody_awaits_do_no_harm,
);

#[tokio::test]
async fn a_broken_pipe_is_unknown() {
    let rig = StdoutRig::default();
    let sink = rig.open().await;
    rig.stop().await;
    let outcomes = publish(&*sink, batch(0, 2)).await;
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Unknown { .. })), "{outcomes:?}");
}

/// A reader that reads when the test says so.
struct Stuck(mpsc::Receiver<()>);

impl Write for Stuck {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // An error means that the test is over.
        self.0.recv().map_err(|_| std::io::ErrorKind::BrokenPipe)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_holds_nobody_for_ever() {
    let (read, gate) = mpsc::channel();
    let sink = StdoutSink::to(Box::new(Stuck(gate)), Duration::from_millis(100));
    let begun = publish(&sink, batch(0, 2)).await;
    assert!(begun.iter().all(|outcome| matches!(outcome, Outcome::Unknown { .. })), "{begun:?}");
    // The first batch is still being written; of the second nothing is.
    for outcome in publish(&sink, batch(2, 2)).await {
        let Outcome::Refused(refusal) = outcome else { panic!("{outcome:?}") };
        assert_eq!((refusal.scope, refusal.code.as_str()), (Scope::Sink, "blocked"));
    }
    for _ in 0..100 {
        read.send(()).unwrap();
    }
    publish_until_accepted(&sink, batch(2, 2)).await;
}
