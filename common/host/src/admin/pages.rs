//! The pages that the programs share, with upstream's statuses and bodies. As in upstream, every method gets the page.

use std::future::ready;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{HOST, HeaderValue, LOCATION};
use http::uri::Authority;
use http::{Request, StatusCode};

use super::shared_page::SharedPage;
use super::{Reply, Routes};
use crate::net::dial::{join_host_port, split_host_port};
use crate::telemetry::metrics::Registry;

/// Advice for clients that request a profile.
pub(crate) const NO_PROFILES: &str = "this program has no pprof profiles; use `perf record -g -p PID` on the node, and the metrics process_*";

/// Path of Go's profiles. Profiles have this path or a path below it.
const PPROF: &str = "/debug/pprof";

/// Content type of the Prometheus text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One readiness check of the agent.
pub struct Check {
    /// Name on the page.
    pub name: &'static str,
    /// Function that runs the check. Returns `Ok`, or the reason for the failure.
    pub run: Box<dyn Fn() -> Result<(), String> + Send + Sync>,
}

// === impl Routes ===

impl Routes {
    /// Adds `/healthz`, which always returns `ok`.
    #[must_use]
    pub fn with_healthz(self) -> Self {
        self.any_method("/healthz", |_| ready(Reply::text(StatusCode::OK, "ok")))
    }

    /// Adds the server's `/readyz` and its old name `/ready`. The page is `ok`, or status 500 with the text
    /// from `fault`.
    #[must_use]
    pub fn with_server_readyz(
        self,
        fault: impl Fn() -> Option<&'static str> + Send + Sync + 'static,
    ) -> Self {
        let page = move || match fault() {
            None => Reply::text(StatusCode::OK, "ok"),
            Some(text) => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, text),
        };
        self.at_both_names(move |_| page())
    }

    /// Adds the agent's `/readyz` and its old name `/ready`. The page is `ok`; with `?verbose`, one line per
    /// check. If a check fails, the page has status 503 and one line per check.
    #[must_use]
    pub fn with_agent_readyz(self, checks: Vec<Check>) -> Self {
        self.at_both_names(move |query| {
            let mut names = query
                .unwrap_or_default()
                .split('&')
                .map(|pair| pair.split('=').next());
            check_page(&checks, names.any(|name| name == Some("verbose")))
        })
    }

    /// Adds `/metrics`.
    #[must_use]
    pub fn with_metrics(self, registry: Arc<Registry>) -> Self {
        self.with_metrics_at(&["/metrics"], move || registry.render())
    }

    /// Adds a page in the Prometheus text format at several paths. The page is rendered for each request, unless there
    /// are many requests or earlier answers are not sent yet; a page is then up to one second old. It is older, by at most the
    /// time limit of an answer, while several clients read slowly.
    #[must_use]
    pub fn with_metrics_at(
        self,
        paths: &[&'static str],
        render: impl Fn() -> String + Send + Sync + 'static,
    ) -> Self {
        let page = Arc::new(SharedPage::new(render));
        paths.iter().fold(self, |routes, path| {
            let page = Arc::clone(&page);
            routes.any_method(path, move |_| {
                ready(Reply::new(StatusCode::OK, METRICS_TYPE, page.get()))
            })
        })
    }

    /// Redirects `path` permanently (301) to the same path on another port of the requested host. Upstream's
    /// agent redirects its admin `/metrics` in the same way.
    #[must_use]
    pub fn with_redirect_to_port(self, path: &'static str, port: u16) -> Self {
        self.any_method(path, move |request| ready(redirect(port, &request)))
    }

    fn at_both_names(self, page: impl Fn(Option<&str>) -> Reply + Send + Sync + 'static) -> Self {
        let page = Arc::new(page);
        let alias = Arc::clone(&page);
        self.any_method("/readyz", move |request| ready(page(request.uri().query())))
            .any_method("/ready", move |request| ready(alias(request.uri().query())))
    }
}

/// Returns the answer for an unknown path.
pub(super) fn not_found(path: &str) -> Reply {
    let text = match path.strip_prefix(PPROF) {
        Some(rest) if rest.is_empty() || rest.starts_with('/') => format!("{NO_PROFILES}\n"),
        // Go's `net/http` sends this body with a 404.
        _ => "404 page not found\n".to_owned(),
    };
    Reply::text(StatusCode::NOT_FOUND, text)
}

fn check_page(checks: &[Check], is_verbose: bool) -> Reply {
    let mut lines = String::new();
    let mut has_failed = false;
    for check in checks {
        match (check.run)() {
            Ok(()) => lines.push_str(&format!("[+]{} ok\n", check.name)),
            Err(reason) => {
                has_failed = true;
                lines.push_str(&format!("[-]{} failed: {reason}\n", check.name));
            }
        }
    }
    if has_failed {
        Reply::text(StatusCode::SERVICE_UNAVAILABLE, lines)
    } else if is_verbose {
        Reply::text(StatusCode::OK, lines + "check passed\n")
    } else {
        Reply::text(StatusCode::OK, "ok")
    }
}

/// Builds a redirect without a scheme, as upstream does, so that the client keeps the scheme of its request.
fn redirect(port: u16, request: &Request<Bytes>) -> Reply {
    let host = request.headers().get(HOST);
    let host = host.and_then(|host| host.to_str().ok()).unwrap_or_default();
    let host = match split_host_port(host) {
        Ok((host, _)) => host,
        Err(_) => host.trim_matches(['[', ']']),
    };
    let authority = join_host_port(host, port);
    let path = request.uri().path();
    let query = match request.uri().query().unwrap_or_default() {
        "" => String::new(),
        query => format!("?{query}"),
    };
    // The host comes from the request. A malformed host could redirect the client elsewhere.
    let is_sound = authority.parse::<Authority>().is_ok();
    match HeaderValue::try_from(format!("//{authority}{path}{query}")) {
        Ok(location) if is_sound => {
            Reply::text(StatusCode::MOVED_PERMANENTLY, "Moved Permanently\n")
                .with(LOCATION, location)
        }
        _ => Reply::text(StatusCode::BAD_REQUEST, "malformed Host header\n"),
    }
}
