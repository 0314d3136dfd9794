//! Port numbers that no other test process uses.
//!
//! The programs' flags accept ports 1024 to 49151 but not 0, so the system cannot choose a port. Ports are
//! allocated in blocks below the ephemeral range. A listener on the first port of a block is the lock of the
//! block: this lock works across processes, and the kernel always releases the lock of a dead process.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

use rand::Rng as _;

/// Range of all blocks. Linux assigns ports from 32768 up on its own.
const RANGE: Range<u16> = 10_000..32_000;

/// Number of ports in a block, including the lock.
pub const BLOCK: u16 = 20;

/// A block of ports, locked until the value is dropped.
#[derive(Debug)]
pub struct PortBlock {
    _lock: TcpListener,
    left: Range<u16>,
}

impl PortBlock {
    /// Allocates a free block.
    ///
    /// # Panics
    /// If every block is in use.
    pub fn allocate() -> Self {
        let blocks = (RANGE.end - RANGE.start) / BLOCK;
        // A random start, so that different processes rarely try the same blocks.
        let start = rand::rng().random_range(0..blocks);
        (0..blocks)
            .map(|i| RANGE.start + (start + i) % blocks * BLOCK)
            .find_map(Self::lock)
            .expect("a free block of ports")
    }

    fn lock(first: u16) -> Option<Self> {
        let lock = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()?;
        Some(Self {
            _lock: lock,
            left: first + 1..first + BLOCK,
        })
    }

    /// Returns the next port of the block that has no listener; `None` when the block is used up.
    pub fn next_port(&mut self) -> Option<u16> {
        // A bind to all addresses fails if any address has a listener on the port.
        self.left
            .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
    }
}

/// An unlimited supply of ports: allocates blocks as needed.
#[derive(Debug, Default)]
pub struct Ports {
    blocks: Vec<PortBlock>,
}

impl Ports {
    /// Returns a port without a listener. No other test process gets the port while this value exists.
    ///
    /// # Panics
    /// If every block is in use.
    pub fn next_port(&mut self) -> u16 {
        loop {
            let port = self.blocks.last_mut().and_then(PortBlock::next_port);
            if let Some(port) = port {
                return port;
            }
            self.blocks.push(PortBlock::allocate());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_allocated_twice() {
        let (mut one, mut two) = (Ports::default(), Ports::default());
        let mut seen = HashSet::new();
        for _ in 0..3 * BLOCK {
            for ports in [&mut one, &mut two] {
                let port = ports.next_port();
                assert!(RANGE.contains(&port));
                assert!(seen.insert(port), "{port} twice");
            }
        }
    }

    #[test]
    fn blocks_stay_locked_until_they_are_dropped() {
        let blocks: Vec<_> = (0..10).map(|_| PortBlock::allocate()).collect();
        let firsts: Vec<_> = blocks.iter().map(|block| block.left.start - 1).collect();
        assert!(firsts.iter().all(|first| PortBlock::lock(*first).is_none()));
        drop(blocks);
        // Another process may have locked some of them meanwhile.
        assert!(firsts.iter().any(|first| PortBlock::lock(*first).is_some()));
    }

    #[test]
    fn a_port_in_use_is_skipped() {
        let mut block = PortBlock::allocate();
        let taken = block.left.start;
        let _other = TcpListener::bind((Ipv4Addr::LOCALHOST, taken)).unwrap();
        assert_ne!(block.next_port(), Some(taken));
    }
}
