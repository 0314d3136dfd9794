//! The search for an OpenVPN server: tries all remotes in turn, forever, with growing pauses.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use culvert_host::file_follower::{
    PROMPT_READ, SLOW_READ, read_in_background, read_until, too_slow,
};
use culvert_host::net::{dial, listen, long_path};
use culvert_host::reload::Latest;
use culvert_host::telemetry::log_once::LogOnce;
use culvert_openvpn::Role as End;
use culvert_openvpn::options::Transport;
use culvert_openvpn::session::{ClientConfig, Ended, Session};
use culvert_openvpn::tls::ClientTls;
use culvert_openvpn_io::config_file::{Client as Settings, Remote};
use culvert_openvpn_io::files::{self, FileError};
use culvert_openvpn_io::link::{Link, LinkEnd};
use culvert_openvpn_io::now;
use rand::Rng as _;
use rand::seq::SliceRandom as _;
use tokio::net::UdpSocket;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info_span, warn};

use super::material::TlsMaterial;
use super::metrics::Outcome;
use super::role::ClientRole;
use super::tunnel::Tunnel;
use crate::files::{Files, Reloader};

/// Pause after the first failure, and longest pause. The values are the defaults of OpenVPN 2.6.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// Time limit for connecting to the server, or for resolving its name, without `connect-timeout`. The stock
/// client waits 120 s.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Shortest lifetime of a tunnel that counts as a success. A shorter tunnel counts as a failure, so pauses
/// keep growing when a server accepts this client and then drops it again. This happens when two clients
/// share one name.
const STABLE: Duration = Duration::from_secs(30);

/// Largest random fraction added to a pause, so that clients do not reconnect all at once.
const JITTER: f64 = 0.1;

/// Receive buffer requested for a UDP socket, in bytes; the system may grant less.
const UDP_BUFFER: usize = 2 << 20;

/// The search for a server.
pub(crate) struct Client {
    tunnel: Arc<Tunnel>,
    settings: Settings,
    tls: Latest<Arc<ClientTls>>,
    /// Permit to read the files of a session.
    turn: Arc<Semaphore>,
}

/// Outcome of one attempt and the consequences for the next attempt.
struct Attempt {
    outcome: Option<Outcome>,
    text: String,
    /// Time for which the tunnel carried data; `None` if it was never established.
    lived: Option<Duration>,
    /// True if the next attempt uses the next server of the list.
    next: bool,
    /// True if an early retry is pointless; the next pause is then the longest one.
    hopeless: bool,
}

impl Attempt {
    /// Returns true if the next attempt goes to the next server. After the end of a session, the same server is first, but not
    /// after two short sessions. `short` is the number of consecutive short sessions with this server so far.
    fn is_next(&self, short: &mut u32) -> bool {
        let is_short = self.lived.is_some_and(|lived| lived < STABLE);
        *short = if is_short { *short + 1 } else { 0 };
        let is_next = self.next || *short > 1;
        if is_next {
            *short = 0;
        }
        is_next
    }

    fn failed(outcome: Outcome, text: String) -> Self {
        Self {
            outcome: Some(outcome),
            text,
            lived: None,
            next: true,
            hopeless: false,
        }
    }
}

impl Client {
    /// Creates the search. Reads all files once, so that mistakes show up at the start. `reloader` follows the
    /// certificates.
    ///
    /// # Errors
    /// Fails if a file cannot be used.
    pub(crate) async fn new(
        tunnel: Arc<Tunnel>,
        settings: Settings,
        reloader: &mut Reloader,
    ) -> anyhow::Result<Self> {
        let material = TlsMaterial::new(&settings.common).context("OpenVPN client")?;
        let tls = reloader.follow(Files::Openvpn, material).await;
        let client = Self {
            tunnel,
            settings,
            tls: tls.context("OpenVPN client")?,
            turn: Arc::new(Semaphore::new(1)),
        };
        let (paths, reading) = client.reading(Transport::Tcp);
        let is_slow = || {
            let why = too_slow(files::one_of(&paths), SLOW_READ);
            warn!("{why}; this agent starts once the files are read");
        };
        let (config, _) = read_in_background(reading, is_slow).await;
        config.context("OpenVPN client")?;
        Ok(client)
    }

    /// Connects to servers and serves the tunnel until the token fires.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let (first, longest) = self.settings.retry.unwrap_or(RETRY);
        let mut remotes = std::mem::take(&mut self.settings.remotes);
        if self.settings.random {
            remotes.shuffle(&mut rand::rng());
        }
        let (mut turn, mut failures, mut short) = (0_usize, 0_u32, 0_u32);
        let mut known = LogOnce::default();
        while let Some(remote) = remotes.get(turn % remotes.len().max(1)) {
            let round = turn / remotes.len().max(1);
            let span = info_span!("openvpn", remote = %remote);
            let attempt = async {
                let attempt = self.attempt(remote, round, &stop).await?;
                attempt.log(&mut known);
                Some(attempt)
            };
            let Some(attempt) = attempt.instrument(span).await else {
                return;
            };
            if let Some(outcome) = attempt.outcome {
                self.tunnel.metrics.connect(outcome);
            }
            failures = match attempt.lived {
                Some(lived) if lived >= STABLE => 0,
                _ => failures.saturating_add(1),
            };
            if attempt.is_next(&mut short) {
                turn = turn.wrapping_add(1);
            }
            let pause = match attempt.hopeless {
                true => longest,
                false => pause(first, longest, failures, remotes.len()),
            };
            let jitter = rand::rng().random_range(0.0..JITTER);
            tokio::select! {
                () = sleep(pause.mul_f64(1.0 + jitter)) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Tries one server and runs the resulting session. `round` is the number of earlier rounds through all servers. Returns
    /// `None` after a shutdown.
    async fn attempt(
        &self,
        remote: &Remote,
        round: usize,
        stop: &CancellationToken,
    ) -> Option<Attempt> {
        // Keys and passwords are read again for each session, and certificates are the latest ones.
        let config = self.session_config(remote.transport);
        let config = match stop.run_until_cancelled(config).await? {
            Ok(config) => config,
            Err(error) => return Some(Attempt::failed(Outcome::Files, error.to_string())),
        };
        let limit = self.settings.connect_timeout.unwrap_or(CONNECT_TIMEOUT);
        let mtu = config.common.max_tun_mtu;
        let role = ClientRole::new(self.tunnel.clone(), remote.transport, self.tls.clone());
        let session = || Session::client(Arc::new(config), now());
        let link = tokio::select! {
            link = async {
                Ok::<_, String>(match remote.transport {
                    Transport::Tcp => Link::tcp(tcp(remote, limit).await?, session(), mtu, role),
                    Transport::Udp => {
                        let link = Link::udp(udp(remote, limit, round).await?, session(), role);
                        link.map_err(|error| error.to_string())?
                    }
                })
            } => link,
            () = stop.cancelled() => return None,
        };
        let link = match link {
            Ok(link) => link,
            Err(text) => return Some(Attempt::failed(Outcome::Unreachable, text)),
        };
        debug!("connected to the OpenVPN server");
        let began = Instant::now();
        let (role, end) = Box::pin(link.run(&self.tunnel.agent.shutdown)).await;
        let lived = role.established.then(|| began.elapsed());
        drop(role);
        if stop.is_cancelled() || self.tunnel.agent.shutdown.is_cancelled() {
            return None;
        }
        Some(after(&end, lived))
    }

    async fn session_config(&self, transport: Transport) -> Result<ClientConfig, FileError> {
        let (paths, reading) = self.reading(transport);
        let configured = read_until(Instant::now() + PROMPT_READ, &self.turn, reading).await;
        configured.unwrap_or_else(|| Err(FileError::too_slow(&paths, PROMPT_READ)))
    }

    /// Returns the files of a session, and the function that reads the files.
    fn reading(
        &self,
        transport: Transport,
    ) -> (
        Vec<PathBuf>,
        impl FnOnce() -> Result<ClientConfig, FileError> + Send + use<>,
    ) {
        let (common, credentials) = (&self.settings.common, &self.settings.credentials);
        let paths = files::paths(common.wrap_key().into_iter().chain(credentials));
        let mut config = ClientConfig::new(transport, self.tls.get());
        config.connect_timeout = self.settings.connect_timeout;
        let (common, credentials) = (common.clone(), credentials.clone());
        let reading = move || {
            files::configure(&common, End::Client, &mut config.common)?;
            config.credentials = credentials.as_ref().map(files::credentials).transpose()?;
            Ok(config)
        };
        (paths, reading)
    }
}

impl Attempt {
    /// Logs the attempt. A failure that is already `known` is logged only at debug level, unless it has lasted for long.
    fn log(&self, known: &mut LogOnce) {
        match self.lived {
            Some(lived) => {
                known.has_recovered();
                let seconds = lived.as_secs();
                warn!(
                    reason = self.text,
                    seconds, "lost the OpenVPN server; its connections are closed"
                );
            }
            None => match known.failed(&self.text) {
                Some(due) => warn!(
                    error = self.text,
                    attempts = due.attempts,
                    failing_seconds = due.failing_seconds,
                    "cannot connect to the OpenVPN server, trying again"
                ),
                None => debug!(error = self.text, "still cannot connect"),
            },
        }
    }
}

/// Returns the pause after a failure. The pause doubles with each round through all servers.
fn pause(first: Duration, longest: Duration, failures: u32, remotes: usize) -> Duration {
    let remotes = u32::try_from(remotes).unwrap_or(u32::MAX).max(1);
    let rounds = failures.saturating_sub(1) / remotes;
    let factor = 1_u32.checked_shl(rounds).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(longest)
}

fn after(end: &LinkEnd, lived: Option<Duration>) -> Attempt {
    let (mut next, mut hopeless) = (lived.is_none(), false);
    let mut outcome = Outcome::Failed;
    match end {
        LinkEnd::Session(Ended::Restart { next_server, .. }) => next |= *next_server,
        LinkEnd::Session(Ended::AuthFailed { temporary, .. }) => {
            (outcome, hopeless) = (Outcome::Refused, !temporary);
        }
        LinkEnd::Session(Ended::Halt(_)) => hopeless = true,
        LinkEnd::Session(_) | LinkEnd::Wire(_) => {}
    }
    Attempt {
        outcome: lived.is_none().then_some(outcome),
        text: end.to_string(),
        lived,
        next,
        hopeless,
    }
}

async fn tcp(remote: &Remote, limit: Duration) -> Result<tokio::net::TcpStream, String> {
    let address = dial::join_host_port(&remote.host, remote.port);
    let stream = dial::dial("tcp", &address, limit).await;
    let stream = stream.map_err(|error| error.text)?;
    // A stock server over TCP may stay silent for hours, so the kernel has to detect a dead path.
    listen::tune(&stream).map_err(|error| error.to_string())?;
    // Control packets and answers to new dials would wait behind the bulk in the kernel's send buffer.
    long_path::tune_link(&stream);
    Ok(stream)
}

/// Creates a socket that receives datagrams only from this server.
async fn udp(remote: &Remote, limit: Duration, round: usize) -> Result<UdpSocket, String> {
    let host = &remote.host;
    let found = timeout(limit, tokio::net::lookup_host((host.as_str(), remote.port))).await;
    let found = found.map_err(|_| format!("lookup {host}: timed out"))?;
    let found = found.map_err(|error| format!("lookup {host}: {error}"))?;
    let mut last = format!("lookup {host}: no such host");
    for address in in_turn(found.collect(), round) {
        let any = match address.is_ipv4() {
            true => "0.0.0.0:0",
            false => "[::]:0",
        };
        let connected = async {
            let socket = UdpSocket::bind(any).await?;
            socket.connect(address).await?;
            // A smaller buffer is acceptable.
            let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(UDP_BUFFER);
            Ok::<_, std::io::Error>(socket)
        };
        match connected.await {
            Ok(socket) => return Ok(socket),
            Err(error) => last = format!("{address}: {error}"),
        }
    }
    Err(last)
}

/// Returns the addresses in the order for a round. A UDP socket connects to every address with a route, so each round starts
/// with the next address, as in the stock client.
fn in_turn(mut found: Vec<SocketAddr>, round: usize) -> Vec<SocketAddr> {
    let first = round % found.len().max(1);
    found.rotate_left(first);
    found
}

#[cfg(test)]
mod tests;
