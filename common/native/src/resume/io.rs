//! The stream that HTTP/2 uses on a resumable link.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::io::poll_read_buf;

use super::core::{Core, FrameError, SLICES};
use super::farewell::Farewell;
use super::session::{Attached, Base, Positions, Session, State};
use super::silence::{Look, SILENCE_CHECK, Silence};
use super::{ACK_DELAY, REPLAY_BYTES};
use crate::window::Inbound;

/// Bytes to read ahead at once.
const AHEAD_READ_BYTES: usize = 64 * 1024;

/// Stream over replaceable transports. While no transport is attached, reads and writes wait. One task must poll both
/// directions.
#[derive(Debug)]
pub struct ResumableIo<T: AsyncRead + AsyncWrite + Unpin> {
    transport: Option<T>,
    core: Core,
    session: Arc<Session<T>>,
    inbound: Arc<Inbound>,
    /// Time without a transport after which the session ends.
    grace: Duration,
    /// Watch for silence; `None` on an end that cannot open a transport.
    silence: Option<Silence>,
    /// With a transport: the next look at unacknowledged bytes. Without a transport: the end of the grace time.
    timer: Pin<Box<Sleep>>,
    is_timed: bool,
    /// Bytes to send before the first frame.
    answer: Bytes,
    /// Bytes of the stream that were read while HTTP/2 waited for room to write.
    ahead: BytesMut,
    is_flushed: bool,
    /// True if HTTP/2 waits until the peer acknowledges bytes.
    is_full: bool,
    /// True once this end has ended the session.
    is_closing: bool,
    /// Reason for the end of the session.
    failure: Option<(ErrorKind, String)>,
}

// === impl ResumableIo ===

impl<T: AsyncRead + AsyncWrite + Unpin> ResumableIo<T> {
    /// Creates the end that opens transports, on its first transport.
    pub fn opening(transport: T, inbound: Arc<Inbound>, grace: Duration) -> Self {
        Self::new(transport, inbound, grace, Some(Silence::default()))
    }

    /// Creates the end that accepts transports, on its first transport.
    pub fn accepting(transport: T, inbound: Arc<Inbound>, grace: Duration) -> Self {
        Self::new(transport, inbound, grace, None)
    }

    fn new(transport: T, inbound: Arc<Inbound>, grace: Duration, silence: Option<Silence>) -> Self {
        inbound.buffers.begin();
        Self {
            transport: Some(transport),
            core: Core::default(),
            session: Arc::new(Session::new()),
            inbound,
            grace,
            silence,
            timer: Box::pin(sleep(Duration::ZERO)),
            is_timed: false,
            answer: Bytes::new(),
            ahead: BytesMut::new(),
            is_flushed: true,
            is_full: false,
            is_closing: false,
            failure: None,
        }
    }

    /// Returns the handle for other tasks.
    pub fn session(&self) -> Arc<Session<T>> {
        self.session.clone()
    }

    /// Attaches an offered transport. Returns false without a transport.
    fn attend(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        if let Some((kind, text)) = &self.failure {
            return Err(io::Error::new(*kind, text.clone()));
        }
        self.session.register(cx.waker());
        if let Some(why) = self.session.revoked() {
            return Err(self.fail(ErrorKind::ConnectionReset, why.to_owned()));
        }
        if let Some(offered) = self.session.offered() {
            self.attach(offered)?;
        }
        if self.transport.is_some() {
            return Ok(true);
        }
        if self.is_closing || self.core.is_ended() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        if let Some(why) = self.session.condemned() {
            return Err(self.fail(ErrorKind::ConnectionReset, why.to_owned()));
        }
        if self.timer.as_mut().poll(cx).is_ready() {
            let why = format!("the link broke, and did not resume within {:?}", self.grace);
            return Err(self.fail(ErrorKind::TimedOut, why));
        }
        Ok(false)
    }

    fn attach(&mut self, offered: Attached<T>) -> io::Result<()> {
        let attached = match offered.base {
            Base::Told(Positions { received, from }) => self.core.attach(from, received),
            Base::Answer { received, .. } => self.core.attach(self.core.received(), received),
        };
        let from = attached.map_err(|error| self.violation(error))?;
        if let Base::Answer { answer, .. } = offered.base {
            let received = self.core.received();
            self.answer = answer(Positions { received, from }).into();
        }
        if self.transport.replace(offered.transport).is_some() {
            self.inbound.link_broke();
        }
        self.inbound.link_resumed();
        self.is_flushed = false;
        self.is_timed = false;
        if let Some(silence) = &mut self.silence {
            silence.forget();
        }
        self.session.set(State::Attached);
        Ok(())
    }

    /// Leaves a broken transport.
    fn detach(&mut self, cx: &mut Context<'_>) {
        if self.transport.take().is_none() {
            return;
        }
        self.answer = Bytes::new();
        self.inbound.link_broke();
        self.timer.as_mut().reset(Instant::now() + self.grace);
        self.is_timed = true;
        self.session.set(State::Away);
        // The next poll registers the timer.
        cx.waker().wake_by_ref();
    }

    /// Ends the session because of an error.
    fn fail(&mut self, kind: ErrorKind, why: String) -> io::Error {
        self.transport = None;
        self.session.close();
        self.failure = Some((kind, why.clone()));
        io::Error::new(kind, why)
    }

    fn violation(&mut self, error: FrameError) -> io::Error {
        let why = format!("the peer violates the protocol of resumable links: {error}");
        self.fail(ErrorKind::InvalidData, why)
    }

    /// Sends everything that waits, including acknowledgements.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(transport) = &mut self.transport else {
            return Poll::Pending;
        };
        while !self.answer.is_empty() {
            let sent = ready!(Pin::new(&mut *transport).poll_write(cx, &self.answer))?;
            if sent == 0 {
                return Poll::Ready(Err(ErrorKind::WriteZero.into()));
            }
            self.answer.advance(sent);
            self.is_flushed = false;
        }
        loop {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.core.output(&mut slices);
            let Some(slices) = slices.get(..count).filter(|slices| !slices.is_empty()) else {
                return Poll::Ready(Ok(()));
            };
            let sent = ready!(Pin::new(&mut *transport).poll_write_vectored(cx, slices))?;
            if sent == 0 {
                return Poll::Ready(Err(ErrorKind::WriteZero.into()));
            }
            self.core.sent(sent);
            self.is_flushed = false;
        }
    }

    /// Sends everything that waits, and flushes the transport.
    fn poll_send_and_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        let Some(transport) = &mut self.transport else {
            return Poll::Pending;
        };
        if !self.is_flushed {
            ready!(Pin::new(transport).poll_flush(cx))?;
            self.is_flushed = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Sends what waits, without waiting for the transport. Leaves a transport that is broken.
    fn send_now(&mut self, cx: &mut Context<'_>) {
        if let Poll::Ready(Err(_)) = self.poll_send_and_flush(cx) {
            self.detach(cx);
        }
    }

    /// Processes bytes that were read from the transport, and returns the number of bytes of the stream among them.
    fn received(&mut self, cx: &mut Context<'_>, bytes: &mut [u8]) -> io::Result<usize> {
        let kept = self.core.input(bytes);
        let kept = kept.map_err(|error| self.violation(error))?;
        self.session.set_received(self.core.received());
        if let Some(silence) = &mut self.silence {
            silence.read();
        }
        if self.is_full && self.core.room() > 0 {
            self.is_full = false;
            cx.waker().wake_by_ref();
        }
        Ok(kept)
    }

    /// Reads while HTTP/2 waits for acknowledgements, or for bytes that are sent again. HTTP/2 may read nothing before its
    /// write succeeds, so the acknowledgements would never be read, and a slow transport would seem to be silent.
    fn read_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while (self.core.room() == 0 || self.core.is_repeating())
            && self.ahead.len() <= REPLAY_BYTES
            && !self.core.is_ended()
        {
            let Some(transport) = &mut self.transport else {
                return Ok(());
            };
            let start = self.ahead.len();
            self.ahead.reserve(AHEAD_READ_BYTES);
            match poll_read_buf(Pin::new(transport), cx, &mut self.ahead) {
                Poll::Pending => break,
                Poll::Ready(Ok(0) | Err(_)) => {
                    self.detach(cx);
                    break;
                }
                Poll::Ready(Ok(_)) => {
                    let mut new = self.ahead.split_off(start);
                    let kept = self.received(cx, &mut new)?;
                    new.truncate(kept);
                    if kept > 0 {
                        // The transport wakes nobody for bytes that were already read from it.
                        cx.waker().wake_by_ref();
                    }
                    self.ahead.unsplit(new);
                }
            }
        }
        self.send_now(cx);
        Ok(())
    }

    /// Looks at unacknowledged bytes of both directions, at intervals while there are any.
    fn tick(&mut self, cx: &mut Context<'_>) {
        loop {
            if self.transport.is_none() {
                return;
            }
            if !self.is_timed {
                let Some(after) = self.next_look() else {
                    if let Some(silence) = &mut self.silence {
                        silence.forget();
                    }
                    return;
                };
                if let Some(silence) = &mut self.silence {
                    silence.begin();
                }
                self.timer.as_mut().reset(Instant::now() + after);
                self.is_timed = true;
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                return;
            }
            self.is_timed = false;
            self.core.acknowledge();
            self.send_now(cx);
            self.look_for_silence();
        }
    }

    /// Returns the time until the next look, or `None` while the link is idle.
    fn next_look(&self) -> Option<Duration> {
        let (owed, stream_bytes) = (self.core.is_unacknowledged(), self.inbound.stream_bytes());
        if let Some(silence) = &self.silence
            && silence.is_due(owed, stream_bytes)
        {
            return Some(SILENCE_CHECK);
        }
        self.core.owes_acknowledgement().then_some(ACK_DELAY)
    }

    fn look_for_silence(&mut self) {
        let (Some(silence), Some(_)) = (&mut self.silence, &self.transport) else {
            return;
        };
        let owed = self.core.is_unacknowledged();
        match silence.look(owed, self.inbound.stream_bytes()) {
            Look::Heard => self.session.set(State::Attached),
            Look::Silent => self.session.set(State::Silent),
            Look::Probe => self.inbound.probe(),
            Look::Wait => {}
        }
    }

    fn poll_write_slices(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.core.is_ended() {
            return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
        }
        if !self.attend(cx)? {
            return Poll::Pending;
        }
        // Bytes wait here only until the transport accepts them. Otherwise small streams would wait behind bulk in this
        // buffer.
        match self.poll_send(cx) {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(_)) => {
                self.detach(cx);
                return Poll::Pending;
            }
            Poll::Pending => {
                self.read_ahead(cx)?;
                self.tick(cx);
                return Poll::Pending;
            }
        }
        if self.core.room() == 0 {
            self.read_ahead(cx)?;
            if self.core.is_ended() {
                return Poll::Ready(Err(ErrorKind::BrokenPipe.into()));
            }
            if self.core.room() == 0 {
                self.is_full = true;
                self.tick(cx);
                return Poll::Pending;
            }
        }
        let buffers = &self.inbound.buffers;
        let written = self.core.write_from(slices, |slice| buffers.find(slice));
        self.send_now(cx);
        Poll::Ready(Ok(written))
    }

    fn poll_read_bytes(
        &mut self,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if target.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if !self.ahead.is_empty() {
                let count = self.ahead.len().min(target.remaining());
                target.put_slice(&self.ahead.split_to(count));
                if self.ahead.is_empty() {
                    // Frees the memory.
                    self.ahead = BytesMut::new();
                }
                return Poll::Ready(Ok(()));
            }
            if self.core.is_ended() {
                self.session.close();
                return Poll::Ready(Ok(()));
            }
            if !self.attend(cx)? {
                return Poll::Pending;
            }
            let Some(transport) = &mut self.transport else {
                return Poll::Pending;
            };
            let before = target.filled().len();
            match Pin::new(transport).poll_read(cx, target) {
                Poll::Pending => {
                    self.send_now(cx);
                    self.tick(cx);
                    return Poll::Pending;
                }
                Poll::Ready(Err(_)) => self.detach(cx),
                Poll::Ready(Ok(())) if target.filled().len() == before => self.detach(cx),
                Poll::Ready(Ok(())) => {
                    let new = target.filled_mut().get_mut(before..);
                    let kept = self.received(cx, new.unwrap_or_default())?;
                    target.set_filled(before + kept);
                    self.send_now(cx);
                    if kept > 0 {
                        return Poll::Ready(Ok(()));
                    }
                }
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for ResumableIo<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.get_mut().poll_read_bytes(cx, target)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ResumableIo<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_write_slices(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_write_slices(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.attend(cx)? {
            return Poll::Pending;
        }
        let sent = this.poll_send_and_flush(cx);
        match sent {
            Poll::Ready(Ok(())) => {
                // HTTP/2 may wait for an answer, and read nothing before its task is woken.
                if !this.is_timed {
                    this.tick(cx);
                }
                sent
            }
            Poll::Ready(Err(_)) => {
                this.detach(cx);
                Poll::Pending
            }
            Poll::Pending => {
                this.tick(cx);
                Poll::Pending
            }
        }
    }

    /// Ends the session.
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.is_closing = true;
        this.session.close();
        this.core.end();
        if this.transport.is_none() {
            return Poll::Ready(Ok(()));
        }
        ready!(this.poll_send(cx))?;
        match &mut this.transport {
            Some(transport) => Pin::new(transport).poll_shutdown(cx),
            None => Poll::Ready(Ok(())),
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Drop for ResumableIo<T> {
    /// Ends the session. Sends the end as far as the transport accepts bytes at once, and leaves the rest to
    /// [`Session::farewell`].
    fn drop(&mut self) {
        if !self.core.is_ended() {
            self.core.abort();
            let mut cx = Context::from_waker(Waker::noop());
            let is_broken = matches!(self.poll_send_and_flush(&mut cx), Poll::Ready(Err(_)));
            if let Some(transport) = self.transport.take().filter(|_| !is_broken) {
                let rest = [self.answer.as_ref(), &self.core.rest()].concat();
                let farewell = Farewell::new(transport, rest);
                self.session.set_farewell(farewell);
            }
        }
        self.session.close();
    }
}

#[cfg(test)]
mod tests;
