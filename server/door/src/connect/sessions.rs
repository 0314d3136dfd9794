//! The HTTP/2 connections of the CONNECT port. They share the memory for connections and for unread uploads.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::net::shares::{Share, Shares};
use culvert_stream::allowance::Allowance;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// HTTP/2 connections that an address may have for each free place. All nodes of a cluster may have one address.
const SESSION_FACTOR: u64 = 8;

/// All HTTP/2 connections.
pub(crate) struct Sessions {
    /// Shares of the clients' addresses in the places that fit the memory limit.
    places: Arc<Shares>,
    /// Allowance for the unread uploads of all connections together.
    uploads: Arc<Allowance>,
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    last: u64,
    /// Connections from the oldest to the newest.
    by_id: BTreeMap<u64, Member>,
}

/// An HTTP/2 connection, with its streams.
struct Member {
    /// Place in the memory limit; `None` once the connection has ended. Its streams may end later.
    place: Option<Share>,
    session: Arc<State>,
}

/// State of a connection.
struct State {
    /// Unread uploads of the connection's streams.
    uploads: Arc<Allowance>,
    streams: AtomicUsize,
    /// Fires if the uploads of all connections are too large, and this connection has the largest.
    exceeded: CancellationToken,
}

/// A connection, until the value and all [`SessionStream`]s are dropped.
pub(crate) struct Session(Arc<Entry>);

/// A stream of a connection, until dropped.
pub(crate) struct SessionStream(Arc<Entry>);

struct Entry {
    sessions: Arc<Sessions>,
    id: u64,
    state: Arc<State>,
}

impl Sessions {
    /// Creates the set for `places` connections. `uploads` bounds the unread uploads of all connections.
    pub(crate) fn new(places: u64, uploads: Arc<Allowance>) -> Arc<Self> {
        Arc::new(Self {
            places: Shares::of(places, SESSION_FACTOR),
            uploads,
            members: Mutex::default(),
        })
    }

    /// Adds a connection from `source`. Returns `None` without a place.
    pub(crate) fn enter(self: &Arc<Self>, source: IpAddr) -> Option<Session> {
        let mut members = self.members.lock();
        let place = self.places.take_place(source)?;
        members.last += 1;
        let id = members.last;
        let state = Arc::new(State {
            uploads: self.uploads.part(usize::MAX),
            streams: AtomicUsize::new(0),
            exceeded: CancellationToken::new(),
        });
        let member = Member {
            place: Some(place),
            session: state.clone(),
        };
        members.by_id.insert(id, member);
        Some(Session(Arc::new(Entry {
            sessions: self.clone(),
            id,
            state,
        })))
    }

    /// Ends the connection with the largest unread uploads whenever the uploads of all connections exceed their
    /// allowance, until `stop` fires.
    pub(crate) async fn bound_uploads(self: Arc<Self>, stop: CancellationToken) {
        while stop
            .run_until_cancelled(self.uploads.exceeded())
            .await
            .is_some()
        {
            self.members.lock().end_largest(&self.uploads);
        }
    }
}

impl Members {
    /// Ends the connections with the largest uploads until the uploads of the others fit the allowance.
    fn end_largest(&mut self, uploads: &Allowance) {
        let held = |member: &&Member| member.session.uploads.held();
        let (ended, mut others): (Vec<_>, Vec<_>) =
            (self.by_id.values()).partition(|member| member.session.exceeded.is_cancelled());
        let mut ended: usize = ended.iter().map(held).sum();
        others.sort_unstable_by_key(held);
        while uploads.is_exceeded_without(ended)
            && let Some(largest) = others.pop()
        {
            ended += held(&largest);
            largest.session.exceeded.cancel();
        }
    }
}

impl Session {
    /// Counts a new stream.
    pub(crate) fn stream(&self) -> SessionStream {
        self.0.state.streams.fetch_add(1, Ordering::Relaxed);
        SessionStream(self.0.clone())
    }

    /// Returns true if the connection has no streams.
    pub(crate) fn is_idle(&self) -> bool {
        self.0.state.streams.load(Ordering::Relaxed) == 0
    }

    /// Returns the allowance for the unread uploads of the connection.
    pub(crate) fn uploads(&self) -> Arc<Allowance> {
        self.0.state.uploads.clone()
    }

    /// Resolves once the connection has to end because of its unread uploads.
    pub(crate) async fn exceeded(&self) {
        self.0.state.exceeded.cancelled().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut members = self.0.sessions.members.lock();
        if let Some(member) = members.by_id.get_mut(&self.0.id) {
            member.place = None;
        }
    }
}

impl SessionStream {
    /// Resolves once the connection has to end because of its unread uploads.
    pub(crate) async fn exceeded(&self) {
        self.0.state.exceeded.cancelled().await;
    }
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        self.0.state.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.sessions.members.lock().by_id.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures_util::FutureExt as _;

    use super::*;

    fn sessions(places: u64, uploads: usize) -> Arc<Sessions> {
        Sessions::new(places, Allowance::new(uploads))
    }

    #[tokio::test(start_paused = true)]
    async fn connection_with_the_largest_uploads_ends_once_all_together_are_too_large() {
        let sessions = sessions(u64::MAX, 100);
        let stop = CancellationToken::new();
        tokio::spawn(sessions.clone().bound_uploads(stop.clone()));
        let _stop = stop.drop_guard();
        let source = "192.0.2.1".parse().unwrap();
        let [small, large] = [(); 2].map(|()| sessions.enter(source).unwrap());
        let [mut of_small, mut of_large] =
            [&small, &large].map(|session| session.uploads().hold(0));
        of_large.grow(60);
        of_small.grow(40);
        tokio::task::yield_now().await;
        assert!(large.exceeded().now_or_never().is_none());
        of_small.grow(1);
        large.exceeded().await;
        // The bytes of the ended connection count no longer, although its streams still have them.
        of_small.grow(59);
        tokio::task::yield_now().await;
        assert!(small.exceeded().now_or_never().is_none());
        // Streams that outlive their connection count.
        let stream = small.stream();
        drop(small);
        of_small.grow(1);
        stream.exceeded().await;
    }
}
