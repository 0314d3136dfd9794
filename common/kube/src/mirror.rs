//! Objects of a Kubernetes API as they were seen last: a list, and a watch of what changes.
//!
//! A [`Mirror`] keeps what it knows while the API can not be reached, tells the log once when that
//! begins and once when it is over, and what it holds is bounded if its owner says so.
//!
//! An API that has fallen silent is one that can not be reached: no answer may be silent for longer
//! than [`SILENCE`]. So that a watch without changes is never that silent, the API is asked to end
//! it after half a minute; the next one goes on from the version that was seen last.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _, stream};
use kube::Api;
use kube::runtime::watcher::{self, Event};
use rand::Rng as _;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use crate::client::{SILENCE, root};

/// The pause before the first new try, and the longest. Real ones are half of that at least, so that
/// not all who have lost an API come back at once.
const PAUSES: [Duration; 2] = [Duration::from_millis(800), Duration::from_secs(30)];

/// How long the API lets one watch live, in seconds. Kubernetes' own programs ask for 5 to 10 minutes:
/// that long may a dead one be taken for one without changes. It costs one small request each time.
const WATCH: u32 = 30;

/// `watcher` takes a silent watch for one that has ended, and goes on, 5 s after its end is due.
/// Before, it has to be a failure; and it must not be one if its end is a little late.
const _: () = {
    let silence = SILENCE.as_secs();
    assert!(WATCH as u64 + 3 <= silence && silence < WATCH as u64 + 5);
};

/// Who has failed to watch that long after a list has watched meanwhile.
const WATCHED: Duration = Duration::from_secs(3);

/// How many reasons of one failure are told once.
const TOLD: usize = 4;

/// A kind's objects, as far as they are known.
pub struct Mirror<T> {
    /// Whose they are, for the log.
    kind: &'static str,
    /// How many are kept at most.
    limit: usize,
    objects: HashMap<Key, T>,
    /// A list that is being received; it replaces the objects when it is complete.
    listing: Option<HashMap<Key, T>>,
    /// The first list is complete.
    synced: bool,
    /// Why the watch has failed since it last worked, as the log has it: the newest [`TOLD`] reasons.
    failing: Vec<String>,
    /// The log knows that some are left out.
    overflowed: bool,
}

/// Namespace, empty for what has none, and name.
type Key = (String, String);

/// All of an API's objects, from now on. After a failure it begins anew with a list, by pauses that
/// grow: a watch that goes on from the version it knows would not show that it works again before
/// something changes, and repeats for ever what a proxy in between makes of an expired version.
pub fn objects<K>(api: Api<K>) -> impl Stream<Item = Result<Event<K>, watcher::Error>> + use<K>
where
    K: kube::Resource + Clone + fmt::Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().timeout(WATCH);
    let begin = move || watcher::watcher(api.clone(), config.clone()).boxed();
    let first = (begin(), Pause::default());
    stream::unfold(
        (first, begin),
        |((mut events, mut pause), begin)| async move {
            if let Some(time) = pause.due.take() {
                sleep(time).await;
                events = begin();
            }
            let event = events.next().await?;
            pause.note(&event);
            Some((event, ((events, pause), begin)))
        },
    )
}

/// How long the next new try waits.
#[derive(Default)]
struct Pause {
    due: Option<Duration>,
    last: Option<Duration>,
    /// When a list was complete, if nothing has failed since.
    listed: Option<Instant>,
}

// === impl Mirror ===

impl<T: PartialEq> Mirror<T> {
    /// Nothing yet. `kind` is a plural.
    pub fn new(kind: &'static str) -> Self {
        Self {
            kind,
            limit: usize::MAX,
            objects: HashMap::new(),
            listing: None,
            synced: false,
            failing: Vec::new(),
            overflowed: false,
        }
    }

    /// Keeps no more than so many; the log names it when there are more.
    #[must_use]
    pub fn at_most(mut self, limit: usize) -> Self {
        self.limit = limit;
        self
    }

    /// What is known.
    pub fn values(&self) -> impl Iterator<Item = &T> + Clone {
        self.objects.values()
    }

    /// Whether one of that name is known.
    pub fn has(&self, namespace: &str, name: &str) -> bool {
        let key = (namespace.to_owned(), name.to_owned());
        self.objects.contains_key(&key)
    }

    /// Whether the first list is complete.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Whether the last that was heard was no failure.
    pub fn is_up(&self) -> bool {
        self.failing.is_empty()
    }

    /// Whether anything differs now. What `convert` makes nothing of counts as not there.
    pub fn take<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: impl FnOnce(K) -> Option<T>,
    ) -> bool {
        self.take_where(event, convert, |_| true)
    }

    /// The same, if a difference counts only where it `matters` before or after. All is kept.
    pub fn take_where<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: impl FnOnce(K) -> Option<T>,
        matters: impl Fn(&T) -> bool,
    ) -> bool {
        let event = match event {
            Ok(event) => event,
            Err(failed) => {
                let (mut why, root) = (failed.to_string(), root(&failed));
                if !why.contains(&root) {
                    why = format!("{why}: {root}");
                }
                self.fail(why);
                return false;
            }
        };
        // A list that is not complete has not succeeded yet.
        let has_succeeded = !matches!(event, Event::Init | Event::InitApply(_));
        if has_succeeded && !self.is_up() {
            self.failing.clear();
            info!("watching {} again", self.kind);
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
                let listed = self.listing.take().unwrap_or_default();
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

    fn fail(&mut self, why: String) {
        // Reasons may take turns: what refuses connections resets some and closes others.
        if !self.failing.contains(&why) {
            error!(
                error = why,
                "cannot watch {}; what was seen last stays in force, and it is tried again",
                self.kind
            );
            self.failing.truncate(TOLD - 1);
            self.failing.insert(0, why);
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

fn has_room<T>(objects: &HashMap<Key, T>, key: &Key, limit: usize) -> bool {
    objects.len() < limit || objects.contains_key(key)
}

// === impl Pause ===

impl Pause {
    /// Plans the pause after a failure. A list that succeeds does not make it short again, but a
    /// watch that lives for a while does: an account may be allowed to list and not to watch, and
    /// what is in between may break every watch that it lets begin.
    fn note<K>(&mut self, event: &Result<Event<K>, watcher::Error>) {
        match event {
            Ok(Event::InitDone) => {
                self.listed = Some(Instant::now());
                return;
            }
            Ok(_) => return,
            Err(_) => {}
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
