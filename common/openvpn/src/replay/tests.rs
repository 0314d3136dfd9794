#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

#[test]
fn each_id_is_accepted_once() {
    let now = Instant::now();
    let mut window = ReplayWindow::default();
    assert_eq!(window.check(0), Err(ReplayError::Zero));
    for id in [1, 3, 2, 100, 99, WINDOW, WINDOW + 50] {
        assert_eq!(window.check(id), Ok(()), "{id}");
        window.record(id, now);
        assert_eq!(window.check(id), Err(ReplayError::Repeated(id)));
    }
    assert_eq!(window.check(51), Ok(()));
    assert_eq!(window.check(50), Err(ReplayError::TooOld(50)));
}

#[test]
fn largest_ids_are_handled() {
    let now = Instant::now();
    let mut window = ReplayWindow::default();
    window.record(u32::MAX, now);
    assert_eq!(window.check(u32::MAX), Err(ReplayError::Repeated(u32::MAX)));
    assert_eq!(window.check(u32::MAX - WINDOW + 1), Ok(()));
    assert_eq!(
        window.check(u32::MAX - WINDOW),
        Err(ReplayError::TooOld(u32::MAX - WINDOW))
    );
    assert_eq!(window.check(1), Err(ReplayError::TooOld(1)));
}

#[test]
fn missing_id_expires() {
    let start = Instant::now();
    let mut window = ReplayWindow::default();
    window.record(10, start);
    window.record(11, start + MAX_AGE - Duration::from_millis(1));
    assert_eq!(window.check(9), Ok(()));
    window.record(12, start + MAX_AGE);
    assert_eq!(window.check(9), Err(ReplayError::TooOld(9)));
    // The first id newer than 15 has arrived only now.
    window.record(20, start + MAX_AGE);
    assert_eq!(window.check(15), Ok(()));
    window.record(21, start + 2 * MAX_AGE);
    assert_eq!(window.check(11), Err(ReplayError::TooOld(11)));
    assert_eq!(window.check(15), Ok(()));
    window.record(22, start + 3 * MAX_AGE);
    assert_eq!(window.check(15), Err(ReplayError::TooOld(15)));
}

#[test]
fn later_time_starts_an_empty_window() {
    let now = Instant::now();
    let mut window = LongReplayWindow::default();
    window.record(LongId { id: 7, time: 100 }, now);
    assert_eq!(
        window.check(LongId { id: 7, time: 100 }),
        Err(ReplayError::Repeated(7))
    );
    assert_eq!(
        window.check(LongId { id: 8, time: 99 }),
        Err(ReplayError::TimeBackwards(99))
    );
    assert_eq!(
        window.check(LongId { id: 0, time: 101 }),
        Err(ReplayError::Zero)
    );
    assert_eq!(window.check(LongId { id: 7, time: 101 }), Ok(()));
    window.record(LongId { id: 7, time: 101 }, now);
    assert_eq!(
        window.check(LongId { id: 8, time: 100 }),
        Err(ReplayError::TimeBackwards(100))
    );
    assert_eq!(window.check(LongId { id: 6, time: 101 }), Ok(()));
}

#[test]
fn long_ids_have_the_wire_format() {
    let bytes = [0, 0, 0, 1, 0x6b, 0x02, 0x6e, 0xcc];
    let id = LongId {
        id: 1,
        time: 0x6b02_6ecc,
    };
    assert_eq!(LongId::from_bytes(bytes), id);
    assert_eq!(id.to_bytes(), bytes);
}

proptest! {
    /// The window accepts every new id in its range, and no id twice, like a set of all ids.
    #[test]
    fn window_behaves_like_a_set(
        start in prop::sample::select(vec![0, 1000, u32::MAX - 5000]),
        steps in prop::collection::vec((-2500..2500_i64, prop::bool::weighted(0.05)), 1..300),
    ) {
        let now = Instant::now();
        let mut window = ReplayWindow::default();
        let mut seen = HashSet::new();
        let mut newest = 0;
        let mut at = i64::from(start);
        for (step, far) in steps {
            at = (at + if far { step * 1000 } else { step / 8 }).clamp(0, i64::from(u32::MAX));
            let id = at as u32;
            let fresh = id != 0 && !seen.contains(&id);
            let inside = u64::from(id) + u64::from(WINDOW) > u64::from(newest);
            prop_assert_eq!(window.check(id).is_ok(), fresh && inside, "{} after {}", id, newest);
            if fresh && inside {
                window.record(id, now);
                seen.insert(id);
                newest = newest.max(id);
            }
        }
    }
}
