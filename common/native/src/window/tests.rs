#![allow(clippy::unwrap_used)]

use super::*;
use crate::CONNECTION_WINDOW_BYTES;

const BUDGET: usize = 64 << 20;
const MS: Duration = Duration::from_millis(1);

/// Measures a path with `rate` bytes per ms and a round trip of `rtt` ms until the window no longer
/// changes.
fn settle(estimate: &mut Estimate, rtt: u32, rate: u64) -> u32 {
    for _ in 0..100 {
        let bytes = u64::from(estimate.window).min(rate * u64::from(rtt));
        estimate.measured(bytes, MS * rtt, 0);
    }
    estimate.window
}

#[test]
fn window_fits_a_long_path_and_stays_at_the_minimum_on_a_short_path() {
    assert_eq!(
        settle(
            &mut Estimate::new(WindowProfile::Shared, BUDGET),
            100,
            100_000
        ),
        LONG_PATH_BYTES
    );
    assert_eq!(
        settle(
            &mut Estimate::new(WindowProfile::Shared, BUDGET),
            100,
            10_000
        ),
        2 << 20
    );
    assert_eq!(
        settle(
            &mut Estimate::new(WindowProfile::Shared, BUDGET),
            1,
            100_000
        ),
        SHORT_PATH_BYTES
    );
}

#[test]
fn queueing_delay_does_not_enlarge_the_window() {
    let mut estimate = Estimate::new(WindowProfile::Shared, BUDGET);
    estimate.measured(0, MS / 10, 0);
    // 1 GB/s through a queue of 5 ms.
    for _ in 0..100 {
        estimate.measured(5_000_000, MS * 5, 0);
    }
    assert_eq!(estimate.window, SHORT_PATH_BYTES);
}

#[test]
fn queueing_delay_under_a_lasting_load_does_not_become_the_shortest_round_trip() {
    let mut estimate = Estimate::new(WindowProfile::Shared, BUDGET);
    estimate.measured(0, MS / 10, 0);
    for _ in 0..2 * FORGET_AFTER {
        estimate.measured(5_000_000, MS * 5, 0);
    }
    assert_eq!(estimate.shortest, MS / 10);
    assert_eq!(estimate.window, SHORT_PATH_BYTES);
    // An idle path shows its new round trip.
    estimate.measured(0, MS * 5, 0);
    assert_eq!(estimate.shortest, MS * 5);
}

#[test]
fn kept_bytes_of_many_streams_leave_a_part_of_the_connections_window() {
    for (streams, window) in [
        (1, LONG_PATH_BYTES),
        (128, LONG_PATH_BYTES),
        (1000, 4 << 20),
        (4096, SHORT_PATH_BYTES),
        (50_000, CROWDED_BYTES),
    ] {
        let mut estimate = Estimate::new(WindowProfile::Shared, BUDGET);
        settle(&mut estimate, 100, 100_000);
        estimate.crowded(0, streams);
        assert_eq!(estimate.window, window, "{streams}");
        let kept = u64::from(window) / 3 * streams as u64;
        assert!(
            kept < u64::from(CONNECTION_WINDOW_BYTES) / 3 * 2,
            "{streams}"
        );
        // A measurement of the path does not undo the limit.
        assert_eq!(settle(&mut estimate, 100, 100_000), window, "{streams}");
    }
}

#[test]
fn unread_bytes_shrink_the_window_at_once_and_it_recovers() {
    let mut estimate = Estimate::new(WindowProfile::Shared, BUDGET);
    settle(&mut estimate, 100, 100_000);
    for (held, window) in [
        (BUDGET / 16, LONG_PATH_BYTES),
        (BUDGET / 2, 16 << 20),
        (BUDGET, CROWDED_BYTES),
        (2 * BUDGET, CROWDED_BYTES),
    ] {
        estimate.crowded(held, 1);
        assert_eq!(estimate.window, window);
    }
    assert_eq!(settle(&mut estimate, 100, 100_000), LONG_PATH_BYTES);
}

#[test]
fn small_streams_shrink_the_window_of_a_short_path_only() {
    let mut near = Estimate::new(WindowProfile::Shared, BUDGET);
    settle(&mut near, 1, 100_000);
    near.beside();
    assert_eq!(near.window, 256 * 1024);
    assert_eq!(settle(&mut near, 1, 10_000), BESIDE_BYTES);
    near.beside = false;
    assert_eq!(settle(&mut near, 1, 10_000), SHORT_PATH_BYTES);
    let mut far = Estimate::new(WindowProfile::Shared, BUDGET);
    settle(&mut far, 100, 100_000);
    far.beside();
    assert_eq!(far.window, LONG_PATH_BYTES);
}

#[test]
fn small_streams_do_not_shrink_a_fixed_window() {
    for bytes in [SHORT_PATH_BYTES, 16 << 20] {
        let mut estimate = Estimate::new(WindowProfile::Fixed(bytes), BUDGET);
        settle(&mut estimate, 1, 10_000);
        estimate.beside();
        assert_eq!(settle(&mut estimate, 1, 10_000), bytes);
    }
}

#[test]
fn a_window_shrinks_after_the_path_got_faster() {
    let mut estimate = Estimate::new(WindowProfile::Shared, BUDGET);
    settle(&mut estimate, 100, 100_000);
    assert_eq!(settle(&mut estimate, 1, 100_000), SHORT_PATH_BYTES);
}

#[test]
fn packet_stream_has_bounds_of_its_own() {
    let mut estimate = Estimate::new(WindowProfile::Packets, BUDGET);
    assert_eq!(settle(&mut estimate, 1, 100_000), SHORT_PATH_BYTES);
    estimate.beside();
    assert_eq!(estimate.window, PACKETS_BESIDE_BYTES);
    // Twice 1.2 MB, in steps of 512 KiB.
    let mut estimate = Estimate::new(WindowProfile::Packets, BUDGET);
    assert_eq!(settle(&mut estimate, 100, 12_000), 5 << 19);
    let mut estimate = Estimate::new(WindowProfile::Packets, BUDGET);
    assert_eq!(
        settle(&mut estimate, 100, 1_000_000),
        PACKETS_LONG_PATH_BYTES
    );
    estimate.crowded(BUDGET, 1);
    assert_eq!(estimate.window, PACKETS_BESIDE_BYTES);
}

#[test]
fn bytes_ahead_of_a_stock_server_are_limited_on_short_paths() {
    let ahead = |micros: u64, is_beside: bool| {
        let mut estimate = Estimate::new(WindowProfile::Packets, BUDGET);
        assert!(
            estimate.ahead(is_beside) > 0,
            "the path is not measured yet"
        );
        estimate.measured(0, Duration::from_micros(micros), 0);
        estimate.ahead(is_beside)
    };
    assert_eq!(ahead(50, false), PACKETS_AHEAD_BYTES);
    assert_eq!(ahead(50, true), PACKETS_AHEAD_BYTES / 2);
    assert_eq!(ahead(500, false), 2 * PACKETS_AHEAD_BYTES);
    assert_eq!(ahead(1000, true), 2 * PACKETS_AHEAD_BYTES);
    assert_eq!(ahead(1000, false), 4 * PACKETS_AHEAD_BYTES);
    assert_eq!(ahead(1100, true), 0);
}
