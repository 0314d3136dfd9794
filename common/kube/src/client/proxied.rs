//! Connections to a Kubernetes API server through an HTTP proxy.
//!
//! `kube` has a feature for proxies, but compares `NO_PROXY` with the name of the proxy, not of the API server
//! (kube-client 5.0, `ConfigLoader::proxy_url`), and refuses an empty entry in `NO_PROXY`.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::net::proxy::{self, ProxyScheme, ProxyTarget};
use futures_util::future::BoxFuture;
use http::Uri;
use http::uri::Scheme;
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::{Body, ConfigExt as _};
use kube::config::Cluster;
use kube::{Client, Config};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tower::{BoxError, Service, ServiceBuilder};

/// Port of an API server whose URL has no port.
const HTTPS_PORT: u16 = 443;

/// Time limit for a connection if the account sets none.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Returns the proxy of an account. The `proxy-url` of the kubeconfig's cluster is used as it is, as client-go does.
/// Without a `proxy-url`, the environment decides, by Go's rules.
///
/// # Errors
/// Fails if a proxy is set but cannot be used. The error omits the URL, because the URL may contain a password.
pub(super) fn of(
    config: &Config,
    cluster: Option<&Cluster>,
) -> anyhow::Result<Option<ProxyTarget>> {
    let url = cluster.and_then(|cluster| cluster.proxy_url.as_deref());
    if let Some(url) = url.filter(|url| !url.is_empty()) {
        let proxy = ProxyTarget::parse(url, ProxyScheme::Counts).ok().context(
            "proxy-url must be http://[user:password@]host:port; https and socks proxies are not supported",
        )?;
        return Ok(Some(proxy));
    }
    if config.cluster_url.scheme() != Some(&Scheme::HTTPS) {
        return Ok(None);
    }
    let (host, port) = target(&config.cluster_url);
    Ok(proxy::from_env(host, port, ProxyScheme::Counts)?)
}

/// Creates a client like `kube`'s own client, but through `proxy`.
pub(super) fn client(config: Config, proxy: ProxyTarget) -> kube::Result<Client> {
    let limit = config.connect_timeout.unwrap_or(CONNECT_LIMIT);
    let through = Through {
        proxy: Arc::new(proxy),
        limit,
    };
    if CryptoProvider::get_default().is_none() {
        // An error means that another thread was faster, as in `kube`'s own client.
        aws_lc_rs::default_provider().install_default().ok();
    }
    let connector = config.rustls_https_connector_with_connector(through)?;
    let mut connector = TimeoutConnector::new(connector);
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_write_timeout(config.write_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let http = legacy::Client::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

/// Opens connections through a proxy.
#[derive(Clone)]
struct Through {
    proxy: Arc<ProxyTarget>,
    /// Time limit for the connection to the proxy and for its answer.
    limit: Duration,
}

impl Service<Uri> for Through {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<TcpStream>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        let proxy = Arc::clone(&self.proxy);
        let deadline = Instant::now() + self.limit;
        Box::pin(async move {
            let (host, port) = target(&server);
            let stream = proxy::connect(&proxy, host, port, deadline).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(stream))
        })
    }
}

/// Returns the host without brackets, and the port.
fn target(server: &Uri) -> (&str, u16) {
    let host = server.host().unwrap_or_default();
    let port = server.port_u16().unwrap_or(HTTPS_PORT);
    (host.trim_matches(['[', ']']), port)
}
