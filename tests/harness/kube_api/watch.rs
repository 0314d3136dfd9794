//! One watch: what it selects of each change, its events as lines of JSON, and its body.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Sleep;

use super::address::{Filter, Kind};

/// How many events wait for a client that does not read. With more, the watch ends, as the API
/// server's does, and the client resumes it.
const MAX_WAITING: usize = 1000;

/// What a client asks for.
#[derive(Debug)]
pub(super) struct WatchRequest {
    pub(super) filter: Filter,
    /// Path and query as they were sent.
    pub(super) path: String,
    pub(super) start: Start,
    /// Whether bookmarks are wanted.
    pub(super) bookmarks: bool,
    pub(super) lifetime: Duration,
    /// Whether the watch is to say nothing at all.
    pub(super) silent: bool,
}

/// Where a watch starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// With what has changed since a version.
    After(u64),
    /// With what there is, as if it were added now.
    Present,
    /// The same, and then a bookmark that says that this was all: a streaming list.
    PresentAndMark,
}

/// One change of one object.
#[derive(Debug)]
pub(super) struct Change {
    /// The version that the change makes.
    pub(super) version: u64,
    pub(super) kind: &'static Kind,
    /// The object before; nothing if it is created.
    pub(super) before: Option<Value>,
    /// The object after; nothing if it is deleted.
    pub(super) after: Option<Value>,
}

/// The API's end of an open watch.
#[derive(Debug)]
pub(super) struct Watcher {
    filter: Filter,
    path: String,
    bookmarks: bool,
    silent: bool,
    lines: mpsc::Sender<Bytes>,
}

/// The client's end of a watch: ends with the watch or after its time, whichever is first.
#[derive(Debug)]
pub(super) struct WatchBody {
    lines: mpsc::Receiver<Bytes>,
    end: Pin<Box<Sleep>>,
}

/// One event as a line.
pub(super) fn event(kind: &str, object: &Value) -> Bytes {
    // The type first, as the API server has it, so that a client need not hold back the object.
    Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
}

/// A bookmark for a version, which may end a streaming list.
pub(super) fn bookmark(kind: &Kind, version: u64, ends_list: bool) -> Bytes {
    let mut object = json!({
        "kind": kind.name,
        "apiVersion": kind.api_version,
        "metadata": {"resourceVersion": version.to_string(), "creationTimestamp": null},
    });
    if ends_list {
        object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    event("BOOKMARK", &object)
}

// === impl Change ===

impl Change {
    /// What a watch with this filter sees of it. An object that begins or ceases to be selected is
    /// added or deleted for that watch.
    pub(super) fn line(&self, filter: &Filter) -> Option<Bytes> {
        if self.kind != filter.kind {
            return None;
        }
        let selected = |object: &Option<Value>| {
            let object = object.as_ref();
            object.filter(|object| filter.matches(object)).cloned()
        };
        match (selected(&self.before), selected(&self.after)) {
            (None, None) => None,
            (None, Some(after)) => Some(event("ADDED", &after)),
            (Some(_), Some(after)) => Some(event("MODIFIED", &after)),
            (Some(mut before), None) => {
                // The last state, but with the version to go on from.
                before["metadata"]["resourceVersion"] = json!(self.version.to_string());
                Some(event("DELETED", &before))
            }
        }
    }
}

// === impl Watcher ===

impl Watcher {
    /// Opens a watch whose first events are `lines`.
    pub(super) fn open(request: WatchRequest, lines: Vec<Bytes>) -> (Self, WatchBody) {
        let (sender, body) = WatchBody::new(lines.len() + MAX_WAITING, request.lifetime);
        let watcher = Self {
            filter: request.filter,
            path: request.path,
            bookmarks: request.bookmarks,
            silent: request.silent,
            lines: sender,
        };
        for line in lines {
            assert!(watcher.send(line), "there is room for the first events");
        }
        (watcher, body)
    }

    /// Tells it about a change; false if the watch is over.
    pub(super) fn tell(&self, change: &Change) -> bool {
        let line = change.line(&self.filter);
        line.is_none_or(|line| self.send(line))
    }

    /// Sends it a bookmark if it wants them; false if the watch is over.
    pub(super) fn mark(&self, version: u64) -> bool {
        !self.bookmarks || self.send(bookmark(self.filter.kind, version, false))
    }

    /// Makes it say nothing any more if its path and query contain `text`.
    pub(super) fn silence(&mut self, text: &str) {
        self.silent |= self.path.contains(text);
    }

    pub(super) fn is_open(&self) -> bool {
        !self.lines.is_closed()
    }

    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    fn send(&self, line: Bytes) -> bool {
        self.silent || self.lines.try_send(line).is_ok()
    }
}

// === impl WatchBody ===

impl WatchBody {
    fn new(capacity: usize, lifetime: Duration) -> (mpsc::Sender<Bytes>, Self) {
        let (sender, lines) = mpsc::channel(capacity);
        let end = Box::pin(tokio::time::sleep(lifetime));
        (sender, Self { lines, end })
    }

    /// A watch that has one event and ends.
    pub(super) fn only(line: Bytes) -> Self {
        let (sender, body) = Self::new(1, Duration::MAX);
        sender.try_send(line).expect("room for one event");
        body
    }
}

impl Body for WatchBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.lines.poll_recv(context) {
            Poll::Ready(line) => Poll::Ready(line.map(|line| Ok(Frame::data(line)))),
            Poll::Pending => self.end.as_mut().poll(context).map(|()| None),
        }
    }
}
