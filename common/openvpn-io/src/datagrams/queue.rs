//! Datagrams that wait to be sent, and how many of them go out in one call.
//!
//! The kernel cuts what it is given into datagrams of one length, of which the last may be shorter
//! (generic segmentation offload). So a batch is a run of equal lengths to one address.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use bytes::{Buf as _, BytesMut};
use quinn_udp::{Transmit, is_msg_size_err};

/// The most that one call takes: what an IPv6 or IPv4 packet can hold, without headers.
const MAX_BATCH: usize = u16::MAX as usize - 48;

/// See the module.
#[derive(Debug)]
pub(super) struct Queue {
    out: BytesMut,
    /// Where the datagrams in `out` go, and their lengths.
    cuts: VecDeque<(SocketAddr, usize)>,
    /// The first datagrams were refused as a batch: they go one by one.
    singly: usize,
    /// Datagrams of this length or more do not fit a path whole. The kernel sends them in fragments,
    /// but does not cut batches into such.
    oversize: usize,
}

impl Queue {
    pub(super) fn new() -> Self {
        Self {
            out: BytesMut::new(),
            cuts: VecDeque::new(),
            singly: 0,
            oversize: usize::MAX,
        }
    }

    /// Where datagrams are appended; after each, [`cut`](Self::cut).
    pub(super) fn out(&mut self) -> &mut BytesMut {
        &mut self.out
    }

    /// What was appended behind `start` is a datagram.
    pub(super) fn cut(&mut self, to: SocketAddr, start: usize) {
        if self.out.len() > start {
            self.cuts.push_back((to, self.out.len() - start));
        }
    }

    /// Bytes that wait.
    pub(super) fn len(&self) -> usize {
        self.out.len()
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.out.clear();
        self.cuts.clear();
        self.singly = 0;
    }

    /// What the next call takes, no more than `most` datagrams.
    pub(super) fn next(&self, most: usize) -> Option<(Batch, Transmit<'_>)> {
        let (destination, length) = self.cuts.front().copied()?;
        let most = match self.singly > 0 || length >= self.oversize {
            true => 1,
            false => most,
        };
        let batch = Batch::first_of(self.cuts.iter().copied(), most)?;
        let transmit = Transmit {
            destination,
            ecn: None,
            contents: self.out.get(..batch.bytes)?,
            segment_size: (batch.datagrams > 1).then_some(length),
            src_ip: None,
        };
        Some((batch, transmit))
    }

    /// What became of it. Not to be told while the socket takes nothing.
    pub(super) fn sent(&mut self, batch: Batch, result: io::Result<()>) {
        match result {
            // Nothing has left: a driver cannot cut them (EIO, EINVAL), the path is too narrow, or an
            // earlier datagram was answered by ICMP.
            Err(error) if batch.datagrams > 1 => {
                self.singly = batch.datagrams;
                if is_msg_size_err(&error)
                    && let Some((_, length)) = self.cuts.front()
                {
                    self.oversize = self.oversize.min(*length);
                }
            }
            // A datagram may be lost anyway. What ends the session is silence.
            Ok(()) | Err(_) => {
                self.cuts.drain(..batch.datagrams.min(self.cuts.len()));
                self.out.advance(batch.bytes.min(self.out.len()));
                self.singly = self.singly.saturating_sub(batch.datagrams);
            }
        }
    }
}

/// The first datagrams of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) datagrams: usize,
    pub(super) bytes: usize,
}

impl Batch {
    /// The longest that one call takes, of at least one and at most `most` datagrams.
    pub(super) fn first_of(
        cuts: impl IntoIterator<Item = (SocketAddr, usize)>,
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

    use proptest::prelude::*;

    use super::*;

    const EIO: i32 = 5;
    const EMSGSIZE: i32 = 90;

    fn address(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    fn first(cuts: &[(u16, usize)], most: usize) -> (usize, usize) {
        let cuts = cuts.iter().map(|(port, length)| (address(*port), *length));
        let batch = Batch::first_of(cuts, most).unwrap();
        (batch.datagrams, batch.bytes)
    }

    fn queue(cuts: &[(u16, usize)]) -> Queue {
        let mut queue = Queue::new();
        for (index, (port, length)) in cuts.iter().enumerate() {
            let start = queue.len();
            queue.out().resize(start + length, index as u8);
            queue.cut(address(*port), start);
        }
        queue
    }

    /// Sends all with a kernel of which `take` says how it answers a call.
    fn run(queue: &mut Queue, mut take: impl FnMut(usize, usize) -> io::Result<()>) -> Vec<usize> {
        let mut calls = Vec::new();
        while let Some((batch, transmit)) = queue.next(64) {
            let size = transmit.segment_size.unwrap_or(transmit.contents.len());
            let taken = take(batch.datagrams, size);
            calls.push(batch.datagrams);
            queue.sent(batch, taken);
        }
        assert_eq!((queue.len(), queue.cuts.len(), queue.singly), (0, 0, 0));
        calls
    }

    #[test]
    fn a_batch_is_a_run_of_equal_lengths_to_one_address() {
        assert_eq!(Batch::first_of([], 64), None);
        assert_eq!(first(&[(1, 100)], 64), (1, 100));
        assert_eq!(first(&[(1, 100), (1, 100), (2, 100)], 64), (2, 200));
        // A shorter one is the last, a longer one begins anew.
        assert_eq!(first(&[(1, 100), (1, 60), (1, 60)], 64), (2, 160));
        assert_eq!(first(&[(1, 100), (1, 101)], 64), (1, 100));
        assert_eq!(first(&[(1, 100); 100], 64), (64, 6400));
        assert_eq!(first(&[(1, 100); 100], 1), (1, 100));
        assert_eq!(first(&[(1, 1448); 100], 64), (45, 65_160));
        assert_eq!(first(&[(1, 70_000); 2], 64), (1, 70_000));
    }

    #[test]
    fn what_is_refused_as_a_batch_goes_one_by_one() {
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
    fn what_does_not_fit_the_path_is_never_batched_again() {
        let lengths = [90, 90, 90, 40, 90, 40, 40];
        let mut queue = queue(&lengths.map(|length| (1, length)));
        let calls = run(&mut queue, |count, size| match count > 1 && size > 50 {
            true => Err(io::Error::from_raw_os_error(EMSGSIZE)),
            false => Ok(()),
        });
        assert_eq!(calls, [4, 1, 1, 1, 1, 1, 2]);
    }

    #[test]
    fn a_datagram_that_nobody_takes_does_not_stop_the_next() {
        let mut queue = queue(&[(1, 70_000), (1, 10), (1, 10)]);
        let calls = run(&mut queue, |_, size| match size > 65_507 {
            true => Err(io::Error::from_raw_os_error(EMSGSIZE)),
            false => Ok(()),
        });
        assert_eq!(calls, [1, 2]);
    }

    proptest! {
        #[test]
        fn all_leave_in_order(
            cuts in prop::collection::vec((1_u16..3, prop_oneof![1_usize..4, Just(1448)]), 0..200),
            most in 1_usize..65,
            fails in prop::collection::vec(any::<bool>(), 0..50),
        ) {
            let mut fails = fails.into_iter();
            let mut queue = queue(&cuts);
            let mut left = Vec::new();
            while let Some((batch, transmit)) = queue.next(most) {
                prop_assert!(batch.datagrams <= most);
                if batch.datagrams > 1 && fails.next().unwrap_or(false) {
                    queue.sent(batch, Err(io::Error::from_raw_os_error(EIO)));
                    continue;
                }
                let size = transmit.segment_size.unwrap_or(transmit.contents.len());
                for datagram in transmit.contents.chunks(size) {
                    left.push((transmit.destination, datagram.to_vec()));
                }
                queue.sent(batch, Ok(()));
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
