//! The life of one connection: bytes both ways until the end, with byte counters and one close reason.

use std::pin::Pin;
use std::time::Duration;

use metrics::Counter;
use tokio::time::Instant;

use super::pump::{Direction, pump};
use super::{CloseReason, Sink, Source};

/// End of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// The only close reason of the connection.
    pub reason: CloseReason,
    /// True if the reason came from outside the connection, not from one of its sides.
    pub cut: bool,
    /// True if the client ended its direction, and the endpoint has got the end.
    pub client_ended: bool,
    /// The side that accepted none of the bytes that waited for it for [`CLOSE_STALL`](super::CLOSE_STALL), after the other side
    /// had closed.
    pub given_up: Option<&'static str>,
    /// Bytes from the client to the endpoint.
    pub to_endpoint: u64,
    /// Bytes from the endpoint to the client.
    pub from_endpoint: u64,
    /// Time from the opening of the connection to its end.
    pub duration: Duration,
    /// Time from the end of the client's bytes to the end of the endpoint's bytes; `None` unless the client's
    /// bytes ended first.
    pub answer_time: Option<Duration>,
}

/// Carries a connection until both directions have ended, a side has failed, or `cut` resolves.
/// `bytes` counts the bytes to and from the endpoint. A direction that ended waits for the opposite
/// direction as long as bytes move within `half_open`.
///
/// `cut` is pinned by the caller, because a future that is moved into another future needs its memory
/// twice. The caller closes both sides with the returned reason.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn would keep its arguments twice"
)]
pub fn run_connection<CS, CK, ES, EK>(
    client: (&mut CS, &mut CK),
    endpoint: (&mut ES, &mut EK),
    bytes: [Counter; 2],
    half_open: Duration,
    cut: Pin<&mut impl Future<Output = CloseReason>>,
) -> impl Future<Output = Ended>
where
    CS: Source,
    CK: Sink,
    ES: Source,
    EK: Sink,
{
    async move {
        let started = Instant::now();
        let [up, down] = bytes.map(Direction::new);
        let (reason, cut) = tokio::select! {
            reason = pump(client, endpoint, [&up, &down], half_open) => (reason, false),
            reason = cut => (reason, true),
        };
        Ended {
            reason,
            cut,
            client_ended: up.ended().is_some(),
            given_up: match (up.is_given_up(), down.is_given_up()) {
                (true, _) => Some("endpoint"),
                (_, true) => Some("client"),
                _ => None,
            },
            to_endpoint: up.bytes(),
            from_endpoint: down.bytes(),
            duration: started.elapsed(),
            answer_time: up.ended().zip(down.ended()).and_then(|(asked, answered)| {
                answered
                    .checked_duration_since(asked)
                    .filter(|time| !time.is_zero())
            }),
        }
    }
}

impl Ended {
    /// Returns true if the endpoint has the complete stream of the client. Otherwise the endpoint's connection is
    /// reset, because an ordinary end would make a part look like the whole.
    pub fn is_complete(&self) -> bool {
        let ordinary = matches!(
            self.reason,
            CloseReason::Finished | CloseReason::ClientClosed | CloseReason::EndpointClosed
        );
        ordinary || self.client_ended
    }

    /// Returns true if the connection was closed because a receiver was too slow for a shared stream.
    pub fn is_overdue(&self) -> bool {
        let slow = matches!(
            self.reason,
            CloseReason::Stalled | CloseReason::BufferExceeded
        );
        self.cut && slow
    }
}

/// Logs the end of a connection: the given fields, then close reason, bytes and duration. A warning if the last bytes may
/// be lost.
#[macro_export]
macro_rules! log_closed {
    (@ $level:ident, $text:literal, $ended:expr, $($field:tt)+) => {
        ::tracing::$level!(
            $($field)+,
            reason = %$ended.reason,
            to_endpoint = $ended.to_endpoint,
            from_endpoint = $ended.from_endpoint,
            seconds = $ended.duration.as_secs_f64(),
            $text
        )
    };
    ($ended:expr, $($field:tt)+) => {
        match $ended.given_up {
            Some(side) => $crate::log_closed!(
                @ warn,
                "the {side} accepts none of its remaining bytes for 30 s after the other side has closed: closing this \
                 connection, these bytes may be lost. Check whether the program of the {side} hangs",
                $ended, $($field)+
            ),
            None => $crate::log_closed!(@ debug, "connection closed", $ended, $($field)+),
        }
    };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::pin::pin;

    use bytes::Bytes;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};

    use super::super::io::{ReadSource, WriteSink};
    use super::super::{CLOSE_STALL, HALF_OPEN_IDLE};
    use super::*;

    #[tokio::test]
    async fn connection_ends_with_the_reason_of_its_cut_and_the_bytes_so_far() {
        let (client, near) = duplex(64);
        let (far, mut endpoint) = duplex(64);
        let cut = async {
            let (mut read, mut write) = split(client);
            write.write_all(b"ping").await.unwrap();
            endpoint.read_exact(&mut [0; 4]).await.unwrap();
            endpoint.write_all(b"po").await.unwrap();
            read.read_exact(&mut [0; 2]).await.unwrap();
            CloseReason::Shutdown
        };
        let lost = CloseReason::ClientLost;
        let ((read, write), (far_read, far_write)) = (split(near), split(far));
        let mut source = ReadSource::new(read, Bytes::new(), lost);
        let mut sink = WriteSink::new(write, lost);
        let mut far_source = ReadSource::new(far_read, Bytes::new(), lost);
        let mut far_sink = WriteSink::new(far_write, lost);
        let ended = run_connection(
            (&mut source, &mut sink),
            (&mut far_source, &mut far_sink),
            [Counter::noop(), Counter::noop()],
            HALF_OPEN_IDLE,
            pin!(cut),
        )
        .await;
        assert_eq!(ended.reason, CloseReason::Shutdown);
        assert!(ended.cut && !ended.is_overdue() && ended.given_up.is_none());
        assert_eq!((ended.to_endpoint, ended.from_endpoint), (4, 2));
    }

    /// Source with one chunk, whose connection has been aborted since.
    struct Aborted;

    impl Source for Aborted {
        async fn recv(&mut self) -> Result<Option<Bytes>, CloseReason> {
            Ok(Some(Bytes::from_static(&[7; 100])))
        }

        async fn fill(&mut self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn endpoint_that_accepts_nothing_after_an_abort_is_given_up() {
        let ((_client, near), (far, _endpoint)) = (duplex(64), duplex(64));
        let (far_read, far_write) = split(far);
        let mut far_source = ReadSource::new(far_read, Bytes::new(), CloseReason::EndpointLost);
        let ended = run_connection(
            (
                &mut Aborted,
                &mut WriteSink::new(near, CloseReason::ClientLost),
            ),
            (
                &mut far_source,
                &mut WriteSink::new(far_write, CloseReason::EndpointLost),
            ),
            [Counter::noop(), Counter::noop()],
            HALF_OPEN_IDLE,
            pin!(std::future::pending()),
        )
        .await;
        assert_eq!(ended.given_up, Some("endpoint"));
        assert!(!ended.is_overdue());
        assert_eq!(ended.duration, CLOSE_STALL);
    }
}
