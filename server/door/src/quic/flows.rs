//! The flows of one listener: finds the flow of a datagram, opens flows, and bounds their number.
//!
//! A flow is *proven* once its client is known to receive the endpoint's packets; until then the client's address may
//! be forged. Flows that are not proven share a bounded number of places, and a new flow displaces the flow whose
//! client has been silent for longest. A displaced flow loses at most the packets on their way: the client's next packet
//! finds the endpoint by its connection id. A proven flow has a place among the flows of its upstream and is never
//! displaced.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use culvert_host::net::shares::Share;
use culvert_host::telemetry::metrics::GaugeGuard;
use culvert_stream::CloseReason;
use quinn_udp::EcnCodepoint;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::flow::{Flow, Path, Wire, tag_of};
use super::initial::Header;
use crate::front::Front;
use crate::metrics::{Entrance, Refusal};
use crate::upstream::{FlowPlace, Upstream};

/// Time without datagrams after which a flow ends. Our agents send a packet every 15 s.
const IDLE: Duration = Duration::from_secs(120);

/// Largest number of unproven flows in the process.
const MAX_UNPROVEN: usize = 4096;

/// Largest number of flows of one client address and port.
const MAX_OF_CLIENT: usize = 32;

/// Smallest address, for searches in the map of flows.
const FIRST_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Address of a client, and of an endpoint.
pub(super) type Key = (SocketAddr, SocketAddr);

/// The flows of one listener.
pub(super) struct Flows {
    front: Arc<Front>,
    listener: Arc<Wire>,
    flows: BTreeMap<Key, Entry>,
    /// Unproven flows; flows that have been proven or removed since stay until the next sweep.
    unproven: VecDeque<Unproven>,
    last: u64,
    /// Largest number of unproven flows.
    max_unproven: usize,
    /// True if a flow was displaced since the last call of [`Flows::take_displaced`].
    has_displaced: bool,
}

struct Entry {
    flow: Arc<Flow>,
    number: u64,
    /// `None` while the flow is unproven.
    place: Option<FlowPlace>,
    /// True once the flow has entered the queue of unproven flows.
    is_queued: bool,
    /// Task that moves the endpoint's datagrams.
    _task: AbortOnDropHandle<()>,
    _share: Share,
    _open: GaugeGuard,
}

struct Unproven {
    key: Key,
    number: u64,
    /// Bytes from the client before the flow entered the queue.
    sent: u64,
}

/// Reason why a datagram is dropped.
#[derive(Debug)]
pub(super) struct Refused {
    pub reason: Refusal,
    pub why: String,
}

// === impl Refused ===

impl Refused {
    pub(super) fn new(reason: Refusal, why: impl Into<String>) -> Self {
        let why = why.into();
        Self { reason, why }
    }
}

// === impl Flows ===

impl Flows {
    /// Creates the table of one of `parts` listeners.
    pub(super) fn new(front: Arc<Front>, listener: Arc<Wire>, parts: usize) -> Self {
        Self {
            front,
            listener,
            flows: BTreeMap::new(),
            unproven: VecDeque::new(),
            last: 0,
            max_unproven: MAX_UNPROVEN / parts.max(1),
            has_displaced: false,
        }
    }

    /// Returns true if a flow was displaced since the last call. Its task keeps the flow's socket open until the
    /// runtime has run the task once more.
    pub(super) fn take_displaced(&mut self) -> bool {
        std::mem::take(&mut self.has_displaced)
    }

    /// Finds the flow of a packet, or opens a flow to the endpoint in the packet's connection id. `None` if the packet
    /// belongs to no flow.
    ///
    /// # Errors
    /// As [`Flows::open`].
    pub(super) fn find(&mut self, path: Path, header: &Header<'_>) -> Result<Option<Key>, Refused> {
        let now = Instant::now();
        // After a refusal, the client's next packet may find another endpoint.
        let own = self.of_client(path.client);
        let own = own.filter(|(_, entry)| !entry.flow.is_refused());
        let latest = match own.clone().find(|(_, entry)| entry.flow.owns(header)) {
            Some((key, _)) => return Ok(Some(*key)),
            None => own.min_by_key(|(_, entry)| entry.flow.idle(now)),
        };
        let latest = latest.map(|(key, _)| *key);
        let tagged = tag_of(header).and_then(|tag| self.front.table.by_tag(tag, path.client.ip()));
        match tagged {
            Some((upstream, endpoint)) => self.open(path, upstream, endpoint, None).map(Some),
            // The ids of other servers are unknown.
            None => Ok(latest.filter(|_| matches!(header, Header::Short(_)))),
        }
    }

    /// Opens a flow, or adds a hello to a flow. `first_id` is the destination id of the hello; `None` for a flow that
    /// continues a connection.
    ///
    /// # Errors
    /// Fails if the client or the upstream has too many flows, the client's address is not permitted, or no socket can
    /// be opened.
    pub(super) fn open(
        &mut self,
        path: Path,
        upstream: Arc<Upstream>,
        endpoint: SocketAddr,
        first_id: Option<Vec<u8>>,
    ) -> Result<Key, Refused> {
        let (client, front) = (path.client, &self.front);
        let key = (client, endpoint);
        if !permits(front, &upstream, client) {
            let why = format!("the Service {} does not allow the address", upstream.key);
            return Err(Refused::new(Refusal::Address, why));
        }
        if first_id.is_some() && upstream.is_full_of_flows() {
            let why = format!(
                "{} has as many flows as --max-connections allows",
                upstream.key
            );
            return Err(Refused::new(Refusal::Overflow, why));
        }
        let known = self.flows.get(&key).map(|entry| &entry.flow);
        if let (Some(known), Some(id)) = (known.filter(|flow| !flow.is_refused()), &first_id) {
            known.add_hello(id.clone());
            return Ok(key);
        }
        if self.of_client(client).count() >= MAX_OF_CLIENT {
            let why = "the address has flows to too many endpoints";
            return Err(Refused::new(Refusal::TooManyConnections, why));
        }
        let flow = Flow::open(path, upstream, endpoint, first_id).map_err(|error| {
            let why = format!("cannot open a socket to {endpoint}: {error}");
            Refused::new(Refusal::Upstream, why)
        })?;
        let share = front.shares.take(client.ip(), flow.socket());
        let share = share.ok_or_else(|| {
            let why = "the address has more flows than descriptors are free";
            Refused::new(Refusal::TooManyConnections, why)
        })?;
        let flow = Arc::new(flow);
        let (moving, listener) = (flow.clone(), self.listener.clone());
        self.last += 1;
        let entry = Entry {
            flow,
            number: self.last,
            place: None,
            is_queued: false,
            _task: AbortOnDropHandle::new(tokio::spawn(async move { moving.run(&listener).await })),
            _share: share,
            _open: front.metrics.open(Entrance::Quic),
        };
        if let Some(refused) = self.flows.insert(key, entry) {
            self.count_end(refused.place.is_some(), CloseReason::EndpointLost);
        }
        Ok(key)
    }

    /// Sends datagrams of a client to the endpoint of the flow. `header` belongs to the first datagram.
    pub(super) fn send(
        &mut self,
        key: Key,
        header: &Header<'_>,
        bytes: &[u8],
        stride: usize,
        ecn: Option<EcnCodepoint>,
    ) {
        let Some(entry) = self.flows.get_mut(&key) else {
            return;
        };
        let flow = &entry.flow;
        if entry.place.is_none() && flow.is_proven_by(header) {
            // Without a free place, the flow stays unproven.
            entry.place = flow.upstream.flow_place(key.0.ip());
        }
        flow.send(bytes, stride, ecn);
        if !entry.is_queued {
            entry.is_queued = true;
            self.unproven.push_back(Unproven {
                key,
                number: entry.number,
                sent: flow.sent(),
            });
            self.displace();
        }
    }

    /// Ends flows that are idle, whose endpoint is gone, or whose client has lost its permission.
    pub(super) fn sweep(&mut self, now: Instant) {
        let front = self.front.clone();
        let end_of = |(client, endpoint): &Key, flow: &Flow| {
            let is_silent = flow.unanswered(now) >= IDLE;
            // Another Service may have taken over the endpoint.
            let is_permitted = front
                .table
                .any_with_quic_endpoint(*endpoint, |upstream| permits(&front, upstream, *client));
            if flow.is_refused() {
                Some(CloseReason::EndpointLost)
            } else if flow.idle(now) >= IDLE {
                Some(CloseReason::IdleTimeout)
            } else if !permits(&front, &flow.upstream, *client) || is_permitted == Some(false) {
                front.metrics.refused(Entrance::Quic, Refusal::Address);
                Some(CloseReason::Shutdown)
            } else if is_silent && is_permitted.is_none() {
                Some(CloseReason::EndpointLost)
            } else {
                None
            }
        };
        let mut ends = Vec::new();
        self.flows.retain(|key, entry| {
            let end = end_of(key, &entry.flow);
            ends.extend(end.map(|reason| (entry.place.is_some(), reason)));
            end.is_none()
        });
        for (is_proven, reason) in ends {
            self.count_end(is_proven, reason);
        }
        let flows = &self.flows;
        self.unproven.retain(|queued| is_unproven(flows, queued));
    }

    /// Returns true if no flow has moved a datagram for this time.
    pub(super) fn are_idle_for(&self, time: Duration, now: Instant) -> bool {
        let mut flows = self.flows.values();
        flows.all(|entry| entry.flow.idle(now) >= time)
    }

    /// Removes unproven flows that exceed the limit. A flow whose client has sent something since it entered the queue
    /// enters the queue again.
    fn displace(&mut self) {
        while self.unproven.len() > self.max_unproven
            && let Some(queued) = self.unproven.pop_front()
        {
            if !is_unproven(&self.flows, &queued) {
                continue;
            }
            let sent = self.flows.get(&queued.key).map(|entry| entry.flow.sent());
            match sent {
                Some(sent) if sent > queued.sent => {
                    self.unproven.push_back(Unproven { sent, ..queued });
                }
                _ => {
                    self.flows.remove(&queued.key);
                    self.has_displaced = true;
                    let metrics = &self.front.metrics;
                    metrics.refused(Entrance::Quic, Refusal::TooManyConnections);
                }
            }
        }
    }

    /// Counts the end of a flow. Of unproven flows, only refusals by endpoints count.
    fn count_end(&self, is_proven: bool, reason: CloseReason) {
        let metrics = &self.front.metrics;
        if is_proven {
            metrics.count_connection().end(reason);
        } else if reason == CloseReason::EndpointLost {
            metrics.refused(Entrance::Quic, Refusal::Upstream);
        }
    }

    fn of_client(&self, client: SocketAddr) -> impl Iterator<Item = (&Key, &Entry)> + Clone {
        let flows = self.flows.range((client, FIRST_ADDRESS)..);
        flows.take_while(move |((of, _), _)| *of == client)
    }
}

impl Drop for Flows {
    fn drop(&mut self) {
        for entry in self.flows.values() {
            self.count_end(entry.place.is_some(), CloseReason::Shutdown);
        }
    }
}

/// Returns true if the upstream allows the client.
fn permits(front: &Front, upstream: &Upstream, client: SocketAddr) -> bool {
    // A load balancer that hides the addresses of clients cannot send them with UDP.
    let is_hidden = upstream.is_restricted() && front.proxies.contains(client.ip());
    upstream.permits(client.ip()) && !is_hidden
}

fn is_unproven(flows: &BTreeMap<Key, Entry>, queued: &Unproven) -> bool {
    let entry = flows.get(&queued.key);
    entry.is_some_and(|entry| entry.number == queued.number && entry.place.is_none())
}
