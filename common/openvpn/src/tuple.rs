//! The addresses and ports that identify a flow.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::net::SocketAddrV4;

use rand::RngCore;

/// The two ends of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tuple {
    pub(crate) local: SocketAddrV4,
    pub(crate) remote: SocketAddrV4,
}

/// A tuple as two integers, for fast comparison and hashing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64, u64);

impl Key {
    pub(crate) fn new(local: SocketAddrV4, remote: SocketAddrV4) -> Self {
        let number =
            |end: SocketAddrV4| u64::from(end.ip().to_bits()) << 16 | u64::from(end.port());
        Self(number(local), number(remote))
    }
}

impl From<Tuple> for Key {
    fn from(tuple: Tuple) -> Self {
        Self::new(tuple.local, tuple.remote)
    }
}

/// A hash map with keyed hashing.
pub(crate) type Table<K, V> = HashMap<K, V, Keyed>;

/// Keyed hash for short keys: multiplies with secrets and mixes both halves of the product. Peers choose
/// ports and addresses, but do not know the secrets.
#[derive(Clone, Debug)]
pub(crate) struct Keyed([u64; 2]);

impl Keyed {
    pub(crate) fn new(random: &mut dyn RngCore) -> Self {
        Self([random.next_u64() | 1, random.next_u64()])
    }
}

impl BuildHasher for Keyed {
    type Hasher = Mixer;

    fn build_hasher(&self) -> Mixer {
        let Self([secret, state]) = *self;
        Mixer { secret, state }
    }
}

pub(crate) struct Mixer {
    secret: u64,
    state: u64,
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.state ^ number) * u128::from(self.secret);
        self.state = (product as u64) ^ (product >> 64) as u64;
        // A different odd factor for the next number makes the hash depend on the order of the numbers.
        self.secret = self.secret.rotate_left(23) | 1;
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
