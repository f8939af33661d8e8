//! The sink suite on standard output, as far as it fits.

use postrider_conformance::sink::stdout::StdoutRig;
use postrider_conformance::sink_suite;

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
