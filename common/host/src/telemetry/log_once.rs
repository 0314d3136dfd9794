//! Repeated failures that are logged once.

/// Largest number of failure texts to remember. A text may contain one of the addresses of a name.
const MAX_TEXTS: usize = 16;

/// Failures of one activity since its last success. A caller logs only new texts, and the recovery.
///
/// The newest few texts are remembered, because failures may alternate: a peer that refuses connections
/// resets some and closes others.
#[derive(Clone, Debug, Default)]
pub struct LogOnce {
    /// Newest first, at most [`MAX_TEXTS`]. Empty while the activity works.
    texts: Vec<String>,
}

// === impl LogOnce ===

impl LogOnce {
    /// Records a failure. Returns true if the caller must log `text`.
    pub fn is_new(&mut self, text: &str) -> bool {
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
        !std::mem::take(&mut self.texts).is_empty()
    }

    /// Returns the text of the last failure, or `None` after a success.
    pub fn current(&self) -> Option<&str> {
        self.texts.first().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_and_alternating_texts_are_new_once() {
        let mut log = LogOnce::default();
        let new = ["reset", "closed", "reset", "closed"].map(|text| log.is_new(text));
        assert_eq!(new, [true, true, false, false]);
        assert_eq!(log.current(), Some("closed"));
    }

    #[test]
    fn success_after_a_failure_is_a_recovery_and_forgets_the_texts() {
        let mut log = LogOnce::default();
        assert!(!log.has_recovered());
        assert!(log.is_new("reset"));
        assert!(log.has_recovered() && !log.has_recovered());
        assert_eq!(log.current(), None);
        assert!(log.is_new("reset"));
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
