//! The congestion controller of a link: quinn's BBR, with a bound on the queue that the link fills.
//!
//! quinn paces by the window alone, and the window of its BBR grows with every burst of acknowledgements. So bulk
//! transfers fill the queue of the path, and small streams wait behind them. Here BBR searches for the rate at the start,
//! and empties the queue every 10 s, which shows the shortest round trip. The bound limits the bytes in flight otherwise.
#![expect(
    clippy::disallowed_types,
    reason = "the controllers of quinn get the time as std's Instant"
)]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use quinn::Connection;
use quinn::congestion::{Bbr, BbrConfig, Controller, ControllerFactory, ControllerMetrics};
use quinn_proto::RttEstimator;

/// Shortest time of a measurement. Shorter times measure bursts.
const PERIOD: Duration = Duration::from_millis(10);

/// Number of recent measurements. The rate is the largest of them.
const RATES: usize = 10;

/// The search for the rate ends after so many measurements in which the rate has grown by less than [`GROWTH`], as in
/// BBR.
const MEASUREMENTS_WITHOUT_GROWTH: u32 = 3;
const GROWTH: f64 = 1.25;

/// Shortest time that the bytes in the queue of a path may take. Acknowledgements come in bursts, and a sender must not
/// run out of window between two bursts.
const QUEUE: Duration = Duration::from_millis(10);

/// Number of consecutive measurements with long round trips after which the shortest round trip is measured again: more
/// than [`RATES`], because the queue of a path that has become slower empties only once the old rate is forgotten.
const LONG_ROUND_TRIPS: u32 = 12;

/// While round trips are long, one of [`PROBES`] measurements permits more than the bound, up to [`PROBE`] times.
const PROBES: u32 = 4;
const PROBE: f64 = 1.5;

/// Part of a measured jitter that is added to the average of earlier ones.
const JITTER_SHARE: f64 = 0.125;

/// Smallest bound, in packets.
const LEAST_PACKETS: u64 = 16;

/// Number of bursts that may leave a silent link although its window is full, and the room for each, in packets. quinn leaves
/// the last packet of a window unused. A packet with acknowledgements alone is a burst, too.
const PERMITTED_BURSTS: u32 = 4;
const BURST_PACKETS: u64 = 3;

/// Creates the controllers of links.
#[derive(Debug, Default)]
pub(super) struct BoundedBbrConfig(Arc<BbrConfig>);

/// quinn's BBR with an upper bound on its window.
#[derive(Clone)]
struct BoundedBbr {
    bbr: Bbr,
    mtu: u64,
    path: Path,
    /// Upper bound for the bytes that are sent and not acknowledged. Counts lost bytes until the next acknowledgement.
    in_flight: u64,
    /// Number of bursts that may leave although the window is full. Copies of the controller share it.
    permitted: Arc<AtomicU32>,
}

/// Lets some packets leave although the window is full. An outage leaves a window full of lost bytes. quinn learns of the
/// losses from the next acknowledgement, but sends nothing that can be acknowledged, except for probes, whose intervals
/// double up to the length of the outage.
pub(super) fn permit_packets(connection: &Connection) {
    let controller = connection.congestion_state().into_any();
    if let Ok(controller) = controller.downcast::<BoundedBbr>() {
        controller
            .permitted
            .store(PERMITTED_BURSTS, Ordering::Relaxed);
    }
}

/// Measurements of a path. Each takes at least one round trip.
#[derive(Clone, Debug)]
struct Path {
    /// Shortest round trip since the start, or since the round trips became longer.
    round_trip: Duration,
    /// Average difference between the mean and the shortest round trip of a measurement, in seconds.
    jitter: f64,
    /// Shortest round trip of the last measurement.
    before: Duration,
    /// Number of consecutive measurements with round trips longer than the bound explains.
    long: u32,
    /// The last rates in bytes per second, the latest at the end.
    rates: [f64; RATES],
    /// The rate at its last growth, and the number of measurements since.
    grown: f64,
    measurements: u32,
    /// The current measurement.
    current: Measurement,
    /// Largest number of bytes to have in flight, computed after each measurement; `None` during the search for the rate.
    bound: Option<u64>,
}

/// A measurement in progress.
#[derive(Clone, Debug)]
struct Measurement {
    since: Instant,
    /// Acknowledged bytes.
    acked: u64,
    /// Shortest round trip; `MAX` before the first acknowledgement.
    shortest: Duration,
    /// Sum of the round trips in seconds, each times the acknowledged bytes.
    round_trips: f64,
    /// True if the sender had too little to send to fill the path.
    is_idle: bool,
}

// === impl BoundedBbrConfig ===

impl ControllerFactory for BoundedBbrConfig {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        Box::new(BoundedBbr {
            bbr: Bbr::new(self.0.clone(), mtu),
            mtu: mtu.into(),
            path: Path::new(now),
            in_flight: 0,
            permitted: Arc::default(),
        })
    }
}

// === impl BoundedBbr ===

impl Controller for BoundedBbr {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet: u64) {
        self.bbr.on_sent(now, bytes, last_packet);
        self.in_flight += bytes;
        let permitted = self.permitted.load(Ordering::Relaxed);
        if permitted > 0 {
            self.permitted.store(permitted - 1, Ordering::Relaxed);
        }
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        is_idle: bool,
        round_trip: &RttEstimator,
    ) {
        self.bbr.on_ack(now, sent, bytes, is_idle, round_trip);
        self.path.acked(now, sent, bytes);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        is_idle: bool,
        largest_acked: Option<u64>,
    ) {
        self.bbr.on_end_acks(now, in_flight, is_idle, largest_acked);
        self.in_flight = in_flight;
        self.permitted.store(0, Ordering::Relaxed);
        self.path
            .end_acks(now, in_flight, is_idle, self.bbr.window());
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent: bool, lost: u64) {
        self.bbr.on_congestion_event(now, sent, is_persistent, lost);
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.bbr.on_mtu_update(mtu);
        self.mtu = mtu.into();
    }

    fn window(&self) -> u64 {
        let window = self.bbr.window();
        let window = match self.path.bound {
            Some(bound) => window.min(bound.max(LEAST_PACKETS * self.mtu)),
            None => window,
        };
        match self.permitted.load(Ordering::Relaxed) {
            0 => window,
            _ => window.max(self.in_flight + BURST_PACKETS * self.mtu),
        }
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = self.bbr.metrics();
        metrics.congestion_window = self.window();
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.bbr.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

// === impl Path ===

impl Path {
    fn new(now: Instant) -> Self {
        Self {
            round_trip: Duration::MAX,
            jitter: 0.0,
            before: Duration::MAX,
            long: 0,
            rates: [0.0; RATES],
            grown: 0.0,
            measurements: 0,
            current: Measurement::new(now),
            bound: None,
        }
    }

    /// Returns the rate in bytes per second.
    fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }

    /// Returns the longest round trip that the bound explains: with its queue, and with the jitter of the path.
    fn permitted(&self) -> Duration {
        let queue = QUEUE.max(self.round_trip / 4);
        let jitter = Duration::from_secs_f64(self.jitter);
        self.round_trip.saturating_add(queue + jitter)
    }

    /// Notes a packet that the peer has acknowledged.
    fn acked(&mut self, now: Instant, sent: Instant, bytes: u64) {
        let current = &mut self.current;
        let round_trip = now.saturating_duration_since(sent);
        self.round_trip = self.round_trip.min(round_trip);
        if current.acked == 0 && sent > current.since {
            // The sender was silent. The measurement begins now.
            *current = Measurement::new(now);
            return;
        }
        current.acked += bytes;
        current.shortest = current.shortest.min(round_trip);
        current.round_trips += round_trip.as_secs_f64() * bytes as f64;
    }

    /// Ends the measurement if it has taken long enough. `window` is the window of BBR.
    ///
    /// If the sender or BBR did not fill the path, the path has at least the measured rate. For quinn, a sender whose
    /// streams have used up their windows has nothing to send, either: if its bytes wait in the queue of the path, the
    /// measurement counts.
    fn end_acks(&mut self, now: Instant, in_flight: u64, is_idle: bool, window: u64) {
        let product = self.rate() * self.round_trip.as_secs_f64();
        self.current.is_idle |= is_idle && (in_flight as f64) < product;
        let time = now.saturating_duration_since(self.current.since);
        if self.current.acked == 0 || time < self.current.shortest.max(PERIOD) {
            return;
        }
        let ended = std::mem::replace(&mut self.current, Measurement::new(now));
        self.add(&ended, time, window);
        self.bound = self.is_bounded().then(|| self.limit());
    }

    /// Adds a measurement that took `time`.
    fn add(&mut self, ended: &Measurement, time: Duration, window: u64) {
        let mean = ended.round_trips / ended.acked as f64;
        let jitter = (mean - ended.shortest.as_secs_f64()).max(0.0);
        self.jitter += JITTER_SHARE * (jitter - self.jitter);
        self.look_at_round_trip(ended.shortest, time);
        let rate = ended.acked as f64 / time.as_secs_f64();
        // BBR has a small window while it empties the queue.
        let is_small = (window as f64) < GROWTH * rate * self.round_trip.as_secs_f64();
        let is_least = ended.is_idle || is_small;
        if is_least && rate <= self.rate() {
            return;
        }
        self.rates.rotate_left(1);
        if let Some(oldest) = self.rates.last_mut() {
            *oldest = rate;
        }
        if self.is_bounded() {
            return;
        }
        if rate >= self.grown * GROWTH {
            (self.grown, self.measurements) = (rate, 0);
        } else if !is_least {
            self.measurements += 1;
        }
    }

    /// Notices round trips that the bound does not explain: the path has become longer, or others fill its queue. A
    /// bound by the old round trip would then reduce the rate again and again. `time` is the time of the measurement.
    fn look_at_round_trip(&mut self, shortest: Duration, time: Duration) {
        let permitted = self.permitted();
        // Falling round trips mean that a queue from before the bound empties.
        let falls = shortest + time / 2 <= std::mem::replace(&mut self.before, shortest);
        self.long = match shortest > permitted && !falls && self.is_bounded() {
            true => self.long.saturating_add(1),
            false => 0,
        };
        if self.long >= LONG_ROUND_TRIPS && shortest > permitted.mul_f64(GROWTH) {
            self.round_trip = shortest;
            self.long = 0;
        }
    }

    /// Returns true once the search for the rate has ended. A path that becomes faster is noticed later, too, because the
    /// permitted queue is room for growth.
    fn is_bounded(&self) -> bool {
        self.measurements >= MEASUREMENTS_WITHOUT_GROWTH
    }

    /// Returns the largest number of bytes to have in flight: the bandwidth-delay product, and a short queue.
    fn limit(&self) -> u64 {
        let permitted = self.permitted().as_secs_f64();
        let gain = match self.long % PROBES == PROBES - 1 {
            // The link loses rate by the ratio of the round trips, and a probe regains more than that.
            true => (self.before.as_secs_f64() / permitted)
                .powi(2)
                .clamp(1.0, PROBE),
            false => 1.0,
        };
        (gain * self.rate() * permitted) as u64
    }
}

// === impl Measurement ===

impl Measurement {
    fn new(since: Instant) -> Self {
        Self {
            since,
            acked: 0,
            shortest: Duration::MAX,
            round_trips: 0.0,
            is_idle: false,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(20);

    /// A path of [`ROUND_TRIP`].
    struct Measured {
        path: Path,
        now: Instant,
    }

    impl Measured {
        fn new() -> Self {
            let now = Instant::now();
            let path = Path::new(now);
            Self { path, now }
        }

        /// Adds measurements of `bytes` each.
        fn measure(&mut self, count: u32, bytes: u64, is_idle: bool) {
            for _ in 0..count {
                let sent = self.now;
                self.now += ROUND_TRIP;
                self.path.acked(self.now, sent, bytes);
                let in_flight = if is_idle { 0 } else { bytes };
                self.path.end_acks(self.now, in_flight, is_idle, u64::MAX);
            }
        }

        /// A packet alone after `pause`.
        fn ping(&mut self, pause: Duration) {
            self.now += pause + ROUND_TRIP;
            self.path.acked(self.now, self.now - ROUND_TRIP, 100);
            self.path.end_acks(self.now, 0, false, u64::MAX);
        }
    }

    #[test]
    fn window_is_bounded_once_the_rate_has_stopped_growing() {
        let mut measured = Measured::new();
        for doubled in 0..10 {
            measured.measure(1, 1000 << doubled, false);
            assert_eq!(measured.path.bound, None);
        }
        measured.measure(3, 512_000, false);
        // 25.6 MB/s for 30 ms.
        assert_eq!(measured.path.bound, Some(768_000));
    }

    #[test]
    fn sender_with_little_to_send_keeps_the_rate_of_its_path() {
        let mut measured = Measured::new();
        measured.measure(20, 20_000, true);
        assert_eq!(measured.path.bound, None);
        measured.measure(20, 20_000, false);
        let bound = measured.path.bound;
        assert_eq!(bound, Some(30_000));
        measured.measure(100, 100, true);
        assert_eq!(measured.path.bound, bound);
        for _ in 0..2 * RATES {
            measured.ping(Duration::from_secs(10));
        }
        assert_eq!(measured.path.bound, bound);
        measured.measure(RATES as u32, 10_000, false);
        assert_eq!(measured.path.bound, Some(15_000));
        // Acknowledgements prove a rate, whatever the sender has to send.
        measured.measure(1, 20_000, true);
        assert_eq!(measured.path.bound, bound);
    }
}
