//! The second link to a server, over QUIC; see [`culvert_native::quic`]. The agent connects in the background, and again
//! after a failure, so UDP that does not reach the server delays nothing.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::loss::Packets;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_host::tls::reload::ClientTls;
use culvert_konnectivity::message::PacketType;
use culvert_konnectivity::metrics::Segment;
use culvert_native::dial as message;
use culvert_native::hello::{self, Answer, HelloError, NO_SESSION};
use culvert_native::quic::endpoint::{client, client_config, rebind};
use culvert_native::quic::halves::{QuicSink, QuicSource};
use culvert_native::quic::link::{Link, answer, read_dial};
use culvert_native::quic::words::{Preferred, Word};
use culvert_native::quic::{PORT_HEADER, SAME_PORT, SESSION_HEADER, TRIAL_BYTES};
use culvert_native::window::TAKER_HELD_BYTES;
use culvert_stream::{CloseReason, Sink as _};
use http::{HeaderMap, HeaderValue};
use parking_lot::Mutex;
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tracing::{debug, info};

use crate::agent::{Agent, Dialed};
use crate::config::{Config, LinkTransport};
use crate::introduction::{metadata, server_of};
use crate::link::{LinkSocket, SharedSocket};
use crate::metrics::ProbeOutcome;
use crate::native::carry;
use crate::path::{Cuts, Path};

/// Time for the QUIC handshake: a few round trips of any usable path, and two lost packets.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);

/// Time for the introduction and the trial. The server may have to ask for a review of the token.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Pause after the first failure, and the longest pause. Each failure doubles the pause.
const FIRST_PAUSE: Duration = Duration::from_secs(60);
const LONGEST_PAUSE: Duration = Duration::from_secs(3600);

/// Number of attempts with a short pause after UDP has reached another server: a Service chooses a server for each port of
/// the agent.
const OTHER_SERVERS: u32 = 10;
const SHORT_PAUSE: Duration = Duration::from_secs(1);

/// Life of a link after which a failure counts as the first.
const LASTING: Duration = Duration::from_secs(300);

/// Interval between two looks at the loss of the path.
const LOOK: Duration = Duration::from_secs(5);

/// Offer of a server: its UDP port (`None` for the number of the TCP port), and the session.
pub(crate) struct Offer {
    port: Option<u16>,
    session: HeaderValue,
}

/// The TCP connection beside the link.
pub(crate) struct Origin {
    /// Address of the server.
    pub server: SocketAddr,
    /// The socket, for the counters of lost packets. Dropped when the connection ends.
    pub socket: OwnedFd,
}

/// The second link to a server, not connected yet.
pub(crate) struct Second {
    /// Address of the server over TCP at first, and the port for QUIC; `None` is the port of TCP.
    server: SocketAddr,
    port: Option<u16>,
    session: HeaderValue,
    server_id: String,
    /// Socket of the TCP connection.
    pub socket: SharedSocket,
    tls: ClientTls,
    config: Arc<Config>,
}

/// A connected link, and its control stream.
struct Open {
    endpoint: Endpoint,
    connection: Connection,
    control: (SendStream, RecvStream),
}

// === impl Offer ===

impl Offer {
    /// Reads the offer in a server's answer.
    pub(crate) fn of(answer: &HeaderMap) -> Option<Self> {
        let port = answer.get(PORT_HEADER)?.to_str().ok()?;
        let port = match port {
            SAME_PORT => None,
            number => Some(number.parse().ok()?),
        };
        let session = answer.get(SESSION_HEADER)?.clone();
        Some(Self { port, session })
    }
}

// === impl Second ===

impl Second {
    /// Creates the link that a server offers. `origin` is the TCP connection to the server.
    pub(crate) fn new(
        offer: Offer,
        origin: Origin,
        server_id: String,
        tls: ClientTls,
        config: &Arc<Config>,
    ) -> Self {
        Self {
            server: origin.server,
            port: offer.port,
            session: offer.session,
            server_id,
            socket: Arc::new(Mutex::new(LinkSocket::new(origin.socket))),
            tls,
            config: config.clone(),
        }
    }

    /// Connects and serves the link until the TCP connection ends, which `ended` reports. Streams of the link then
    /// continue until the server ends the link.
    pub(crate) async fn run(self, agent: Arc<Agent>, cuts: Cuts, ended: CancellationToken) {
        let Self {
            server,
            port,
            session,
            server_id,
            socket,
            tls,
            config,
        } = self;
        let mut probe = Probe {
            remote: server,
            session,
            server_id,
            tls,
            config,
        };
        let path = Mutex::new(Path::new(cuts));
        // The socket stays open with the TCP connection, and no longer.
        let close = async {
            ended.cancelled().await;
            socket.lock().close();
        };
        let links = async {
            let (mut pause, mut last_error) = (FIRST_PAUSE, String::new());
            let mut others = OTHER_SERVERS;
            let replaced = socket.lock().replaced();
            while !ended.is_cancelled() {
                // A link that has resumed may have another address.
                let mut server = socket.lock().server().unwrap_or(probe.remote);
                server.set_port(port.unwrap_or(server.port()));
                probe.remote = server;
                let connected = tokio::select! {
                    connected = probe.connect() => connected,
                    () = ended.cancelled() => return,
                };
                let outcome = match &connected {
                    Ok(_) => ProbeOutcome::Connected,
                    Err(_) => ProbeOutcome::Failed,
                };
                agent.metrics.quic_probes.get(outcome).increment(1);
                match connected {
                    Ok(open) => {
                        let since = Instant::now();
                        last_error.clear();
                        others = OTHER_SERVERS;
                        path.lock().new_link();
                        socket.lock().set_quic(true);
                        let cause = probe.carry(&agent, open, &path, &socket, &ended).await;
                        socket.lock().set_quic(false);
                        info!(cause, "the QUIC link has ended");
                        if since.elapsed() >= LASTING {
                            pause = FIRST_PAUSE;
                        }
                    }
                    Err(NoLink::OtherServer(error)) if others > 0 => {
                        others -= 1;
                        debug!(error, "trying again from another port");
                        tokio::select! {
                            () = sleep(SHORT_PAUSE) => continue,
                            () = ended.cancelled() => return,
                        }
                    }
                    Err(NoLink::OtherServer(error) | NoLink::Failed(error))
                        if error == last_error =>
                    {
                        debug!(error, "still no QUIC link")
                    }
                    Err(NoLink::OtherServer(error) | NoLink::Failed(error)) => {
                        info!(error, address = %probe.remote, "no QUIC link, TCP carries all connections");
                        last_error = error;
                    }
                }
                tokio::select! {
                    () = sleep(pause.mul_f64(rand::random_range(0.9..1.1))) => {
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                    () = replaced.notified() => (pause, others) = (FIRST_PAUSE, OTHER_SERVERS),
                    () = ended.cancelled() => return,
                }
            }
        };
        tokio::join!(close, links);
    }
}

/// Reason why an attempt failed.
enum NoLink {
    /// UDP reaches another server than TCP.
    OtherServer(String),
    Failed(String),
}

impl From<String> for NoLink {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// Everything for one attempt to connect.
struct Probe {
    remote: SocketAddr,
    session: HeaderValue,
    server_id: String,
    tls: ClientTls,
    config: Arc<Config>,
}

// === impl Probe ===

impl Probe {
    /// Makes one attempt to connect.
    async fn connect(&self) -> Result<Open, NoLink> {
        let endpoint = client(self.remote).map_err(text)?;
        let config = client_config(&self.tls.get()).map_err(text)?;
        let host = self.config.server_host.trim_matches(['[', ']']);
        let connecting = endpoint.connect_with(config, self.remote, host);
        let handshake = timeout(HANDSHAKE_TIMEOUT, connecting.map_err(text)?).await;
        let connection = handshake
            .map_err(|_| "the server does not answer over UDP".to_owned())?
            .map_err(text)?;
        let introduced = timeout(INTRODUCTION_TIMEOUT, self.introduce(&connection)).await;
        let control = introduced.map_err(|_| "the server does not answer anymore".to_owned())??;
        Ok(Open {
            endpoint,
            connection,
            control,
        })
    }

    /// Introduces the agent, and tries packets of all sizes.
    async fn introduce(&self, connection: &Connection) -> Result<(SendStream, RecvStream), NoLink> {
        let deadline = Instant::now() + INTRODUCTION_TIMEOUT;
        let metadata = metadata(&self.config, deadline).await.map_err(text)?;
        let mut headers = metadata.into_headers();
        headers.insert(SESSION_HEADER, self.session.clone());
        let (mut send, mut receive) = connection.open_bi().await.map_err(text)?;
        let mut both = tokio::io::join(&mut receive, &mut send);
        let answer = match hello::introduce(&mut both, &headers).await {
            Ok(Answer::Accepted(answer)) => MetadataMap::from_headers(answer),
            Ok(Answer::AlreadyConnected(_)) => {
                return Err("the server refused the link".to_owned().into());
            }
            // Only the server that TCP reaches has the session.
            Err(HelloError::Refused(why)) if why.starts_with(NO_SESSION) => {
                return Err(NoLink::OtherServer(why));
            }
            Err(error) => return Err(text(error).into()),
        };
        let (server_id, _) = server_of(&answer)?;
        if server_id != self.server_id {
            return Err(NoLink::OtherServer(format!(
                "UDP reaches the server {server_id:?}, and TCP the server {:?}",
                self.server_id
            )));
        }
        let bytes = vec![0x5a; TRIAL_BYTES];
        let mut echo = vec![0; TRIAL_BYTES];
        let trial = async {
            let write = async { send.write_all(&bytes).await.map_err(text) };
            let read = async { receive.read_exact(&mut echo).await.map(drop).map_err(text) };
            tokio::try_join!(write, read)
        };
        trial.await?;
        match echo == bytes {
            true => Ok((send, receive)),
            false => Err("the server returned other bytes".to_owned().into()),
        }
    }

    /// Serves a link until it ends, and returns the cause.
    async fn carry(
        &self,
        agent: &Arc<Agent>,
        open: Open,
        path: &Mutex<Path>,
        socket: &Mutex<LinkSocket>,
        ended: &CancellationToken,
    ) -> String {
        let Open {
            endpoint,
            connection,
            control,
        } = open;
        let _counted = GaugeGuard::new(&agent.metrics.quic_links);
        info!(address = %self.remote, "connected over QUIC, too");
        let (link, words) = Link::new(connection, TAKER_HELD_BYTES, CloseReason::ServerLost);
        let link_ended = agent.shutdown.child_token();
        let _ended = link_ended.clone().drop_guard();
        // A NAT device may have forgotten the old port.
        let on_silence = |silent: Duration| {
            let result = rebind(&endpoint, self.remote);
            debug!(
                ?silent,
                ?result,
                "the server does not answer: using a new port"
            );
        };
        let on_word = |word| {
            if word == Word::Slow {
                path.lock().slow(Instant::now());
            }
        };
        let accept = async {
            loop {
                match link.accept().await {
                    Ok(halves) => {
                        let serving = serve(agent.clone(), halves, link_ended.clone());
                        agent.tasks.spawn(serving);
                    }
                    Err(cause) => return cause,
                }
            }
        };
        let cause = tokio::select! {
            cause = link.run(control, words, on_word, on_silence) => cause,
            cause = accept => cause,
            cause = self.prefer(&link, path, socket) => cause,
            cause = retired(&link, ended) => cause,
            () = agent.shutdown.cancelled() => "this agent is stopping".to_owned(),
        };
        link.close(&cause);
        // The server learns the end from the last packet.
        let _ = timeout(HANDSHAKE_TIMEOUT, endpoint.wait_idle()).await;
        cause
    }

    /// Tells the server which link new dials should use. Never ends.
    async fn prefer(&self, link: &Link, path: &Mutex<Path>, socket: &Mutex<LinkSocket>) -> String {
        let mut preferred = None;
        loop {
            let tcp = socket.lock().packets();
            let of_link = link.path();
            let quic = Packets::of_sender(of_link.sent_packets, of_link.lost_packets);
            let is_lossy = path.lock().prefers_quic(Instant::now(), tcp, quic);
            let wanted = match is_lossy || self.config.transport == LinkTransport::Quic {
                true => Preferred::Quic,
                false => Preferred::Tcp,
            };
            if preferred != Some(wanted) {
                if preferred.is_some() || wanted == Preferred::Quic {
                    info!(link = ?wanted, "new connections use another link");
                }
                preferred = Some(wanted);
                link.send(Word::Prefer(wanted));
            }
            sleep(LOOK).await;
        }
    }
}

/// Resolves once the TCP connection has ended and the link has no stream. The server ends the link earlier, unless the
/// server is gone.
async fn retired(link: &Link, ended: &CancellationToken) -> String {
    ended.cancelled().await;
    loop {
        sleep(LOOK).await;
        if link.open() == 0 {
            return "the TCP connection has ended".to_owned();
        }
    }
}

/// Serves one dial.
async fn serve(
    agent: Arc<Agent>,
    (mut source, mut sink): (QuicSource, QuicSink),
    ended: CancellationToken,
) {
    // Counted from the start of the dial, so that a drained agent does not exit during a dial.
    let _active = agent.activity();
    let dial = match timeout(message::HEAD_TIMEOUT, read_dial(&mut source)).await {
        Ok(Ok(dial)) => dial,
        Ok(Err(error)) => {
            return debug!(
                error,
                "the server withdrew a dial, or opened a stream without one"
            );
        }
        Err(_) => return debug!("a stream without a dial: timed out"),
    };
    let count = |segment, packet| agent.metrics.streams.count_as(segment, packet);
    count(Segment::ToAgent, PacketType::DialReq);
    let dialed = tokio::select! {
        dialed = agent.dial(&dial.protocol, &dial.address) => dialed,
        // The server cancelled the dial, or the link ended.
        () = sink.stopped() => return,
        () = ended.cancelled() => return,
    };
    count(Segment::FromAgent, PacketType::DialRsp);
    match dialed {
        Ok(Dialed {
            socket,
            open: _open,
        }) => {
            if answer(&mut sink, &message::accepted()).await.is_err() {
                return;
            }
            let evicted = source.cut();
            let cut = pin!(async {
                tokio::select! {
                    reason = agent.server_lost(&ended) => reason,
                    () = evicted.due() => CloseReason::BufferExceeded,
                }
            });
            let end = |sink: QuicSink, reason| sink.end(reason, &agent.leaving);
            carry(&agent, socket, (source, sink), &dial, cut, end).await;
        }
        Err(error) => {
            let refusal = message::refusal(error.is_timeout(), &error.text);
            if answer(&mut sink, &refusal).await.is_ok() {
                let _ = sink.finish().await;
            }
        }
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn offer(port: &'static str) -> Option<Option<u16>> {
        let mut answer = HeaderMap::new();
        answer.insert(PORT_HEADER, HeaderValue::from_static(port));
        answer.insert(SESSION_HEADER, HeaderValue::from_static("00ff"));
        Offer::of(&answer).map(|offer| offer.port)
    }

    #[test]
    fn offer_has_a_port_and_a_session() {
        assert_eq!(offer("8443"), Some(Some(8443)));
        assert_eq!(offer("same"), Some(None));
        for malformed in ["", "0x1", "65536", "-1"] {
            assert_eq!(offer(malformed), None);
        }
        assert!(Offer::of(&HeaderMap::new()).is_none());
    }
}
