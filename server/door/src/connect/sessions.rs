//! The HTTP/2 connections of the CONNECT port. They share the memory for connections and for unread uploads.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use culvert_host::net::admission::host_key;
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
    host: u64,
    /// Place in the memory limit; `None` once the connection has ended or is displaced. Its streams may end later.
    place: Option<Share>,
    session: Arc<State>,
}

/// State of a connection.
struct State {
    /// Unread uploads of the connection's streams.
    uploads: Arc<Allowance>,
    streams: AtomicUsize,
    /// Fires if a new client gets the place of the connection, which has no streams.
    displaced: CancellationToken,
    /// Fires if the uploads of all connections are too large, and this connection has to end.
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

    /// Adds a connection from `source`. If no place is free, the connection gets the place of the oldest connection
    /// without streams of the address with the most connections, but only if this address keeps at least as many as
    /// `source` then has. Returns `None` without a place.
    pub(crate) fn enter(self: &Arc<Self>, source: IpAddr) -> Option<Session> {
        let host = host_key(source);
        let mut members = self.members.lock();
        let mut place = self.places.take_place(source);
        if place.is_none() && members.displace(host) {
            place = self.places.take_place(source);
        }
        let place = place?;
        members.last += 1;
        let id = members.last;
        let state = Arc::new(State {
            uploads: self.uploads.part(usize::MAX),
            streams: AtomicUsize::new(0),
            displaced: CancellationToken::new(),
            exceeded: CancellationToken::new(),
        });
        let member = Member {
            host,
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

    /// Ends connections whenever the unread uploads of all connections exceed their allowance, until `stop` fires.
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
    /// Takes the place of a connection for a new connection of `host`. Returns false if no connection may be displaced, or
    /// if a free place would not suffice.
    fn displace(&mut self, host: u64) -> bool {
        let mut counts = HashMap::<u64, u64>::new();
        let placed = self.by_id.values().filter(|member| member.place.is_some());
        for member in placed {
            *counts.entry(member.host).or_default() += 1;
        }
        // Connections without a place keep their memory until they have ended.
        let placed: u64 = counts.values().sum();
        if self.by_id.len() as u64 - placed > placed / 8 {
            return false;
        }
        let own = counts.get(&host).copied().unwrap_or_default();
        let crowd = counts.into_iter().max_by_key(|(_, count)| *count);
        let Some((crowd, _)) = crowd.filter(|(_, count)| *count > own + 1 && own < SESSION_FACTOR)
        else {
            return false;
        };
        let is_idle = |member: &&mut Member| {
            let is_open = member.place.is_some() && member.host == crowd;
            is_open && member.session.streams.load(Ordering::Relaxed) == 0
        };
        let Some(oldest) = self.by_id.values_mut().find(is_idle) else {
            return false;
        };
        oldest.place = None;
        oldest.session.displaced.cancel();
        true
    }

    /// Ends connections until the uploads of the others fit the allowance: of the address with the largest uploads, the
    /// connections with the largest.
    fn end_largest(&mut self, uploads: &Allowance) {
        // Other threads change the uploads meanwhile.
        let (mut ended, mut others, mut hosts) = (0, Vec::new(), HashMap::<u64, usize>::new());
        for member in self.by_id.values() {
            let held = member.session.uploads.held();
            if member.session.exceeded.is_cancelled() {
                ended += held;
            } else {
                *hosts.entry(member.host).or_default() += held;
                others.push((held, member));
            }
        }
        while uploads.is_exceeded_without(ended) {
            let rank =
                |(held, member): &&(usize, &Member)| (hosts.get(&member.host).copied(), *held);
            let Some((held, largest)) = others.iter().max_by_key(rank).copied() else {
                return;
            };
            ended += held;
            if let Some(of_host) = hosts.get_mut(&largest.host) {
                *of_host -= held;
            }
            others.retain(|(_, member)| !Arc::ptr_eq(&member.session, &largest.session));
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

    /// Resolves once the place of the connection is taken.
    pub(crate) async fn displaced(&self) {
        self.0.state.displaced.cancelled().await;
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
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use futures_util::FutureExt as _;

    use super::*;

    fn sessions(places: u64, uploads: usize) -> Arc<Sessions> {
        Sessions::new(places, Allowance::new(uploads))
    }

    fn is_displaced(session: &Session) -> bool {
        session.displaced().now_or_never().is_some()
    }

    /// Opens connections from `source` until one is refused.
    fn fill(sessions: &Arc<Sessions>, source: &str) -> Vec<Session> {
        let source = source.parse().unwrap();
        std::iter::from_fn(|| sessions.enter(source)).collect()
    }

    #[test]
    fn new_client_gets_the_place_of_the_oldest_idle_connection_of_the_largest_address() {
        let sessions = sessions(90, 0);
        let crowd = fill(&sessions, "192.0.2.1");
        let others = fill(&sessions, "192.0.2.2");
        let last = fill(&sessions, "192.0.2.3");
        // The third address has displaced connections until it had as many as one free place permits.
        assert_eq!((crowd.len(), others.len(), last.len()), (80, 9, 8));
        assert!(crowd.iter().take(7).all(is_displaced));
        assert!(!crowd.iter().skip(7).chain(&others).any(is_displaced));
        let stream = crowd[7].stream();
        let newest = sessions.enter("192.0.2.4".parse().unwrap());
        assert!(newest.is_some() && !is_displaced(&crowd[7]) && is_displaced(&crowd[8]));
        drop(stream);
        assert!(sessions.enter("192.0.2.5".parse().unwrap()).is_some());
        assert!(is_displaced(&crowd[7]));
    }

    #[test]
    fn displaced_connections_that_have_not_ended_are_few() {
        let sessions = sessions(90, 0);
        let mut crowd = fill(&sessions, "192.0.2.1");
        let others: Vec<_> = (2..100)
            .map_while(|last| sessions.enter([192, 0, 2, last].into()))
            .collect();
        let displaced = crowd.iter().filter(|session| is_displaced(session));
        assert_eq!((displaced.count(), others.len()), (12, 22));
        crowd.retain(|session| !is_displaced(session));
        assert!(sessions.enter([192, 0, 2, 100].into()).is_some());
    }

    #[test]
    fn connections_with_streams_and_lone_connections_keep_their_places() {
        let sessions = sessions(3, 0);
        let enter = |source: &str| sessions.enter(source.parse().unwrap());
        let pair = ["192.0.2.1"; 2].map(|source| enter(source).unwrap());
        let lone = enter("192.0.2.2").unwrap();
        let streams: Vec<_> = pair.iter().map(Session::stream).collect();
        assert!(enter("192.0.2.3").is_none());
        drop(streams);
        let third = enter("192.0.2.3").unwrap();
        assert!(is_displaced(&pair[0]) && !is_displaced(&pair[1]));
        // Each address has one connection.
        assert!(enter("192.0.2.4").is_none());
        assert!(![&pair[1], &lone, &third].into_iter().any(is_displaced));
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

    #[tokio::test(start_paused = true)]
    async fn small_uploads_of_one_address_do_not_end_the_connection_of_another() {
        let sessions = sessions(u64::MAX, 100);
        let stop = CancellationToken::new();
        tokio::spawn(sessions.clone().bound_uploads(stop.clone()));
        let _stop = stop.drop_guard();
        let enter = |source: &str| sessions.enter(source.parse().unwrap()).unwrap();
        let crowd = ["192.0.2.1"; 3].map(enter);
        let other = enter("192.0.2.2");
        let _unread = [(&crowd[0], 20), (&crowd[1], 21), (&crowd[2], 20)]
            .map(|(session, bytes)| session.uploads().hold(bytes));
        let mut of_other = other.uploads().hold(0);
        of_other.grow(40);
        crowd[1].exceeded().await;
        assert!(crowd[0].exceeded().now_or_never().is_none());
        assert!(other.exceeded().now_or_never().is_none());
    }
}
