//! A client for one Kubernetes API server: [`client()`] sets the credentials and timeouts, and [`root()`]
//! returns the cause of a client's error.
//!
//! A client follows its kubeconfig, and the certificates, keys and token files that the kubeconfig names: the next
//! request after a change uses the new content. A credential plugin runs again before its credentials expire, and after the
//! API has refused them. `kube` itself reads the files of the pod's own account again every minute.

mod kubeconfig;
mod plugin;
mod proxied;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use culvert_host::reload::{Latest, Reloader};
use culvert_host::telemetry::metrics::LabelSet;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use kube::config::{Cluster, KubeconfigError};
use kube::core::Status;
use parking_lot::Mutex;
use rand::Rng as _;
use tokio::time::{Instant, sleep_until};
use tower::{Service, service_fn};

use self::kubeconfig::Account;

/// Longest time that a Kubernetes API server may send nothing, before or within an answer. A firewall or load
/// balancer may forget a connection and drop its packets without closing the connection; an API server in
/// trouble may accept requests and never answer. The limit is well above the time that a server needs to start
/// sending a large list. Watches end sooner (see [`object_cache`](crate::object_cache)).
pub const SILENCE: Duration = Duration::from_secs(34);

/// Shortest time between the starts of two watches. A watch without changes lasts much longer.
const WATCH_GAP: Duration = Duration::from_secs(1);

/// Parameter of a watch with its lifetime in seconds.
const LIFETIME: &str = "timeoutSeconds=";

/// Shortest lifetime of the first watch after a list, in seconds.
const SHORTEST_LIFETIME: u32 = 5;

/// The watches of one path.
struct Watches {
    /// Earliest start of the next watch.
    next: Instant,
    /// Set if no watch has started since the last list.
    is_first: bool,
}

/// Returns a client for a kubeconfig file, or for the pod's own account. `reloader` follows the kubeconfig under the
/// name `files`. The namespace of the kubeconfig's context is read once.
///
/// # Errors
/// Fails if the credentials are missing or cannot be used.
pub async fn client<F>(
    kubeconfig: Option<&Path>,
    reloader: &mut Reloader<F>,
    files: F,
) -> anyhow::Result<Client>
where
    F: LabelSet + Send + Sync + 'static,
{
    let Some(path) = kubeconfig else {
        let config = kube::Config::incluster().map_err(|error| {
            anyhow::anyhow!("no Kubernetes account: {error}; run in a pod, or give --kubeconfig")
        })?;
        return Ok(paced(connect(config, None)?));
    };
    let latest = reloader.follow(files, Account::new(path)).await?;
    let namespace = latest.get().client.default_namespace().to_owned();
    let listed = HashMap::new();
    Ok(paced(Client::new(Following { latest, listed }, namespace)))
}

/// Returns a client that starts a watch of the same path at most once per [`WATCH_GAP`]. A proxy may answer every watch
/// with a success and end it at once. `kube` then starts the next watch without a pause.
///
/// The first watch after each list has a random lifetime. Otherwise the watches of clients that have started together
/// would end together forever.
fn paced(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    let paths = Arc::new(Mutex::new(HashMap::<String, Watches>::new()));
    let service = service_fn(move |mut request: Request<Body>| {
        let start = begin(&mut paths.lock(), &mut request);
        let (client, paths) = (client.clone(), paths.clone());
        async move {
            let Some(start) = start else {
                return client.send(request).await;
            };
            sleep_until(start).await;
            let path = request.uri().path().to_owned();
            let answer = client.send(request).await?;
            if answer.status().is_success()
                && let Some(watches) = paths.lock().get_mut(&path)
            {
                watches.is_first = false;
            }
            Ok(answer)
        }
    });
    Client::new(service, namespace)
}

/// Returns the time at which a watch may start, and shortens the first watch; `None` for any other request.
fn begin(paths: &mut HashMap<String, Watches>, request: &mut Request<Body>) -> Option<Instant> {
    let path = request.uri().path();
    if !is_watch(request) {
        if request.method() == Method::GET
            && let Some(watches) = paths.get_mut(path)
        {
            watches.is_first = true;
        }
        return None;
    }
    let now = Instant::now();
    let watches = paths.entry(path.to_owned()).or_insert(Watches {
        next: now,
        is_first: true,
    });
    let start = now.max(watches.next);
    watches.next = start + WATCH_GAP;
    if watches.is_first {
        shorten(request.uri_mut());
    }
    Some(start)
}

/// Replaces the lifetime of a watch by a shorter random lifetime.
fn shorten(uri: &mut http::Uri) {
    let mut pairs = uri.query().unwrap_or_default().split('&');
    let lifetime = pairs.find_map(|pair| pair.strip_prefix(LIFETIME)?.parse().ok());
    let Some(longest) = lifetime else { return };
    let shorter = rand::rng().random_range(SHORTEST_LIFETIME.min(longest)..=longest);
    let (from, to) = (
        format!("{LIFETIME}{longest}"),
        format!("{LIFETIME}{shorter}"),
    );
    if let Ok(shortened) = uri.to_string().replace(&from, &to).parse::<http::Uri>() {
        *uri = shortened;
    }
}

/// Returns true if the request starts a watch.
pub(crate) fn is_watch(request: &Request<Body>) -> bool {
    let query = request.uri().query().unwrap_or_default();
    request.method() == Method::GET && query.split('&').any(|pair| pair == "watch=true")
}

/// A client and the API server that it uses.
#[derive(Clone)]
struct Access {
    client: Client,
    server: http::Uri,
    /// True once the API has refused the credentials (401). `None` without a credential plugin: unchanged files contain the
    /// same credentials.
    refused: Option<Arc<AtomicBool>>,
}

/// Error of a request without an answer.
#[derive(Debug, thiserror::Error)]
#[error("no answer from the Kubernetes API {server} of --kubeconfig")]
struct Unanswered {
    server: http::Uri,
    source: tower::BoxError,
}

/// Sends each request with the latest client.
struct Following {
    latest: Latest<Access>,
    /// API server of the last list, by path.
    listed: HashMap<String, http::Uri>,
}

impl Following {
    /// Returns false for a watch that continues a list of another API server: versions of objects are valid only
    /// within one cluster.
    fn may_send(&mut self, request: &Request<Body>, server: &http::Uri) -> bool {
        let uri = request.uri();
        if is_watch(request) {
            let listed = self.listed.get(uri.path());
            return listed.is_none_or(|listed| listed == server);
        }
        if request.method() == Method::GET {
            self.listed.insert(uri.path().to_owned(), server.clone());
        }
        true
    }
}

impl Service<Request<Body>> for Following {
    type Response = Response<Body>;
    type Error = kube::Error;
    type Future = BoxFuture<'static, kube::Result<Response<Body>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<kube::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let Access {
            client,
            server,
            refused,
        } = self.latest.get();
        let may_send = self.may_send(&request, &server);
        Box::pin(async move {
            if may_send {
                let sent = client.send(request).await;
                if let (Ok(answer), Some(refused)) = (&sent, refused)
                    && answer.status() == StatusCode::UNAUTHORIZED
                {
                    refused.store(true, Ordering::Relaxed);
                }
                return sent.map_err(|error| match error {
                    kube::Error::Service(source) => {
                        kube::Error::Service(Unanswered { server, source }.into())
                    }
                    error => error,
                });
            }
            let why = format!("the kubeconfig now names the API server {server}; listing again");
            let status = Status::failure(&why, "Expired").with_code(410);
            Err(kube::Error::Api(status.boxed()))
        })
    }
}

/// Creates the client of an account. `cluster` is the entry of the kubeconfig.
fn connect(mut config: kube::Config, cluster: Option<&Cluster>) -> anyhow::Result<Client> {
    // `kube` would end each request with a panic.
    anyhow::ensure!(
        config.cluster_url.scheme().is_some(),
        "the address of the Kubernetes API server, {}, has no scheme; expected a URL such as https://{0}",
        config.cluster_url
    );
    // A trailing dot in the host name keeps resolvers from trying search domains. Names in certificates have
    // no trailing dot, so the certificate is verified against the host name without the dot.
    let host = config.cluster_url.host().unwrap_or_default();
    if let Some(name) = host.strip_suffix('.')
        && config.tls_server_name.is_none()
    {
        config.tls_server_name = Some(name.to_owned());
    }
    // Callers retry, and log each failure.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    // Time that the connection was idle before a request must not count toward [`SILENCE`].
    config.reset_reader_on_write = true;
    let created = match proxied::of(&config, cluster)? {
        Some(proxy) => proxied::client(config, proxy),
        None => {
            // `kube` copies the variable without Go's exceptions, and would refuse the account.
            config.proxy_url = None;
            Client::try_from(config)
        }
    };
    created.map_err(|error| {
        let advice = match error.to_string() {
            text if text.contains("UnsupportedCertVersion") => {
                "; its client certificate is of X.509 version 1: issue it again with an extension, \
                 such as openssl's -extfile with extendedKeyUsage=clientAuth"
            }
            _ => "",
        };
        anyhow::anyhow!("cannot use the Kubernetes account: {error}{advice}")
    })
}

/// Returns an error without lines of the file. The parser's text shows the lines around an error, and a token may
/// be in these lines. Other texts contain their cause, which is therefore not the source of the returned error.
fn without_content(error: KubeconfigError) -> anyhow::Error {
    let error = match error {
        KubeconfigError::Parse(error) => error,
        KubeconfigError::CurrentContextNotSet => {
            return anyhow::anyhow!("no current-context is set; is the file a kubeconfig?");
        }
        error => return anyhow::Error::msg(error),
    };
    match error.location() {
        Some(at) => anyhow::anyhow!(
            "not a valid kubeconfig at line {}, column {}",
            at.line(),
            at.column()
        ),
        None => anyhow::anyhow!("not a valid kubeconfig"),
    }
}

/// Returns the innermost cause of a client's error. The outer layers only repeat that there was an error.
pub fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

#[cfg(test)]
pub(crate) mod tests;
