//! The pages of the listeners for health, metrics and administration.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use culvert_host::admin::{Reply, Routes};
use http::StatusCode;
use tracing::info;

use super::front::Front;
use super::metrics::SourceState;

/// `/readyz` text during the drain.
const DRAINING: &str = "draining";

/// `/readyz` text after `/healthcheck/fail`.
const FAILED: &str = "failed by a request to /healthcheck/fail";

/// `/readyz` text before the first routes are known.
const NOT_SYNCED: &str = "not all Services are known yet; is the Kubernetes API reachable?";

/// `/readyz` text while the source cannot be read and the last known routes stay in force.
const STALE: &str = "ok, with the last known routes: their source cannot be read";

/// `/readyz` text while the file has mistakes and the last good routes stay in force.
const REJECTED: &str = "ok, with the last known routes: the file is not in force because it has mistakes; the log names them";

/// Returns the pages for health and metrics. `/livez` always succeeds: a restart would end connections that a drain or
/// `/healthcheck/fail` leaves alone.
pub(super) fn stats(front: &Arc<Front>) -> Routes {
    let [alive, ready_front] = [(); 2].map(|()| front.clone());
    with_metrics(Routes::new(), front)
        .any_method("/livez", |_| ready(Reply::text(StatusCode::OK, "ok")))
        .any_method("/healthz", move |_| ready(health(&alive)))
        .any_method("/readyz", move |_| ready(readiness(&ready_front)))
}

/// Returns the pages that change the health, and the metrics, as Envoy's admin listener.
pub(super) fn admin(front: &Arc<Front>) -> Routes {
    let [failing, recovering] = [(); 2].map(|()| front.clone());
    with_metrics(Routes::new(), front)
        .action("/healthcheck/fail", move |_| {
            ready(set_health(&failing, true))
        })
        .action("/healthcheck/ok", move |_| {
            ready(set_health(&recovering, false))
        })
}

fn with_metrics(routes: Routes, front: &Arc<Front>) -> Routes {
    let front = front.clone();
    routes.with_metrics_at(&["/stats/prometheus", "/metrics"], move || {
        front.metrics.render(&front.table)
    })
}

/// Returns the answer of Envoy's health check filter, which sends no body.
fn health(front: &Front) -> Reply {
    let status = match front.metrics.is_healthy() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    Reply::text(status, "")
}

/// Returns the readiness. The proxy is ready even if only the last known routes are in force; the text then informs
/// people.
fn readiness(front: &Front) -> Reply {
    let metrics = &front.metrics;
    let fault = match (
        metrics.draining.load(Ordering::Relaxed),
        metrics.failed.load(Ordering::Relaxed),
        metrics.is_synced(),
    ) {
        (true, ..) => Some(DRAINING),
        (false, true, _) => Some(FAILED),
        (false, false, false) => Some(NOT_SYNCED),
        (false, false, true) => None,
    };
    if let Some(text) = fault {
        return Reply::text(StatusCode::SERVICE_UNAVAILABLE, text);
    }
    let text = match *metrics.source.lock() {
        SourceState::Good => "ok",
        SourceState::Unreadable => STALE,
        SourceState::Rejected => REJECTED,
    };
    Reply::text(StatusCode::OK, text)
}

/// Changes the health, and returns Envoy's answer.
fn set_health(front: &Front, failed: bool) -> Reply {
    if front.metrics.failed.swap(failed, Ordering::Relaxed) != failed {
        match failed {
            true => info!("/healthcheck/fail: health and readiness answer 503"),
            false => info!("/healthcheck/ok: health and readiness are back to normal"),
        }
    }
    Reply::text(StatusCode::OK, "OK\n")
}
