//! TCP dialing like Go's `net.Dialer`, including the error texts.
//!
//! The error texts are part of the protocol: the server classifies dial failures by substrings such as
//! `connection refused` or `no such host`, and kube-apiserver shows the texts to users. The order of attempts
//! is also Go's. The two address families race: the second family starts after 300 ms, or as soon as the
//! first family has failed. Within a family, addresses are tried one after another, each with a share of the
//! remaining time.

mod lookups;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::pin::pin;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use self::lookups::{LOOKUPS, Lookups};
use super::destinations::{Denial, Destinations};
use super::listen::{TOO_MANY_FILES, is_last};

/// Head start of the first address family (`net.Dialer`'s default `FallbackDelay`).
const FALLBACK_DELAY: Duration = Duration::from_millis(300);

/// Minimum time for one address, unless less time remains (`net.partialDeadline`).
const SANE_MINIMUM: Duration = Duration::from_secs(2);

/// Idle time before the first keepalive probe, and between probes (`net.Dialer`'s default).
const KEEPALIVE: Duration = Duration::from_secs(15);

/// Number of retries after a socket has connected to itself (`net.sysDialer.doDialTCPProto`).
const SELF_CONNECT_RETRIES: u32 = 2;

/// Maximum timeout. A longer timeout is cut to this value, because adding it to the clock could fail.
const FAR_FUTURE: Duration = Duration::from_secs(365 * 24 * 3600);

/// Bounds on the dials for one purpose.
struct Bounds {
    /// Shared lookups with a limit; `None` for any number of lookups.
    lookups: Option<&'static Lookups>,
    /// Returns true for a socket that a connection must not use.
    is_reserved: fn(&TcpSocket) -> bool,
}

/// Bounds on the connections of the program itself, such as the link to a server.
static OWN: Bounds = Bounds {
    lookups: None,
    is_reserved: |_| false,
};

/// Bounds on connections to endpoints. Peers may request any number of them.
static ENDPOINT: Bounds = Bounds {
    lookups: Some(&LOOKUPS),
    is_reserved: is_last,
};

/// A failed dial.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct DialError {
    /// Go's error text, such as `dial tcp 10.0.0.1:443: connect: connection refused`.
    pub text: String,
    /// Kind of the failure: `TimedOut` where Go's `net.Error.Timeout` is true, and `Other` if no attempt to
    /// connect was made.
    pub kind: io::ErrorKind,
    /// Denial by the policy for destinations; `None` if an attempt was permitted, or no address was found.
    pub denial: Option<Denial>,
}

impl DialError {
    /// Returns true if the dial timed out.
    pub fn is_timeout(&self) -> bool {
        self.kind == io::ErrorKind::TimedOut
    }
}

/// An address that is not `host:port`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("address {address}: {reason}")]
pub struct AddressError {
    /// The whole address.
    pub address: String,
    /// Reason in Go's words.
    pub reason: &'static str,
}

/// Dials `address` (`host:port`) over `protocol`: `tcp`, `tcp4` or `tcp6`. The whole dial, including the name
/// lookup, takes at most `timeout`. As in Go, the connection has `TCP_NODELAY` set and sends keepalive probes
/// every 15 s.
///
/// Dropping the future cancels all attempts. A running name lookup continues in the background, and its
/// result is discarded.
///
/// # Errors
///
/// Returns a [`DialError`] with Go's error text.
pub async fn dial(
    protocol: &str,
    address: &str,
    timeout: Duration,
) -> Result<TcpStream, DialError> {
    let all = Destinations::default();
    dial_within(protocol, address, timeout, &all, &OWN).await
}

/// Dials an endpoint like [`dial`], but only addresses that `destinations` allows, and not with one of the last descriptors
/// of the process. Each address of a name is checked.
///
/// # Errors
///
/// Returns a [`DialError`]. If all addresses are denied, the error has the first denial.
pub async fn dial_permitted(
    protocol: &str,
    address: &str,
    timeout: Duration,
    destinations: &Destinations,
) -> Result<TcpStream, DialError> {
    dial_within(protocol, address, timeout, destinations, &ENDPOINT).await
}

async fn dial_within(
    protocol: &str,
    address: &str,
    timeout: Duration,
    destinations: &Destinations,
    bounds: &Bounds,
) -> Result<TcpStream, DialError> {
    let fail = |reason: String, kind| DialError {
        text: format!("dial {protocol}: {reason}"),
        kind,
        denial: None,
    };
    let unusable = |reason| fail(reason, io::ErrorKind::Other);
    if !matches!(protocol, "tcp" | "tcp4" | "tcp6") {
        let reason = format!("unknown network {protocol} (only tcp is allowed)");
        return Err(unusable(reason));
    }
    if address.is_empty() {
        return Err(unusable("missing address".to_owned()));
    }
    let (host, port) = split_host_port(address).map_err(|error| unusable(error.to_string()))?;
    let port = parse_port(protocol, port).map_err(unusable)?;

    let deadline = Instant::now() + timeout.min(FAR_FUTURE);
    let targets = resolve(protocol, host, port, deadline, bounds)
        .await
        .map_err(|(reason, kind)| fail(reason, kind))?;
    let targets = permitted(protocol, targets, destinations)?;
    let stream = dial_any(protocol, targets, deadline, bounds).await?;
    configure(&stream);
    Ok(stream)
}

/// Resolves a host to all of its addresses, each of them once and in an order that does not depend on the resolver.
///
/// # Errors
///
/// Returns a [`DialError`] with Go's error text.
pub async fn lookup(
    protocol: &str,
    host: &str,
    port: u16,
    timeout: Duration,
) -> Result<Vec<SocketAddr>, DialError> {
    let deadline = Instant::now() + timeout.min(FAR_FUTURE);
    let targets = resolve(protocol, host, port, deadline, &OWN).await;
    let targets = targets.map_err(|(reason, kind)| DialError {
        text: format!("dial {protocol}: {reason}"),
        kind,
        denial: None,
    })?;
    let mut found: Vec<_> = targets.iter().map(|target| target.address).collect();
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Dials like [`dial`], but the given addresses instead of a name. The first address is tried first.
///
/// # Errors
///
/// Returns a [`DialError`] with Go's error text for the first failed address.
pub async fn dial_addresses(
    protocol: &str,
    addresses: Vec<SocketAddr>,
    timeout: Duration,
) -> Result<TcpStream, DialError> {
    let deadline = Instant::now() + timeout.min(FAR_FUTURE);
    let targets = addresses.into_iter().map(Target::from).collect();
    let stream = dial_any(protocol, targets, deadline, &OWN).await?;
    configure(&stream);
    Ok(stream)
}

/// Splits `host:port`, `[host]:port` or `[host%zone]:port` like Go's `net.SplitHostPort`. Brackets are
/// removed. The port may be empty or a service name.
///
/// # Errors
///
/// Returns an [`AddressError`] with Go's reason.
pub fn split_host_port(address: &str) -> Result<(&str, &str), AddressError> {
    let fail = |reason| AddressError {
        address: address.to_owned(),
        reason,
    };
    let (before, port) = address
        .rsplit_once(':')
        .ok_or_else(|| fail("missing port in address"))?;
    let (host, rest) = match address.strip_prefix('[') {
        Some(bracketed) => {
            let (host, after) = bracketed
                .split_once(']')
                .ok_or_else(|| fail("missing ']' in address"))?;
            match after.strip_prefix(':') {
                Some(rest) if rest == port => (host, rest),
                Some(_) => return Err(fail("too many colons in address")),
                None => return Err(fail("missing port in address")),
            }
        }
        None if before.contains(':') => return Err(fail("too many colons in address")),
        None => (before, address),
    };
    if host.contains('[') || rest.contains('[') {
        return Err(fail("unexpected '[' in address"));
    }
    if rest.contains(']') {
        return Err(fail("unexpected ']' in address"));
    }
    Ok((host, port))
}

/// Joins a host and a port like Go's `net.JoinHostPort`: a host that contains a colon is put in brackets.
pub fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Parses a port number. Go also looks up service names in `/etc/services`. Here every service name fails
/// with Go's text for an unknown name, because no Kubernetes component dials by service name.
pub(super) fn parse_port(protocol: &str, port: &str) -> Result<u16, String> {
    if port.is_empty() {
        return Ok(0);
    }
    let digits = port.strip_prefix(['+', '-']).unwrap_or(port);
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("lookup {protocol}/{port}: unknown port"));
    }
    let value = digits.trim_start_matches('0');
    let number = if value.is_empty() {
        Ok(0)
    } else {
        value.parse()
    };
    match number {
        Ok(number) if number == 0 || !port.starts_with('-') => Ok(number),
        _ => Err(format!("address {port}: invalid port")),
    }
}

/// An address to try, and its text in Go's format.
#[derive(Clone, Debug)]
struct Target {
    address: SocketAddr,
    text: String,
}

/// Resolves a host to all addresses of the family in `protocol`. The error is a pair: Go's text without the
/// prefix `dial tcp:`, and the kind of the failure.
async fn resolve(
    protocol: &str,
    host: &str,
    port: u16,
    deadline: Instant,
    bounds: &Bounds,
) -> Result<Vec<Target>, (String, io::ErrorKind)> {
    let fail = |reason: String| (reason, io::ErrorKind::Other);
    if host.is_empty() {
        // An empty host means the local system. Go prints such an address as `:port`.
        let loopback: IpAddr = match protocol {
            "tcp6" => Ipv6Addr::LOCALHOST.into(),
            _ => Ipv4Addr::LOCALHOST.into(),
        };
        return Ok(vec![Target {
            address: SocketAddr::new(loopback, port),
            text: format!(":{port}"),
        }]);
    }
    let found: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => match timeout_at(deadline, addresses(host, port, bounds)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return Err(fail(lookup_text(host, &error))),
            Err(_) => {
                let reason = format!("lookup {host}: i/o timeout");
                return Err((reason, io::ErrorKind::TimedOut));
            }
        },
    };
    if found.is_empty() {
        return Err(fail(format!("lookup {host}: no such host")));
    }
    let targets: Vec<Target> = found
        .into_iter()
        .map(canonical)
        .filter(|address| match protocol {
            "tcp4" => address.is_ipv4(),
            "tcp6" => address.is_ipv6(),
            _ => true,
        })
        .map(Target::from)
        .collect();
    if targets.is_empty() {
        return Err(fail(format!("address {host}: no suitable address found")));
    }
    Ok(targets)
}

/// Looks up the addresses of a name.
async fn addresses(host: &str, port: u16, bounds: &Bounds) -> io::Result<Vec<SocketAddr>> {
    let call = |host: &str| Ok((host, 0).to_socket_addrs()?.collect());
    let mut found: Vec<SocketAddr> = match bounds.lookups {
        Some(lookups) => lookups.share(host, call).await?,
        None => {
            let host = host.to_owned();
            spawn_blocking(move || call(&host)).await??
        }
    };
    found.iter_mut().for_each(|address| address.set_port(port));
    Ok(found)
}

/// Drops the addresses that the policy denies.
fn permitted(
    protocol: &str,
    targets: Vec<Target>,
    destinations: &Destinations,
) -> Result<Vec<Target>, DialError> {
    let mut denied = None;
    let mut permitted = Vec::with_capacity(targets.len());
    for target in targets {
        match destinations.check(target.address) {
            Ok(()) => permitted.push(target),
            Err(denial) => {
                denied.get_or_insert_with(|| DialError {
                    text: format!("dial {protocol} {}: {denial}", target.text),
                    kind: io::ErrorKind::PermissionDenied,
                    denial: Some(denial),
                });
            }
        }
    }
    match denied {
        Some(error) if permitted.is_empty() => Err(error),
        _ => Ok(permitted),
    }
}

/// Converts an IPv4 address in IPv6 form to IPv4, as Go does. A link-local address keeps its scope.
fn canonical(found: SocketAddr) -> SocketAddr {
    match found.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), found.port()),
        IpAddr::V6(_) => found,
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        let text = address.to_string();
        Self { address, text }
    }
}

/// Returns Go's text for a failed lookup. The error contains only `getaddrinfo`'s text (glibc's or musl's),
/// not its error code.
fn lookup_text(host: &str, error: &io::Error) -> String {
    let text = error.to_string();
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    let reason = if let Some(code) = error.raw_os_error() {
        errno_text(code, error)
    } else if error.kind() == io::ErrorKind::InvalidInput
        || has(&[
            "not known",
            "No address associated",
            "does not resolve",
            "no usable address",
        ])
    {
        "no such host".to_owned()
    } else if has(&["Temporary failure", "Try again"]) {
        "server misbehaving".to_owned()
    } else {
        text.trim_start_matches("failed to lookup address information: ")
            .to_owned()
    };
    format!("lookup {host}: {reason}")
}

/// Races the two address families. The family of the first address starts first.
async fn dial_any(
    protocol: &str,
    targets: Vec<Target>,
    deadline: Instant,
    bounds: &Bounds,
) -> Result<TcpStream, DialError> {
    let first_is_v4 = targets
        .first()
        .is_some_and(|target| target.address.is_ipv4());
    let (primaries, fallbacks): (Vec<_>, Vec<_>) = targets
        .into_iter()
        .partition(|target| target.address.is_ipv4() == first_is_v4);
    if fallbacks.is_empty() {
        return dial_serial(protocol, &primaries, deadline, bounds).await;
    }

    let mut primary = pin!(dial_serial(protocol, &primaries, deadline, bounds));
    let fallback = dial_serial(protocol, &fallbacks, deadline, bounds);
    match tokio::time::timeout(FALLBACK_DELAY, &mut primary).await {
        Ok(Ok(stream)) => return Ok(stream),
        Ok(Err(first)) => return fallback.await.map_err(|_| first),
        Err(_) => {}
    }
    let mut fallback = pin!(fallback);
    tokio::select! {
        outcome = &mut primary => match outcome {
            Ok(stream) => Ok(stream),
            Err(first) => fallback.await.map_err(|_| first),
        },
        outcome = &mut fallback => match outcome {
            Ok(stream) => Ok(stream),
            // Report the error of the first family.
            Err(_) => primary.await,
        },
    }
}

/// Tries the addresses in order. If all fail, returns the first error.
async fn dial_serial(
    protocol: &str,
    targets: &[Target],
    deadline: Instant,
    bounds: &Bounds,
) -> Result<TcpStream, DialError> {
    let mut first = None;
    for (index, target) in targets.iter().enumerate() {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let share = partial_timeout(remaining, targets.len() - index);
        let attempt = async {
            timeout_at(Instant::now() + share, connect(target.address, bounds))
                .await
                .unwrap_or_else(|_| Err(("i/o timeout".to_owned(), io::ErrorKind::TimedOut)))
        };
        match attempt.await {
            Ok(stream) => return Ok(stream),
            Err((reason, kind)) => {
                first.get_or_insert_with(|| DialError {
                    text: format!("dial {protocol} {}: {reason}", target.text),
                    kind,
                    denial: None,
                });
            }
        }
        if share.is_zero() {
            break;
        }
    }
    Err(first.unwrap_or_else(|| DialError {
        text: format!("dial {protocol}: missing address"),
        kind: io::ErrorKind::Other,
        denial: None,
    }))
}

/// Returns the time for the next address, like Go's `partialDeadline`: an equal share of the remaining time
/// for each address, but at least two seconds if they remain.
fn partial_timeout(remaining: Duration, addresses: usize) -> Duration {
    let addresses = u32::try_from(addresses).unwrap_or(u32::MAX).max(1);
    (remaining / addresses).max(SANE_MINIMUM).min(remaining)
}

/// Makes one attempt. The error is a pair: Go's text without the address, and the kind of the failure.
async fn connect(
    address: SocketAddr,
    bounds: &Bounds,
) -> Result<TcpStream, (String, io::ErrorKind)> {
    let fail = |call: &str, error: io::Error| {
        let code = error.raw_os_error();
        let reason = code.map_or_else(|| error.to_string(), |code| errno_text(code, &error));
        (format!("{call}: {reason}"), kind(&error))
    };
    let mut retries = SELF_CONNECT_RETRIES;
    loop {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }
        .map_err(|error| fail("socket", error))?;
        if (bounds.is_reserved)(&socket) {
            warn!(%address, "dial refused: {TOO_MANY_FILES}");
            return Err((format!("socket: {TOO_MANY_FILES}"), io::ErrorKind::Other));
        }
        let stream = socket
            .connect(address)
            .await
            .map_err(|error| fail("connect", error))?;
        // A dial to a port in this host's ephemeral range can connect the socket to itself.
        let is_self = matches!((stream.local_addr(), stream.peer_addr()), (Ok(a), Ok(b)) if a == b);
        if !is_self || retries == 0 {
            return Ok(stream);
        }
        retries -= 1;
    }
}

/// Returns the kind of a failed call. Go counts EAGAIN and ETIMEDOUT as timeouts. The standard library has no
/// kind for EHOSTDOWN.
fn kind(error: &io::Error) -> io::ErrorKind {
    match error.raw_os_error() {
        Some(11 | 110) => io::ErrorKind::TimedOut,
        Some(112) => io::ErrorKind::HostUnreachable,
        _ => error.kind(),
    }
}

/// Sets the options that Go sets on a new connection. Setting an option fails only on a dead connection. Such
/// a failure is ignored, as in Go, because the reader notices the dead connection.
fn configure(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE)
        .with_interval(KEEPALIVE);
    let outcome = stream
        .set_nodelay(true)
        .and_then(|()| SockRef::from(stream).set_tcp_keepalive(&keepalive));
    if let Err(error) = outcome {
        tracing::debug!(%error, "could not set options on a new connection");
    }
}

/// Returns an errno's text in Go's words (`syscall/zerrors_linux_*.go`). The errnos that a dial can return
/// are listed, because musl words them differently. Other errnos have the C library's text in lower case.
fn errno_text(code: i32, error: &io::Error) -> String {
    let known = match code {
        1 => "operation not permitted",
        11 => "resource temporarily unavailable",
        12 => "cannot allocate memory",
        13 => "permission denied",
        22 => "invalid argument",
        23 => "too many open files in system",
        24 => "too many open files",
        97 => "address family not supported by protocol",
        99 => "cannot assign requested address",
        100 => "network is down",
        101 => "network is unreachable",
        103 => "software caused connection abort",
        104 => "connection reset by peer",
        105 => "no buffer space available",
        110 => "connection timed out",
        111 => "connection refused",
        112 => "host is down",
        113 => "no route to host",
        _ => {
            let text = error.to_string().to_lowercase();
            let (text, _) = text.split_once(" (os error").unwrap_or((&text, ""));
            return text.to_owned();
        }
    };
    known.to_owned()
}

#[cfg(test)]
mod tests;
