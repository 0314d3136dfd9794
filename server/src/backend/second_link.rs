//! The QUIC links of native agents. An agent adds a link to its TCP connection by a session.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use culvert_native::quic::link::Link;
use culvert_native::quic::{PORT_HEADER, SAME_PORT, SESSION_HEADER};
use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::resume::Owner;

/// Largest number of QUIC connections of one session: the link, and earlier links whose streams or timeouts continue.
pub(crate) const MAX_CONNECTIONS: usize = 4;

/// Second links of the agents that are connected over TCP.
pub(crate) struct SecondLinks {
    /// Announcement of the port for QUIC.
    port: HeaderValue,
    /// True once no new QUIC connection is possible.
    is_closed: AtomicBool,
    table: Mutex<HashMap<u128, Weak<SecondLink>>>,
}

/// The second link of one agent connection.
pub(crate) struct SecondLink {
    id: u128,
    links: Arc<SecondLinks>,
    /// Agent that has introduced itself over TCP.
    pub owner: Owner,
    /// Fires when the TCP connection of the agent has ended.
    pub retired: CancellationToken,
    second: Mutex<Second>,
    /// Number of QUIC connections of the session, also without trial.
    connections: AtomicUsize,
}

/// The second link of an agent whose TCP connection exists. Dropping the value retires the link.
pub(crate) struct Offered {
    link: Arc<SecondLink>,
    _retires: DropGuard,
}

/// Place of a QUIC connection in its session; dropping the value frees the place.
pub(crate) struct ConnectionPlace(Arc<SecondLink>);

#[derive(Default)]
struct Second {
    link: Option<Arc<Link>>,
    /// True if the agent wants new dials on the link.
    is_preferred: bool,
}

// === impl SecondLinks ===

impl SecondLinks {
    /// Creates an empty table. Agents reach the UDP port `quic`, or the UDP port with the number of the TCP port
    /// that they use if `quic` equals `tcp`: a load balancer or a Service may change both numbers.
    pub(crate) fn new(quic: u16, tcp: u16) -> Arc<Self> {
        let port = match quic == tcp {
            true => HeaderValue::from_static(SAME_PORT),
            false => quic.into(),
        };
        Arc::new(Self {
            port,
            is_closed: AtomicBool::new(false),
            table: Mutex::default(),
        })
    }

    /// Stops the announcements: the UDP socket has failed.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Prepares the second link of an agent, and announces its session in the server's answer, unless the table is closed.
    pub(crate) fn begin(self: &Arc<Self>, owner: &Owner, answer: &mut HeaderMap) -> Offered {
        let id = rand::random();
        let retired = CancellationToken::new();
        let link = Arc::new(SecondLink {
            id,
            links: self.clone(),
            owner: owner.clone(),
            retired: retired.clone(),
            second: Mutex::default(),
            connections: AtomicUsize::new(0),
        });
        self.table.lock().insert(id, Arc::downgrade(&link));
        if !self.is_closed.load(Ordering::Relaxed)
            && let Ok(id) = HeaderValue::try_from(format!("{id:032x}"))
        {
            answer.insert(PORT_HEADER, self.port.clone());
            answer.insert(SESSION_HEADER, id);
        }
        Offered {
            link,
            _retires: retired.drop_guard(),
        }
    }

    /// Returns the second link that an agent's introduction over QUIC names, if the agent's TCP connection still exists.
    pub(crate) fn of(&self, headers: &HeaderMap) -> Option<Arc<SecondLink>> {
        let id = headers.get(SESSION_HEADER)?.to_str().ok()?;
        let id = u128::from_str_radix(id, 16).ok()?;
        let second = self.table.lock().get(&id).and_then(Weak::upgrade);
        second.filter(|second| !second.retired.is_cancelled())
    }
}

// === impl Offered ===

impl Offered {
    /// Returns the link.
    pub(crate) fn link(&self) -> Arc<SecondLink> {
        self.link.clone()
    }
}

// === impl SecondLink ===

impl SecondLink {
    /// Takes a place for a QUIC connection. `None` if the session has [`MAX_CONNECTIONS`].
    pub(crate) fn connection(self: &Arc<Self>) -> Option<ConnectionPlace> {
        let place = ConnectionPlace(self.clone());
        let others = self.connections.fetch_add(1, Ordering::Relaxed);
        (others < MAX_CONNECTIONS).then_some(place)
    }

    /// Returns true if the agent has a QUIC link.
    pub(crate) fn has_link(&self) -> bool {
        self.second.lock().link.is_some()
    }

    /// Returns the link for a new dial; `None` if the dial belongs on the TCP connection. `is_alone`: the TCP connection
    /// does not answer.
    pub(crate) fn usable(&self, is_alone: bool) -> Option<Arc<Link>> {
        let second = self.second.lock();
        let link = second.link.as_ref();
        let link = link.filter(|_| is_alone || second.is_preferred)?;
        link.is_healthy().then(|| link.clone())
    }

    /// Sets the link for new dials. An older link keeps its streams.
    pub(crate) fn set(&self, link: Arc<Link>) {
        *self.second.lock() = Second {
            link: Some(link),
            is_preferred: false,
        };
    }

    /// Removes the link, unless a newer link has replaced it.
    pub(crate) fn clear(&self, link: &Arc<Link>) {
        let mut second = self.second.lock();
        if second
            .link
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, link))
        {
            *second = Second::default();
        }
    }

    /// Records that the agent wants new dials on the link. Returns true if this is a change.
    pub(crate) fn prefer(&self, link: &Arc<Link>, is_preferred: bool) -> bool {
        let mut second = self.second.lock();
        let is_current = second
            .link
            .as_ref()
            .is_some_and(|own| Arc::ptr_eq(own, link));
        is_current && std::mem::replace(&mut second.is_preferred, is_preferred) != is_preferred
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for SecondLink {
    fn drop(&mut self) {
        self.links.table.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn owner() -> Owner {
        Owner {
            agent_id: "a".to_owned(),
            identity: "a".into(),
            is_proven: false,
            common_name: None,
            process: None,
        }
    }

    #[test]
    fn announced_session_is_found_until_its_tcp_connection_ends() {
        let links = SecondLinks::new(8443, 8091);
        let mut answer = HeaderMap::new();
        let offered = links.begin(&owner(), &mut answer);
        let second = offered.link();
        assert_eq!(answer.get(PORT_HEADER).unwrap(), "8443");
        let found = links.of(&answer).unwrap();
        assert!(Arc::ptr_eq(&found, &second) && !found.has_link());
        let mut places: Vec<_> = (0..MAX_CONNECTIONS).map(|_| second.connection()).collect();
        assert!(places.iter().all(Option::is_some) && second.connection().is_none());
        places.pop();
        assert!(second.connection().is_some());
        drop(places);
        drop(offered);
        assert!(second.retired.is_cancelled() && links.of(&answer).is_none());
        drop((second, found));
        assert!(links.table.lock().is_empty());
    }

    #[test]
    fn closed_table_announces_no_session() {
        let links = SecondLinks::new(8443, 8091);
        links.close();
        let mut answer = HeaderMap::new();
        let _offered = links.begin(&owner(), &mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }

    #[test]
    fn unknown_and_malformed_sessions_are_not_found() {
        let links = SecondLinks::new(8091, 8091);
        let mut answer = HeaderMap::new();
        let _offered = links.begin(&owner(), &mut answer);
        assert_eq!(answer.get(PORT_HEADER).unwrap(), SAME_PORT);
        for text in ["", "x", "0", "ffffffffffffffffffffffffffffffff0"] {
            answer.insert(SESSION_HEADER, text.parse().unwrap());
            assert!(links.of(&answer).is_none());
        }
        assert!(links.of(&HeaderMap::new()).is_none());
    }
}
