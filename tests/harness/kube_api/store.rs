//! The objects, the version counter that all changes share, and the log that watches resume from.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Value, json};

use super::address::{Filter, Kind};
use super::fault::Gone;
use super::status::Failure;
use super::text;
use super::watch::{Change, Start, WatchBody, WatchRequest, Watcher, bookmark, event};

/// Number of changes that the log keeps. A watch that resumes from an older version is expired.
const MAX_LOG: usize = 10_000;

/// Plural, namespace (empty for a kind without namespaces) and name.
pub(super) type Key = (&'static str, String, String);

/// Returns the key of an object.
pub(super) fn key(kind: &'static Kind, object: &Value) -> Key {
    let namespace = if kind.namespaced {
        text(object, "/metadata/namespace")
    } else {
        ""
    };
    let name = text(object, "/metadata/name");
    (kind.plural, namespace.to_owned(), name.to_owned())
}

/// All objects, their log and their watches.
#[derive(Debug)]
pub(super) struct Store {
    version: u64,
    /// Oldest version that a watch can resume from.
    oldest: u64,
    gone: Gone,
    objects: BTreeMap<Key, Value>,
    log: VecDeque<Change>,
    watchers: Vec<Watcher>,
}

// === impl Store ===

impl Store {
    /// Creates a store without objects. The first version is 1, because 0 in a request means any version.
    pub(super) fn new() -> Self {
        Self {
            version: 1,
            oldest: 1,
            gone: Gone::Event,
            objects: BTreeMap::new(),
            log: VecDeque::new(),
            watchers: Vec::new(),
        }
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    pub(super) fn names(&self, kind: &'static Kind, namespace: &str) -> Vec<String> {
        let keys = self.objects.keys();
        let keys = keys.filter(|(plural, of, _)| *plural == kind.plural && of == namespace);
        keys.map(|(_, _, name)| name.clone()).collect()
    }

    pub(super) fn list<'a>(&'a self, filter: &'a Filter) -> impl Iterator<Item = &'a Value> {
        let of_kind = self
            .objects
            .iter()
            .filter_map(move |((plural, ..), object)| {
                (*plural == filter.kind.plural).then_some(object)
            });
        of_kind.filter(move |object| filter.matches(object))
    }

    /// Creates or replaces an object, and returns the stored object. As in the API server, a write that
    /// changes nothing creates no version. `object` and its metadata must be JSON objects.
    pub(super) fn set(&mut self, kind: &'static Kind, mut object: Value) -> Value {
        let key = key(kind, &object);
        let before = self.objects.get(&key).cloned();
        object["apiVersion"] = json!(kind.api_version);
        object["kind"] = json!(kind.name);
        let metadata = &mut object["metadata"];
        match &before {
            Some(before) => {
                for field in ["uid", "creationTimestamp", "resourceVersion"] {
                    metadata[field] = before["metadata"][field].clone();
                }
            }
            None => {
                if text(metadata, "/uid").is_empty() {
                    let next = self.version + 1;
                    metadata["uid"] = json!(format!("00000000-0000-4000-8000-{next:012x}"));
                }
                if text(metadata, "/creationTimestamp").is_empty() {
                    metadata["creationTimestamp"] = json!(timestamp());
                }
            }
        }
        if before.as_ref() == Some(&object) {
            return object;
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.objects.insert(key, object.clone());
        self.record(kind, before, Some(object.clone()));
        object
    }

    /// Deletes an object, and returns its last state.
    pub(super) fn remove(&mut self, kind: &'static Kind, key: &Key) -> Option<Value> {
        let before = self.objects.remove(key)?;
        self.version += 1;
        self.record(kind, Some(before.clone()), None);
        Some(before)
    }

    fn record(&mut self, kind: &'static Kind, before: Option<Value>, after: Option<Value>) {
        let change = Change {
            version: self.version,
            kind,
            before,
            after,
        };
        self.watchers.retain(|watcher| watcher.tell(&change));
        self.log.push_back(change);
        if self.log.len() > MAX_LOG {
            let dropped = self.log.pop_front().expect("a change in a full log");
            self.oldest = self.oldest.max(dropped.version);
        }
    }

    /// Opens a watch.
    pub(super) fn watch(&mut self, request: WatchRequest) -> Result<WatchBody, Failure> {
        let filter = &request.filter;
        let lines: Vec<Bytes> = match request.start {
            Start::After(version) if version < self.oldest => {
                let failure = Failure::expired(version, self.oldest);
                return match self.gone {
                    Gone::Event => Ok(WatchBody::only(event("ERROR", &failure.object()))),
                    Gone::Http => Err(failure),
                };
            }
            Start::After(version) => {
                let newer = self.log.iter().filter(|change| change.version > version);
                newer.filter_map(|change| change.line(filter)).collect()
            }
            Start::Present | Start::PresentAndMark => {
                let present = self.list(filter).map(|object| event("ADDED", object));
                let marked = request.start == Start::PresentAndMark && request.bookmarks;
                let mark = marked.then(|| bookmark(filter.kind, self.version, true));
                present.chain(mark).collect()
            }
        };
        let (watcher, body) = Watcher::open(request, lines);
        self.watchers.retain(Watcher::is_open);
        self.watchers.push(watcher);
        Ok(body)
    }

    /// Returns the number of watches that are open and not silent.
    pub(super) fn watches(&self) -> usize {
        let watchers = self.watchers.iter();
        watchers
            .filter(|watcher| watcher.is_open() && !watcher.is_silent())
            .count()
    }

    /// Sends a bookmark to every watch that allows bookmarks.
    pub(super) fn bookmark(&mut self) {
        let version = self.version;
        self.watchers.retain(|watcher| watcher.mark(version));
    }

    /// Makes open watches silent if their path and query contain `text`.
    pub(super) fn silence(&mut self, text: &str) {
        for watcher in &mut self.watchers {
            watcher.silence(text);
        }
    }

    /// Makes all versions known so far expire. `gone` selects the answer that later watches get.
    pub(super) fn expire(&mut self, gone: Gone) {
        // A version without an object: even the newest version that a client can know expires.
        self.version += 1;
        self.oldest = self.version;
        self.gone = gone;
        self.log.clear();
    }
}

/// Returns the current time in the format of the API, in whole seconds.
fn timestamp() -> String {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = elapsed.expect("a clock after 1970").as_secs();
    // The calendar of `rcgen`, which the certificates need anyway.
    let now = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    format!(
        "{}-{:02}-{:02}T{:02}:{:02}:{:02}Z",
        now.year(),
        u8::from(now.month()),
        now.day(),
        now.hour(),
        now.minute(),
        now.second()
    )
}
