//! What a seed stands for: sizes, speeds, and which faults happen how often. Each kind of fault is on in about half of
//! the seeds, so that the schedules differ in kind and not only in luck.

use std::time::Duration;

use postrider_relay::core::settings::{Backoff, BreakerSettings, OnDead, Pages, Protections, Settings};

/// A protection that is switched off, to show that the simulation notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the first six are the fields of `Protections`")]
pub enum Mutant {
    Lanes,
    SettleAfterAck,
    LateWindow,
    HeldKeys,
    WaitForSettle,
    OutageUncounted,
    /// The store answers reads without comparing tokens.
    ReadsUnfenced,
    /// The store settles without comparing tokens.
    SettleUnfenced,
    /// The store settles waiting rows by their id alone.
    TriesUnmatched,
    /// The store answers the `xmax` of PostgreSQL's snapshots, which running transactions may exceed.
    EndedXmax,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Lanes,
        Self::SettleAfterAck,
        Self::LateWindow,
        Self::HeldKeys,
        Self::WaitForSettle,
        Self::OutageUncounted,
        Self::ReadsUnfenced,
        Self::SettleUnfenced,
        Self::TriesUnmatched,
        Self::EndedXmax,
    ];

    fn protections(self) -> Protections {
        let mut p = Protections::default();
        match self {
            Self::Lanes => p.lanes = false,
            Self::SettleAfterAck => p.settle_after_ack = false,
            Self::LateWindow => p.late_window = false,
            Self::HeldKeys => p.held_keys = false,
            Self::WaitForSettle => p.wait_for_settle = false,
            Self::OutageUncounted => p.outage_uncounted = false,
            Self::ReadsUnfenced | Self::SettleUnfenced | Self::TriesUnmatched | Self::EndedXmax => {}
        }
        p
    }
}

/// Everything that is decided before a schedule begins. Times are in microseconds of virtual time, chances in 0..1.
#[derive(Clone, Debug)]
pub struct Options {
    pub(super) mutant: Option<Mutant>,
    /// Ids commit in order (SQLite).
    pub(super) ordered: bool,
    pub(super) relays: usize,
    pub(super) shards: i16,
    pub(super) keys: u8,
    /// Two keys share a lane.
    pub(super) lanes_collide: bool,
    pub(super) sinks: usize,
    pub(super) topics: u8,
    /// Faults happen up to this time.
    pub(super) faults_until: u64,
    pub(super) transactions: usize,
    pub(super) unkeyed: f64,
    pub(super) burst: bool,
    pub(super) rollback: f64,
    pub(super) long_transaction: f64,
    /// The id is taken before the transaction has a number, within the late margin.
    pub(super) late_number: f64,
    /// The same, beyond the late margin, for messages without key.
    pub(super) very_late_number: f64,
    pub(super) delayed: f64,
    pub(super) call_time: u64,
    pub(super) slow_call: f64,
    pub(super) slow_call_time: u64,
    /// A call fails before it has an effect.
    pub(super) call_fails: f64,
    /// A call has its effect, and the answer is lost.
    pub(super) answer_lost: f64,
    /// A call is given up, and has its effect later.
    pub(super) effect_late: f64,
    pub(super) effect_late_by: u64,
    pub(super) publish_time: u64,
    pub(super) slow_publish: f64,
    pub(super) publish_answer_lost: f64,
    pub(super) publish_lost: f64,
    pub(super) soft_refusal: f64,
    pub(super) exhausting: f64,
    pub(super) poison: f64,
    pub(super) refused_in_passing: f64,
    pub(super) crashes: usize,
    pub(super) crash_at_acceptance: f64,
    pub(super) crash_at_settle: f64,
    pub(super) pauses: usize,
    pub(super) stops: usize,
    pub(super) outages: usize,
    pub(super) destination_outages: usize,
    /// When all else has healed, one sink (`None`) or one topic of it stays down a while longer; what has nothing to do
    /// with it must arrive meanwhile.
    pub(super) lasting: Option<(usize, Option<u8>)>,
    pub(super) clock_steps: usize,
    pub(super) operator: usize,
    /// Events reach the core in batches.
    pub(super) batching: bool,
    /// Actions are carried out a moment after they were decided.
    pub(super) late_hands: bool,
    pub(super) settings: Settings,
}

pub(super) fn chance(rng: &mut fastrand::Rng, p: f64) -> bool {
    p > 0.0 && rng.f64() < p
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A value from `small`, or the real default.
fn size(rng: &mut fastrand::Rng, small: std::ops::RangeInclusive<u32>, real: u32) -> u32 {
    if rng.u8(0..4) == 0 { real } else { rng.u32(small) }
}

/// `p` in about half of the seeds, else nothing.
fn sometimes(rng: &mut fastrand::Rng, p: f64) -> f64 {
    if rng.bool() { p * rng.f64() } else { 0.0 }
}

fn some(rng: &mut fastrand::Rng, most: usize) -> usize {
    if rng.bool() { rng.usize(1..=most) } else { 0 }
}

impl Options {
    /// The options of the schedule `rng` stands for.
    pub(super) fn draw(rng: &mut fastrand::Rng, mutant: Option<Mutant>) -> Self {
        let settings = draw_settings(rng, mutant);
        let lease = micros(settings.lease);
        let ordered = rng.u8(0..5) == 0;
        // It matters only while two relays believe in the same shard, which takes a jump of the clock and luck.
        let zombies = mutant == Some(Mutant::ReadsUnfenced);
        let faults_until = rng.u64(2 * lease..6 * lease);
        let (sinks, topics) = (rng.usize(1..=2), rng.u8(1..=4));
        let lasting = draw_lasting(rng, &settings, sinks, topics);
        Self {
            mutant,
            ordered,
            relays: if zombies { 3 } else { rng.usize(1..=3) },
            shards: if ordered { 1 } else { rng.i16(1..=4) },
            keys: rng.u8(1..=6),
            lanes_collide: rng.u8(0..4) == 0,
            sinks,
            topics,
            faults_until,
            transactions: rng.usize(3..=24),
            unkeyed: if rng.bool() { 0.1 } else { 0.5 },
            burst: rng.u8(0..3) == 0,
            rollback: sometimes(rng, 0.4),
            long_transaction: sometimes(rng, 0.7),
            late_number: if ordered { 0.0 } else { sometimes(rng, 0.5) },
            very_late_number: if ordered { 0.0 } else { sometimes(rng, 0.2) },
            delayed: sometimes(rng, 0.5),
            call_time: *[300, 1_000, 5_000].get(rng.usize(0..3)).unwrap_or(&300),
            slow_call: sometimes(rng, 0.2),
            slow_call_time: if rng.bool() { rng.u64(10_000..lease) } else { rng.u64(lease..4 * lease) },
            call_fails: sometimes(rng, 0.1),
            answer_lost: sometimes(rng, 0.1),
            effect_late: sometimes(rng, 0.1),
            effect_late_by: if rng.bool() { 200_000 } else { 3 * lease },
            publish_time: *[500, 2_000, 20_000].get(rng.usize(0..3)).unwrap_or(&500),
            slow_publish: sometimes(rng, 0.1),
            publish_answer_lost: sometimes(rng, 0.1),
            publish_lost: sometimes(rng, 0.1),
            soft_refusal: if zombies { 0.7 } else { sometimes(rng, 0.5) },
            exhausting: sometimes(rng, 0.2),
            poison: sometimes(rng, 0.2),
            refused_in_passing: sometimes(rng, 0.2),
            crashes: some(rng, 3),
            crash_at_acceptance: sometimes(rng, 0.05),
            crash_at_settle: sometimes(rng, 0.1),
            pauses: some(rng, 3),
            stops: some(rng, 3),
            outages: some(rng, 3),
            destination_outages: some(rng, 3),
            lasting,
            clock_steps: if zombies {
                12
            } else if rng.u8(0..4) == 0 {
                rng.usize(1..=2)
            } else {
                0
            },
            operator: some(rng, 6),
            batching: rng.bool(),
            late_hands: rng.bool(),
            settings,
        }
    }
}

/// Only where the limits are the real ones: when as many keys are held back as may be remembered, all others wait too.
fn draw_lasting(
    rng: &mut fastrand::Rng,
    settings: &Settings,
    sinks: usize,
    topics: u8,
) -> Option<(usize, Option<u8>)> {
    if settings.held_lanes < 1_000 || settings.buffer_heads < 1_000 || rng.bool() {
        return None;
    }
    let topic = rng.u8(0..topics);
    let sink = usize::from(topic) % sinks;
    Some((sink, rng.bool().then_some(topic)))
}

fn draw_settings(rng: &mut fastrand::Rng, mutant: Option<Mutant>) -> Settings {
    let lease = ms(*[600, 1_500, 4_000].get(rng.usize(0..3)).unwrap_or(&600));
    let renew_every = lease / 3;
    let margin = lease / 15;
    let longest = micros(lease - renew_every - margin);
    Settings {
        lease,
        renew_every,
        margin,
        publish_timeout: Duration::from_micros(rng.u64(longest / 8..=longest)),
        idle_poll: ms(rng.u64(20..=200)),
        sweep_every: ms(rng.u64(100..=1_000)),
        late_margin: ms(rng.u64(2..=60)),
        head_batch: size(rng, 1..=8, 2_000),
        load_batch: size(rng, 1..=6, 500),
        settle_batch: size(rng, 1..=6, 1_000),
        in_flight: size(rng, 1..=6, 1_000),
        buffer_bytes: if rng.u8(0..4) == 0 { rng.u64(1..=100) } else { 64 << 20 },
        buffer_heads: size(rng, 1..=10, 10_000),
        held_lanes: size(rng, 1..=3, 250_000),
        lane_heads: size(rng, 1..=4, 64),
        max_attempts: rng.u32(1..=4),
        backoff: Backoff {
            first: ms(rng.u64(5..=300)),
            factor: 2.0,
            cap: ms(rng.u64(300..=1_500)),
            jitter: 0.3,
        },
        on_dead: if rng.u8(0..3) == 0 { OnDead::Block } else { OnDead::Skip },
        confirm_delay: ms(rng.u64(5..=300)),
        breaker: BreakerSettings {
            failures: rng.u32(1..=5),
            first_probe: ms(rng.u64(20..=200)),
            probe_cap: ms(rng.u64(200..=1_500)),
            auth_probe: ms(rng.u64(200..=1_500)),
        },
        pages: if rng.u8(0..3) == 0 {
            Pages::default()
        } else {
            Pages {
                held: rng.u32(1..=3),
                lane: rng.u32(1..=4),
                due: rng.u32(1..=6),
                lanes_by_rescan: rng.usize(0..=3),
            }
        },
        protections: mutant.map(Mutant::protections).unwrap_or_default(),
    }
}

pub(super) fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}
