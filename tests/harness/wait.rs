//! Waiting for a state, never for a time.

use std::fmt::Display;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

/// How long to leave the world alone between two looks at it.
const STEP: Duration = Duration::from_millis(10);

/// What one look has shown: the awaited value, or a description of what there is instead.
pub trait Observation {
    /// What the wait gives once it is over.
    type Value;

    /// The value, or the present state in words.
    ///
    /// # Errors
    /// While the awaited state is not there.
    fn judge(self) -> Result<Self::Value, String>;
}

impl Observation for bool {
    type Value = ();

    fn judge(self) -> Result<(), String> {
        self.then_some(()).ok_or_else(|| "not so".to_owned())
    }
}

impl<T, E: Display> Observation for Result<T, E> {
    type Value = T;

    fn judge(self) -> Result<T, String> {
        self.map_err(|state| format!("{state:#}"))
    }
}

/// Looks every 10 ms until `probe` shows what is awaited, and gives that.
///
/// `probe` says `true`/`false`, or better a `Result` whose error describes the present state.
///
/// # Panics
/// When `deadline` passes first, with the state last seen.
pub async fn eventually<O: Observation>(
    what: &str,
    deadline: Duration,
    mut probe: impl AsyncFnMut() -> O,
) -> O::Value {
    let end = Instant::now() + deadline;
    let mut last = "nothing seen".to_owned();
    loop {
        match timeout_at(end, probe()).await.map(Observation::judge) {
            Ok(Ok(value)) => return value,
            Ok(Err(state)) => last = state,
            Err(_) => panic!("{what}: the look did not end in {deadline:?}; before it: {last}"),
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
    async fn gives_the_value_once_it_is_there() {
        let mut looks = 0;
        let value = eventually("third look", LIMIT, async || {
            looks += 1;
            (looks == 3).then_some(looks).ok_or(looks)
        });
        assert_eq!(value.await, 3);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "four legs: not within 5s; last seen: 2 legs")]
    async fn panics_with_the_last_state() {
        eventually("four legs", LIMIT, async || Err::<(), _>("2 legs")).await;
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "an answer: the look did not end in 5s")]
    async fn a_look_that_hangs_does_not_hang_the_test() {
        eventually("an answer", LIMIT, std::future::pending::<bool>).await;
    }
}
