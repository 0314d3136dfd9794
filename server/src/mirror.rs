//! Objects of a Kubernetes API as they were seen last: a list, and a watch of what changes.
//!
//! A [`Mirror`] keeps what it knows while the API can not be reached, tells the log once when that
//! begins and once when it is over, and what it holds is bounded if its owner says so.

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

/// The pause before the first new try, and the longest. Real ones are half of that at least, so that
/// not all who have lost an API come back at once.
const PAUSES: [Duration; 2] = [Duration::from_millis(800), Duration::from_secs(30)];

/// Who has failed to watch that long after a list has watched meanwhile.
const WATCHED: Duration = Duration::from_secs(3);

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
    /// Why the watch fails at present, as the log has it.
    failing: Option<String>,
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
    let begin = move || watcher::watcher(api.clone(), watcher::Config::default()).boxed();
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
            failing: None,
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

    /// Whether the first list is complete.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    /// Whether the last that was heard was no failure.
    pub fn is_up(&self) -> bool {
        self.failing.is_none()
    }

    /// Whether anything differs now. What `convert` makes nothing of counts as not there.
    pub fn take<K: kube::ResourceExt>(
        &mut self,
        event: Result<Event<K>, watcher::Error>,
        convert: fn(K) -> Option<T>,
    ) -> bool {
        let event = match event {
            Ok(event) => event,
            Err(failed) => {
                self.fail(failed.to_string());
                return false;
            }
        };
        // A list that begins has not succeeded yet.
        if !matches!(event, Event::Init) && self.failing.take().is_some() {
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
                        if has_room {
                            self.objects.insert(key, object);
                        }
                        self.overflow(!has_room);
                        has_room
                    }
                    None => self.objects.remove(&key).is_some(),
                }
            }
            Event::Delete(object) => self.objects.remove(&key(&object)).is_some(),
            Event::Init => {
                self.listing = Some(HashMap::new());
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
                let changed = !self.synced || listed != self.objects;
                self.objects = listed;
                self.synced = true;
                changed
            }
        }
    }

    fn fail(&mut self, why: String) {
        if self.failing.as_ref() != Some(&why) {
            error!(
                error = why,
                "cannot watch {}; what was seen last stays in force, and it is tried again",
                self.kind
            );
            self.failing = Some(why);
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
    /// watch does: an account may be allowed to list and not to watch.
    fn note<K>(&mut self, event: &Result<Event<K>, watcher::Error>) {
        let error = match event {
            Ok(Event::InitDone) => {
                self.listed = Some(Instant::now());
                return;
            }
            Ok(_) => return,
            Err(error) => error,
        };
        let had_begun = matches!(
            error,
            watcher::Error::WatchFailed(_) | watcher::Error::WatchError(_)
        );
        let listed = self.listed.take();
        let has_lived = listed.is_some_and(|at| at.elapsed() > WATCHED);
        let [shortest, longest] = PAUSES;
        let last = self.last.filter(|_| !had_begun && !has_lived);
        let pause = last.map_or(shortest, |last| (2 * last).min(longest));
        self.last = Some(pause);
        self.due = Some(pause.mul_f64(rand::rng().random_range(0.5..=1.0)));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use k8s_openapi::api::core::v1::Node;
    use kube::ResourceExt as _;
    use kube::core::Status;

    use super::*;

    fn node(name: &str, label: &str) -> Node {
        let mut node = Node::default();
        node.metadata.name = Some(name.to_owned());
        let labels = [("label".to_owned(), label.to_owned())];
        node.metadata.labels = Some(labels.into());
        node
    }

    /// Nodes without a label are nothing.
    fn label_of(node: Node) -> Option<String> {
        let label = node.labels().get("label").cloned();
        label.filter(|label| !label.is_empty())
    }

    fn refused() -> watcher::Error {
        let status = Status::failure("no", "Forbidden").with_code(403);
        watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()))
    }

    fn known(mirror: &Mirror<String>) -> Vec<&str> {
        let mut known: Vec<&str> = mirror.values().map(String::as_str).collect();
        known.sort_unstable();
        known
    }

    #[test]
    fn a_list_counts_once_it_is_complete_and_changes_follow() {
        let mut mirror = Mirror::new("Nodes");
        let mut take = |event| (mirror.take(Ok(event), label_of), mirror.is_synced());
        assert_eq!(take(Event::Init), (false, false));
        assert_eq!(take(Event::InitApply(node("a", "1"))), (false, false));
        assert_eq!(take(Event::InitApply(node("b", ""))), (false, false));
        assert_eq!(take(Event::InitDone), (true, true));
        assert_eq!(take(Event::Apply(node("a", "1"))), (false, true));
        assert_eq!(take(Event::Apply(node("b", "2"))), (true, true));
        assert_eq!(take(Event::Apply(node("c", "3"))), (true, true));
        assert_eq!(take(Event::Apply(node("b", ""))), (true, true));
        assert_eq!(take(Event::Delete(node("a", "1"))), (true, true));
        assert_eq!(take(Event::Delete(node("a", "1"))), (false, true));
        assert_eq!(known(&mirror), ["3"]);
    }

    #[test]
    fn what_was_seen_last_stays_while_lists_fail() {
        let mut mirror = Mirror::new("Nodes");
        mirror.take(Ok(Event::Init), label_of);
        mirror.take(Ok(Event::InitApply(node("a", "1"))), label_of);
        mirror.take(Ok(Event::InitDone), label_of);
        for _ in 0..3 {
            assert!(!mirror.take(Err(refused()), label_of));
            // It is tried again, which is no success yet.
            assert!(!mirror.take(Ok(Event::<Node>::Init), label_of));
            assert!(!mirror.is_up());
            mirror.take(Ok(Event::InitApply(node("b", "2"))), label_of);
            assert_eq!(known(&mirror), ["1"]);
        }
        mirror.take(Ok(Event::Init), label_of);
        mirror.take(Ok(Event::InitApply(node("c", "3"))), label_of);
        assert!(mirror.take(Ok(Event::<Node>::InitDone), label_of) && mirror.is_up());
        assert_eq!(known(&mirror), ["3"]);
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for() {
        let mut mirror = Mirror::new("Nodes").at_most(2);
        mirror.take(Ok(Event::Init), label_of);
        for name in ["a", "b", "c"] {
            mirror.take(Ok(Event::InitApply(node(name, name))), label_of);
        }
        assert!(mirror.take(Ok(Event::<Node>::InitDone), label_of));
        assert_eq!(known(&mirror), ["a", "b"]);
        assert!(!mirror.take(Ok(Event::Apply(node("d", "d"))), label_of));
        assert!(mirror.take(Ok(Event::Apply(node("a", "x"))), label_of));
        assert!(mirror.take(Ok(Event::Delete(node("b", "b"))), label_of));
        assert!(mirror.take(Ok(Event::Apply(node("d", "d"))), label_of));
        assert_eq!(known(&mirror), ["d", "x"]);
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_until_a_watch_has_begun() {
        let mut pause = Pause::default();
        let mut after = |event: Result<Event<Node>, watcher::Error>| {
            pause.note(&event);
            pause.due.take()
        };
        let [shortest, longest] = PAUSES;
        let mut expected = shortest;
        for _ in 0..10 {
            let time = after(Err(refused())).unwrap();
            assert!(time <= expected && time >= expected / 2, "{time:?}");
            assert_eq!(after(Ok(Event::Init)), None);
            assert_eq!(after(Ok(Event::InitDone)), None);
            expected = (2 * expected).min(longest);
        }
        let broken = watcher::Error::WatchFailed(kube::Error::TlsRequired);
        assert!(after(Err(broken)).unwrap() <= shortest);
        assert!(after(Err(refused())).unwrap() >= shortest);
        // What has watched for a while need not have failed by itself: the API may have gone.
        assert_eq!(after(Ok(Event::InitDone)), None);
        tokio::time::advance(2 * WATCHED).await;
        assert!(after(Err(refused())).unwrap() <= shortest);
    }
}
