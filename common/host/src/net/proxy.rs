//! Connections through an HTTP proxy: `HTTPS_PROXY` and `NO_PROXY` as in Go's
//! `http.ProxyFromEnvironment`, and the CONNECT request.
//!
//! hyper-util parses the proxy's URL. This module decides whether to use the proxy, because hyper-util
//! follows curl, and curl and Go treat `NO_PROXY` differently: ports, `*.domain`, a leading dot that excludes
//! the domain itself, and loopback addresses, which are never proxied.

use std::fmt;
use std::io;
use std::net::IpAddr;

use bytes::BytesMut;
use culvert_stream::head::{HeadError, read_head};
use http::header::HeaderValue;
use hyper_util::client::proxy::matcher::Matcher;
use ipnet::IpNet;
use tokio::io::{AsyncRead, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use super::dial::{dial, join_host_port, split_host_port};

/// Maximum size of a proxy's response head, in bytes.
const MAX_HEAD_BYTES: usize = 8 << 10;

/// Maximum number of header fields in a proxy's response head.
const MAX_HEADERS: usize = 64;

/// Meaning of the scheme of a proxy's URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyScheme {
    /// As in Go's net/http, but only `http` is supported. The default port is 80.
    Counts,
    /// As in grpc-go (`internal/resolver/delegatingresolver`), which sends a plain CONNECT request whatever the scheme. The
    /// default port is 443.
    Ignored,
}

/// Variables for the proxy of TLS targets. The first non-empty variable is used.
const PROXY_VARIABLES: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];

/// Variables for exceptions. The first non-empty variable is used.
const NO_PROXY_VARIABLES: [&str; 2] = ["NO_PROXY", "no_proxy"];

/// An HTTP proxy.
#[derive(Clone)]
pub struct ProxyTarget {
    host: String,
    port: u16,
    authorization: Option<HeaderValue>,
}

/// Error for an unusable proxy setting in the environment. The error omits the variable's value, because the
/// value may contain a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyError {
    /// The value is not the URL of a proxy.
    #[error("HTTPS_PROXY is not a proxy URL; write it as http://[user:password@]host:port")]
    Invalid,
    /// The proxy's URL has a scheme other than `http`.
    #[error(
        "HTTPS_PROXY names a proxy that is not http://; https and socks proxies are not supported"
    )]
    Scheme,
}

/// Returns the proxy for a TLS connection to `host:port`, from the process environment. `None` means a direct
/// connection.
///
/// # Errors
///
/// Fails if the environment sets a proxy for this target but the proxy cannot be used.
pub fn from_env(
    host: &str,
    port: u16,
    scheme: ProxyScheme,
) -> Result<Option<ProxyTarget>, ProxyError> {
    from_variables(host, port, scheme, |name| std::env::var(name).ok())
}

/// Returns the proxy as [`from_env`] does; `get` looks up a variable.
///
/// # Errors
///
/// Same as [`from_env`].
pub fn from_variables(
    host: &str,
    port: u16,
    scheme: ProxyScheme,
    get: impl Fn(&str) -> Option<String>,
) -> Result<Option<ProxyTarget>, ProxyError> {
    let first = |names: [&str; 2]| {
        let values = names.into_iter().filter_map(&get);
        values.into_iter().find(|value| !value.is_empty())
    };
    let Some(url) = first(PROXY_VARIABLES) else {
        return Ok(None);
    };
    let exceptions = first(NO_PROXY_VARIABLES).unwrap_or_default();
    if is_exempt(host, port, &exceptions) {
        return Ok(None);
    }
    ProxyTarget::parse(&url, scheme).map(Some)
}

/// Connects to `host:port` through `proxy`. The returned stream starts directly after the proxy's response;
/// no byte of the tunnel is lost.
///
/// # Errors
///
/// Fails if the proxy cannot be reached, does not respond before `deadline`, refuses the request, or does not
/// send HTTP.
pub async fn connect(
    proxy: &ProxyTarget,
    host: &str,
    port: u16,
    deadline: Instant,
) -> io::Result<TcpStream> {
    let request = connect_request(proxy, host, port)?;
    let remaining = deadline.saturating_duration_since(Instant::now());
    let mut stream = dial("tcp", &join_host_port(&proxy.host, proxy.port), remaining)
        .await
        .map_err(|error| io::Error::new(error.kind, format!("proxy {proxy}: {error}")))?;
    let exchange = async {
        stream.write_all(&request).await?;
        read_answer(&mut stream).await
    };
    match timeout_at(deadline, exchange).await {
        Ok(outcome) => outcome
            .map_err(|error| io::Error::new(error.kind(), format!("proxy {proxy}: {error}")))?,
        Err(_) => {
            let text = format!("proxy {proxy} did not answer the CONNECT request in time");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
    }
    Ok(stream)
}

// === impl ProxyTarget ===

impl ProxyTarget {
    /// Parses a proxy URL. A URL without a scheme means `http://`.
    ///
    /// # Errors
    ///
    /// Fails if the text is not the URL of a supported proxy. The error names `HTTPS_PROXY`.
    pub fn parse(url: &str, scheme: ProxyScheme) -> Result<Self, ProxyError> {
        let (name, rest) = url.split_once("://").unwrap_or(("http", url));
        // hyper-util ignores unknown schemes.
        if scheme == ProxyScheme::Counts && !name.eq_ignore_ascii_case("http") {
            return Err(ProxyError::Scheme);
        }
        let default_port = match scheme {
            ProxyScheme::Counts => 80,
            ProxyScheme::Ignored => 443,
        };
        let proxy = Matcher::builder()
            .https(format!("http://{rest}"))
            .build()
            .intercept(&http::Uri::from_static("https://target.invalid/"))
            .ok_or(ProxyError::Invalid)?;
        let host = proxy.uri().host().filter(|host| !host.is_empty());
        let host = host.ok_or(ProxyError::Invalid)?;
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port: proxy.uri().port_u16().unwrap_or(default_port),
            authorization: proxy.basic_auth().cloned(),
        })
    }
}

impl fmt::Display for ProxyTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&join_host_port(&self.host, self.port))
    }
}

/// Debug output omits the credentials.
impl fmt::Debug for ProxyTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProxyTarget({self})")
    }
}

/// Returns true if `NO_PROXY` or Go's own rules exempt a target (`golang.org/x/net/http/httpproxy`).
fn is_exempt(host: &str, port: u16, exceptions: &str) -> bool {
    let host = host.trim().to_lowercase();
    let ip = host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    exceptions
        .split(',')
        .map(|entry| entry.trim().to_lowercase())
        .any(|entry| matches_entry(&entry, &host, ip, port))
}

/// Matches one entry of `NO_PROXY`, in lower case: `*`, a CIDR, an IP address or a domain. An IP address or
/// domain may have a `:port`.
fn matches_entry(entry: &str, host: &str, ip: Option<IpAddr>, port: u16) -> bool {
    if entry == "*" {
        return true;
    }
    if let Ok(network) = entry.parse::<IpNet>() {
        return ip.is_some_and(|ip| network.contains(&ip));
    }
    let (name, entry_port) = split_host_port(entry).unwrap_or((entry, ""));
    if !entry_port.is_empty() && entry_port != port.to_string() {
        return false;
    }
    if let Ok(address) = name.parse::<IpAddr>() {
        return ip == Some(address.to_canonical());
    }
    let name = name
        .strip_prefix('*')
        .filter(|rest| rest.starts_with('.'))
        .unwrap_or(name);
    match name.strip_prefix('.') {
        // With a leading dot, only subdomains match.
        Some(domain) => is_below(host, domain),
        None => host == name && !name.is_empty() || is_below(host, name),
    }
}

fn is_below(host: &str, domain: &str) -> bool {
    !domain.is_empty()
        && host
            .strip_suffix(domain)
            .is_some_and(|front| front.ends_with('.'))
}

fn connect_request(proxy: &ProxyTarget, host: &str, port: u16) -> io::Result<Vec<u8>> {
    if host.is_empty() || !host.bytes().all(|byte| byte.is_ascii_graphic()) {
        let text = "the host name cannot be sent to a proxy";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let target = join_host_port(host, port);
    let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes();
    if let Some(authorization) = &proxy.authorization {
        request.extend_from_slice(b"Proxy-Authorization: ");
        request.extend_from_slice(authorization.as_bytes());
        request.extend_from_slice(b"\r\n");
    }
    request.extend_from_slice(b"\r\n");
    Ok(request)
}

/// Reads the proxy's answer to a CONNECT request. Later bytes belong to the tunnel and stay in `stream`.
///
/// # Errors
///
/// Fails if the proxy refuses the request, does not send HTTP, or closes the connection.
pub async fn read_answer<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<()> {
    let head = read_answer_head(stream).await?;
    check_head(&head)
}

async fn read_answer_head<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<BytesMut> {
    let head = read_head(stream, MAX_HEAD_BYTES).await;
    head.map_err(|error| match error {
        HeadError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => io::Error::new(
            error.kind(),
            "closed the connection instead of answering the CONNECT request",
        ),
        HeadError::Io(error) => error,
        HeadError::TooLarge => {
            let text = format!("the answer's head is longer than {MAX_HEAD_BYTES} bytes");
            io::Error::new(io::ErrorKind::InvalidData, text)
        }
    })
}

fn check_head(head: &[u8]) -> io::Result<()> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    response.parse(head).map_err(|error| {
        let text = format!("the answer is not HTTP ({error})");
        io::Error::new(io::ErrorKind::InvalidData, text)
    })?;
    match response.code {
        Some(200) => Ok(()),
        code => {
            let status = code.unwrap_or_default();
            let reason = response.reason.unwrap_or_default();
            let text = format!("refused the CONNECT request: {status} {reason}");
            Err(io::Error::other(text))
        }
    }
}

#[cfg(test)]
mod tests;
