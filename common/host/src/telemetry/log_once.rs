//! Repeated failures that are logged once for each text, and every ten minutes while they last.

use std::time::Duration;

use tokio::time::Instant;

/// Time without a log line after which a failure with a known text is logged again. Log files rotate: without later lines, a
/// program that has failed for days looks idle.
const REPEAT: Duration = Duration::from_secs(600);

/// Largest number of failure texts to remember. A text may contain one of the addresses of a name.
const MAX_TEXTS: usize = 16;

/// Failures of one activity since its last success. A caller logs new texts, a known text after ten minutes without a line,
/// and the recovery.
///
/// The newest few texts are remembered, because failures may alternate: a peer that refuses connections
/// resets some and closes others.
#[derive(Clone, Debug, Default)]
pub struct LogOnce {
    /// Newest first, at most [`MAX_TEXTS`]. Empty while the activity works.
    texts: Vec<String>,
    /// `None` while the activity works.
    outage: Option<Outage>,
}

/// Times and number of the failures.
#[derive(Clone, Copy, Debug)]
struct Outage {
    /// Time of the first failure.
    began: Instant,
    /// Time of the last log line.
    logged: Instant,
    failures: u64,
}

/// A failure that the caller must log, with fields for the line. The fields are `None` for a new text, and `tracing` leaves
/// such fields out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// Time since the first failure, in seconds.
    pub failing_seconds: Option<u64>,
    /// Number of failures since the last success.
    pub attempts: Option<u64>,
}

// === impl LogOnce ===

impl LogOnce {
    /// Records a failure. Returns `None` if the caller must not log `text`.
    pub fn failed(&mut self, text: &str) -> Option<Due> {
        let is_new = self.is_new(text);
        let now = Instant::now();
        let outage = self.outage.get_or_insert(Outage {
            began: now,
            logged: now,
            failures: 0,
        });
        outage.failures += 1;
        if !is_new && now.duration_since(outage.logged) < REPEAT {
            return None;
        }
        outage.logged = now;
        Some(match is_new {
            true => Due::default(),
            false => Due {
                failing_seconds: Some(now.duration_since(outage.began).as_secs()),
                attempts: Some(outage.failures),
            },
        })
    }

    /// Remembers a text. Returns true if the text was unknown.
    fn is_new(&mut self, text: &str) -> bool {
        let known = self.texts.iter().position(|known| known == text);
        let entry = known.map(|at| self.texts.remove(at));
        let is_new = entry.is_none();
        self.texts.truncate(MAX_TEXTS - 1);
        self.texts
            .insert(0, entry.unwrap_or_else(|| text.to_owned()));
        is_new
    }

    /// Records a success. Returns true after a failure: the caller must log the recovery.
    pub fn has_recovered(&mut self) -> bool {
        self.texts.clear();
        self.outage.take().is_some()
    }

    /// Returns the text of the last failure, or `None` after a success.
    pub fn current(&self) -> Option<&str> {
        self.texts.first().map(String::as_str)
    }
}

// === impl Due ===

impl Due {
    /// Returns true for a new text.
    pub fn is_new(self) -> bool {
        self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const NEW: Option<Due> = Some(Due {
        failing_seconds: None,
        attempts: None,
    });

    fn repeated(seconds: u64, attempts: u64) -> Option<Due> {
        Some(Due {
            failing_seconds: Some(seconds),
            attempts: Some(attempts),
        })
    }

    #[test]
    fn repeated_and_alternating_texts_are_new_once() {
        let mut log = LogOnce::default();
        let due = ["reset", "closed", "reset", "closed"].map(|text| log.failed(text));
        assert_eq!(due, [NEW, NEW, None, None]);
        assert_eq!(log.current(), Some("closed"));
    }

    #[test]
    fn success_after_a_failure_is_a_recovery_and_forgets_the_texts() {
        let mut log = LogOnce::default();
        assert!(!log.has_recovered());
        assert_eq!(log.failed("reset"), NEW);
        assert!(log.has_recovered() && !log.has_recovered());
        assert_eq!(log.current(), None);
        assert_eq!(log.failed("reset"), NEW);
    }

    #[tokio::test(start_paused = true)]
    async fn failure_that_lasts_is_logged_every_ten_minutes() {
        let mut log = LogOnce::default();
        let mut logged = Vec::new();
        for second in 0..1300 {
            // Texts that alternate have one line together.
            let text = match second % 2 {
                0 => "reset",
                _ => "closed",
            };
            logged.extend(log.failed(text).map(|due| (second, Some(due))));
            advance(Duration::from_secs(1)).await;
        }
        let expected = [
            (0, NEW),
            (1, NEW),
            (601, repeated(601, 602)),
            (1201, repeated(1201, 1202)),
        ];
        assert_eq!(logged, expected);
        assert!(log.has_recovered());
        assert_eq!(log.failed("reset"), NEW);
        advance(REPEAT).await;
        assert_eq!(log.failed("reset"), repeated(600, 2));
    }

    #[tokio::test(start_paused = true)]
    async fn new_text_postpones_the_repeated_line() {
        let mut log = LogOnce::default();
        assert_eq!(log.failed("reset"), NEW);
        advance(REPEAT / 2).await;
        assert_eq!(log.failed("closed"), NEW);
        advance(REPEAT / 2).await;
        assert_eq!(log.failed("reset"), None);
        advance(REPEAT / 2).await;
        assert_eq!(log.failed("reset"), repeated(900, 4));
    }

    #[test]
    fn only_the_newest_texts_are_remembered() {
        let mut log = LogOnce::default();
        for text in 0..100 {
            assert!(log.is_new(&text.to_string()));
        }
        assert_eq!(log.texts.len(), MAX_TEXTS);
        assert!(!log.is_new("84") && log.is_new("83"));
        // The older of the known texts made room.
        assert!(log.is_new("85") && !log.is_new("84"));
    }
}
