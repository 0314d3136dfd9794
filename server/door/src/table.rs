//! The routes in force. A change touches only the difference. An upstream that stays keeps its counters, its
//! position in the rotation, and its connections. An upstream that comes back while connections are still
//! open also keeps them.

use std::collections::{BTreeMap, HashMap};
use std::iter::successors;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use culvert_native::quic::connection_id::Tag;
use parking_lot::{Mutex, RwLock};
use tracing::info;

use super::routes::{Routes, UpstreamKey};
use super::upstream::Upstream;

/// The table in which every new connection finds its upstream.
#[derive(Debug)]
pub struct Table {
    current: RwLock<Arc<Current>>,
    /// Removed upstreams with open connections.
    retired: Mutex<HashMap<UpstreamKey, Weak<Upstream>>>,
    /// Maximum number of simultaneous connections per upstream.
    limit: u64,
}

#[derive(Debug, Default)]
struct Current {
    routes: Routes,
    upstreams: BTreeMap<UpstreamKey, Arc<Upstream>>,
    /// Endpoints that serve QUIC, by the tag in their connection ids. Two endpoints rarely have the same tag, but
    /// several upstreams may have the same endpoint.
    tags: HashMap<Tag, Vec<(Arc<Upstream>, SocketAddr)>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub added: usize,
    pub removed: usize,
    /// Number of upstreams with different endpoints or conditions.
    pub moved: usize,
    /// True if names, authorities or node ports differ.
    pub rerouted: bool,
}

// === impl Change ===

impl Change {
    /// Logs the change.
    pub(crate) fn log(self) {
        let Self {
            added,
            removed,
            moved,
            rerouted,
        } = self;
        info!(added, removed, moved, rerouted, "routes changed");
    }
}

// === impl Table ===

impl Table {
    /// Creates a table without routes. Each upstream allows `limit` simultaneous connections.
    pub fn new(limit: u64) -> Self {
        Self {
            current: RwLock::default(),
            retired: Mutex::default(),
            limit,
        }
    }

    /// Applies `routes` to all new connections.
    pub(crate) fn apply(&self, routes: Routes) -> Change {
        let before = self.current.read().clone();
        let mut retired = self.retired.lock();
        retired.retain(|_, upstream| upstream.strong_count() > 0);
        let mut change = Change::default();
        let mut upstreams = BTreeMap::new();
        for (key, backend) in &routes.upstreams {
            let upstream = match before.upstreams.get(key) {
                Some(upstream) => {
                    change.moved += usize::from(upstream.set_backend(backend));
                    upstream.clone()
                }
                None => {
                    change.added += 1;
                    let back = retired.remove(key).and_then(|upstream| upstream.upgrade());
                    let back = back.inspect(|upstream| {
                        upstream.set_backend(backend);
                    });
                    back.unwrap_or_else(|| Upstream::new(key.clone(), backend, self.limit))
                }
            };
            upstreams.insert(key.clone(), upstream);
        }
        for (key, upstream) in &before.upstreams {
            if !upstreams.contains_key(key) {
                change.removed += 1;
                // A client that looked up the upstream a moment ago finds no endpoint. A QUIC flow already has its endpoint:
                // the upstream keeps its permitted networks.
                upstream.retire();
                retired.insert(key.clone(), Arc::downgrade(upstream));
            }
        }
        change.rerouted = before.routes.server_names != routes.server_names
            || before.routes.authorities != routes.authorities
            || before.routes.node_ports != routes.node_ports;
        let tags = tags_of(&routes, &upstreams);
        *self.current.write() = Arc::new(Current {
            routes,
            upstreams,
            tags,
        });
        change
    }

    /// Returns the upstream for a TLS server name in lower case. An exact name wins over a wildcard, and a
    /// longer wildcard over a shorter one.
    pub(crate) fn by_server_name(&self, name: &str) -> Option<Arc<Upstream>> {
        let current = self.current.read();
        let exact = current.routes.server_names.get(name);
        let parents = successors(Some(name), |name| Some(name.split_once('.')?.1)).skip(1);
        let mut wildcards = parents.map(|parent| format!("*.{parent}"));
        let key =
            exact.or_else(|| wildcards.find_map(|name| current.routes.server_names.get(&name)));
        current.upstreams.get(key?).cloned()
    }

    /// Returns the upstream for an authority, ignoring case.
    pub(crate) fn by_authority(&self, authority: &str) -> Option<Arc<Upstream>> {
        let authority = authority.to_ascii_lowercase();
        let current = self.current.read();
        let key = current.routes.authorities.get(&authority)?;
        current.upstreams.get(key).cloned()
    }

    pub(crate) fn by_node_port(&self, port: u16) -> Option<Arc<Upstream>> {
        let current = self.current.read();
        let key = current.routes.node_ports.get(&port)?;
        current.upstreams.get(key).cloned()
    }

    /// Returns the endpoint whose QUIC connection ids have this tag, with its upstream. If there are several, one that
    /// permits `client` comes first.
    pub(crate) fn by_tag(&self, tag: Tag, client: IpAddr) -> Option<(Arc<Upstream>, SocketAddr)> {
        let current = self.current.read();
        let found = current.tags.get(&tag)?;
        let permitted = found.iter().find(|(upstream, _)| upstream.permits(client));
        permitted.or(found.first()).cloned()
    }

    /// Returns true if `is_match` holds for an upstream with the UDP address of an endpoint. `None` if the routes do not contain
    /// the address.
    pub(crate) fn any_with_quic_endpoint(
        &self,
        address: SocketAddr,
        is_match: impl Fn(&Upstream) -> bool,
    ) -> Option<bool> {
        let current = self.current.read();
        let found = current.tags.get(&Tag::of(address))?;
        let of_address = found.iter().filter(|(_, endpoint)| *endpoint == address);
        let matches = of_address.map(|(upstream, _)| is_match(upstream));
        matches.reduce(|any, next| any || next)
    }

    /// Returns the wanted node ports.
    pub(crate) fn node_ports(&self) -> Vec<u16> {
        let current = self.current.read();
        current.routes.node_ports.keys().copied().collect()
    }

    /// Returns every upstream, sorted by key.
    pub(crate) fn upstreams(&self) -> Vec<Arc<Upstream>> {
        self.current.read().upstreams.values().cloned().collect()
    }
}

fn tags_of(
    routes: &Routes,
    upstreams: &BTreeMap<UpstreamKey, Arc<Upstream>>,
) -> HashMap<Tag, Vec<(Arc<Upstream>, SocketAddr)>> {
    let mut tags: HashMap<_, Vec<_>> = HashMap::new();
    for (key, backend) in &routes.upstreams {
        let addresses = backend.endpoints.iter();
        for address in addresses.filter_map(|endpoint| backend.quic_address(*endpoint)) {
            if let Some(upstream) = upstreams.get(key) {
                let found = tags.entry(Tag::of(address)).or_default();
                found.push((upstream.clone(), address));
            }
        }
    }
    tags
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::atomic::Ordering;

    use culvert_host::net::networks::Networks;

    use super::*;
    use crate::routes::{Backend, QuicPort};

    fn backend(endpoint: SocketAddr) -> Backend {
        Backend {
            endpoints: vec![endpoint],
            ..Backend::default()
        }
    }

    fn routes(services: &[(&str, u16)]) -> Routes {
        let mut routes = Routes::default();
        for (service, port) in services {
            let key = UpstreamKey::of_service("ns", service, "");
            let endpoint = ([10, 0, 0, 1], *port).into();
            routes.upstreams.insert(key.clone(), backend(endpoint));
            let name = format!("{service}.example.com");
            routes.server_names.insert(name, key.clone());
            let authority = format!("{service}.ns.svc.cluster.local:443");
            routes.authorities.insert(authority, key.clone());
            routes.node_ports.insert(30_000 + port, key);
        }
        routes
    }

    #[test]
    fn a_change_touches_only_what_differs() {
        let table = Table::new(10);
        let change = table.apply(routes(&[("a", 1), ("b", 2)]));
        assert_eq!((change.added, change.removed, change.moved), (2, 0, 0));
        let a = table.by_server_name("a.example.com").unwrap();
        let b = table.by_node_port(30_002).unwrap();
        a.stats.opened.fetch_add(7, Ordering::Relaxed);

        let mut next = routes(&[("a", 1), ("c", 3)]);
        next.upstreams
            .insert(a.key.clone(), backend(([10, 0, 0, 2], 9).into()));
        let change = table.apply(next.clone());
        assert_eq!((change.added, change.removed, change.moved), (1, 1, 1));
        assert!(change.rerouted);
        let same = table.by_authority("A.ns.svc.cluster.local:443").unwrap();
        assert!(Arc::ptr_eq(&a, &same), "the upstream and its counters stay");
        assert_eq!(b.endpoint_count(), 0);
        assert!(table.by_server_name("b.example.com").is_none());
        assert_eq!(table.node_ports(), [30_001, 30_003]);
        assert_eq!(table.apply(next), Change::default());
    }

    #[test]
    fn returning_upstream_is_reused_while_it_has_connections() {
        let table = Table::new(10);
        table.apply(routes(&[("a", 1)]));
        let used = table.by_node_port(30_001).unwrap();
        used.stats.opened.fetch_add(7, Ordering::Relaxed);
        table.apply(routes(&[("b", 2)]));
        table.apply(routes(&[("b", 2), ("c", 3)]));
        let change = table.apply(routes(&[("a", 1)]));
        assert_eq!((change.added, change.removed), (1, 2));
        let back = table.by_node_port(30_001).unwrap();
        assert!(Arc::ptr_eq(&used, &back));
        assert_eq!(back.endpoint_count(), 1);

        table.apply(Routes::default());
        drop((used, back));
        table.apply(routes(&[("a", 1)]));
        let fresh = table.by_node_port(30_001).unwrap();
        assert_eq!(fresh.stats.opened.load(Ordering::Relaxed), 0);
        assert!(table.retired.lock().is_empty(), "nothing is kept forever");
    }

    #[test]
    fn endpoint_of_a_quic_packet_is_found_by_its_tag() {
        let table = Table::new(10);
        let mut routes = routes(&[("a", 1), ("b", 2)]);
        let key = |service| UpstreamKey::of_service("ns", service, "");
        let backend = routes.upstreams.get_mut(&key("a")).unwrap();
        backend.quic_port = Some(QuicPort::Number(8133.try_into().unwrap()));
        // Another upstream with the same endpoint, for few clients.
        let mut restricted = backend.clone();
        restricted.allowed = Some(Networks::parse(["192.0.2.0/24"]).unwrap());
        routes.upstreams.insert(key("0"), restricted);
        table.apply(routes);
        let found = |address: &str, client: &str| {
            let tag = Tag::of(address.parse().unwrap());
            let found = table.by_tag(tag, client.parse().unwrap());
            found.map(|(upstream, address)| (upstream.key.clone(), address.to_string()))
        };
        let udp = "10.0.0.1:8133";
        assert_eq!(found(udp, "192.0.2.1"), Some((key("0"), udp.to_owned())));
        assert_eq!(found(udp, "10.0.0.9"), Some((key("a"), udp.to_owned())));
        assert_eq!(found("10.0.0.1:1", "10.0.0.9"), None);
        assert_eq!(found("10.0.0.1:2", "10.0.0.9"), None, "b serves no QUIC");
        let upstream = table.upstreams().swap_remove(0);
        let permits = |client: &str| upstream.permits(client.parse().unwrap());
        assert!(permits("192.0.2.1") && !permits("10.0.0.9"));
        table.apply(Routes::default());
        assert_eq!(found(udp, "10.0.0.9"), None);
        // Flows may still use the upstream.
        assert_eq!(upstream.endpoint_count(), 0);
        assert!(permits("192.0.2.1") && !permits("10.0.0.9"));
    }

    #[test]
    fn most_specific_name_wins() {
        let table = Table::new(10);
        let mut routes = routes(&[("a", 1), ("b", 2), ("c", 3)]);
        let key = |service| UpstreamKey::of_service("ns", service, "");
        routes.server_names = BTreeMap::from([
            ("*.example.com".to_owned(), key("a")),
            ("*.x.example.com".to_owned(), key("b")),
            ("one.x.example.com".to_owned(), key("c")),
        ]);
        table.apply(routes);
        let found = |name| {
            table
                .by_server_name(name)
                .map(|upstream| upstream.key.clone())
        };
        assert_eq!(found("one.x.example.com"), Some(key("c")));
        assert_eq!(found("two.x.example.com"), Some(key("b")));
        assert_eq!(found("deep.two.x.example.com"), Some(key("b")));
        assert_eq!(found("y.example.com"), Some(key("a")));
        assert_eq!(found("example.com"), None);
        assert_eq!(found(""), None);
    }
}
