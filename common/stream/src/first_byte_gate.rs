//! The short delay of an endpoint's first bytes, for stock peers.
//!
//! Stock gRPC clients close a connection if bytes arrive before the client has registered the connection.
//! Stock servers may write bytes before the CONNECT status line. kube-apiserver's CONNECT client refuses
//! bytes that arrive together with the status line. In all three cases the answer to the dial races against
//! the first bytes of an endpoint that sends first. The delay ends with the client's first byte, so no
//! connection waits if its client sends first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

/// Length of the delay. Longer than a client needs to register a connection, shorter than a person notices.
const HOLD: Duration = Duration::from_millis(25);

/// Flag for the client's first byte; clones share the flag.
#[derive(Clone, Default)]
pub struct FirstByteGate(Arc<(AtomicBool, Notify)>);

impl FirstByteGate {
    /// Creates a flag already set, so nothing is delayed.
    pub fn already_open() -> Self {
        let gate = Self::default();
        gate.open();
        gate
    }

    /// Ends the delay: the client has sent a byte.
    pub fn open(&self) {
        if !self.0.0.swap(true, Ordering::Relaxed) {
            self.0.1.notify_one();
        }
    }

    /// Waits for the client's first byte, for at most a short time and only once.
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
    async fn delay_ends_with_the_clients_first_byte_or_after_its_limit() {
        let gate = FirstByteGate::default();
        let started = Instant::now();
        tokio::join!(gate.wait(), async { gate.open() });
        assert_eq!(started.elapsed(), Duration::ZERO);

        FirstByteGate::already_open().wait().await;
        assert_eq!(started.elapsed(), Duration::ZERO);

        let silent = FirstByteGate::default();
        silent.wait().await;
        assert_eq!(started.elapsed(), HOLD);
        silent.wait().await;
        assert_eq!(started.elapsed(), HOLD);
    }
}
