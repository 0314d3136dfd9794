//! Shared helpers: waiting, metric values, and an innocent connection that must always work.

use std::future::Future;
use std::time::Duration;

use culvert_kit::client::{BoxedStream, ClientError};
use culvert_kit::pki::Pki;
use culvert_tests::metrics::Metrics;
use culvert_tests::{Mode, Topology, Transport, eventually};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;

/// Time limit for every expected event. Generous, because two cores run many tests.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Both modes over a Unix socket.
pub(crate) const MODES: [Mode; 2] = [Mode::Grpc, Mode::HttpConnect];

/// Every front end: both modes over both kinds of socket.
pub(crate) const FRONTS: [(Mode, Transport); 4] = [
    (Mode::Grpc, Transport::Uds),
    (Mode::Grpc, Transport::Tcp),
    (Mode::HttpConnect, Transport::Uds),
    (Mode::HttpConnect, Transport::Tcp),
];

/// Waits for `work`. The panic text contains `what`.
///
/// # Panics
/// If `work` does not finish within [`LIMIT`].
pub(crate) async fn timely<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(LIMIT, work)
        .await
        .unwrap_or_else(|_| panic!("{what}: did not happen within {LIMIT:?}"))
}

/// Returns the flags of a server whose admin listener requires certificates of a PKI.
pub(crate) fn admin_flags(pki: &Pki) -> [String; 3] {
    [
        format!("--admin-cert={}", pki.server.cert.display()),
        format!("--admin-key={}", pki.server.key.display()),
        format!("--admin-ca-cert={}", pki.ca.display()),
    ]
}

/// Returns the full name of a server metric.
pub(crate) fn server_name(name: &str) -> String {
    format!("konnectivity_network_proxy_server_{name}")
}

/// Returns the full name of an agent metric.
pub(crate) fn agent_name(name: &str) -> String {
    format!("konnectivity_network_proxy_agent_{name}")
}

/// Returns a metric value of the first server, or 0 if the series is missing.
pub(crate) async fn server_value(topology: &Topology, name: &str, labels: &[(&str, &str)]) -> f64 {
    let metrics = topology.server_metrics(0).await;
    value(&metrics, &server_name(name), labels)
}

/// Returns a metric value, or 0 if the series is missing.
pub(crate) fn value(metrics: &Metrics, name: &str, labels: &[(&str, &str)]) -> f64 {
    metrics.value(name, labels).unwrap_or_default()
}

/// Returns the number of failed dials of the first server with this reason.
pub(crate) async fn dial_failures(topology: &Topology, reason: &str) -> f64 {
    server_value(topology, "dial_failure_count", &[("reason", reason)]).await
}

/// Waits until a metric value of the first server is `expected`.
pub(crate) async fn server_shows(
    topology: &Topology,
    name: &str,
    labels: &[(&str, &str)],
    expected: f64,
) {
    let name = server_name(name);
    eventually(
        &format!("{name}{labels:?} is {expected}"),
        LIMIT,
        async || {
            let shown = value(&topology.server_metrics(0).await, &name, labels);
            (shown == expected)
                .then_some(())
                .ok_or_else(|| shown.to_string())
        },
    )
    .await;
}

/// Waits until a metric value of the first agent is `expected`.
pub(crate) async fn agent_shows(
    topology: &Topology,
    name: &str,
    labels: &[(&str, &str)],
    expected: f64,
) {
    agent_at_shows(topology, 0, name, labels, expected).await;
}

/// Waits until a metric value of an agent is `expected`.
pub(crate) async fn agent_at_shows(
    topology: &Topology,
    agent: usize,
    name: &str,
    labels: &[(&str, &str)],
    expected: f64,
) {
    let name = agent_name(name);
    eventually(
        &format!("{name}{labels:?} of agent {agent} is {expected}"),
        LIMIT,
        async || {
            let shown = value(&topology.agent_metrics(agent).await, &name, labels);
            (shown == expected)
                .then_some(())
                .ok_or_else(|| shown.to_string())
        },
    )
    .await;
}

/// Waits until the first server has no pending dial, no connection and no front-end call.
pub(crate) async fn server_is_idle(topology: &Topology) {
    for name in [
        "pending_backend_dials",
        "established_connections",
        "http_connections",
    ] {
        server_shows(topology, name, &[], 0.0).await;
    }
    server_shows(
        topology,
        "grpc_connections",
        &[("service_method", "Proxy")],
        0.0,
    )
    .await;
}

/// Returns the number of connections closed by a program because of a slow receiver.
pub(crate) fn closed_as_slow(metrics: &Metrics) -> f64 {
    let closed = |reason| {
        let name = "culvert_connections_closed_total";
        value(metrics, name, &[("reason", reason)])
    };
    closed("stalled") + closed("buffer_exceeded")
}

/// Opens a connection to `target` through the front end.
///
/// # Panics
/// If the dial fails.
pub(crate) async fn open(topology: &Topology, target: &str) -> BoxedStream {
    let connected = topology.connect(target).await;
    connected.unwrap_or_else(|error| panic!("{target}: {error}"))
}

/// Dials `target` and returns the error.
///
/// # Panics
/// If the dial succeeds.
pub(crate) async fn refusal(topology: &Topology, target: &str) -> ClientError {
    let Err(error) = topology.connect(target).await else {
        panic!("{target} was connected");
    };
    error
}

/// Checks the refusal of a dial: status and text in CONNECT mode, only the text in gRPC mode.
pub(crate) fn assert_refused(error: &ClientError, status: u16, http_text: &str, grpc_text: &str) {
    match error {
        ClientError::Refused { status: seen, body } => {
            assert_eq!(*seen, status, "{body}");
            assert!(body.contains(http_text), "{body:?} lacks {http_text:?}");
        }
        ClientError::Dial(text) => {
            assert!(text.contains(grpc_text), "{text:?} lacks {grpc_text:?}");
        }
        other => panic!("not a refusal: {other}"),
    }
}

/// Reads to the end of the stream. A reset is also an end.
pub(crate) async fn read_rest(stream: &mut BoxedStream) -> Vec<u8> {
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    timely("the end of a stream", read).await.ok();
    rest
}

/// An open echo connection. Tests check the echo after misbehavior of other peers.
pub(crate) struct Innocent(BoxedStream);

impl Innocent {
    /// Opens a connection to the raw service.
    pub(crate) async fn open(topology: &Topology, raw: std::net::SocketAddr) -> Self {
        Self::over(open(topology, &raw.to_string()).await).await
    }

    /// Starts the echo on a connection to the raw service.
    pub(crate) async fn over(mut stream: BoxedStream) -> Self {
        stream.write_all(b"echo\n").await.unwrap();
        let mut innocent = Self(stream);
        innocent.still_echoes("at the start").await;
        innocent
    }

    /// Checks that bytes still come back. Panic texts contain `when`, the preceding event.
    pub(crate) async fn still_echoes(&mut self, when: &str) {
        let echo = async {
            self.0.write_all(when.as_bytes()).await?;
            self.0.flush().await?;
            let mut back = vec![0; when.len()];
            self.0.read_exact(&mut back).await?;
            Ok::<_, std::io::Error>(back)
        };
        let back = timely(&format!("an echo after: {when}"), echo).await;
        let back = back.unwrap_or_else(|error| panic!("no echo after: {when}: {error}"));
        assert_eq!(back, when.as_bytes());
    }
}

/// Checks that the first server and the first agent are running, answer, and count no panics.
pub(crate) async fn assert_unharmed(topology: &mut Topology) {
    assert_eq!(topology.server(0).exited(), None);
    assert_eq!(topology.agent(0).exited(), None);
    let server = topology.server_metrics(0).await;
    let agent = topology.agent_metrics(0).await;
    for page in [server, agent] {
        assert_eq!(page.value("culvert_panics_total", &[]), Some(0.0));
    }
}
