//! One QUIC connection between a server and an agent: dials, words, and the watch over its health.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use culvert_stream::head::HeadError;
use culvert_stream::{CloseReason, Dial};
use http::{Response, StatusCode};
use parking_lot::Mutex;
use quinn::{Connection, ReadError, RecvStream, SendStream, VarInt};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep};

use super::NO_REASON;
use super::congestion::permit_packets;
use super::endpoint::{AGENT_STREAMS, IDLE_TIMEOUT, MAX_STREAMS};
use super::halves::{QuicSink, QuicSource, halves};
use super::health::{Counters, DIAL_LOOK, Health, LOOK, Look};
use super::streams::{Streams, WAITING_WORDS};
use super::words::{Word, WordReader};
use crate::dial;

/// Interval of the pings to a silent peer. After an outage, the link continues within this time.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Priority of the control stream, above all other streams.
const CONTROL_PRIORITY: i32 = 3;

/// Error for a dial on a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkDialError {
    /// The link is silent or has ended before an answer: no byte of the client was sent, and another link may carry
    /// the dial.
    Unusable,
    /// The agent abandoned the dial.
    Abandoned,
    /// The agent could not reach the endpoint; the text is the agent's.
    Refused(String),
}

/// A link whose peer is authenticated.
pub struct Link {
    connection: Connection,
    streams: Arc<Streams>,
    healthy: watch::Sender<bool>,
    health: Mutex<Health>,
    /// Number of answers to pings.
    answers: AtomicU64,
    /// Number of dials that wait for an answer.
    dialing: AtomicUsize,
    /// Number of streams that the peer may open.
    limit: AtomicU32,
    lost: CloseReason,
}

/// Dial that waits for its answer; dropping the value ends the wait.
struct Dialing<'a>(&'a Link);

/// Words that wait for the control stream.
pub struct Words(mpsc::Receiver<Word>);

impl Link {
    /// Creates a link. Streams whose receivers do not read may hold `held_bytes` together. `lost` is the close reason
    /// of its connections if the link ends.
    pub fn new(connection: Connection, held_bytes: usize, lost: CloseReason) -> (Arc<Self>, Words) {
        let (streams, words) = Streams::new(held_bytes);
        let link = Arc::new(Self {
            connection,
            streams,
            healthy: watch::Sender::new(true),
            health: Mutex::default(),
            answers: AtomicU64::new(0),
            dialing: AtomicUsize::new(0),
            limit: AtomicU32::new(AGENT_STREAMS),
            lost,
        });
        (link, Words(words))
    }

    /// Returns true while the peer answers.
    pub fn is_healthy(&self) -> bool {
        *self.healthy.borrow() && !self.streams.ended.is_cancelled()
    }

    /// Resolves once the peer does not answer, or the link has ended.
    pub async fn unusable(&self) {
        let mut healthy = self.healthy.subscribe();
        tokio::select! {
            _ = healthy.wait_for(|healthy| !healthy) => {}
            () = self.streams.ended.cancelled() => {}
        }
    }

    /// Returns the number of open streams.
    pub fn open(&self) -> usize {
        self.streams.open()
    }

    /// Sends a word to the peer.
    pub fn send(&self, word: Word) {
        self.streams.send(word);
    }

    /// Returns the current address of the peer.
    pub fn remote_address(&self) -> SocketAddr {
        self.connection.remote_address()
    }

    /// Returns the current properties of the path.
    pub fn path(&self) -> quinn::PathStats {
        self.connection.stats().path
    }

    /// Ends the link and its streams. The peer receives the text.
    pub fn close(&self, text: &str) {
        self.connection.close(NO_REASON, text.as_bytes());
        self.streams.ended.cancel();
    }

    /// Opens a stream for a dial, and waits for the answer. Dropping the future cancels the dial.
    ///
    /// # Errors
    /// See [`LinkDialError`].
    pub async fn dial(&self, dial: &Dial) -> Result<(QuicSource, QuicSink), LinkDialError> {
        let unusable = |_| LinkDialError::Unusable;
        let answered = async {
            let (send, receive) = self.connection.open_bi().await.map_err(unusable)?;
            let (mut source, mut sink) = halves(send, receive, &self.streams, self.lost);
            let request = dial::request_text(&dial::request(dial));
            sink.head(request)
                .await
                .map_err(|reason| self.failed(reason))?;
            let head = source.head().await.map_err(|error| broken(&error))?;
            let answer = dial::parse_response(&head).map_err(|_| LinkDialError::Abandoned)?;
            match answer.status() {
                StatusCode::OK => Ok((source, sink)),
                _ => Err(LinkDialError::Refused(dial::error_text(&answer))),
            }
        };
        tokio::select! {
            biased;
            answered = answered => answered,
            () = self.unusable() => Err(LinkDialError::Unusable),
            () = self.watch_dial() => Err(LinkDialError::Unusable),
        }
    }

    /// Looks at the health of the link while a dial waits. Never ends.
    async fn watch_dial(&self) {
        let _dialing = Dialing::new(self);
        loop {
            sleep(DIAL_LOOK).await;
            self.look();
        }
    }

    fn failed(&self, reason: CloseReason) -> LinkDialError {
        match reason == self.lost {
            true => LinkDialError::Unusable,
            false => LinkDialError::Abandoned,
        }
    }

    /// Accepts the stream of a dial. Permits more streams when most are in use: each permitted stream costs memory
    /// from the start of the connection.
    ///
    /// # Errors
    /// Fails with the cause once the connection has ended.
    pub async fn accept(&self) -> Result<(QuicSource, QuicSink), String> {
        let (send, receive) = self.connection.accept_bi().await.map_err(text)?;
        let halves = halves(send, receive, &self.streams, self.lost);
        let limit = self.limit.load(Ordering::Relaxed);
        if self.open() >= limit as usize / 4 * 3 && limit < MAX_STREAMS {
            self.limit.store(limit * 2, Ordering::Relaxed);
            let limit = VarInt::from_u32(limit * 2);
            self.connection.set_max_concurrent_bi_streams(limit);
        }
        Ok(halves)
    }

    /// Carries words until the link ends, and returns the cause. Calls `on_word` for words about the whole link, and
    /// `on_silence` every 2 s while the peer does not answer, with the time since the first unanswered packet. A ping follows
    /// each call.
    pub async fn run(
        &self,
        (mut send, receive): (SendStream, RecvStream),
        Words(mut words): Words,
        on_word: impl FnMut(Word),
        on_silence: impl Fn(Duration),
    ) -> String {
        // Fails only for a stream that has ended.
        let _ = send.set_priority(CONTROL_PRIORITY);
        let outgoing = async {
            while let Some(word) = words.recv().await {
                if let Err(error) = send.write_chunk(word.to_line()).await {
                    return error.to_string();
                }
            }
            "no more words".to_owned()
        };
        let cause = tokio::select! {
            error = self.connection.closed() => error.to_string(),
            cause = self.receive(receive, on_word) => cause,
            cause = outgoing => cause,
            cause = self.watch(on_silence) => cause,
            () = self.streams.overflow.cancelled() => {
                format!("the peer does not read its control stream: {WAITING_WORDS} words wait")
            }
        };
        self.close(&cause);
        cause
    }

    async fn receive(&self, mut receive: RecvStream, mut on_word: impl FnMut(Word)) -> String {
        let mut words = WordReader::default();
        loop {
            match receive.read_chunk(usize::MAX, true).await {
                Ok(Some(chunk)) => words.push(&chunk.bytes, |word| match word {
                    Word::End(end) => self.streams.announce(end),
                    Word::Ping => self.send(Word::Pong),
                    Word::Pong => drop(self.answers.fetch_add(1, Ordering::Relaxed)),
                    word => on_word(word),
                }),
                Ok(None) => return "the peer ended the control stream".to_owned(),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Watches the health of the link while it has streams or is unhealthy. Ends with the cause once the peer has not
    /// answered for [`IDLE_TIMEOUT`].
    async fn watch(&self, on_silence: impl Fn(Duration)) -> String {
        let mut asked = Duration::ZERO;
        loop {
            while self.open() == 0 && *self.healthy.borrow() {
                self.streams.opened.notified().await;
            }
            while self.open() > 0 || !*self.healthy.borrow() {
                if let Look::Silent(time) | Look::Waking(time) = self.look() {
                    // The other direction may work, and keep the connection alive.
                    if time >= IDLE_TIMEOUT {
                        return format!("the peer has not answered for {IDLE_TIMEOUT:?}");
                    }
                    // A new silence begins at zero.
                    asked = asked.min(time);
                    if time - asked >= ASK_AGAIN {
                        asked = time;
                        on_silence(time);
                        self.ask_again();
                    }
                }
                sleep(LOOK).await;
            }
        }
    }

    /// Looks for answers of the peer, and asks for an answer that is due.
    fn look(&self) -> Look {
        let is_dialing = self.dialing.load(Ordering::Relaxed) > 0;
        // Locked until the end, so that an older look does not replace the result of a newer one.
        let mut health = self.health.lock();
        let look = health.look(Instant::now(), self.counters(), is_dialing);
        let set = |healthy| {
            let is_new = |was: &mut bool| std::mem::replace(was, healthy) != healthy;
            self.healthy.send_if_modified(is_new)
        };
        match look {
            Look::Answered => drop(set(true)),
            Look::Quiet => {}
            Look::Unanswered => self.send(Word::Ping),
            Look::Silent(_) | Look::Waking(_) => {
                if set(false) {
                    self.streams.opened.notify_one();
                }
                if matches!(look, Look::Waking(_)) {
                    self.ask_again();
                }
            }
        }
        look
    }

    /// Asks a silent peer for an answer, even if the window is full.
    fn ask_again(&self) {
        permit_packets(&self.connection);
        self.send(Word::Ping);
    }

    fn counters(&self) -> Counters {
        let stats = self.connection.stats();
        Counters {
            received: stats.udp_rx.datagrams,
            answers: self.answers.load(Ordering::Relaxed),
            sent: stats.udp_tx.datagrams,
            round_trip: stats.path.rtt,
        }
    }
}

// === impl Dialing ===

impl<'a> Dialing<'a> {
    fn new(link: &'a Link) -> Self {
        link.dialing.fetch_add(1, Ordering::Relaxed);
        Self(link)
    }
}

impl Drop for Dialing<'_> {
    fn drop(&mut self) {
        self.0.dialing.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Reads the dial at the start of an accepted stream.
///
/// # Errors
/// Fails with the cause if the stream ends, or does not start with a dial.
pub async fn read_dial(source: &mut QuicSource) -> Result<Dial, String> {
    let head = source.head().await.map_err(|error| format!("{error:?}"))?;
    let request = dial::parse_request(&head).map_err(text)?;
    Ok(dial::dial_of(&request))
}

/// Answers a dial.
///
/// # Errors
/// Fails with the close reason if the server has given the dial up.
pub async fn answer(sink: &mut QuicSink, response: &Response<()>) -> Result<(), CloseReason> {
    sink.head(dial::response_text(response)).await
}

/// Returns the error of a dial whose answer cannot be read.
fn broken(error: &HeadError) -> LinkDialError {
    let HeadError::Io(error) = error else {
        return LinkDialError::Abandoned;
    };
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(ReadError::ConnectionLost(_)) => LinkDialError::Unusable,
        _ => LinkDialError::Abandoned,
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests;
