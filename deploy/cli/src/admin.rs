//! A client for a server's admin pages, over the server's Unix socket or over mutual TLS.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context as _, bail};
use bytes::Bytes;
use culvert_host::flags::GoDuration;
use culvert_host::net::dial::split_host_port;
use culvert_host::tls::{self, Identity, TlsOptions, TrustBundle};
use culvert_kit::client::BoxedStream;
use culvert_kit::metrics::Metrics;
use culvert_server::switch::status::{Request, STATUS_PATH, SWITCH_PATH, Status};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::{TlsConnector, rustls};

use crate::stdout::printable;

/// Path of the metrics (GET).
const METRICS_PATH: &str = "/metrics";

/// Longest accepted answer, in bytes; enough for a server with 100,000 agents that have some identifiers.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Longest duration of one request, connection included.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Context of an error after the server has accepted a switch.
const ACCEPTED: &str = "the server has accepted the switch, but its answer cannot be read; `culvert status` shows the progress";

/// Context of an error after a request for a switch, without a status code.
const UNKNOWN: &str = "the server may have accepted the switch; `culvert status` shows the mode";

/// A request without a complete answer.
struct Failed {
    reached: Reached,
    why: anyhow::Error,
}

/// The part of a request that succeeded.
enum Reached {
    Nothing,
    /// The connection; the request may have arrived.
    Server,
    /// The status code of the answer.
    Answer(StatusCode),
}

/// Address and credentials of a server's admin pages.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "The server")]
#[command(group = clap::ArgGroup::new("address").args(["admin_uds", "admin"]).required(true).multiple(true))]
pub(crate) struct Admin {
    /// Path of the server's admin Unix socket: the value of the server's --admin-uds. Ignored if --admin is set.
    #[arg(long, value_name = "PATH", env = "CULVERT_ADMIN_UDS")]
    admin_uds: Option<PathBuf>,

    /// Address of the server's admin listener; the server must run with --admin-cert. Needs --ca-cert, --cert
    /// and --key.
    #[arg(long, value_name = "HOST:PORT", requires_all = ["ca_cert", "cert", "key"])]
    admin: Option<String>,

    /// PEM CA bundle that the server's certificate must chain to.
    #[arg(long, value_name = "FILE", requires = "admin")]
    ca_cert: Option<PathBuf>,

    /// PEM client certificate chain, signed by a CA of the server's --admin-ca-cert.
    #[arg(long, value_name = "FILE", requires = "admin")]
    cert: Option<PathBuf>,

    /// PEM private key of --cert.
    #[arg(long, value_name = "FILE", requires = "admin")]
    key: Option<PathBuf>,

    /// The name in the server's certificate; by default the host of --admin.
    #[arg(long, value_name = "NAME", requires = "admin")]
    server_name: Option<String>,
}

impl Admin {
    /// Returns the settings for the admin Unix socket at `path`.
    pub(crate) fn uds(path: PathBuf) -> Self {
        Self {
            admin_uds: Some(path),
            ..Self::default()
        }
    }

    /// Returns the status of the server's tunnels, at most `limit` later.
    ///
    /// # Errors
    /// Fails if the server cannot be reached or the answer is not a status.
    pub(crate) async fn status(&self, limit: Duration) -> anyhow::Result<Status> {
        let asked = self.ask(Method::GET, STATUS_PATH, Bytes::new(), limit);
        let (code, body) = asked.await.map_err(|failed| failed.why)?;
        understand(code, StatusCode::OK, &body)
    }

    /// Returns the status of the server's tunnels and the server's metrics, at most `limit` later. The metrics may be an error.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if the status cannot be read.
    pub(crate) async fn status_and_metrics(
        &self,
        limit: Duration,
    ) -> anyhow::Result<(Status, anyhow::Result<Metrics>)> {
        let metrics = async { anyhow::Ok(self.metrics(limit).await) };
        tokio::try_join!(Box::pin(self.status(limit)), Box::pin(metrics))
    }

    /// Returns the server's metrics, at most `limit` later.
    ///
    /// # Errors
    /// Fails if the server cannot be reached or the answer is not a metrics page.
    async fn metrics(&self, limit: Duration) -> anyhow::Result<Metrics> {
        let asked = self.ask(Method::GET, METRICS_PATH, Bytes::new(), limit);
        let (code, body) = asked.await.map_err(|failed| failed.why)?;
        let page = expect(code, StatusCode::OK, &body)?;
        let metrics = Metrics::parse(&String::from_utf8_lossy(page));
        metrics.context("the server's metrics cannot be read")
    }

    /// Requests a tunnel mode, and waits at most `limit` for the answer.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, rejects the request, or sends no readable answer. The text gives the reason,
    /// and states if the server has or may have accepted the switch.
    pub(crate) async fn switch(
        &self,
        request: &Request,
        limit: Duration,
    ) -> anyhow::Result<Status> {
        let body = serde_json::to_vec(request)?.into();
        let asked = self.ask(Method::POST, SWITCH_PATH, body, limit).await;
        let (code, body) = asked.map_err(|failed| match failed.reached {
            Reached::Nothing => failed.why,
            Reached::Server => failed.why.context(UNKNOWN),
            Reached::Answer(StatusCode::ACCEPTED) => failed.why.context(ACCEPTED),
            Reached::Answer(_) => failed.why,
        })?;
        let status = understand(code, StatusCode::ACCEPTED, &body);
        match code {
            StatusCode::ACCEPTED => status.context(ACCEPTED),
            _ => status,
        }
    }

    /// Sends a request, and returns the answer.
    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), Failed> {
        let end = Instant::now() + limit;
        let late = |_| anyhow::anyhow!("no answer from {} in {limit:?}", self.name());
        let connected = timeout_at(end, self.connect()).await.map_err(late);
        let stream = connected.and_then(|stream| stream).map_err(|why| Failed {
            reached: Reached::Nothing,
            why,
        })?;
        let head = OnceLock::new();
        let answered = timeout_at(end, self.converse(stream, method, path, body, &head)).await;
        let answer = answered.map_err(late).and_then(|answer| answer);
        answer.map_err(|why| match (head.get(), refusal(&why)) {
            (Some(code), _) => Failed {
                reached: Reached::Answer(*code),
                why,
            },
            (None, Some(refusal)) => Failed {
                reached: Reached::Nothing,
                why: anyhow::anyhow!("{} refused the connection: {refusal}", self.name()),
            },
            (None, None) => Failed {
                reached: Reached::Server,
                why,
            },
        })
    }

    /// Sends a request over a connection. Stores the status code in `head` before the body arrives.
    async fn converse(
        &self,
        stream: BoxedStream,
        method: Method,
        path: &str,
        body: Bytes,
        head: &OnceLock<StatusCode>,
    ) -> anyhow::Result<(StatusCode, Bytes)> {
        let broken = || format!("{} is not an admin listener, or stopped", self.name());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .with_context(broken)?;
        let request = http::Request::builder()
            .method(method)
            .uri(path)
            .header(http::header::HOST, "culvert")
            .body(Full::new(body))?;
        let answered = async {
            let answer = sender.send_request(request).await?;
            let code = *head.get_or_init(|| answer.status());
            let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES);
            let body = body.collect().await.map_err(io::Error::other)?;
            anyhow::Ok((code, body.to_bytes()))
        };
        tokio::select! {
            biased;
            answered = answered => answered.with_context(broken),
            ended = connection => {
                ended.with_context(broken)?;
                bail!(broken())
            }
        }
    }

    async fn connect(&self) -> anyhow::Result<BoxedStream> {
        if let Some(path) = self.socket() {
            let stream = UnixStream::connect(path).await.with_context(|| {
                let path = path.display();
                format!(
                    "cannot reach a server at {path}: the server must run with --admin-uds={path}, and as this user"
                )
            })?;
            return Ok(Box::new(stream));
        }
        let (Some(address), Some(ca), Some(cert), Some(key)) =
            (&self.admin, &self.ca_cert, &self.cert, &self.key)
        else {
            bail!("set --admin-uds, or --admin with --ca-cert, --cert and --key");
        };
        let trust = TrustBundle::load(ca)?;
        let identity = Identity::load(cert, key)?;
        let config = tls::client_config(
            &trust,
            Some(&identity),
            &[b"http/1.1"],
            &TlsOptions::default(),
        )?;
        let (host, _) = split_host_port(address).with_context(|| format!("--admin {address}"))?;
        anyhow::ensure!(
            !host.is_empty(),
            "--admin {address} has no host; write HOST:PORT, such as 10.0.0.1{address}"
        );
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).context("--server-name")?;
        let stream = TcpStream::connect(address.as_str())
            .await
            .with_context(|| format!("cannot reach a server at {address}"))?;
        let stream = TlsConnector::from(config).connect(name, stream).await;
        let stream = stream.map_err(|error| {
            let why = tls::explain(&error);
            match rustls_error(&error) {
                Some(rustls::Error::InvalidMessage(_)) => anyhow::anyhow!(
                    "{address}: {why}. The admin port of a server has TLS only with --admin-cert"
                ),
                _ => anyhow::anyhow!("{address}: {why}"),
            }
        })?;
        Ok(Box::new(stream))
    }

    /// Returns the path of the Unix socket, unless --admin is set: the path may come from the environment.
    fn socket(&self) -> Option<&Path> {
        let path = self.admin_uds.as_deref();
        path.filter(|_| self.admin.is_none())
    }

    /// Returns the path or the address of the admin pages.
    pub(crate) fn name(&self) -> String {
        let path = self.socket();
        path.map(|path| path.display().to_string())
            .or_else(|| self.admin.clone())
            .unwrap_or_default()
    }
}

/// Parses the value of a flag for a duration.
pub(crate) fn duration(text: &str) -> Result<GoDuration, String> {
    let duration: GoDuration = text.parse().map_err(|error| format!("{error}"))?;
    match duration.nanos() {
        ..0 => Err("must be >= 0".to_owned()),
        _ => Ok(duration),
    }
}

/// Returns the explanation of a TLS alert among the causes of `why`. In TLS 1.3 a server verifies the client's certificate
/// after the client's part of the handshake, so the alert arrives when the request was already sent (RFC 8446, 4.4.2).
fn refusal(why: &anyhow::Error) -> Option<String> {
    let mut causes = why
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    let alert =
        causes.find(|error| matches!(rustls_error(error), Some(rustls::Error::AlertReceived(_))));
    alert.map(tls::explain)
}

/// Returns the TLS error inside of an I/O error.
fn rustls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref())
}

fn understand(code: StatusCode, expected: StatusCode, body: &[u8]) -> anyhow::Result<Status> {
    serde_json::from_slice(expect(code, expected, body)?)
        .context("the answer does not match this version: use the culvert of the server's version")
}

/// Returns the body of an answer with the expected status code.
fn expect(code: StatusCode, expected: StatusCode, body: &[u8]) -> anyhow::Result<&[u8]> {
    if code == expected {
        return Ok(body);
    }
    let text = String::from_utf8_lossy(body);
    match code {
        StatusCode::NOT_FOUND => bail!(
            "the server has no such page: use a newer server, or check that this is the server's admin socket"
        ),
        _ => bail!("{}", printable(text.trim_end())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        admin: Admin,
    }

    #[test]
    fn error_without_an_address_names_both_flags() {
        let parsed = <Cli as clap::Parser>::try_parse_from(["culvert"]);
        let error = parsed.err().unwrap().to_string();
        assert!(
            error.contains("<--admin-uds <PATH>|--admin <HOST:PORT>>"),
            "{error}"
        );
    }

    /// Returns the error of a status over mutual TLS, with the certificates of `folder`.
    async fn refused(address: &str, folder: &Path) -> String {
        let pki = culvert_kit::pki::Pki::create(folder).unwrap();
        let admin = Admin {
            admin: Some(address.to_owned()),
            ca_cert: Some(pki.ca),
            cert: Some(pki.agent.cert),
            key: Some(pki.agent.key),
            ..Admin::default()
        };
        let error = admin.status(TIMEOUT).await.unwrap_err();
        format!("{error:#}")
    }

    #[tokio::test]
    async fn address_without_a_host_is_an_error_with_an_example() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            refused(":8133", folder.path()).await,
            "--admin :8133 has no host; write HOST:PORT, such as 10.0.0.1:8133"
        );
    }

    #[tokio::test]
    async fn error_of_a_listener_without_tls_names_the_flag_of_the_server() {
        let folder = tempfile::tempdir().unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let answer = b"HTTP/1.1 400 Bad Request\r\n\r\n";
            tokio::io::AsyncWriteExt::write_all(&mut stream, answer)
                .await
                .unwrap();
            stream
        };
        let (_stream, error) = tokio::join!(server, refused(&address, folder.path()));
        assert!(error.contains("--admin-cert"), "{error}");
    }

    #[test]
    fn address_of_the_admin_listener_counts_although_a_socket_is_set() {
        let address = ["--admin=h:1", "--ca-cert=a", "--cert=c", "--key=k"];
        let words = ["culvert", "--admin-uds=/run/admin.sock"].into_iter();
        let cli = <Cli as clap::Parser>::parse_from(words.clone().chain(address));
        assert_eq!(cli.admin.name(), "h:1");
        let cli = <Cli as clap::Parser>::parse_from(words);
        assert_eq!(cli.admin.name(), "/run/admin.sock");
    }
}
