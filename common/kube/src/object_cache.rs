//! A local copy of Kubernetes objects: a list, and then a watch for changes.
//!
//! A [`ObjectCache`] keeps its objects while the API is unreachable, and logs the start and the end of an outage
//! once. Its owner may limit the number of objects.
//!
//! An API server that sends nothing for [`SILENCE`] counts as unreachable. A watch without changes is silent,
//! too, so each watch requests that the API server end it after half a minute at most; the next watch continues
//! from the last version received.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use culvert_host::telemetry::log_once::LogOnce;
use futures_util::{Stream, StreamExt as _, stream};
use kube::Api;
use kube::runtime::watcher::{self, Event};
use rand::Rng as _;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};

use crate::client::{SILENCE, root};
use crate::request::reason;

/// Shortest and longest planned pause before a retry. The actual pause is random, between half and all of the
/// planned pause, so that clients do not return to an API at the same moment.
const PAUSES: [Duration; 2] = [Duration::from_millis(800), Duration::from_secs(30)];

/// Lifetime of a watch, in seconds, sent to the API. Kubernetes' own programs request 5 to 10 minutes, so a
/// dead watch may look like a watch without changes for that long. Every new watch costs a small request. The client
/// shortens the first watch after a list.
const WATCH: u32 = 30;

/// [`SILENCE`] must be longer than [`WATCH`], so that a watch that ends up to 3 s late is not a failure, but
/// shorter than `WATCH` plus 5 s: after that time `watcher` starts another watch without reporting a failure.
const _: () = {
    let silence = SILENCE.as_secs();
    assert!(WATCH as u64 + 3 <= silence && silence < WATCH as u64 + 5);
};

/// Time for which a watch must stay up after its list. A longer life resets the retry pauses.
const WATCHED: Duration = Duration::from_secs(3);

/// Number of refused watches that are repeated from the last known version, since the last event. Lists of all objects would
/// make the overload worse.
const REFUSALS: u32 = 2;

/// The known objects of a kind.
pub struct ObjectCache<T> {
    /// Plural name of the kind, for the log.
    kind: &'static str,
    /// Largest number of objects to keep.
    limit: usize,
    objects: HashMap<Key, T>,
    /// The list in progress; replaces the objects when complete.
    listing: Option<HashMap<Key, T>>,
    /// Set once the first list is complete.
    synced: bool,
    /// Reasons of the current failure.
    failing: LogOnce,
    /// True if the API no longer had the known version, since the last success of a watch.
    is_outdated: bool,
    /// Set once the log has reported that objects were left out.
    overflowed: bool,
}

/// Namespace (empty for objects without one) and name.
type Key = (String, String);

/// Returns the events of all objects of an API, from now on. After a failure the stream waits for a growing
/// pause and starts again with a list. The stream does not resume from the last known version: such a watch
/// would not prove that it works until an object changes, and could fail forever if a proxy misreports an
/// expired version. Only a watch that an overloaded API refuses to start is repeated, twice. After a failure, the next
/// watch sends [`Event::InitDone`] a second time once it has stayed up.
pub fn objects<K>(api: Api<K>) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + use<K>
where
    K: kube::Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    events_of(api, "", REFUSALS)
}

/// Returns the events of the objects that match a label selector, as [`objects`] does. An empty selector matches
/// all objects. No refused watch is repeated: the caller measures times between events, and must know of each gap.
pub fn selected<K>(
    api: Api<K>,
    labels: &str,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + use<K>
where
    K: kube::Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    events_of(api, labels, 0)
}

fn events_of<K>(
    api: Api<K>,
    labels: &str,
    repeats: u32,
) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + use<K>
where
    K: kube::Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().timeout(WATCH);
    let config = match labels {
        "" => config,
        labels => config.labels(labels),
    };
    let begin = move || watcher::watcher(api.clone(), config.clone()).boxed();
    let pause = Pause {
        repeats,
        ..Pause::default()
    };
    let first = (begin(), pause);
    stream::unfold(
        (first, begin),
        |((mut events, mut pause), begin)| async move {
            if let Some(time) = pause.due.take() {
                sleep(time).await;
                events = begin();
            }
            let event = loop {
                let Ok(event) = timeout(pause.until_proof(), events.next()).await else {
                    // The watch is up.
                    pause.proof = None;
                    return Some((Ok(Event::InitDone), ((events, pause), begin)));
                };
                let event = event?;
                let Some(time) = pause.before_repeat(&event) else {
                    break event;
                };
                // Without a new list, the stream continues from the last known version.
                sleep(time).await;
            };
            pause.note(&event);
            Some((event, ((events, pause), begin)))
        },
    )
}

/// Schedule of the pauses before retries.
#[derive(Default)]
struct Pause {
    due: Option<Duration>,
    last: Option<Duration>,
    /// Time of the last complete list; `None` after a failure.
    listed: Option<Instant>,
    /// Number of refused watches since the last event.
    refused: u32,
    /// Number of refused watches that are repeated.
    repeats: u32,
    /// Time for which a watch must stay up after a failure; `None` without a failure since the last success of a watch.
    proof: Option<Duration>,
}

// === impl ObjectCache ===

impl<T: PartialEq> ObjectCache<T> {
    /// Creates an empty cache. `kind` is a plural.
    pub fn new(kind: &'static str) -> Self {
        Self {
            kind,
            limit: usize::MAX,
            objects: HashMap::new(),
            listing: None,
            synced: false,
            failing: LogOnce::default(),
            is_outdated: false,
            overflowed: false,
        }
    }

    /// Limits the number of objects. The log reports when objects are left out.
    #[must_use]
    pub fn at_most(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// Returns the known objects.
    pub fn values(&self) -> impl Iterator<Item = &T> + Clone {
        self.objects.values()
    }

    /// Returns true if an object with the name is known.
    pub fn has(&self, namespace: &str, name: &str) -> bool {
        let key = (namespace.to_owned(), name.to_owned());
        self.objects.contains_key(&key)
    }

    /// Returns true once the first list is complete.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Returns true unless the watch has failed since its last success.
    pub fn is_up(&self) -> bool {
        self.failing.current().is_none()
    }

    /// Applies an event. Returns true if the known objects have changed. An object rejected by `convert`
    /// counts as absent.
    pub fn take<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: impl FnOnce(K) -> Option<T>,
    ) -> bool {
        self.take_where(event, convert, |_| true)
    }

    /// Applies an event as [`ObjectCache::take`] does, but a change counts only if the object `matters` before
    /// or after the change. All objects are kept.
    pub fn take_where<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: impl FnOnce(K) -> Option<T>,
        matters: impl Fn(&T) -> bool,
    ) -> bool {
        let event = match event {
            Ok(event) => event,
            Err(failed) => {
                self.fail(&failed);
                return false;
            }
        };
        // A list proves little: an account may be allowed to list and not to watch.
        let has_succeeded = match event {
            Event::Init | Event::InitApply(_) => false,
            Event::InitDone => self.listing.is_none(),
            Event::Apply(_) | Event::Delete(_) => true,
        };
        if has_succeeded {
            self.is_outdated = false;
            if self.failing.has_recovered() {
                info!("watching {} again", self.kind);
            }
        }
        let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Apply(object) => {
                let key = key(&object);
                match convert(object) {
                    Some(object) if self.objects.get(&key) == Some(&object) => false,
                    Some(object) => {
                        let has_room = has_room(&self.objects, &key, self.limit);
                        self.overflow(!has_room);
                        let counts = matters(&object);
                        let before = match has_room {
                            true => self.objects.insert(key, object),
                            false => return false,
                        };
                        counts || before.is_some_and(|before| matters(&before))
                    }
                    None => self.objects.remove(&key).is_some_and(|it| matters(&it)),
                }
            }
            Event::Delete(object) => {
                let before = self.objects.remove(&key(&object));
                before.is_some_and(|before| matters(&before))
            }
            Event::Init => {
                self.listing = Some(HashMap::new());
                self.overflowed = false;
                false
            }
            Event::InitApply(object) => {
                let key = key(&object);
                if let (Some(listing), Some(object)) = (&mut self.listing, convert(object)) {
                    let has_room = has_room(listing, &key, self.limit);
                    if has_room {
                        listing.insert(key, object);
                    }
                    self.overflow(!has_room);
                }
                false
            }
            Event::InitDone => {
                let Some(listed) = self.listing.take() else {
                    return false;
                };
                let before = std::mem::replace(&mut self.objects, listed);
                let differs = |these: &HashMap<Key, T>, those: &HashMap<Key, T>| {
                    let mut these = these.iter();
                    these.any(|(key, it)| matters(it) && those.get(key) != Some(it))
                };
                let was_synced = std::mem::replace(&mut self.synced, true);
                !was_synced || differs(&self.objects, &before) || differs(&before, &self.objects)
            }
        }
    }

    /// Returns the reason of a failure, with the remedy if the API has refused the request.
    fn why(&self, failed: &watcher::Error) -> String {
        use watcher::Error::{InitialListFailed, WatchFailed, WatchStartFailed};
        match failed {
            InitialListFailed(error @ kube::Error::Api(_))
            | WatchStartFailed(error @ kube::Error::Api(_))
            | WatchFailed(error @ kube::Error::Api(_)) => {
                reason(error, || format!("list and watch {}", self.kind))
            }
            failed => {
                let (why, root) = (failed.to_string(), root(failed));
                match why.contains(&root) {
                    true => why,
                    false => format!("{why}: {root}"),
                }
            }
        }
    }

    fn fail(&mut self, failed: &watcher::Error) {
        let why = self.why(failed);
        if self.is_up() && is_outdated(failed) && !std::mem::replace(&mut self.is_outdated, true) {
            // A new list follows.
            info!(reason = why, "listing {} again", self.kind);
            return;
        }
        if let Some(due) = self.failing.failed(&why) {
            error!(
                error = why,
                attempts = due.attempts,
                failing_seconds = due.failing_seconds,
                "cannot watch {}; keeping the last known objects and retrying",
                self.kind
            );
        }
    }

    fn overflow(&mut self, is_over: bool) {
        if is_over && !self.overflowed {
            let (kind, limit) = (self.kind, self.limit);
            warn!("there are more than {limit} {kind}; the rest is left out");
            self.overflowed = true;
        }
    }
}

/// Returns true if the API no longer has the version from which the watch should continue.
fn is_outdated(failed: &watcher::Error) -> bool {
    use watcher::Error::{WatchError, WatchFailed, WatchStartFailed};
    let status = match failed {
        WatchError(status) => status,
        WatchStartFailed(kube::Error::Api(status)) | WatchFailed(kube::Error::Api(status)) => {
            status
        }
        _ => return false,
    };
    status.code == 410
}

fn has_room<T>(objects: &HashMap<Key, T>, key: &Key, limit: usize) -> bool {
    objects.len() < limit || objects.contains_key(key)
}

// === impl Pause ===

impl Pause {
    /// Returns the pause before another attempt to continue a watch that an overloaded API has refused to start; `None` for
    /// any other event, and once there were enough attempts.
    fn before_repeat<K>(&mut self, event: &Result<Event<K>, watcher::Error>) -> Option<Duration> {
        let Err(watcher::Error::WatchStartFailed(kube::Error::Api(status))) = event else {
            return None;
        };
        let is_overloaded = status.code == 429 || status.code >= 500;
        if !is_overloaded || self.refused == self.repeats {
            return None;
        }
        self.refused += 1;
        let [shortest, _] = PAUSES;
        let pause = shortest * self.refused;
        Some(pause.mul_f64(rand::rng().random_range(0.5..=1.0)))
    }

    /// Returns the time after which a watch without events counts as up.
    fn until_proof(&self) -> Duration {
        let proof = self.proof.filter(|_| self.listed.is_some());
        proof.unwrap_or(Duration::MAX)
    }

    /// Plans the pause after a failure. A complete list does not shorten the pauses again, but a watch that
    /// stays up does: an account may be allowed to list and not to watch, and a proxy may break every watch
    /// soon after its start.
    fn note<K>(&mut self, event: &Result<Event<K>, watcher::Error>) {
        if event.is_ok() {
            self.refused = 0;
        }
        match event {
            Ok(Event::InitDone) => {
                self.listed = Some(Instant::now());
                return;
            }
            Ok(Event::Init | Event::InitApply(_)) => return,
            Ok(Event::Apply(_) | Event::Delete(_)) => {
                self.proof = None;
                return;
            }
            // The next watch may get no answer, too.
            Err(failed) if root(failed) == "timed out" => self.proof = Some(SILENCE + WATCHED),
            Err(_) => self.proof = Some(WATCHED),
        }
        let listed = self.listed.take();
        let has_lived = listed.is_some_and(|at| at.elapsed() > WATCHED);
        let [shortest, longest] = PAUSES;
        let last = self.last.filter(|_| !has_lived);
        let pause = last.map_or(shortest, |last| (2 * last).min(longest));
        self.last = Some(pause);
        self.due = Some(pause.mul_f64(rand::rng().random_range(0.5..=1.0)));
    }
}

#[cfg(test)]
mod tests;
