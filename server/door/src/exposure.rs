//! The computation of [`Routes`] from Services and their EndpointSlices. No I/O.
//!
//! This module decides the precedence between Services, and writes the messages for operators about
//! everything not exposed as requested. Services are processed oldest first, and the older Service wins a
//! conflict. A Service without a ready endpoint has no routes and reserves nothing; its annotations are
//! checked anyway, to show a mistake before the first pod is up.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use culvert_host::net::networks::Networks;

use super::annotations::{
    ALLOWED_NETWORKS_ANNOTATION, Exposure, MappingError, PORT_MAPPING_ANNOTATION,
    PROXY_PROTOCOL_ANNOTATION, QUIC_PORT_ANNOTATION, check_ports, parse_networks,
    parse_port_mapping,
};
use super::routes::{Backend, Routes, UnknownQuicPort, UpstreamKey};

/// The relevant part of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    pub namespace: String,
    pub name: String,
    /// UID; decides between Services created in the same second.
    pub uid: String,
    /// Time of creation, in seconds since 1970.
    pub created: i64,
    pub is_node_port: bool,
    pub has_cluster_ip: bool,
    /// Annotations; only those of [`annotations`](super::annotations) are needed.
    pub annotations: BTreeMap<String, String>,
    pub ports: Vec<ServicePort>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServicePort {
    /// Name; may be empty in a Service with one port.
    pub name: String,
    /// True for TCP, the only exposed protocol.
    pub is_tcp: bool,
    /// Port number at the cluster IP.
    pub port: u16,
    /// Port number on every node; 0 if there is no node port.
    pub node_port: u16,
}

/// The relevant part of an EndpointSlice. A Service may have many slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Namespace of the slice and of the Service.
    pub namespace: String,
    /// Name of the Service (label `kubernetes.io/service-name`).
    pub service: String,
    /// TCP ports of each endpoint in the slice: the name of the Service port in front, and the port number.
    pub ports: Vec<(String, u16)>,
    /// Addresses of the ready endpoints, IPv4 and IPv6; all are used.
    pub ready: Vec<IpAddr>,
}

/// The annotation to look for, and the available listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Key of the annotation that exposes a Service, by default
    /// [`EXPOSE_ANNOTATION`](super::annotations::EXPOSE_ANNOTATION).
    pub annotation: String,
    /// True if there is a listener for TLS server names. Without it `SNI` is ignored.
    pub server_names: bool,
    /// True if there is a listener for CONNECT requests. Without it `Tunneling` is ignored.
    pub authorities: bool,
}

/// Routes under construction.
struct Plan<'a> {
    options: &'a Options,
    routes: Routes,
    /// Owner of each server name, including names whose port has no endpoint now.
    owners: HashMap<String, &'a Service>,
    /// Parts of requests that cannot be fulfilled: Service, cause and remedy.
    problems: Vec<String>,
}

/// Computes the routes of all Services with the annotation. The order of the input does not matter. Problems
/// are sorted by Service.
pub(crate) fn expose<'a>(
    services: impl Iterator<Item = &'a Service>,
    slices: impl Iterator<Item = &'a Slice>,
    options: &Options,
) -> (Routes, Vec<String>) {
    let mut ready: HashMap<(&str, &str), Vec<&Slice>> = HashMap::new();
    for slice in slices.filter(|slice| !slice.ready.is_empty()) {
        let service = (slice.namespace.as_str(), slice.service.as_str());
        ready.entry(service).or_default().push(slice);
    }
    let mut annotated: Vec<(&Service, &String)> = services
        .filter_map(|service| Some((service, service.annotations.get(&options.annotation)?)))
        .collect();
    annotated.sort_unstable_by(|(a, _), (b, _)| a.seniority().cmp(&b.seniority()));

    let mut plan = Plan {
        options,
        routes: Routes::default(),
        owners: HashMap::new(),
        problems: Vec::new(),
    };
    for (service, value) in annotated {
        let name = (service.namespace.as_str(), service.name.as_str());
        let slices = ready.get(&name).map(Vec::as_slice);
        plan.add(service, value, slices.unwrap_or_default());
    }
    plan.problems.sort_unstable();
    (plan.routes, plan.problems)
}

/// Returns the host names requested by a Service, by port name.
fn requested_hosts(service: &Service) -> Result<BTreeMap<String, String>, MappingError> {
    let json = service.annotations.get(PORT_MAPPING_ANNOTATION);
    let json = json.ok_or(MappingError::Missing)?;
    let mapping = parse_port_mapping(json)?;
    let tcp_ports: BTreeSet<&str> = service.tcp_ports().map(|port| port.name.as_str()).collect();
    check_ports(&mapping, &tcp_ports)?;
    Ok(mapping)
}

/// Returns the ready endpoints of a Service port, sorted, without duplicates.
fn endpoints_of(port: &ServicePort, slices: &[&Slice]) -> Vec<SocketAddr> {
    let mut found = BTreeSet::new();
    for slice in slices {
        // The only port of a Service may lack a name; all endpoint ports belong to it then.
        let is_of_port = |name: &str| port.name.is_empty() || port.name == name;
        for (_, number) in slice.ports.iter().filter(|(name, _)| is_of_port(name)) {
            let ready = slice.ready.iter();
            found.extend(ready.map(|&address| SocketAddr::new(address, *number)));
        }
    }
    found.into_iter().collect()
}

// === impl Plan ===

impl<'a> Plan<'a> {
    fn add(&mut self, service: &'a Service, value: &str, slices: &[&Slice]) {
        let annotation = &self.options.annotation;
        let exposure = match Exposure::parse(value) {
            Ok(exposure) => exposure,
            Err(error) => {
                self.problem(service, format!("annotation {annotation}: {error}"));
                return;
            }
        };
        if exposure.node_port && !service.is_node_port {
            self.problem(
                service,
                format!(
                    "annotation {annotation} asks for NodePort, but the Service is not of type \
                     NodePort: change its type, or the annotation"
                ),
            );
        }
        let mut hosts = BTreeMap::new();
        if exposure.sni && self.options.server_names {
            match requested_hosts(service) {
                Ok(requested) => hosts = requested,
                Err(error) => self.problem(
                    service,
                    format!("annotation {PORT_MAPPING_ANNOTATION}: {error}"),
                ),
            }
        }
        let conditions = self.conditions(service);
        if slices.is_empty() {
            return;
        }
        if !self.claim(service, &hosts) {
            hosts.clear();
        }
        for port in service.tcp_ports() {
            let endpoints = endpoints_of(port, slices);
            if !endpoints.is_empty() {
                let host = hosts.get(&port.name);
                let backend = Backend {
                    endpoints,
                    // QUIC connections are found by server name only.
                    quic_port: conditions.quic_port.filter(|_| host.is_some()),
                    ..conditions.clone()
                };
                self.add_port(service, port, exposure, host, backend);
            }
        }
    }

    /// Returns the conditions for connections to a Service, without endpoints. With a wrong annotation, no client
    /// is permitted: the endpoints rely on these conditions.
    fn conditions(&mut self, service: &Service) -> Backend {
        let mut conditions = Backend::default();
        if let Some(value) = service.annotations.get(ALLOWED_NETWORKS_ANNOTATION) {
            let networks = parse_networks(value).unwrap_or_else(|error| {
                let why = format!("no client may connect: {error}");
                self.problem(
                    service,
                    format!("annotation {ALLOWED_NETWORKS_ANNOTATION}: {why}"),
                );
                Networks::default()
            });
            conditions.allowed = Some(networks);
        }
        if let Some(value) = service.annotations.get(PROXY_PROTOCOL_ANNOTATION) {
            match value.parse() {
                Ok(version) => conditions.header = Some(version),
                Err(error) => {
                    let why = format!("no client may connect: {error}");
                    self.problem(
                        service,
                        format!("annotation {PROXY_PROTOCOL_ANNOTATION}: {why}"),
                    );
                    conditions.allowed = Some(Networks::default());
                }
            }
        }
        if let Some(value) = service.annotations.get(QUIC_PORT_ANNOTATION) {
            let parsed = value.parse().map_err(|error: UnknownQuicPort| {
                self.problem(
                    service,
                    format!("annotation {QUIC_PORT_ANNOTATION}: {error}"),
                );
            });
            conditions.quic_port = parsed.ok();
        }
        conditions
    }

    /// Reserves all host names for a Service, or none: a partly served Service would be harder to notice.
    fn claim(&mut self, service: &'a Service, hosts: &BTreeMap<String, String>) -> bool {
        let taken = hosts
            .values()
            .find_map(|host| Some((host, self.owners.get(host)?)));
        if let Some((host, owner)) = taken {
            let text = format!(
                "host name {host:?} is already taken by Service {}, so none of this Service's \
                 host names is served: change annotation {PORT_MAPPING_ANNOTATION} of one of the two Services",
                owner.full_name()
            );
            self.problem(service, text);
            return false;
        }
        self.owners
            .extend(hosts.values().map(|host| (host.clone(), service)));
        true
    }

    fn add_port(
        &mut self,
        service: &Service,
        port: &ServicePort,
        exposure: Exposure,
        host: Option<&String>,
        backend: Backend,
    ) {
        let node_port = exposure.node_port && service.is_node_port && port.node_port != 0;
        let authority = exposure.tunneling && self.options.authorities;
        if !node_port && host.is_none() && !authority {
            return;
        }
        let key = UpstreamKey::of_service(&service.namespace, &service.name, &port.name);
        // Port `c` of Service `a-b` and port `b-c` of Service `a` have the same key. Without this check,
        // clients of one Service would reach the other.
        let known = self.routes.upstreams.get(&key);
        if known.is_some_and(|known| *known != backend) {
            let text = format!(
                "port {:?} is not served: a port of an older Service has the same key {key}; \
                 rename one of the ports",
                port.name
            );
            self.problem(service, text);
            return;
        }
        let mut exposed = node_port && self.add_node_port(service, port.node_port, &key);
        if let Some(host) = host {
            let server_names = &mut self.routes.server_names;
            server_names.insert(host.clone(), key.clone());
            exposed = true;
        }
        if authority {
            let authorities = &mut self.routes.authorities;
            authorities.insert(service.authority(port.port), key.clone());
            exposed = true;
        }
        if exposed {
            self.routes.upstreams.insert(key, backend);
        }
    }

    /// Reserves a node port; returns false if an older Service has it. Kubernetes may assign the port of a
    /// deleted Service again before the deletion is visible here.
    fn add_node_port(&mut self, service: &Service, port: u16, key: &UpstreamKey) -> bool {
        let node_ports = &mut self.routes.node_ports;
        let owner = node_ports.entry(port).or_insert_with(|| key.clone());
        if *owner == *key {
            return true;
        }
        let text = format!(
            "node port {port} still belongs to {owner} of an older Service; if this message stays, \
             delete one of the two Services"
        );
        self.problem(service, text);
        false
    }

    fn problem(&mut self, service: &Service, text: String) {
        let problem = format!("Service {}: {text}", service.full_name());
        self.problems.push(problem);
    }
}

// === impl Service ===

impl Service {
    /// Returns `<namespace>/<name>`.
    pub(crate) fn full_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Returns the literal target for CONNECT requests. The cluster domain is fixed, as in the stock proxy:
    /// the name is never resolved.
    fn authority(&self, port: u16) -> String {
        format!("{}.{}.svc.cluster.local:{port}", self.name, self.namespace)
    }

    fn tcp_ports(&self) -> impl Iterator<Item = &ServicePort> {
        self.ports.iter().filter(|port| port.is_tcp)
    }

    /// Returns the sort key for age, oldest first. The names make the order deterministic.
    fn seniority(&self) -> (i64, [&String; 3]) {
        (self.created, [&self.uid, &self.namespace, &self.name])
    }
}
