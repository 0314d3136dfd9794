//! A UDP socket for quinn that loses packets on request.

use std::fmt::Debug;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use parking_lot::Mutex;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, Runtime as _, TokioRuntime, UdpPoller};

/// Losses of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Losses {
    /// No packet is lost.
    None,
    /// At least half of the received packets are lost.
    HalfReceived,
    /// Every second sent packet is lost, and received packets wait.
    EverySecondSent,
    /// All sent packets are lost, and received packets wait.
    All,
}

/// A socket that loses packets.
#[derive(Debug)]
pub(super) struct LossySocket {
    inner: Arc<dyn AsyncUdpSocket>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    losses: Losses,
    is_next_lost: bool,
    /// Task that waits for a received packet.
    receiver: Option<Waker>,
}

impl LossySocket {
    /// Makes a socket lossy; at first no packet is lost.
    pub(super) fn new(socket: UdpSocket) -> Arc<Self> {
        Arc::new(Self {
            inner: TokioRuntime.wrap_udp_socket(socket).unwrap(),
            state: Mutex::new(State {
                losses: Losses::None,
                is_next_lost: false,
                receiver: None,
            }),
        })
    }

    /// Changes the losses for packets from now on.
    pub(super) fn set(&self, losses: Losses) {
        let mut state = self.state.lock();
        state.losses = losses;
        if let Some(receiver) = state.receiver.take() {
            receiver.wake();
        }
    }
}

impl AsyncUdpSocket for LossySocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let mut state = self.state.lock();
        let is_lost = match state.losses {
            Losses::None | Losses::HalfReceived => false,
            Losses::EverySecondSent => {
                state.is_next_lost = !state.is_next_lost;
                state.is_next_lost
            }
            Losses::All => true,
        };
        match is_lost {
            true => Ok(()),
            false => self.inner.try_send(transmit),
        }
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.state.lock();
        match state.losses {
            Losses::None => self.inner.poll_recv(cx, buffers, meta),
            Losses::HalfReceived => {
                let count = ready!(self.inner.poll_recv(cx, buffers, meta))?;
                for batch in &mut meta[..count] {
                    let packets = batch.len.div_ceil(batch.stride.max(1));
                    state.is_next_lost = !state.is_next_lost;
                    let is_kept = packets == 1 && !state.is_next_lost;
                    batch.len = match is_kept {
                        true => batch.len,
                        false => batch.stride * (packets / 2),
                    };
                }
                Poll::Ready(Ok(count))
            }
            Losses::EverySecondSent | Losses::All => {
                state.receiver = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }
}
