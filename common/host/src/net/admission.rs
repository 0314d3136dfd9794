//! The admission of peers to a listener: peers that are not authenticated yet cost a bounded amount, and
//! displace only each other.
//!
//! A listener has a slot for each peer that is not admitted yet. If all slots are in use, a new peer displaces
//! an older one: the host with the most slots loses one, first of all a peer that has sent nothing. Peers that
//! a host opens in excess thus displace only peers of that host. If the new peer's host itself has the most
//! slots, as with a load balancer in front of all peers, a peer that has just begun is not displaced; the new
//! peer waits for a slot instead, and is refused if none becomes free in time. If the peers are spread over many
//! hosts, with few peers on each, the peers of all hosts are candidates, first of all the peers of the hosts with the
//! most peers, and a new peer does not wait.
//!
//! [`Gated`] limits the bytes that a peer may send before its admission.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;

use super::listen::{register, usable_descriptors};

/// Largest read from a peer before its admission, in bytes.
const GATED_READ_BYTES: usize = 4 * 1024;

/// Number of peers that may wait for a slot, and number of peers that may wait for the rest of a PROXY protocol header,
/// each as a multiple of the slots. A waiting peer costs its socket and about 2 KiB.
const QUEUE_FACTOR: usize = 8;

/// The peers are spread over many hosts if no host has more than this part of the slots.
const SPREAD_FACTOR: usize = 32;

/// Pause of a new peer between two attempts to get a slot.
const RETRY: Duration = Duration::from_millis(50);

/// Limits of a listener for peers that are not admitted yet.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionLimits {
    /// Largest number of peers that wait for admission at once. Eight times as many more may wait for
    /// a slot.
    pub peers: usize,
    /// Largest number of bytes read from a peer before its admission.
    pub bytes: usize,
    /// Time for a peer to be admitted, from its accept.
    pub deadline: Duration,
    /// Age at which a peer may be displaced by another peer of the same host: the longest time that an honest
    /// peer needs, also while many others connect.
    pub grace: Duration,
}

/// The slots of a listener.
pub struct Admission {
    limits: AdmissionLimits,
    hosts: Mutex<Hosts>,
    /// Number of peers that wait for a slot.
    for_slots: AtomicUsize,
    /// Number of peers that wait for the rest of their headers. Peers whose addresses are not known yet cannot displace
    /// other peers, so peers that wait for slots must not use up the places.
    for_headers: AtomicUsize,
}

#[derive(Default)]
struct Hosts {
    last: u64,
    len: usize,
    /// Peers by host, from oldest to newest.
    peers: HashMap<u64, BTreeMap<u64, Peer>>,
}

struct Peer {
    since: Instant,
    has_sent: bool,
    displaced: CancellationToken,
}

/// Reason for closing a peer before its admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unadmitted {
    /// The deadline has passed.
    #[error("not authenticated in time")]
    Late,
    /// A newer peer got the slot, or no slot was free.
    #[error("displaced: too many peers wait for authentication")]
    Displaced,
}

/// A peer that is not admitted yet. Dropping the value frees its slot.
pub struct Candidate {
    /// `None` once the peer is admitted.
    slot: Mutex<Option<Slot>>,
    is_admitted: AtomicBool,
    /// Waker of the task that reads from the peer.
    reader: AtomicWaker,
    deadline: Instant,
    displaced: CancellationToken,
}

struct Slot {
    admission: Arc<Admission>,
    host: u64,
    id: u64,
}

/// Stream of a peer. Before the admission of the peer, reads stop at a limit.
pub struct Gated<S> {
    inner: S,
    /// Bytes that may be read before the admission.
    left: usize,
    /// `None` once the peer is admitted.
    candidate: Option<Arc<Candidate>>,
}

/// Counts a waiting peer until dropped.
pub(super) struct Waiting<'a>(&'a AtomicUsize);

impl Admission {
    /// Creates the slots of a listener.
    pub fn new(limits: AdmissionLimits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            hosts: Mutex::default(),
            for_slots: AtomicUsize::new(0),
            for_headers: AtomicUsize::new(0),
        })
    }

    /// Takes a slot for a peer of the host `from`, accepted at `since`. May wait, see the module.
    ///
    /// # Errors
    /// Fails if no slot became free before the peer's deadline.
    pub async fn enter(
        self: &Arc<Self>,
        from: IpAddr,
        since: Instant,
    ) -> Result<Arc<Candidate>, Unadmitted> {
        let deadline = since + self.limits.deadline;
        let host = host_key(from);
        if let Some(candidate) = self.take(host, deadline) {
            return Ok(candidate);
        }
        let _waiting = self.wait(&self.for_slots)?;
        let taken = async {
            loop {
                sleep(RETRY).await;
                if let Some(candidate) = self.take(host, deadline) {
                    return candidate;
                }
            }
        };
        let taken = timeout_at(deadline, taken).await;
        taken.map_err(|_| Unadmitted::Displaced)
    }

    /// Takes a slot for a peer of the host `from`, whose first packet came at `since`, without waiting.
    ///
    /// # Errors
    /// Fails if no slot is free.
    pub fn try_enter(
        self: &Arc<Self>,
        from: IpAddr,
        since: Instant,
    ) -> Result<Arc<Candidate>, Unadmitted> {
        let taken = self.take(host_key(from), since + self.limits.deadline);
        taken.ok_or(Unadmitted::Displaced)
    }

    /// Limits the bytes read from a peer before its admission.
    pub fn gate<S>(&self, stream: S, candidate: &Arc<Candidate>) -> Gated<S> {
        Gated {
            inner: stream,
            left: self.limits.bytes,
            candidate: Some(candidate.clone()),
        }
    }

    /// Counts a peer that waits for the rest of its header.
    ///
    /// # Errors
    /// Fails if too many peers wait for their headers.
    pub(super) fn wait_for_header(&self) -> Result<Waiting<'_>, Unadmitted> {
        self.wait(&self.for_headers)
    }

    fn wait<'a>(&self, count: &'a AtomicUsize) -> Result<Waiting<'a>, Unadmitted> {
        // Waiting peers must not use up the descriptors of a process with a small limit.
        let descriptors = usize::try_from(usable_descriptors() / 8).unwrap_or(usize::MAX);
        let limit = (QUEUE_FACTOR * self.limits.peers).min(descriptors);
        let one_more = |count| (count < limit).then_some(count + 1);
        let counted = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        counted.map_err(|_| Unadmitted::Displaced)?;
        Ok(Waiting(count))
    }

    /// Returns the number of slots in use.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.hosts.lock().len
    }

    fn take(self: &Arc<Self>, host: u64, deadline: Instant) -> Option<Arc<Candidate>> {
        let mut hosts = self.hosts.lock();
        if hosts.len >= self.limits.peers && !hosts.displace(host, &self.limits) {
            return None;
        }
        hosts.last += 1;
        hosts.len += 1;
        let (id, displaced) = (hosts.last, CancellationToken::new());
        let peer = Peer {
            since: Instant::now(),
            has_sent: false,
            displaced: displaced.clone(),
        };
        hosts.peers.entry(host).or_default().insert(id, peer);
        let slot = Slot {
            admission: self.clone(),
            host,
            id,
        };
        Some(Arc::new(Candidate {
            slot: Mutex::new(Some(slot)),
            is_admitted: AtomicBool::new(false),
            reader: AtomicWaker::new(),
            deadline,
            displaced,
        }))
    }
}

impl Hosts {
    /// Frees a slot for a peer of `host`. Returns false if no peer may be displaced yet.
    fn displace(&mut self, host: u64, limits: &AdmissionLimits) -> bool {
        let crowd = self.peers.iter().max_by_key(|(_, peers)| peers.len());
        let Some((&crowd, peers)) = crowd else {
            return false;
        };
        let is_spread = peers.len() <= limits.peers / SPREAD_FACTOR;
        let has_grace = !is_spread && crowd == host;
        let now = Instant::now();
        let is_old = |peer: &Peer| now.duration_since(peer.since) >= limits.grace;
        // Peers that wait ask often; without an old peer there is nothing to search.
        if has_grace && !peers.values().next().is_some_and(is_old) {
            return false;
        }
        let hosts = self.peers.iter();
        let hosts = hosts.filter(|(host, _)| is_spread || **host == crowd);
        let all = hosts.flat_map(|(host, peers)| {
            let of_host = peers.iter();
            of_host.map(move |(id, peer)| (*host, *id, peers.len(), peer))
        });
        let first = all.min_by_key(|(_, id, count, peer)| (peer.has_sent, Reverse(*count), *id));
        // A peer that has sent something keeps its slot while a silent peer is not old yet.
        let first = first.filter(|(.., peer)| !has_grace || is_old(peer));
        let Some((host, id, ..)) = first else {
            return false;
        };
        if let Some(peer) = self.remove(host, id) {
            peer.displaced.cancel();
        }
        true
    }

    fn remove(&mut self, host: u64, id: u64) -> Option<Peer> {
        let peers = self.peers.get_mut(&host)?;
        let peer = peers.remove(&id)?;
        if peers.is_empty() {
            self.peers.remove(&host);
        }
        self.len -= 1;
        Some(peer)
    }
}

impl Candidate {
    /// Admits the peer: frees its slot, and lifts the limits.
    pub fn admit(&self) {
        self.is_admitted.store(true, Ordering::Release);
        self.slot.lock().take();
        self.reader.wake();
    }

    /// Runs a step towards the admission of the peer.
    ///
    /// # Errors
    /// Fails if the deadline passes or a newer peer gets the slot.
    pub async fn run<T>(&self, step: impl Future<Output = T>) -> Result<T, Unadmitted> {
        tokio::select! {
            biased;
            why = self.refused() => Err(why),
            done = step => Ok(done),
        }
    }

    /// Resolves once the deadline has passed or a newer peer has got the slot. Never resolves after the
    /// admission.
    pub async fn refused(&self) -> Unadmitted {
        let why = tokio::select! {
            () = self.displaced.cancelled() => Unadmitted::Displaced,
            () = sleep_until(self.deadline) => Unadmitted::Late,
        };
        if self.is_admitted.load(Ordering::Acquire) {
            return std::future::pending().await;
        }
        why
    }

    /// Returns true if a newer peer has got the slot.
    pub fn is_displaced(&self) -> bool {
        self.displaced.is_cancelled()
    }

    /// Records that the peer has sent something. A gated stream does this on its own.
    pub fn has_sent(&self) {
        let slot = self.slot.lock();
        let Some(slot) = &*slot else { return };
        let mut hosts = slot.admission.hosts.lock();
        let peers = hosts.peers.get_mut(&slot.host);
        if let Some(peer) = peers.and_then(|peers| peers.get_mut(&slot.id)) {
            peer.has_sent = true;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.admission.hosts.lock().remove(self.host, self.id);
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Gated ===

impl<S> Gated<S> {
    /// Returns the stream of the peer.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl Gated<TcpStream> {
    /// Moves the connection to the caller's runtime. Tasks that already wait for the connection are not woken anymore.
    ///
    /// # Errors
    /// Fails if the process has too many open files; the connection then stays where it is.
    pub fn rebind(&mut self) -> io::Result<()> {
        self.inner = register(&self.inner)?;
        Ok(())
    }
}

impl<S: AsFd> AsFd for Gated<S> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gated<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        target: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let Some(candidate) = &this.candidate else {
            return Pin::new(&mut this.inner).poll_read(cx, target);
        };
        candidate.reader.register(cx.waker());
        if candidate.is_admitted.load(Ordering::Acquire) {
            this.candidate = None;
            return Pin::new(&mut this.inner).poll_read(cx, target);
        }
        let mut scratch = [0; GATED_READ_BYTES];
        let room = target.remaining().min(this.left).min(GATED_READ_BYTES);
        let Some(scratch) = scratch.get_mut(..room).filter(|part| !part.is_empty()) else {
            // Wakes at the admission; without it, the owner closes the connection.
            return Poll::Pending;
        };
        let mut part = ReadBuf::new(scratch);
        ready!(Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
        let read = part.filled();
        if !read.is_empty() {
            candidate.has_sent();
        }
        this.left -= read.len();
        target.put_slice(read);
        Poll::Ready(Ok(()))
    }
}

culvert_stream::delegate_write!(Gated);

/// Returns a key for the host of an address. IPv6 addresses are grouped by /64 network, because one host may use a
/// whole /64.
pub fn host_key(address: IpAddr) -> u64 {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => (v6.to_bits() >> 64) as u64 | 1 << 63,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const LIMITS: AdmissionLimits = AdmissionLimits {
        peers: 4,
        bytes: 8,
        deadline: Duration::from_secs(15),
        grace: Duration::from_secs(1),
    };

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    async fn enter(admission: &Arc<Admission>, from: &str) -> Arc<Candidate> {
        let now = Instant::now();
        admission.enter(address(from), now).await.unwrap()
    }

    fn displaced(candidates: &[&Arc<Candidate>]) -> Vec<bool> {
        let is_displaced = |candidate: &&Arc<Candidate>| candidate.displaced.is_cancelled();
        candidates.iter().map(is_displaced).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn host_with_most_peers_loses_its_oldest_silent_peer_at_once() {
        let admission = Admission::new(LIMITS);
        let lone = enter(&admission, "192.0.2.1").await;
        let first = enter(&admission, "192.0.2.9").await;
        first.has_sent();
        let second = enter(&admission, "::ffff:192.0.2.9").await;
        let third = enter(&admission, "192.0.2.9").await;
        let started = Instant::now();
        let newcomer = enter(&admission, "192.0.2.2").await;
        assert_eq!(started.elapsed(), Duration::ZERO);
        let all = [&lone, &first, &second, &third, &newcomer];
        assert_eq!(displaced(&all), [false, false, true, false, false]);
        assert_eq!(
            second.run(std::future::pending::<()>()).await,
            Err(Unadmitted::Displaced)
        );
        assert_eq!(admission.len(), 4);
        // A displaced peer does not free a second slot.
        drop(second);
        assert_eq!(admission.len(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn peer_that_does_not_wait_gets_a_free_slot_or_none() {
        let admission = Admission::new(LIMITS);
        let of_crowd = || admission.try_enter(address("192.0.2.9"), Instant::now());
        let crowd: Vec<_> = (0..4).map(|_| of_crowd().unwrap()).collect();
        assert_eq!(of_crowd().map(drop), Err(Unadmitted::Displaced));
        let other = admission.try_enter(address("192.0.2.1"), Instant::now());
        assert!(other.is_ok() && crowd[0].is_displaced());
        assert_eq!(admission.for_slots.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn silent_peers_of_many_hosts_do_not_displace_a_peer_that_has_sent() {
        let limits = AdmissionLimits {
            peers: 2 * SPREAD_FACTOR,
            ..LIMITS
        };
        let admission = Admission::new(limits);
        let mut honest = Vec::new();
        for _ in 0..2 {
            let candidate = enter(&admission, "192.0.2.1").await;
            candidate.has_sent();
            honest.push(candidate);
        }
        let mut silent = Vec::new();
        for number in 0..u8::MAX {
            silent.push(enter(&admission, &format!("198.51.100.{number}")).await);
        }
        assert_eq!(displaced(&[&honest[0], &honest[1]]), [false, false]);
        let newest = silent.len() - (limits.peers - honest.len());
        let expected = (0..silent.len()).map(|number| number < newest);
        let silent: Vec<_> = silent.iter().collect();
        assert_eq!(displaced(&silent), expected.collect::<Vec<_>>());
    }

    #[tokio::test(start_paused = true)]
    async fn silent_peers_of_one_host_go_before_an_older_peer_that_has_sent() {
        let admission = Admission::new(LIMITS);
        let honest = enter(&admission, "192.0.2.1").await;
        honest.has_sent();
        tokio::time::sleep(LIMITS.grace / 2).await;
        let mut silent = Vec::new();
        for _ in 1..LIMITS.peers {
            silent.push(enter(&admission, "192.0.2.1").await);
        }
        let newcomer = enter(&admission, "192.0.2.1").await;
        let all = [&honest, &silent[0], &silent[1], &newcomer];
        assert_eq!(displaced(&all), [false, true, false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn peers_of_one_host_wait_until_an_older_peer_had_its_time() {
        let admission = Admission::new(LIMITS);
        let mut all = Vec::new();
        for _ in 0..LIMITS.peers {
            all.push(enter(&admission, "2001:db8::1").await);
        }
        let started = Instant::now();
        let newcomer = enter(&admission, "2001:db8::2").await;
        let waited = started.elapsed();
        assert!(waited >= LIMITS.grace && waited < 2 * LIMITS.grace);
        assert_eq!(
            displaced(&[&all[0], &all[1], &newcomer]),
            [true, false, false]
        );
        // A slot that becomes free is used without a displacement.
        all.pop();
        let started = Instant::now();
        enter(&admission, "2001:db8::3").await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn step_ends_at_the_deadline_that_starts_at_the_accept() {
        let admission = Admission::new(LIMITS);
        let candidate = enter(&admission, "192.0.2.1").await;
        sleep(LIMITS.deadline / 2).await;
        let started = Instant::now();
        let outcome = candidate.run(std::future::pending::<()>()).await;
        assert_eq!(outcome, Err(Unadmitted::Late));
        assert_eq!(started.elapsed(), LIMITS.deadline / 2);
        drop(candidate);
        assert_eq!(admission.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn reads_stop_at_the_limit_until_the_admission() {
        let admission = Admission::new(LIMITS);
        let candidate = enter(&admission, "192.0.2.1").await;
        let (mut peer, stream) = tokio::io::duplex(64);
        let mut stream = admission.gate(stream, &candidate);
        peer.write_all(b"0123456789").await.unwrap();
        let mut read = [0; 8];
        stream.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"01234567");
        let is_silent = |hosts: &Hosts| {
            let peers = hosts.peers.values().flatten();
            peers.filter(|(_, peer)| !peer.has_sent).count()
        };
        assert_eq!(is_silent(&admission.hosts.lock()), 0);
        let rest = async {
            let mut rest = [0; 2];
            stream.read_exact(&mut rest).await.unwrap();
            rest
        };
        let admit = async {
            sleep(LIMITS.deadline / 2).await;
            candidate.admit();
        };
        let (rest, ()) = tokio::join!(rest, admit);
        assert_eq!(&rest, b"89");
        assert_eq!(admission.len(), 0);
        // The deadline has no meaning after the admission.
        let refused = candidate.run(sleep(LIMITS.deadline)).await;
        assert_eq!(refused, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn number_of_peers_that_wait_for_a_slot_is_limited() {
        let admission = Admission::new(LIMITS);
        let enter = || admission.enter(address("192.0.2.1"), Instant::now());
        let all = futures_util::future::join_all((0..60).map(|_| enter())).await;
        let refused = all.iter().filter(|entered| entered.is_err()).count();
        assert_eq!(refused, 60 - (1 + QUEUE_FACTOR) * LIMITS.peers);
    }
}
