//! The translation of an Envoy bootstrap file into a configuration of the node tunnel.
//!
//! The translation knows the fields in the file of KKP's `envoy-agent`. Any other field is an error, because an
//! unknown field may restrict clients or change the destination.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use culvert_host::flags::{GoDuration, HostPort};
use culvert_host::yaml;
use culvert_native::window::Pings;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::super::pool::CONNECT_TIMEOUT;
use super::PINGS;

/// Largest size of a bootstrap file, in bytes. KKP's file has 3 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// Remedy for a file that cannot be translated.
const REMEDY: &str = "write --listen and --proxy instead of --config-path";

/// Result of a translation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Translated {
    /// Listen addresses with their authorities, not checked yet.
    pub routes: Vec<(HostPort, String)>,
    /// CONNECT port of the seed's proxy.
    pub proxy: HostPort,
    /// Times of the pings.
    pub pings: Pings,
    /// Listener for metrics, if the file has one.
    pub stats: Option<HostPort>,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    admin: Option<Admin>,
    static_resources: Resources,
    #[serde(rename = "node", default)]
    _node: IgnoredAny,
}

/// The admin listener. The node tunnel does not open it, and serves its metrics on the listener that leads there.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Admin {
    address: Address,
    #[serde(rename = "access_log_path", default)]
    _access_log_path: IgnoredAny,
    #[serde(rename = "access_log", default)]
    _access_log: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resources {
    #[serde(default)]
    listeners: Vec<Listener>,
    #[serde(default)]
    clusters: Vec<Cluster>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Address {
    socket_address: SocketAddress,
}

#[derive(Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
struct SocketAddress {
    #[serde(default)]
    protocol: Protocol,
    address: String,
    port_value: u16,
}

#[derive(Deserialize, Default, PartialEq, Eq)]
enum Protocol {
    #[default]
    #[serde(rename = "TCP")]
    Tcp,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Listener {
    #[serde(default)]
    name: String,
    address: Address,
    filter_chains: Vec<Chain>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Chain {
    filters: Vec<Filter>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Filter {
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    typed_config: FilterConfig,
}

#[derive(Deserialize)]
#[serde(tag = "@type")]
enum FilterConfig {
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy")]
    TcpProxy(TcpProxy),
    #[serde(
        rename = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    )]
    Http(HttpManager),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TcpProxy {
    #[serde(rename = "stat_prefix", default)]
    _stat_prefix: IgnoredAny,
    cluster: String,
    tunneling_config: Tunneling,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tunneling {
    hostname: String,
}

/// The HTTP listener for metrics.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpManager {
    #[serde(rename = "stat_prefix", default)]
    _stat_prefix: IgnoredAny,
    #[serde(rename = "codec_type", default)]
    _codec_type: IgnoredAny,
    route_config: RouteConfig,
    #[serde(rename = "http_filters", default)]
    _http_filters: Vec<HttpFilter>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpFilter {
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(rename = "typed_config")]
    _typed_config: HttpFilterConfig,
}

#[derive(Deserialize)]
#[serde(tag = "@type", deny_unknown_fields)]
enum HttpFilterConfig {
    #[serde(rename = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router")]
    Router {},
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteConfig {
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    virtual_hosts: Vec<VirtualHost>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VirtualHost {
    #[serde(rename = "name", default)]
    _name: IgnoredAny,
    #[serde(rename = "domains", default)]
    _domains: IgnoredAny,
    routes: Vec<HttpRoute>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpRoute {
    #[serde(rename = "match")]
    _match: HttpMatch,
    route: HttpAction,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpMatch {
    #[serde(rename = "prefix")]
    _prefix: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpAction {
    cluster: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cluster {
    name: String,
    connect_timeout: Option<String>,
    #[serde(rename = "type", default)]
    _discovery: Discovery,
    /// The order of endpoints; a cluster has only one.
    #[serde(rename = "lb_policy", default)]
    _lb_policy: IgnoredAny,
    typed_extension_protocol_options: Option<ProtocolOptions>,
    load_assignment: Assignment,
}

/// Ways to find an address, which are the same for a node tunnel: it resolves a name for each connection.
#[derive(Deserialize, Default)]
enum Discovery {
    #[default]
    #[serde(rename = "STATIC")]
    Static,
    #[serde(rename = "STRICT_DNS")]
    StrictDns,
    #[serde(rename = "LOGICAL_DNS")]
    LogicalDns,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProtocolOptions {
    #[serde(rename = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions")]
    http: HttpOptions,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HttpOptions {
    #[serde(rename = "@type", default)]
    _type: IgnoredAny,
    explicit_http_config: ExplicitHttp,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplicitHttp {
    http2_protocol_options: Http2Options,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Http2Options {
    connection_keepalive: Option<Keepalive>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keepalive {
    interval: String,
    timeout: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Assignment {
    #[serde(rename = "cluster_name", default)]
    _cluster_name: IgnoredAny,
    endpoints: Vec<Locality>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Locality {
    lb_endpoints: Vec<LbEndpoint>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LbEndpoint {
    endpoint: Endpoint,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Endpoint {
    address: Address,
}

/// Reads and translates a file.
///
/// # Errors
/// Returns the cause and the remedy.
pub(super) fn read(path: &Path) -> Result<Translated, String> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text));
    let shown = path.display();
    match read {
        Err(error) => Err(format!(
            "cannot read {shown}: {error}; check that the file is mounted and may be read by this process"
        )),
        Ok(bytes) if bytes as u64 > MAX_BYTES => Err(format!(
            "{shown} is larger than {MAX_BYTES} bytes; {REMEDY}"
        )),
        Ok(_) => translate(&text).map_err(|why| format!("{shown}: {why}; {REMEDY}")),
    }
}

fn translate(text: &str) -> Result<Translated, String> {
    let document: Document =
        serde_saphyr::from_str(text).map_err(|error| yaml::explain(&error, text))?;
    let Resources {
        listeners,
        clusters,
    } = document.static_resources;
    let (mut routes, mut stats, mut proxy) = (Vec::new(), None, None);
    for listener in listeners {
        let at = HostPort::from(listener.address);
        let problem = |why: &str| format!("listener {:?}: {why}", listener.name);
        match only(listener.filter_chains).and_then(|chain| only(chain.filters)) {
            None => return Err(problem("it must have one filter chain with one filter")),
            Some(Filter { typed_config, .. }) => match typed_config {
                FilterConfig::TcpProxy(tcp) => {
                    routes.push((at, tcp.tunneling_config.hostname));
                    if *proxy.get_or_insert_with(|| tcp.cluster.clone()) != tcp.cluster {
                        let why = "all listeners must have the same cluster";
                        return Err(problem(why));
                    }
                }
                FilterConfig::Http(manager) => {
                    leads_to_admin(manager, &clusters, document.admin.as_ref())
                        .map_err(|why| problem(&why))?;
                    if stats.replace(at).is_some() {
                        return Err(problem("it is the second listener for metrics"));
                    }
                }
            },
        }
    }
    let proxy = proxy.ok_or("there is no listener with a tcp_proxy and a tunneling_config")?;
    let cluster = find(&clusters, &proxy)?;
    let mut warnings = Vec::new();
    if let Some(given) = &cluster.connect_timeout
        && duration(given)? != CONNECT_TIMEOUT
    {
        warnings.push(format!(
            "--config-path: connect_timeout={given} has no effect: the node tunnel waits {CONNECT_TIMEOUT:?} for a connection"
        ));
    }
    Ok(Translated {
        routes,
        proxy: cluster.address()?,
        pings: cluster.pings()?,
        stats,
        warnings,
    })
}

/// Checks that an HTTP listener serves nothing but pages of the admin listener.
fn leads_to_admin(
    manager: HttpManager,
    clusters: &[Cluster],
    admin: Option<&Admin>,
) -> Result<(), String> {
    let hosts = manager.route_config.virtual_hosts.into_iter();
    for route in hosts.flat_map(|host| host.routes) {
        let target = find(clusters, &route.route.cluster)?.address()?;
        let is_admin =
            admin.is_some_and(|admin| HostPort::from(&admin.address.socket_address) == target);
        if !is_admin {
            return Err("its routes must lead to the admin listener".to_owned());
        }
    }
    Ok(())
}

fn find<'a>(clusters: &'a [Cluster], name: &str) -> Result<&'a Cluster, String> {
    let found = clusters.iter().find(|cluster| cluster.name == name);
    found.ok_or_else(|| format!("there is no cluster {name:?}"))
}

/// Returns the element of a list with one element.
fn only<T>(list: Vec<T>) -> Option<T> {
    let mut list = list.into_iter();
    match (list.next(), list.next()) {
        (one, None) => one,
        _ => None,
    }
}

/// Parses a duration of Envoy: seconds, with the unit.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed = text.ends_with('s').then(|| text.parse::<GoDuration>());
    match parsed {
        Some(Ok(time)) if time.nanos() > 0 => Ok(time.saturating()),
        _ => Err(format!("{text:?} is not a duration such as 30s")),
    }
}

// === impl Cluster ===

impl Cluster {
    fn address(&self) -> Result<HostPort, String> {
        let localities = self.load_assignment.endpoints.iter();
        match only(localities.flat_map(|all| &all.lb_endpoints).collect()) {
            Some(one) => Ok(HostPort::from(&one.endpoint.address.socket_address)),
            None => Err(format!("cluster {:?} must have one endpoint", self.name)),
        }
    }

    /// Returns the times of the pings. Requires HTTP/2, because Envoy would use HTTP/1.1 otherwise.
    fn pings(&self) -> Result<Pings, String> {
        let Some(options) = &self.typed_extension_protocol_options else {
            let name = &self.name;
            return Err(format!("cluster {name:?} must have http2_protocol_options"));
        };
        let http2 = &options.http.explicit_http_config.http2_protocol_options;
        match &http2.connection_keepalive {
            Some(keepalive) => Ok(Pings {
                idle: duration(&keepalive.interval)?,
                timeout: duration(&keepalive.timeout)?,
            }),
            None => Ok(PINGS),
        }
    }
}

// === impl HostPort ===

impl From<&SocketAddress> for HostPort {
    fn from(address: &SocketAddress) -> Self {
        Self::new(&address.address, address.port_value)
    }
}

impl From<Address> for HostPort {
    fn from(address: Address) -> Self {
        Self::from(&address.socket_address)
    }
}

#[cfg(test)]
mod tests;
