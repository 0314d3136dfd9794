//! Work on a thread with a runtime of its own, in a network namespace. The load of one party does not delay the
//! tasks of another party.

use std::future::Future;
use std::thread::JoinHandle;

use anyhow::{Context as _, anyhow};
use culvert_tests::openvpn::Namespace;
use tokio::sync::oneshot::{self, error::TryRecvError};

/// The running work. Dropping the value ends the work and waits for the end.
#[derive(Debug)]
pub(super) struct Party<T> {
    stop: Option<oneshot::Sender<()>>,
    result: Option<oneshot::Receiver<anyhow::Result<T>>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: Send + 'static> Party<T> {
    /// Starts `work` in the network `at`, or in the network of this process if `at` is `None`.
    pub(super) fn start<F, W>(at: Option<Namespace>, work: F) -> Self
    where
        F: FnOnce() -> W + Send + 'static,
        W: Future<Output = anyhow::Result<T>>,
    {
        let (stop, stopped) = oneshot::channel();
        let (done, result) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let run = move || block(work, stopped);
            let outcome = match at {
                Some(namespace) => namespace.within(run),
                None => run(),
            };
            if let Some(outcome) = outcome {
                // The receiver may be gone.
                done.send(outcome).ok();
            }
        });
        Self {
            stop: Some(stop),
            result: Some(result),
            thread: Some(thread),
        }
    }

    /// Returns the result if the work has ended and the result was not returned before. Fails if the work panics.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<T>> {
        let Some(result) = &mut self.result else {
            return Ok(None);
        };
        let ended = match result.try_recv() {
            Err(TryRecvError::Empty) => return Ok(None),
            Ok(outcome) => outcome.map(Some),
            Err(TryRecvError::Closed) => Err(anyhow!("a party panicked")),
        };
        self.result = None;
        ended
    }

    /// Waits for the result of the work. Fails if the work panics.
    pub(super) async fn finish(mut self) -> anyhow::Result<T> {
        let result = self.result.take().context("the result is taken")?;
        result.await.context("a party panicked")?
    }
}

impl<T> Drop for Party<T> {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // An error is a panic, which the thread has printed.
            thread.join().ok();
        }
    }
}

/// Runs `work` until its end or until `stopped`. Returns `None` if the work was stopped.
fn block<T, W>(
    work: impl FnOnce() -> W,
    stopped: oneshot::Receiver<()>,
) -> Option<anyhow::Result<T>>
where
    W: Future<Output = anyhow::Result<T>>,
{
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime.context("cannot start a runtime") {
        Ok(runtime) => runtime,
        Err(error) => return Some(Err(error)),
    };
    runtime.block_on(async {
        tokio::select! {
            outcome = async { work().await } => Some(outcome),
            _ = stopped => None,
        }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn dropped_party_ends_its_work() {
        let kept = Arc::new(());
        let inside = Arc::clone(&kept);
        let party: Party<()> = Party::start(None, move || async move {
            let _inside = inside;
            std::future::pending().await
        });
        drop(party);
        assert_eq!(Arc::strong_count(&kept), 1);
    }

    #[tokio::test]
    async fn error_of_ended_work_is_returned_once() {
        let (end, ending) = oneshot::channel();
        let mut party: Party<()> = Party::start(None, || async move {
            ending.await?;
            anyhow::bail!("it broke")
        });
        assert!(party.ended().unwrap().is_none());
        end.send(()).unwrap();
        let error = loop {
            match party.ended() {
                Err(error) => break error,
                Ok(_) => tokio::task::yield_now().await,
            }
        };
        assert_eq!(error.to_string(), "it broke");
        assert!(party.ended().unwrap().is_none());
    }

    #[tokio::test]
    async fn result_or_panic_of_the_work_is_returned() {
        let party = Party::start(None, || async { Ok(7) });
        assert_eq!(party.finish().await.unwrap(), 7);
        let party: Party<()> = Party::start(None, || async { panic!("broken") });
        party.finish().await.unwrap_err();
    }
}
