//! What a test can break, and which requests that strikes.

use std::time::Duration;

use http::StatusCode;

use super::status::Failure;

/// Something that goes wrong until [`KubeApi::clear_faults`](super::KubeApi::clear_faults), with every
/// request unless it is narrowed down.
#[derive(Debug, Clone)]
pub struct Fault {
    effect: Effect,
    /// The text that path and query must contain; empty for any.
    path: String,
    /// The method that it must have; empty for any.
    method: String,
    /// How often it strikes yet; nothing for ever.
    left: Option<usize>,
}

#[derive(Debug, Clone)]
enum Effect {
    Answer {
        status: StatusCode,
        retry_after: Option<u64>,
    },
    Delay(Duration),
    HangWatches,
    Refuse,
}

/// How a watch from an expired version is told so. The API server has both ways, by where it finds out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The watch opens with 200, and its only event is an `ERROR` with a `Status` of code 410.
    Event,
    /// The watch is answered 410.
    Http,
}

/// What the faults do to one request.
#[derive(Debug, Default)]
pub(super) struct Mishap {
    pub(super) delay: Duration,
    pub(super) failure: Option<Failure>,
    /// The watch that it opens never says anything.
    pub(super) silent: bool,
}

// === impl Fault ===

impl Fault {
    fn new(effect: Effect) -> Self {
        Self {
            effect,
            path: String::new(),
            method: String::new(),
            left: None,
        }
    }

    /// Requests are answered with this status and a `Status` object.
    ///
    /// # Panics
    /// When it is no HTTP status.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self::new(Effect::Answer {
            status: StatusCode::from_u16(status).expect("an HTTP status"),
            retry_after: None,
        })
    }

    /// Answers come so much later.
    #[must_use]
    pub fn delay(delay: Duration) -> Self {
        Self::new(Effect::Delay(delay))
    }

    /// Watches are accepted and then say nothing, not even once the fault has ended; those that are
    /// open fall silent at once. They still end after their `timeoutSeconds`.
    #[must_use]
    pub fn hang_watches() -> Self {
        Self::new(Effect::HangWatches)
    }

    /// New connections are closed at once. Those that are open stay; see
    /// [`KubeApi::cut`](super::KubeApi::cut).
    #[must_use]
    pub fn refuse() -> Self {
        Self::new(Effect::Refuse)
    }

    /// Sends `Retry-After` with the status.
    ///
    /// # Panics
    /// When the fault is no status.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        let Effect::Answer { retry_after, .. } = &mut self.effect else {
            panic!("only a status goes with Retry-After: {self:?}");
        };
        *retry_after = Some(seconds);
        self
    }

    /// Strikes only requests whose path and query, as they are sent, contain `text`: such as
    /// `/leases`, `watch=true` or `sendInitialEvents`. Refused connections have no path yet.
    #[must_use]
    pub fn on(mut self, text: &str) -> Self {
        text.clone_into(&mut self.path);
        self
    }

    /// Strikes only requests with this method, such as `PUT`. Refused connections have none yet.
    #[must_use]
    pub fn method(mut self, method: &str) -> Self {
        method.clone_into(&mut self.method);
        self
    }

    /// Strikes so many times only.
    ///
    /// # Panics
    /// When that is 0.
    #[must_use]
    pub fn times(mut self, times: usize) -> Self {
        assert!(times > 0, "a fault that never strikes");
        self.left = Some(times);
        self
    }

    /// If this hangs watches: the text that is in the paths of those.
    pub(super) fn hangs(&self) -> Option<&str> {
        matches!(self.effect, Effect::HangWatches).then_some(self.path.as_str())
    }

    fn spend(&mut self) {
        self.left = self.left.map(|left| left - 1);
    }
}

/// What the faults do to a request. Those that have struck often enough end.
pub(super) fn strike(faults: &mut Vec<Fault>, method: &str, path: &str, watch: bool) -> Mishap {
    let mut mishap = Mishap::default();
    for fault in faults.iter_mut() {
        let is_method = fault.method.is_empty() || fault.method == method;
        if !is_method || !path.contains(&fault.path) {
            continue;
        }
        match fault.effect {
            Effect::Delay(delay) => mishap.delay += delay,
            Effect::HangWatches if watch => mishap.silent = true,
            Effect::Answer {
                status,
                retry_after,
            } if mishap.failure.is_none() => {
                let failure = Failure::new(status, "the test wants this request to fail");
                mishap.failure = Some(failure.retry_after(retry_after));
            }
            _ => continue,
        }
        fault.spend();
    }
    faults.retain(|fault| fault.left != Some(0));
    mishap
}

/// Whether a connection is to be refused.
pub(super) fn refuses(faults: &mut Vec<Fault>) -> bool {
    let refusing = faults
        .iter_mut()
        .find(|fault| matches!(fault.effect, Effect::Refuse));
    let refused = refusing.map(Fault::spend).is_some();
    faults.retain(|fault| fault.left != Some(0));
    refused
}
