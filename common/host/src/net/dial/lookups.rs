//! Lookups of endpoint names. Concurrent lookups of one name share one call, as in Go (`net.Resolver.lookupGroup`). Go forgets a
//! call without callers and starts another. Here later dials join the call, because the call still occupies a thread: a name
//! without an answer occupies one place.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use parking_lot::{Mutex, const_mutex};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;

/// Largest number of concurrent lookups of endpoint names: three quarters of the 512 threads that the runtime has for blocking
/// calls. A silent resolver holds the thread of each lookup for up to a minute, and files and the names of servers need
/// threads, too.
pub(super) const MAX_LOOKUPS: usize = 384;

/// Lookups of all endpoint names. A call belongs to the runtime of its first caller, and ends with that runtime.
pub(super) static LOOKUPS: Lookups = Lookups::new(MAX_LOOKUPS);

/// Result of a lookup, shared by its callers.
type Found = Result<Vec<SocketAddr>, Failure>;

/// Parts of an error from which each caller makes its own error.
#[derive(Clone, Debug)]
struct Failure {
    os: Option<i32>,
    kind: io::ErrorKind,
    text: String,
}

/// Running lookups, and the places for their calls.
pub(super) struct Lookups {
    pub(super) places: Semaphore,
    /// Running lookups by name. A call removes its own entry, also after its callers have given up.
    running: Mutex<BTreeMap<String, watch::Sender<Option<Found>>>>,
}

/// Entry of a running lookup, removed on drop.
struct Entry {
    lookups: &'static Lookups,
    host: String,
    result: watch::Sender<Option<Found>>,
}

// === impl Lookups ===

impl Lookups {
    pub(super) const fn new(places: usize) -> Self {
        Self {
            places: Semaphore::const_new(places),
            running: const_mutex(BTreeMap::new()),
        }
    }

    /// Returns the result of the running lookup of `host`, or waits for a place and makes the blocking call. The call keeps
    /// its place and its entry until its end: it keeps its thread after the callers have given up.
    pub(super) async fn share(
        &'static self,
        host: &str,
        call: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> io::Result<Vec<SocketAddr>> {
        let mut result = self.join(host, call);
        let found = match result.wait_for(Option::is_some).await {
            Ok(found) => found.clone(),
            Err(_) => None,
        };
        let found = found.unwrap_or_else(|| Err(io::Error::other("the lookup was stopped").into()));
        found.map_err(io::Error::from)
    }

    /// Returns the receiver of the running lookup of `host`. Starts a lookup if none is running.
    fn join(
        &'static self,
        host: &str,
        call: impl FnOnce(&str) -> io::Result<Vec<SocketAddr>> + Send + 'static,
    ) -> watch::Receiver<Option<Found>> {
        let mut running = self.running.lock();
        if let Some(result) = running.get(host) {
            return result.subscribe();
        }
        let (sender, result) = watch::channel(None);
        running.insert(host.to_owned(), sender.clone());
        drop(running);
        let entry = Entry {
            lookups: self,
            host: host.to_owned(),
            result: sender,
        };
        tokio::spawn(async move {
            // A lookup without callers gives up its wait for a place. The semaphore is never closed.
            let place = tokio::select! {
                place = self.places.acquire() => place.ok(),
                () = entry.abandoned() => return,
            };
            spawn_blocking(move || {
                let _place = place;
                let found = call(&entry.host).map_err(Failure::from);
                entry.finish(found);
            });
        });
        result
    }
}

// === impl Entry ===

impl Entry {
    /// Waits until no caller is left, and removes the entry.
    async fn abandoned(&self) {
        loop {
            self.result.closed().await;
            let mut running = self.lookups.running.lock();
            // A caller may have joined meanwhile.
            if self.result.is_closed() {
                running.remove(&self.host);
                return;
            }
        }
    }

    /// Sends the result. Later callers start another lookup.
    fn finish(self, found: Found) {
        let result = self.result.clone();
        drop(self);
        result.send_replace(Some(found));
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut running = self.lookups.running.lock();
        let entry = running.get(&self.host);
        // An abandoned entry is removed already, and another lookup may have taken its place.
        if entry.is_some_and(|entry| entry.same_channel(&self.result)) {
            running.remove(&self.host);
        }
    }
}

// === impl Failure ===

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self {
            os: error.raw_os_error(),
            kind: error.kind(),
            text: error.to_string(),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        match failure.os {
            Some(code) => Self::from_raw_os_error(code),
            None => Self::new(failure.kind, failure.text),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;
    use std::time::Duration;

    use futures_util::future::join_all;
    use tokio::time::timeout;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(10);

    fn none(_: &str) -> io::Result<Vec<SocketAddr>> {
        Ok(Vec::new())
    }

    #[tokio::test]
    async fn lookups_of_one_hanging_name_occupy_one_place() {
        static LOOKUPS: Lookups = Lookups::new(2);
        let (end, ended) = mpsc::channel::<()>();
        let hanging = LOOKUPS.share("hanging", move |_| {
            let _ = ended.recv();
            Err(io::Error::other("no answer"))
        });
        timeout(MOMENT, hanging).await.unwrap_err();
        let joined = async || LOOKUPS.share("hanging", none).await;
        let all = join_all((0..1000).map(|_| joined()));
        timeout(MOMENT, all).await.unwrap_err();
        assert_eq!(LOOKUPS.places.available_permits(), 1);
        LOOKUPS.share("other", none).await.unwrap();
        let (failed, ()) = tokio::join!(join_all((0..9).map(|_| joined())), async { drop(end) });
        for error in failed {
            assert_eq!(error.unwrap_err().to_string(), "no answer");
        }
        // The result is not cached.
        LOOKUPS.share("hanging", none).await.unwrap();
        assert!(LOOKUPS.running.lock().is_empty());
    }

    #[tokio::test]
    async fn abandoned_lookup_keeps_its_place_until_it_ends() {
        static LOOKUPS: Lookups = Lookups::new(1);
        let (end, ended) = mpsc::channel::<()>();
        let hanging = LOOKUPS.share("hanging", move |_| {
            let _ = ended.recv();
            Ok(Vec::new())
        });
        timeout(MOMENT, hanging).await.unwrap_err();
        let waiting = LOOKUPS.share("waiting", none);
        timeout(MOMENT, waiting).await.unwrap_err();
        tokio::task::yield_now().await;
        assert!(!LOOKUPS.running.lock().contains_key("waiting"));
        drop(end);
        LOOKUPS.share("waiting", none).await.unwrap();
    }
}
