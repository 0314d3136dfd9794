//! Faults that a test can inject, and the requests to which a fault applies.

use std::time::Duration;

use http::StatusCode;

use super::status::Failure;

/// A fault, active until [`KubeApi::clear_faults`](super::KubeApi::clear_faults). A fault applies to all
/// requests unless the test restricts the fault.
#[derive(Debug, Clone)]
pub struct Fault {
    effect: Effect,
    /// Text that path and query must contain; empty for any request.
    path: String,
    /// Method that the request must have; empty for any method.
    method: String,
    /// Remaining number of times that the fault applies; `None` for no limit.
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

/// The answer to a watch that resumes from an expired version. The API server answers in both ways, depending
/// on where it detects the expiry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// The watch opens with status 200, and its only event is an `ERROR` with a `Status` of code 410.
    Event,
    /// The watch gets status 410.
    Http,
}

/// The combined effect of all faults on a request.
#[derive(Debug, Default)]
pub(super) struct Mishap {
    pub(super) delay: Duration,
    pub(super) failure: Option<Failure>,
    /// True if the watch opened by this request never sends an event.
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

    /// Makes requests fail with this status and a `Status` object.
    ///
    /// # Panics
    /// If `status` is not an HTTP status.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self::new(Effect::Answer {
            status: StatusCode::from_u16(status).expect("an HTTP status"),
            retry_after: None,
        })
    }

    /// Delays every answer by `delay`.
    #[must_use]
    pub fn delay(delay: Duration) -> Self {
        Self::new(Effect::Delay(delay))
    }

    /// Makes watches silent: new watches are accepted but send nothing, and open watches stop sending at
    /// once. Both stay silent after the fault has ended. They still end after their `timeoutSeconds`.
    #[must_use]
    pub fn hang_watches() -> Self {
        Self::new(Effect::HangWatches)
    }

    /// Closes new connections at once. Open connections stay open; see [`KubeApi::cut`](super::KubeApi::cut).
    #[must_use]
    pub fn refuse() -> Self {
        Self::new(Effect::Refuse)
    }

    /// Adds a `Retry-After` header to the answer.
    ///
    /// # Panics
    /// If the fault has no status.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        let Effect::Answer { retry_after, .. } = &mut self.effect else {
            panic!("Retry-After needs a fault with a status: {self:?}");
        };
        *retry_after = Some(seconds);
        self
    }

    /// Restricts the fault to requests with `text` in their path and query as sent, for example `/leases`,
    /// `watch=true` or `sendInitialEvents`. Has no effect on [`refuse`](Self::refuse): a refused connection
    /// has no path yet.
    #[must_use]
    pub fn on(mut self, text: &str) -> Self {
        text.clone_into(&mut self.path);
        self
    }

    /// Restricts the fault to requests with this method, for example `PUT`. Has no effect on
    /// [`refuse`](Self::refuse): a refused connection has no method yet.
    #[must_use]
    pub fn method(mut self, method: &str) -> Self {
        method.clone_into(&mut self.method);
        self
    }

    /// Limits the number of times that the fault applies.
    ///
    /// # Panics
    /// If `times` is 0.
    #[must_use]
    pub fn times(mut self, times: usize) -> Self {
        assert!(times > 0, "a fault must apply at least once");
        self.left = Some(times);
        self
    }

    /// Returns, for a fault that makes watches silent, the text that the paths of these watches contain.
    pub(super) fn hangs(&self) -> Option<&str> {
        matches!(self.effect, Effect::HangWatches).then_some(self.path.as_str())
    }

    fn spend(&mut self) {
        self.left = self.left.map(|left| left - 1);
    }
}

/// Applies the faults to a request and returns their combined effect. Removes faults that have reached their
/// limit.
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
                let failure = Failure::new(status, "the test makes this request fail");
                mishap.failure = Some(failure.retry_after(retry_after));
            }
            _ => continue,
        }
        fault.spend();
    }
    faults.retain(|fault| fault.left != Some(0));
    mishap
}

/// Returns true if the next connection must be refused.
pub(super) fn refuses(faults: &mut Vec<Fault>) -> bool {
    let refusing = faults
        .iter_mut()
        .find(|fault| matches!(fault.effect, Effect::Refuse));
    let refused = refusing.map(Fault::spend).is_some();
    faults.retain(|fault| fault.left != Some(0));
    refused
}
