//! Calls of `kubectl` while something else happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use culvert_tests::eventually;
use tokio::task::JoinSet;

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

/// Running callers.
pub(crate) struct Load {
    done: Arc<AtomicUsize>,
    is_stopped: Arc<AtomicBool>,
    callers: JoinSet<Vec<String>>,
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
                    match kubectl.bytes(args, &[]).await {
                        Ok(answer) if answer.starts_with(expected.as_bytes()) => {}
                        Ok(answer) => failed.push(format!("{args:?}: {answer:?}")),
                        Err(why) => failed.push(format!("{args:?}: {why}")),
                    }
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
        self.is_stopped.store(true, Ordering::Relaxed);
        let failed: Vec<String> = self.callers.join_all().await.concat();
        let done = self.done.load(Ordering::Relaxed);
        assert!(
            failed.is_empty(),
            "{} of {done} calls: {failed:#?}",
            failed.len()
        );
    }
}
