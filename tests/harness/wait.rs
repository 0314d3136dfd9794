//! Waiting for a state instead of a fixed time.

use std::fmt::Display;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

/// Pause between two calls of the probe.
const STEP: Duration = Duration::from_millis(10);

/// The result of a probe: the awaited value, or a description of the current state.
pub trait Observation {
    /// The value that the wait returns.
    type Value;

    /// Returns the awaited value.
    ///
    /// # Errors
    /// Returns a description of the current state while the awaited state is not reached.
    fn judge(self) -> Result<Self::Value, String>;
}

impl Observation for bool {
    type Value = ();

    fn judge(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "still false".to_owned())
    }
}

impl<T, E: Display> Observation for Result<T, E> {
    type Value = T;

    fn judge(self) -> Result<T, String> {
        self.map_err(|state| format!("{state:#}"))
    }
}

/// Calls `probe` every 10 ms until the awaited state is reached, and returns the awaited value.
///
/// `probe` returns a `bool`, or preferably a `Result` whose error describes the current state.
///
/// # Panics
/// If `deadline` passes first; the panic has the last observed state.
pub async fn eventually<O: Observation>(
    what: &str,
    deadline: Duration,
    mut probe: impl AsyncFnMut() -> O,
) -> O::Value {
    let end = Instant::now() + deadline;
    let mut last = "nothing".to_owned();
    loop {
        match timeout_at(end, probe()).await.map(Observation::judge) {
            Ok(Ok(value)) => return value,
            Ok(Err(state)) => last = state,
            Err(_) => panic!("{what}: the probe did not end in {deadline:?}; last seen: {last}"),
        }
        assert!(
            Instant::now() < end,
            "{what}: not within {deadline:?}; last seen: {last}"
        );
        sleep(STEP).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test(start_paused = true)]
    async fn returns_the_value_once_the_state_is_reached() {
        let mut looks = 0;
        let value = eventually("the third probe", LIMIT, async || {
            looks += 1;
            (looks == 3).then_some(looks).ok_or(looks)
        });
        assert_eq!(value.await, 3);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "four legs: not within 5s; last seen: 2 legs")]
    async fn panics_with_the_last_state_at_the_deadline() {
        eventually("four legs", LIMIT, async || Err::<(), _>("2 legs")).await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "an answer: the probe did not end in 5s")]
    async fn a_hanging_probe_ends_at_the_deadline() {
        eventually("an answer", LIMIT, std::future::pending::<bool>).await;
    }
}
