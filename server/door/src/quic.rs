//! QUIC connections, forwarded unchanged: by the server name of the ClientHello at first, then by the connection ids
//! that the server has chosen.
//!
//! | module | contents |
//! |---|---|
//! | [`initial`] | parses the ClientHello in Initial packets, without I/O |
//! | `hellos` | keeps incomplete hellos, without I/O |
//! | `flow` | moves the datagrams between one client and one endpoint |
//! | `flows` | finds the flow of a datagram, and bounds the flows |
//!
//! The ids of our servers contain a mark of the server's address (`culvert_native::quic::connection_id`). A client
//! therefore keeps its connections if its address changes, or if its datagrams reach another replica: no replica needs
//! the state of another. For other servers, the flow of the client's address decides.
//!
//! Each thread has a socket of its own for the same port, and independent tables.

mod flow;
mod flows;
mod hellos;
pub mod initial;

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use culvert_host::admin::BindError;
use culvert_host::net::{is_source, is_unicast};
use culvert_host::runtime::essential;
use culvert_native::quic::connection_id::CONNECTION_ID_BYTES;
use quinn_udp::RecvMeta;
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::flow::{BUFFER_BYTES, Path, Wire};
use self::flows::{Flows, Refused};
use self::hellos::{Arrival, Hellos};
use self::initial::{Header, InitialError};
use super::config::HOST_FLAG;
use super::front::Front;
use super::metrics::{Entrance, Refusal};

/// Buffers filled by one system call. A page of a buffer uses memory only after its first use.
const BUFFERS: usize = 8;

/// Time between checks for idle flows and late hellos.
const SWEEP: Duration = Duration::from_secs(1);

/// Silence of all flows that ends a drain early: their clients' datagrams reach other replicas.
const QUIET: Duration = Duration::from_secs(3);

/// Largest number of log lines about refused datagrams between two sweeps. Anybody can send such datagrams.
const LOG_LINES: u32 = 20;

/// Bytes that the receive buffer of a socket should have, for a burst of one round trip.
const WANTED_BUFFER_BYTES: usize = 1024 * 1024;

/// The QUIC listener of one thread.
struct Listener {
    front: Arc<Front>,
    wire: Arc<Wire>,
    hellos: Hellos,
    flows: Flows,
    /// True if Initial packets were decrypted since the last turn of the other tasks.
    has_decrypted: bool,
    /// Log lines left until the next sweep.
    lines: u32,
    /// Log lines left out since the last sweep.
    left_out: u64,
    drain: Arc<Drain>,
    /// True if this socket counts as busy in `drain`.
    is_busy: bool,
}

/// Opens the sockets of the QUIC listeners, one for each thread.
///
/// # Errors
/// Fails if the address is in use or not permitted; the text contains the remedy.
pub(crate) fn bind(address: SocketAddr, threads: usize) -> Result<Vec<UdpSocket>, BindError> {
    let open = || -> io::Result<Vec<UdpSocket>> {
        let first = flow::bind(address, threads > 1)?;
        // The first socket chooses the number of port 0.
        let address = first.local_addr()?;
        let others = (1..threads).map(|_| flow::bind(address, true));
        std::iter::once(Ok(first)).chain(others).collect()
    };
    let flags = [HOST_FLAG, "--sni-quic-port"];
    open().map_err(|reason| BindError::new(format!("UDP {address}"), &reason, flags))
}

/// The sockets of a drain. If one socket closed before the others, the kernel would move clients between the others,
/// which do not have their flows.
pub(crate) struct Drain {
    /// Number of sockets with flows in use.
    busy: AtomicUsize,
    /// Fires once no socket has a flow in use.
    over: CancellationToken,
}

impl Drain {
    /// Creates the drain of a number of sockets. All count as busy.
    pub(crate) fn of(sockets: usize) -> Arc<Self> {
        Arc::new(Self {
            busy: AtomicUsize::new(sockets),
            over: CancellationToken::new(),
        })
    }

    /// Accounts for a socket whose flows have fallen silent.
    fn rests(&self) {
        if self.busy.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.over.cancel();
        }
    }
}

/// Serves one of `parts` sockets until `until` fires and the flows have moved to other replicas.
pub(crate) async fn serve(
    front: Arc<Front>,
    socket: UdpSocket,
    parts: usize,
    drain: Arc<Drain>,
    until: CancellationToken,
) {
    match Wire::new(socket) {
        Ok(wire) => {
            let listener = Listener::new(front, Arc::new(wire), parts, drain);
            essential("QUIC", until.clone(), listener.run(until)).await;
        }
        // The closed socket gets no datagrams.
        Err(error) => {
            drain.rests();
            warn!(%error, "a thread cannot serve QUIC; the other threads continue");
        }
    }
}

/// Logs the size of the kernel's receive buffers if it is small.
pub(crate) fn check_buffers(sockets: &[UdpSocket]) {
    let granted = sockets.first().map(flow::receive_buffer_bytes);
    if let Some(granted) = granted.filter(|granted| *granted < WANTED_BUFFER_BYTES) {
        info!(
            granted,
            wanted = WANTED_BUFFER_BYTES,
            "the kernel limits the receive buffers of QUIC, in bytes: bursts lose packets; raise net.core.rmem_max"
        );
    }
}

// === impl Listener ===

impl Listener {
    fn new(front: Arc<Front>, wire: Arc<Wire>, parts: usize, drain: Arc<Drain>) -> Self {
        Self {
            drain,
            is_busy: true,
            hellos: Hellos::new(parts),
            flows: Flows::new(front.clone(), wire.clone(), parts),
            front,
            wire,
            has_decrypted: false,
            lines: LOG_LINES,
            left_out: 0,
        }
    }

    async fn run(mut self, until: CancellationToken) {
        let mut input = vec![0; BUFFERS * BUFFER_BYTES];
        let mut sweep = interval(SWEEP);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (wire, front, drain) = (self.wire.clone(), self.front.clone(), self.drain.clone());
        loop {
            tokio::select! {
                ready = wire.socket.readable() => match ready {
                    Ok(()) => {
                        consume_budget().await;
                        self.receive(&mut input);
                        // Under a flood, the sockets of displaced flows would exceed the limit, and decryption would
                        // delay the other tasks.
                        let has_displaced = self.flows.take_displaced();
                        if std::mem::take(&mut self.has_decrypted) || has_displaced {
                            yield_now().await;
                        }
                    }
                    // The runtime is ending.
                    Err(_) => return,
                },
                _ = sweep.tick() => {
                    self.sweep();
                    // New connections are served during a drain, too: other replicas continue them.
                    if until.is_cancelled() {
                        self.join_drain();
                    }
                }
                () = drain.over.cancelled() => return,
                () = front.cut.cancelled() => return,
            }
        }
    }

    fn receive(&mut self, input: &mut [u8]) {
        let mut free = input.chunks_exact_mut(BUFFER_BYTES);
        let mut buffers: [IoSliceMut<'_>; BUFFERS] =
            std::array::from_fn(|_| IoSliceMut::new(free.next().unwrap_or_default()));
        let mut metas = [RecvMeta::default(); BUFFERS];
        // Without a datagram, nothing is filled.
        let filled = self.wire.receive(&mut buffers, &mut metas).unwrap_or(0);
        for (meta, buffer) in metas.iter().zip(&buffers).take(filled) {
            let mut bytes = buffer.get(..meta.len).unwrap_or_default();
            while !bytes.is_empty() {
                let (run, rest) = bytes.split_at(run_bytes(bytes, meta.stride));
                if let Err(refused) = self.forward(meta, run) {
                    self.refuse(meta.addr, &refused);
                }
                bytes = rest;
            }
        }
    }

    /// Forwards datagrams of one connection.
    fn forward(&mut self, meta: &RecvMeta, run: &[u8]) -> Result<(), Refused> {
        // The kernel would refuse the answer with EINVAL, and quinn-udp would then send without GSO and ECN forever.
        if meta.addr.port() == 0 || meta.dst_ip.is_some_and(|ip| !is_unicast(ip)) {
            return Err(Refused::new(
                Refusal::Garbage,
                "no source port, or not sent to one host",
            ));
        }
        let path = Path {
            client: meta.addr,
            local: meta.dst_ip.filter(|ip| is_source(*ip)),
        };
        let first = run.get(..meta.stride).unwrap_or(run);
        let header = Header::parse(first)
            .ok_or_else(|| Refused::new(Refusal::Garbage, InitialError::NotInitial.to_string()))?;
        if let Some(key) = self.flows.find(path, &header)? {
            self.flows.send(key, &header, run, meta.stride, meta.ecn);
            return Ok(());
        }
        match header {
            Header::Long {
                is_initial: true,
                destination,
                ..
            } => self.collect(path, &header, destination, first),
            _ => {
                let why = "neither a flow nor an endpoint has the connection id";
                Err(Refused::new(Refusal::Unknown, why))
            }
        }
    }

    /// Takes a datagram with an Initial packet, and opens a flow once the hello is complete.
    fn collect(
        &mut self,
        path: Path,
        header: &Header<'_>,
        id: &[u8],
        datagram: &[u8],
    ) -> Result<(), Refused> {
        self.has_decrypted = true;
        let (hello, datagrams) = match self.hellos.take(path.client, id, datagram, Instant::now()) {
            Arrival::Complete(hello, datagrams) => (hello, datagrams),
            Arrival::Kept { displaced } => {
                self.count(displaced, Refusal::TooManyConnections);
                return Ok(());
            }
            Arrival::Bad(error) => {
                return Err(Refused::new(Refusal::Garbage, error.to_string()));
            }
            Arrival::TooMany => {
                let why = "the hello has too many datagrams";
                return Err(Refused::new(Refusal::TooManyConnections, why));
            }
        };
        let name = hello
            .server_name
            .ok_or_else(|| Refused::new(Refusal::NoServerName, "the client sent no server name"))?;
        let upstream = self.front.table.by_server_name(&name).ok_or_else(|| {
            Refused::new(Refusal::Unknown, format!("no Service has the name {name}"))
        })?;
        let endpoint = upstream.quic_endpoint().ok_or_else(|| {
            let why = format!("{} has no endpoint that serves QUIC", upstream.key);
            Refused::new(Refusal::Upstream, why)
        })?;
        let key = self
            .flows
            .open(path, upstream, endpoint, Some(id.to_vec()))?;
        for datagram in datagrams {
            self.flows
                .send(key, header, &datagram, datagram.len(), None);
        }
        Ok(())
    }

    /// Tells the drain whether the flows of this socket are in use.
    fn join_drain(&mut self) {
        let is_busy = !self.flows.are_idle_for(QUIET, Instant::now());
        match (self.is_busy, is_busy) {
            (true, false) => self.drain.rests(),
            (false, true) => drop(self.drain.busy.fetch_add(1, Ordering::Relaxed)),
            _ => {}
        }
        self.is_busy = is_busy;
    }

    fn sweep(&mut self) {
        let now = Instant::now();
        let late = self.hellos.expire(now);
        self.count(late, Refusal::Timeout);
        self.flows.sweep(now);
        self.lines = LOG_LINES;
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            debug!(left_out, "more QUIC datagrams were refused");
        }
    }

    fn refuse(&mut self, client: SocketAddr, refused: &Refused) {
        self.count(1, refused.reason);
        if refused.reason == Refusal::TooManyConnections {
            // The log limits such lines itself.
            return warn!(%client, reason = refused.why, "QUIC datagram refused");
        }
        if self.lines == 0 {
            self.left_out += 1;
            return;
        }
        self.lines -= 1;
        debug!(%client, why = refused.why, "QUIC datagram refused");
    }

    fn count(&self, times: usize, reason: Refusal) {
        for _ in 0..times {
            self.front.metrics.refused(Entrance::Quic, reason);
        }
    }
}

/// Returns the length of the first datagrams in `bytes` that belong to one connection: one datagram, or several
/// datagrams whose short headers have the same connection id of our servers.
fn run_bytes(bytes: &[u8], stride: usize) -> usize {
    let mut datagrams = bytes.chunks(stride.max(1));
    let first = datagrams.next().unwrap_or_default();
    let id = |datagram: &[u8]| match Header::parse(datagram)? {
        Header::Short(rest) => rest.first_chunk::<CONNECTION_ID_BYTES>().copied(),
        Header::Long { .. } => None,
    };
    let own = id(first);
    let same = datagrams.take_while(|datagram| own.is_some() && id(datagram) == own);
    first.len() + same.map(<[u8]>::len).sum::<usize>()
}
