//! The switch's pages on the admin listener.

use culvert_host::admin::{Reply, Routes};
use http::StatusCode;

use super::driver::{Refusal, Switcher};
use super::status::{Request, STATUS_PATH, SWITCH_PATH};

const JSON: &str = "application/json";

/// Adds the pages for the status and for mode requests. The listener must authenticate its clients.
#[must_use]
pub(crate) fn add(routes: Routes, switcher: &Switcher) -> Routes {
    let (shown, asked) = (switcher.clone(), switcher.clone());
    routes
        .route(STATUS_PATH, move |_| {
            std::future::ready(status(StatusCode::OK, &shown))
        })
        .action(SWITCH_PATH, move |ask| {
            let switcher = asked.clone();
            async move { switch(ask.body(), &switcher).await }
        })
}

fn status(code: StatusCode, switcher: &Switcher) -> Reply {
    match serde_json::to_vec(&switcher.status()) {
        Ok(body) => Reply::new(code, JSON, body),
        Err(error) => Reply::text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

async fn switch(body: &[u8], switcher: &Switcher) -> Reply {
    let bad = |why: String| Reply::text(StatusCode::BAD_REQUEST, why);
    let request: Request = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return bad(error.to_string()),
    };
    let drain = match request.drain() {
        Ok(drain) => drain,
        Err(why) => return bad(why),
    };
    match switcher.request(request.to, drain).await {
        Ok(()) => status(StatusCode::ACCEPTED, switcher),
        Err(why @ Refusal::Unavailable(_)) => Reply::text(StatusCode::CONFLICT, why.to_string()),
        Err(why @ Refusal::Stopping) => {
            Reply::text(StatusCode::SERVICE_UNAVAILABLE, why.to_string())
        }
    }
}
