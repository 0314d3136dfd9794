//! State that the streams of one QUIC link share: announced ends, outgoing words, and the bound on bytes that wait for
//! receivers that do not read.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use quinn::{RecvStream, VarInt};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::endpoint::{MAX_STREAMS, STREAM_WINDOW_BYTES};
use super::words::{End, Word};

/// Bytes that a connection reads from its stream while its receiver is busy. More bytes stay in the window of the
/// stream.
pub const AHEAD_BYTES: usize = 64 * 1024;

/// Largest number of bytes of a stream whose receiver does not read.
const STALLED_BYTES: usize = AHEAD_BYTES + STREAM_WINDOW_BYTES as usize;

/// Largest number of words that wait for a peer. An open stream causes at most one word, so all streams may end at once;
/// other words are few.
pub(super) const WAITING_WORDS: usize = MAX_STREAMS as usize;

/// Shared state of the streams of one link.
#[derive(Debug)]
pub struct Streams {
    words: mpsc::Sender<Word>,
    /// Fires when a word finds no room: the peer does not read its words.
    pub(crate) overflow: CancellationToken,
    open: AtomicUsize,
    /// Wakes the watcher of the link's health.
    pub(crate) opened: Notify,
    /// Fires when the QUIC connection has ended.
    pub(crate) ended: CancellationToken,
    table: Mutex<HashMap<u64, Weak<StreamState>>>,
    stalled: Mutex<Stalled>,
    /// Largest number of bytes that stalled streams may hold together.
    held_bytes: usize,
}

/// Streams whose receivers do not read, by the order in which they stalled.
#[derive(Debug, Default)]
struct Stalled {
    next: u64,
    streams: BTreeMap<u64, Arc<StreamState>>,
}

/// Shared state of the two halves of a stream.
#[derive(Debug)]
pub(crate) struct StreamState {
    id: u64,
    streams: Arc<Streams>,
    /// The end that the peer has announced.
    end: OnceLock<End>,
    announced: Notify,
    /// Fires when the stream must end because stalled streams hold too many bytes.
    evicted: CancellationToken,
    own: Mutex<Own>,
}

/// This side's end of a stream.
#[derive(Debug, Default)]
struct Own {
    code: Option<VarInt>,
    /// The receiving half of a source that was dropped before the sink. Dropping it stops the stream.
    parked: Option<RecvStream>,
}

/// Entry of a stalled stream; dropping the value removes the entry.
pub(crate) struct StalledGuard<'a> {
    streams: &'a Streams,
    key: u64,
}

/// Signals that a stream must end although its receiver does not read.
pub struct StreamCut(CancellationToken);

// === impl Streams ===

impl Streams {
    /// Creates the state of a link. Returns also the words to send.
    pub(crate) fn new(held_bytes: usize) -> (Arc<Self>, mpsc::Receiver<Word>) {
        let (words, receiver) = mpsc::channel(WAITING_WORDS);
        let streams = Arc::new(Self {
            words,
            overflow: CancellationToken::new(),
            open: AtomicUsize::new(0),
            opened: Notify::new(),
            ended: CancellationToken::new(),
            table: Mutex::default(),
            stalled: Mutex::default(),
            held_bytes,
        });
        (streams, receiver)
    }

    /// Sends a word. A word without room ends the link: without the word, the peer would take a part of a stream for
    /// the whole.
    pub(crate) fn send(&self, word: Word) {
        if let Err(TrySendError::Full(_)) = self.words.try_send(word) {
            self.overflow.cancel();
        }
    }

    /// Returns the number of open streams.
    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Records that the peer has announced the end of a stream. The end of an unknown stream means nothing: the stream
    /// has ended on this side, too.
    pub(crate) fn announce(&self, end: End) {
        let state = self.table.lock().get(&end.stream).and_then(Weak::upgrade);
        if let Some(state) = state {
            // Only the first end counts.
            let _ = state.end.set(end);
            state.announced.notify_one();
        }
    }

    /// Counts a stream whose receiver does not read. If such streams hold too many bytes together, the stream that
    /// stalled first must end.
    pub(crate) fn stall(&self, state: &Arc<StreamState>) -> StalledGuard<'_> {
        let mut stalled = self.stalled.lock();
        let key = stalled.next;
        stalled.next += 1;
        stalled.streams.insert(key, state.clone());
        if stalled.streams.len() * STALLED_BYTES > self.held_bytes
            && let Some((_, first)) = stalled.streams.pop_first()
        {
            first.evicted.cancel();
        }
        StalledGuard { streams: self, key }
    }
}

// === impl StreamState ===

impl StreamState {
    /// Adds a stream to a link.
    pub(crate) fn begin(streams: &Arc<Streams>, id: u64) -> Arc<Self> {
        let state = Arc::new(Self {
            id,
            streams: streams.clone(),
            end: OnceLock::new(),
            announced: Notify::new(),
            evicted: CancellationToken::new(),
            own: Mutex::default(),
        });
        streams.table.lock().insert(id, Arc::downgrade(&state));
        streams.open.fetch_add(1, Ordering::Relaxed);
        streams.opened.notify_one();
        state
    }

    /// Returns the number of the stream.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Returns the shared state of the link.
    pub(crate) fn streams(&self) -> &Arc<Streams> {
        &self.streams
    }

    /// Returns the end that the peer has announced.
    pub(crate) fn end(&self) -> Option<End> {
        self.end.get().copied()
    }

    /// Resolves once the peer has announced an end.
    pub(crate) async fn announced(&self) -> End {
        loop {
            if let Some(end) = self.end() {
                return end;
            }
            self.announced.notified().await;
        }
    }

    /// Returns true if the stream must end because stalled streams hold too many bytes.
    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted.is_cancelled()
    }

    /// Resolves if the stream must end because stalled streams hold too many bytes.
    pub(crate) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Returns the signal that the stream must end.
    pub(crate) fn cut(&self) -> StreamCut {
        StreamCut(self.evicted.clone())
    }

    /// Ends this side with `code`: stops the peer, now or when the source is dropped.
    pub(crate) fn end_with(&self, code: VarInt) {
        let mut own = self.own.lock();
        own.code = Some(code);
        if let Some(mut stream) = own.parked.take() {
            // Fails only for a stream that has ended.
            let _ = stream.stop(code);
        }
    }

    /// Keeps the receiving half of a dropped source until the sink reports its reason.
    pub(crate) fn park(&self, mut stream: RecvStream) {
        let mut own = self.own.lock();
        match own.code {
            Some(code) => drop(stream.stop(code)),
            None => own.parked = Some(stream),
        }
    }
}

impl Drop for StreamState {
    fn drop(&mut self) {
        self.streams.table.lock().remove(&self.id);
        self.streams.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for StalledGuard<'_> {
    fn drop(&mut self) {
        // The entry may be the last owner of its stream, whose end locks other state.
        let entry = self.streams.stalled.lock().streams.remove(&self.key);
        drop(entry);
    }
}

// === impl StreamCut ===

impl StreamCut {
    /// Resolves when the stream must end.
    pub async fn due(&self) {
        self.0.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]

    use culvert_stream::CloseReason;

    use super::*;

    #[test]
    fn stream_that_stalled_first_is_evicted_once_all_hold_too_much() {
        let (streams, _words) = Streams::new(3 * STALLED_BYTES);
        let states: Vec<_> = (0..5).map(|id| StreamState::begin(&streams, id)).collect();
        let mut guards: Vec<_> = states[..3]
            .iter()
            .map(|state| streams.stall(state))
            .collect();
        assert!(states.iter().all(|state| !state.is_evicted()));
        // A stream whose receiver reads again does not count anymore.
        drop(guards.remove(1));
        guards.push(streams.stall(&states[3]));
        assert!(states.iter().all(|state| !state.is_evicted()));
        guards.push(streams.stall(&states[4]));
        let evicted: Vec<_> = states.iter().map(|state| state.is_evicted()).collect();
        assert_eq!(evicted, [true, false, false, false, false]);
        drop(guards);
        assert_eq!(streams.open(), 5);
        drop(states);
        assert_eq!((streams.open(), streams.table.lock().len()), (0, 0));
    }

    #[test]
    fn announced_end_reaches_its_stream_and_no_other() {
        let (streams, _words) = Streams::new(0);
        let state = StreamState::begin(&streams, 4);
        let end = |stream| End {
            stream,
            reason: Some(CloseReason::Stalled),
            offset: 7,
        };
        streams.announce(end(8));
        assert_eq!(state.end(), None);
        streams.announce(end(4));
        assert_eq!(state.end(), Some(end(4)));
    }
}
