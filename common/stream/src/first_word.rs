//! A short hold of an endpoint's first bytes, for the sake of stock peers.
//!
//! Stock gRPC clients close a connection whose bytes arrive before they have registered it, stock
//! servers may write bytes before the CONNECT status line, and kube-apiserver's CONNECT client
//! refuses bytes that arrive together with it. All of them race the answer to the dial against the
//! first bytes of an endpoint that speaks first. The hold ends with the client's first byte, so
//! that no other connection ever waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// Longer than a client takes to register its connection, shorter than a person notices.
const HOLD: Duration = Duration::from_millis(25);

/// Whether the client has sent a byte yet; clones share the answer.
#[derive(Clone, Default)]
pub struct FirstWord(Arc<(AtomicBool, Notify)>);

impl FirstWord {
    /// Holds nothing back.
    pub fn spoken_already() -> Self {
        let word = Self::default();
        word.spoken();
        word
    }

    /// The client has sent a byte.
    pub fn spoken(&self) {
        if !self.0.0.swap(true, Ordering::Relaxed) {
            self.0.1.notify_one();
        }
    }

    /// Waits for the client's first byte, for a short time and once only.
    pub async fn wait(&self) {
        if !self.0.0.load(Ordering::Relaxed) {
            let _ = timeout(HOLD, self.0.1.notified()).await;
            self.0.0.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_hold_ends_with_the_clients_first_byte_or_by_itself() {
        let word = FirstWord::default();
        let started = Instant::now();
        tokio::join!(word.wait(), async { word.spoken() });
        assert_eq!(started.elapsed(), Duration::ZERO);

        FirstWord::spoken_already().wait().await;
        assert_eq!(started.elapsed(), Duration::ZERO);

        let silent = FirstWord::default();
        silent.wait().await;
        assert_eq!(started.elapsed(), HOLD);
        silent.wait().await;
        assert_eq!(started.elapsed(), HOLD);
    }
}
