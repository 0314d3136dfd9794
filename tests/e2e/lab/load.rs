//! Calls of `kubectl` while something else happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_tests::eventually;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::PATIENCE;
use super::kubectl::Kubectl;

/// Commands in two pods' containers, and requests to kubelets, pods and services. Each prints its text.
pub(crate) const CALLS: [(&[&str], &str); 4] = [
    (
        &["exec", "far-side", "-c", "shell", "--", "echo", "answer"],
        "answer",
    ),
    (
        &[
            "logs",
            "far-side",
            "-c",
            "shell",
            "--tail=1",
            "--limit-bytes=20",
        ],
        "",
    ),
    (
        &[
            "get",
            "--raw=/api/v1/namespaces/default/pods/far-side:8080/proxy/bytes/100000",
        ],
        "",
    ),
    (
        &["get", "greetings", "-o", "name"],
        "greeting.greetings.culvert.test/hello",
    ),
];

/// Number of callers at the same time.
const CALLERS: usize = 2;

/// Longest time between the end of a program's connections and that of the program, on a busy machine.
const END: Duration = Duration::from_secs(1);

/// Running callers.
pub(crate) struct Load {
    done: Arc<AtomicUsize>,
    is_stopped: Arc<AtomicBool>,
    callers: JoinSet<Vec<Failure>>,
}

/// A call that failed.
#[derive(Debug)]
struct Failure {
    started: Instant,
    ended: Instant,
    /// The call and its error; for messages.
    _why: String,
}

impl Load {
    /// Starts the callers.
    pub(crate) fn start(kubectl: &Kubectl) -> Self {
        let (done, is_stopped) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let mut callers = JoinSet::new();
        for caller in 0..CALLERS {
            let (done, is_stopped) = (Arc::clone(&done), Arc::clone(&is_stopped));
            let kubectl = kubectl.clone();
            callers.spawn(async move {
                let mut failed = Vec::new();
                for (args, expected) in CALLS.into_iter().cycle().skip(caller) {
                    if is_stopped.load(Ordering::Relaxed) {
                        break;
                    }
                    let started = Instant::now();
                    let why = match kubectl.bytes(args, &[]).await {
                        Ok(answer) if answer.starts_with(expected.as_bytes()) => None,
                        Ok(answer) => Some(format!("{args:?}: {answer:?}")),
                        Err(why) => Some(format!("{args:?}: {why}")),
                    };
                    failed.extend(why.map(|why| Failure {
                        started,
                        ended: Instant::now(),
                        _why: why,
                    }));
                    done.fetch_add(1, Ordering::Relaxed);
                }
                failed
            });
        }
        Self {
            done,
            is_stopped,
            callers,
        }
    }

    /// Waits until this number of further calls has ended.
    pub(crate) async fn more(&self, count: usize) {
        let before = self.done.load(Ordering::Relaxed);
        eventually("more calls have ended", PATIENCE, async || {
            let more = self.done.load(Ordering::Relaxed) - before;
            (more >= count).then_some(()).ok_or(more)
        })
        .await;
    }

    /// Ends the load, which must have had no failed call.
    pub(crate) async fn has_not_failed(self) {
        self.has_failed_only_at(&[]).await;
    }

    /// Ends the load. Only calls in progress at one of these instants may have failed.
    pub(crate) async fn has_failed_only_at(self, ends: &[Instant]) {
        self.is_stopped.store(true, Ordering::Relaxed);
        let failed = self.callers.join_all().await.into_iter().flatten();
        let is_permitted = |failure: &Failure| {
            let mut ends = ends.iter();
            ends.any(|end| failure.started <= *end && failure.ended + END >= *end)
        };
        let failed: Vec<Failure> = failed.filter(|failure| !is_permitted(failure)).collect();
        let done = self.done.load(Ordering::Relaxed);
        assert!(
            failed.is_empty(),
            "{} of {done} calls: {failed:#?}",
            failed.len()
        );
    }
}
