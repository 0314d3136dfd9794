//! The send queue of datagrams, and the choice of datagrams for one system call.
//!
//! With generic segmentation offload the kernel splits one buffer into datagrams of equal length; only the
//! last datagram may be shorter. A batch is therefore a run of equal lengths to one address.

use std::collections::VecDeque;
use std::io;

use bytes::{Buf as _, BytesMut};
use culvert_openvpn::hub::Path;
use quinn_udp::{Transmit, is_msg_size_err};

use super::path_mtu::PathMtus;
use crate::Moment;

/// Largest batch, in bytes: the largest IP packet minus 48 bytes for IPv6 and UDP headers. IPv4 headers are
/// smaller.
const MAX_BATCH: usize = u16::MAX as usize - 48;

/// Datagrams in one buffer, in sending order; see the module documentation.
#[derive(Debug)]
pub(super) struct Queue {
    out: BytesMut,
    /// Addresses and lengths of the datagrams in `out`.
    cuts: VecDeque<(Path, usize)>,
    /// Number of datagrams at the front to send one by one, after the kernel refused them as a batch.
    singly: usize,
    /// Datagrams that exceed the path MTU. The kernel sends such datagrams in fragments, but does not split batches
    /// of them.
    mtus: PathMtus,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            out: BytesMut::new(),
            cuts: VecDeque::new(),
            singly: 0,
            mtus: PathMtus::default(),
        }
    }

    /// Returns the buffer. Callers append a datagram and then call [`cut`](Self::cut).
    pub(super) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// Ends the datagram that was appended at `start`.
    pub(super) fn cut(&mut self, to: Path, start: usize) {
        if self.out.len() > start {
            self.cuts.push_back((to, self.out.len() - start));
        }
    }

    /// Returns the number of queued bytes.
    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    /// Drops all datagrams.
    pub(super) fn clear(&mut self) {
        self.out.clear();
        self.cuts.clear();
        self.singly = 0;
    }

    /// Returns the contents of the next system call: at most `most` datagrams.
    pub(super) fn next(&self, most: usize, now: Moment) -> Option<(Batch, Transmit<'_>)> {
        let (path, length) = self.cuts.front().copied()?;
        let destination = path.remote;
        let is_batch = self.singly == 0 && self.mtus.permits_batch(destination, length, now);
        let most = if is_batch { most } else { 1 };
        let batch = Batch::first_of(self.cuts.iter().copied(), most)?;
        let transmit = Transmit {
            destination,
            ecn: None,
            contents: self.out.get(..batch.bytes)?,
            segment_size: (batch.datagrams > 1).then_some(length),
            src_ip: path.local,
        };
        Some((batch, transmit))
    }

    /// Returns true if the next datagram has a source address.
    fn has_source(&self) -> bool {
        let next = self.cuts.front();
        next.is_some_and(|(path, _)| path.local.is_some())
    }

    /// Processes the result of a system call. Must not be called for `WouldBlock`.
    pub(super) fn sent(&mut self, batch: Batch, result: io::Result<()>, now: Moment) -> Sent {
        match result {
            // The machine no longer has the source address: the kernel chooses another one. For a batch, EINVAL may also
            // mean a small path MTU (Linux before 6.14), so its datagrams are first sent one by one.
            Err(error)
                if is_source_missing(&error)
                    && self.has_source()
                    && (batch.datagrams == 1 || error.kind() != io::ErrorKind::InvalidInput) =>
            {
                for (path, _) in self.cuts.iter_mut().take(batch.datagrams) {
                    path.local = None;
                }
                return Sent::SourceRefused;
            }
            // The kernel sent nothing: the driver cannot split the batch (EIO, EINVAL), the path MTU is too
            // small, or an ICMP error for an earlier datagram was pending.
            Err(error) if batch.datagrams > 1 => {
                self.singly = batch.datagrams;
                if is_msg_size_err(&error)
                    && let Some((to, length)) = self.cuts.front()
                {
                    self.mtus.refused(to.remote, *length, now);
                }
            }
            // UDP may lose any datagram. Only silence of the peer ends the session.
            Ok(()) | Err(_) => {
                self.cuts.drain(..batch.datagrams.min(self.cuts.len()));
                self.out.advance(batch.bytes.min(self.out.len()));
                self.singly = self.singly.saturating_sub(batch.datagrams);
            }
        }
        Sent::Processed
    }
}

/// Returns true for the errors of the kernel about a source address that the machine does not have.
fn is_source_missing(error: &io::Error) -> bool {
    use io::ErrorKind::{AddrNotAvailable, InvalidInput, NetworkUnreachable};
    matches!(
        error.kind(),
        AddrNotAvailable | InvalidInput | NetworkUnreachable
    )
}

/// Consequence of a system call for the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// The socket is unchanged.
    Processed,
    /// The kernel refused the source address.
    SourceRefused,
}

/// The datagrams at the front of a queue that one system call sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) datagrams: usize,
    pub(super) bytes: usize,
}

impl Batch {
    /// Returns the longest batch that one system call accepts, between one and `most` datagrams.
    pub(super) fn first_of(
        cuts: impl IntoIterator<Item = (Path, usize)>,
        most: usize,
    ) -> Option<Self> {
        let mut cuts = cuts.into_iter();
        let (to, length) = cuts.next()?;
        let mut batch = Self {
            datagrams: 1,
            bytes: length,
        };
        for (other, next) in cuts {
            let fits = other == to && next <= length && batch.bytes + next <= MAX_BATCH;
            if !fits || batch.datagrams >= most {
                break;
            }
            batch.datagrams += 1;
            batch.bytes += next;
            if next < length {
                break;
            }
        }
        Some(batch)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::{IpAddr, SocketAddr};

    use proptest::prelude::*;

    use super::*;

    const EIO: i32 = 5;
    const EMSGSIZE: i32 = 90;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn first(cuts: &[(u16, usize)], most: usize) -> (usize, usize) {
        let cuts = cuts
            .iter()
            .map(|(port, length)| (address(*port).into(), *length));
        let batch = Batch::first_of(cuts, most).unwrap();
        (batch.datagrams, batch.bytes)
    }

    fn queue(cuts: &[(u16, usize)]) -> Queue {
        let mut queue = Queue::new();
        for (index, (port, length)) in cuts.iter().enumerate() {
            let start = queue.len();
            queue.out().resize(start + length, index as u8);
            queue.cut(address(*port).into(), start);
        }
        queue
    }

    /// Sends the whole queue. `take` simulates the kernel's result of each call.
    fn run(queue: &mut Queue, mut take: impl FnMut(usize, usize) -> io::Result<()>) -> Vec<usize> {
        let mut calls = Vec::new();
        while let Some((batch, transmit)) = queue.next(64, crate::now()) {
            let size = transmit.segment_size.unwrap_or(transmit.contents.len());
            let taken = take(batch.datagrams, size);
            calls.push(batch.datagrams);
            queue.sent(batch, taken, crate::now());
        }
        assert_eq!((queue.len(), queue.cuts.len(), queue.singly), (0, 0, 0));
        calls
    }

    #[test]
    fn a_batch_is_a_run_of_equal_lengths_to_one_address() {
        assert_eq!(Batch::first_of([], 64), None);
        assert_eq!(first(&[(1, 100)], 64), (1, 100));
        assert_eq!(first(&[(1, 100), (1, 100), (2, 100)], 64), (2, 200));
        // A shorter datagram ends a batch, and a longer datagram starts a new batch.
        assert_eq!(first(&[(1, 100), (1, 60), (1, 60)], 64), (2, 160));
        assert_eq!(first(&[(1, 100), (1, 101)], 64), (1, 100));
        assert_eq!(first(&[(1, 100); 100], 64), (64, 6400));
        assert_eq!(first(&[(1, 100); 100], 1), (1, 100));
        assert_eq!(first(&[(1, 1448); 100], 64), (45, 65_160));
        assert_eq!(first(&[(1, 70_000); 2], 64), (1, 70_000));
    }

    #[test]
    fn refused_batch_is_sent_one_by_one() {
        let mut queue = queue(&[(1, 9), (1, 9), (1, 9), (2, 9), (2, 9)]);
        let mut refused = false;
        let calls = run(&mut queue, |count, _| match count > 1 && !refused {
            true => {
                refused = true;
                Err(io::Error::from_raw_os_error(EIO))
            }
            false => Ok(()),
        });
        assert_eq!(calls, [3, 1, 1, 1, 2]);
    }

    #[test]
    fn datagrams_above_the_path_mtu_are_not_batched_again() {
        let lengths = [90, 90, 90, 40, 90, 40, 40];
        let mut queue = queue(&lengths.map(|length| (1, length)));
        let calls = run(&mut queue, |count, size| match count > 1 && size > 50 {
            true => Err(io::Error::from_raw_os_error(EMSGSIZE)),
            false => Ok(()),
        });
        assert_eq!(calls, [4, 1, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn small_path_mtu_of_one_destination_leaves_others_their_batches() {
        let mut queue = queue(&[(1, 90), (1, 90), (2, 90), (2, 90), (1, 90), (1, 90)]);
        let mut refused = false;
        let calls = run(&mut queue, |count, _| match count > 1 && !refused {
            true => {
                refused = true;
                Err(io::Error::from_raw_os_error(EMSGSIZE))
            }
            false => Ok(()),
        });
        assert_eq!(calls, [2, 1, 1, 2, 1, 1]);
    }

    #[test]
    fn datagrams_leave_without_a_source_address_that_the_machine_has_lost() {
        let mut queue = queue(&[(1, 90), (1, 90)]);
        for (path, _) in &mut queue.cuts {
            path.local = Some(IpAddr::from([192, 0, 2, 9]));
        }
        let now = crate::now();
        let (batch, transmit) = queue.next(64, now).unwrap();
        assert!(transmit.src_ip.is_some());
        queue.sent(batch, Err(io::ErrorKind::NetworkUnreachable.into()), now);
        let (batch, transmit) = queue.next(64, now).unwrap();
        assert_eq!((batch.datagrams, transmit.src_ip), (2, None));
    }

    #[test]
    fn batch_with_einval_keeps_its_source_address_unless_a_single_datagram_fails() {
        let mut queue = queue(&[(1, 90), (1, 90), (1, 90)]);
        let local = Some(IpAddr::from([192, 0, 2, 9]));
        for (path, _) in &mut queue.cuts {
            path.local = local;
        }
        let now = crate::now();
        let invalid = || Err(io::ErrorKind::InvalidInput.into());
        let (batch, _) = queue.next(64, now).unwrap();
        assert_eq!(queue.sent(batch, invalid(), now), Sent::Processed);
        let (batch, transmit) = queue.next(64, now).unwrap();
        assert_eq!((batch.datagrams, transmit.src_ip), (1, local));
        assert_eq!(queue.sent(batch, Ok(()), now), Sent::Processed);
        let (batch, transmit) = queue.next(64, now).unwrap();
        assert_eq!((batch.datagrams, transmit.src_ip), (1, local));
        assert_eq!(queue.sent(batch, invalid(), now), Sent::SourceRefused);
        let (_, transmit) = queue.next(64, now).unwrap();
        assert_eq!(transmit.src_ip, None);
    }

    #[test]
    fn undeliverable_datagram_does_not_block_the_next() {
        let mut queue = queue(&[(1, 70_000), (1, 10), (1, 10)]);
        let calls = run(&mut queue, |_, size| match size > 65_507 {
            true => Err(io::Error::from_raw_os_error(EMSGSIZE)),
            false => Ok(()),
        });
        assert_eq!(calls, [1, 2]);
    }

    proptest! {
        #[test]
        fn all_datagrams_are_sent_in_order(
            cuts in prop::collection::vec((1_u16..3, prop_oneof![1_usize..4, Just(1448)]), 0..200),
            most in 1_usize..65,
            fails in prop::collection::vec(any::<bool>(), 0..50),
        ) {
            let mut fails = fails.into_iter();
            let mut queue = queue(&cuts);
            let mut left = Vec::new();
            let now = crate::now();
            while let Some((batch, transmit)) = queue.next(most, now) {
                prop_assert!(batch.datagrams <= most);
                if batch.datagrams > 1 && fails.next().unwrap_or(false) {
                    queue.sent(batch, Err(io::Error::from_raw_os_error(EIO)), now);
                    continue;
                }
                let size = transmit.segment_size.unwrap_or(transmit.contents.len());
                for datagram in transmit.contents.chunks(size) {
                    left.push((transmit.destination, datagram.to_vec()));
                }
                queue.sent(batch, Ok(()), now);
            }
            let expected: Vec<(SocketAddr, Vec<u8>)> = cuts
                .iter()
                .enumerate()
                .map(|(index, (port, length))| (address(*port), vec![index as u8; *length]))
                .collect();
            prop_assert_eq!(left, expected);
        }
    }
}
