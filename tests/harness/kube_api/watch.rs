//! A single watch: the changes that it selects, its events as lines of JSON, and its body.

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

/// Number of events that wait for a client that does not read. A further event ends the watch, as in the API
/// server, and the client resumes.
const MAX_WAITING: usize = 1000;

/// A client's request to watch.
#[derive(Debug)]
pub(super) struct WatchRequest {
    pub(super) filter: Filter,
    /// Path and query as sent.
    pub(super) path: String,
    pub(super) start: Start,
    /// True if the client allows bookmarks.
    pub(super) bookmarks: bool,
    pub(super) lifetime: Duration,
    /// True if the watch must send nothing at all.
    pub(super) silent: bool,
}

/// The first events of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// All changes after this version.
    After(u64),
    /// All existing objects, as if each were added now.
    Present,
    /// All existing objects, and then a bookmark that marks the end of the list: a streaming list.
    PresentAndMark,
}

/// A change of an object.
#[derive(Debug)]
pub(super) struct Change {
    /// The version that the change creates.
    pub(super) version: u64,
    pub(super) kind: &'static Kind,
    /// The object before the change; `None` if the object is created.
    pub(super) before: Option<Value>,
    /// The object after the change; `None` if the object is deleted.
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

/// The client's end of a watch. Ends with the watch or after its lifetime, whichever is first.
#[derive(Debug)]
pub(super) struct WatchBody {
    lines: mpsc::Receiver<Bytes>,
    end: Pin<Box<Sleep>>,
}

/// Returns an event as a line.
pub(super) fn event(kind: &str, object: &Value) -> Bytes {
    // The type comes first, as in the API server, so that a client can decode the object without buffering.
    Bytes::from(format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"))
}

/// Returns a bookmark with this version. With `ends_list`, the bookmark ends a streaming list.
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
    /// Returns the event for a watch with this filter. An object that starts or stops to match the filter is
    /// an added or deleted object for the watch.
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
                // The last state, with the version of the deletion, from which the client continues.
                before["metadata"]["resourceVersion"] = json!(self.version.to_string());
                Some(event("DELETED", &before))
            }
        }
    }
}

// === impl Watcher ===

impl Watcher {
    /// Opens a watch with `lines` as its first events.
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
            assert!(watcher.send(line), "room for the first events");
        }
        (watcher, body)
    }

    /// Sends the event for a change, if the watch selects the change. Returns false if the watch is closed.
    pub(super) fn tell(&self, change: &Change) -> bool {
        let line = change.line(&self.filter);
        line.is_none_or(|line| self.send(line))
    }

    /// Sends a bookmark, if the client allows bookmarks. Returns false if the watch is closed.
    pub(super) fn mark(&self, version: u64) -> bool {
        !self.bookmarks || self.send(bookmark(self.filter.kind, version, false))
    }

    /// Makes the watch silent if its path and query contain `text`.
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

    /// Creates a watch with a single event, which ends afterwards.
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
