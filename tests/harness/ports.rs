//! Port numbers that no other test process uses.
//!
//! The programs' flags take 1024 to 49151 and no 0, so the system cannot choose. Ports come in blocks from
//! below the ephemeral range, and whoever listens on a block's first port owns the block: that
//! lock holds across processes and cannot be left behind.

use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

use rand::Rng as _;

/// Where blocks lie. Linux hands out 32768 and up by itself.
const RANGE: Range<u16> = 10_000..32_000;

/// How many ports a block has, its lock included.
pub const BLOCK: u16 = 20;

/// A block of ports, owned until it is dropped.
#[derive(Debug)]
pub struct PortBlock {
    _lock: TcpListener,
    left: Range<u16>,
}

impl PortBlock {
    /// Takes a free block.
    ///
    /// # Panics
    /// When every block is taken.
    pub fn allocate() -> Self {
        let blocks = (RANGE.end - RANGE.start) / BLOCK;
        // A random start, so that processes do not try the same blocks one after the other.
        let start = rand::rng().random_range(0..blocks);
        (0..blocks)
            .map(|i| RANGE.start + (start + i) % blocks * BLOCK)
            .find_map(Self::lock)
            .expect("every block of ports is taken")
    }

    fn lock(first: u16) -> Option<Self> {
        let lock = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).ok()?;
        Some(Self {
            _lock: lock,
            left: first + 1..first + BLOCK,
        })
    }

    /// The next port of the block on which nothing listens; none when the block is used up.
    pub fn next_port(&mut self) -> Option<u16> {
        // A bind to all addresses clashes with a listener on any of them.
        self.left
            .find(|port| TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok())
    }
}

/// As many ports as it takes.
#[derive(Debug, Default)]
pub struct Ports {
    blocks: Vec<PortBlock>,
}

impl Ports {
    /// A port on which nothing listens and that no other test process gets while this value lives.
    ///
    /// # Panics
    /// When every block is taken.
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
    fn no_port_is_given_twice() {
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
    fn a_block_in_use_is_not_given_again_and_a_dropped_one_may_be() {
        let block = PortBlock::allocate();
        let first = block.left.start - 1;
        assert!(PortBlock::lock(first).is_none());
        drop(block);
        // Another test may have taken it meanwhile; then its lock shows.
        if PortBlock::lock(first).is_none() {
            assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, first)).is_err());
        }
    }

    #[test]
    fn a_port_in_use_is_skipped() {
        let mut block = PortBlock::allocate();
        let taken = block.left.start;
        let _other = TcpListener::bind((Ipv4Addr::LOCALHOST, taken)).unwrap();
        assert_ne!(block.next_port(), Some(taken));
    }
}
