//! The status page: a small HTTP server on a loopback address that shows one server in the browser.
//!
//! One task asks the server for its status and its metrics every two seconds, also while no page is open, so that the
//! curves have no gaps. Pages receive the last answer, and never cause a request to the server. The page only reads: its
//! listener has no path that changes a state.

mod access;
mod history;
mod view;

use std::future::ready;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use culvert_host::admin::{Reply, Routes, bind, serve};
use culvert_host::runtime::Signals;
use culvert_server::switch::status::Status;
use http::{HeaderValue, Request, StatusCode};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use self::access::{Access, policy, protected};
use self::history::History;
use self::view::View;
use crate::admin::{Admin, TIMEOUT};
use crate::figures::Figures;
use crate::stdout::printable;
use crate::verdict::{clock, duration, reasons, verdict};

const STYLE: &str = include_str!("web/page.css");
const SCRIPT: &str = include_str!("web/page.js");
const PAGE: &str = concat!(
    "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n",
    "<title>Culvert server</title>\n<style>",
    include_str!("web/page.css"),
    "</style>\n</head>\n",
    include_str!("web/body.html"),
    "<script>",
    include_str!("web/page.js"),
    "</script>\n</body>\n</html>\n",
);

/// Pause between an answer of the server and the next request.
const PAUSE: Duration = Duration::from_secs(2);

/// Time limit for an answer of the server, after the first: status and metrics.
const LIMIT: Duration = Duration::from_secs(10);

/// Age from which data are old: the next answer is late.
const OLD: Duration = PAUSE.saturating_add(LIMIT);

/// Last answer of a server.
struct Answer {
    at: Instant,
    /// Time of the answer, in Unix seconds.
    clock: f64,
    status: Status,
    figures: Figures,
}

/// State of a server, and its history.
struct Watched {
    name: String,
    last: Answer,
    /// Error of the last request; `None` if the server has answered.
    error: Option<String>,
    history: History,
}

impl Answer {
    async fn get(admin: &Admin, limit: Duration) -> anyhow::Result<Self> {
        let (status, metrics) = admin.status_and_metrics(limit).await?;
        Ok(Self {
            at: Instant::now(),
            clock: clock(),
            status,
            figures: Figures::read(&metrics?),
        })
    }
}

impl Watched {
    fn new(name: String, answer: Answer) -> Self {
        let mut history = History::default();
        history.add(answer.at, &answer.status, &answer.figures);
        Self {
            name,
            last: answer,
            error: None,
            history,
        }
    }

    fn add(&mut self, outcome: anyhow::Result<Answer>) {
        match outcome {
            Ok(answer) => {
                let (status, figures) = (&answer.status, &answer.figures);
                self.history.add(answer.at, status, figures);
                self.last = answer;
                self.error = None;
            }
            Err(error) => {
                self.history.add_failure(Instant::now());
                self.error = Some(format!("{error:#}"));
            }
        }
    }

    fn view(&self, now: Instant, clock: f64) -> View {
        let Answer {
            status, figures, ..
        } = &self.last;
        let age = now.saturating_duration_since(self.last.at);
        let is_old = self.error.is_some() || age > OLD;
        let late = is_old.then(|| {
            let time = duration(age.as_secs_f64());
            let why = match &self.error {
                Some(error) => printable(error),
                None => "no answer yet".to_owned(),
            };
            format!("the server has not answered for {time}: {why}")
        });
        let reasons = reasons(status, figures, clock);
        let mut view = View::new(status, figures, &self.history, now, clock);
        view.server.clone_from(&self.name);
        view.reasons = late.into_iter().chain(reasons).collect();
        view.verdict = verdict(&view.reasons);
        view.is_old = is_old;
        view.time = self.last.clock;
        view
    }
}

/// Parses the address of the page.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text
        .parse()
        .map_err(|_| "expected an IP address and a port, such as 127.0.0.1:8000".to_owned())?;
    if address.ip().is_loopback() {
        return Ok(address);
    }
    Err(
        "not a loopback address; the page has no TLS, so use 127.0.0.1 or [::1], and reach it from another machine \
         through ssh -L"
            .to_owned(),
    )
}

/// Serves the page until a signal arrives.
///
/// # Errors
/// Fails if the server does not answer the first request, or the listener cannot be opened.
pub(crate) async fn run(admin: &Admin, address: SocketAddr) -> anyhow::Result<()> {
    let mut signals = Signals::of_terminal()?;
    let first = tokio::select! {
        answer = Answer::get(admin, TIMEOUT) => answer?,
        _ = signals.recv() => return Ok(()),
    };
    let host = address.ip().to_string();
    let listener = bind(&host, address.port(), ["--web"; 2]).await?;
    let access = Access::new(listener.local_addr()?)?;
    say!("Status page until Ctrl-C: {}", access.url());
    let watched = Arc::new(Mutex::new(Watched::new(admin.name(), first)));
    let routes = routes(access, &watched)?;
    let shutdown = CancellationToken::new();
    let mut serving = pin!(serve(listener, routes, shutdown.clone()));
    tokio::select! {
        () = serving.as_mut() => {}
        () = watch(admin, &watched) => {}
        _ = signals.recv() => {}
    }
    shutdown.cancel();
    tokio::select! {
        () = serving => {}
        _ = signals.recv() => {}
    }
    Ok(())
}

async fn watch(admin: &Admin, watched: &Mutex<Watched>) {
    loop {
        sleep(PAUSE).await;
        let outcome = timeout(LIMIT, Answer::get(admin, LIMIT)).await;
        let late = || anyhow!("no answer within {}s", LIMIT.as_secs());
        watched.lock().add(outcome.unwrap_or_else(|_| Err(late())));
    }
}

fn routes(access: Access, watched: &Arc<Mutex<Watched>>) -> anyhow::Result<Routes> {
    let policy = policy(STYLE, SCRIPT);
    let policy: HeaderValue = policy.try_into().context("the content security policy")?;
    let access = Arc::new(access);
    let guarded = |answer: Box<dyn Fn() -> Reply + Send + Sync>| {
        let (access, policy) = (Arc::clone(&access), policy.clone());
        move |request: Request<Bytes>| {
            let reply = access.refusal(&request).unwrap_or_else(&answer);
            ready(protected(reply, &policy))
        }
    };
    let page = || Reply::new(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    let watched = Arc::clone(watched);
    let data = move || {
        let view = watched.lock().view(Instant::now(), clock());
        match serde_json::to_vec(&view) {
            Ok(json) => Reply::new(StatusCode::OK, "application/json", json),
            Err(error) => {
                let text = format!("{error}\n");
                Reply::text(StatusCode::INTERNAL_SERVER_ERROR, text)
            }
        }
    };
    Ok(Routes::new()
        .route("/", guarded(Box::new(page)))
        .route("/data", guarded(Box::new(data))))
}

#[cfg(test)]
mod tests;
