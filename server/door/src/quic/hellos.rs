//! Clients whose ClientHello is incomplete: the datagrams so far, bounded by number, bytes and time. No I/O.
//!
//! Anybody can send such datagrams, also with forged addresses. A full table displaces the oldest client, and a source
//! with too many clients displaces its own oldest client, because the datagrams of one hello follow each other closely.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::time::Instant;

use super::initial::{CryptoStream, InitialError};
use crate::client_hello::Hello;

/// Time for a hello to become complete.
const DEADLINE: Duration = Duration::from_secs(3);

/// Largest number of datagrams of one hello.
const MAX_DATAGRAMS: usize = 4;

/// Largest numbers of clients and bytes in all tables of the process, and the largest number of clients of one
/// source: a /24 network, or a /56 network with IPv6.
const MAX_CLIENTS: usize = 8192;
const MAX_BYTES: usize = 32 * 1024 * 1024;
const MAX_CLIENTS_OF_SOURCE: usize = 256;

/// The incomplete hellos of one listener.
#[derive(Debug)]
pub(super) struct Hellos {
    /// Clients by order of arrival.
    clients: BTreeMap<u64, Client>,
    /// Positions in `clients`.
    positions: HashMap<Key, u64>,
    /// Positions of the clients of each source.
    sources: HashMap<u64, BTreeSet<u64>>,
    last: u64,
    /// Memory of all datagrams and handshake bytes.
    bytes: usize,
    /// Number of listeners that share the limits.
    parts: usize,
}

/// Address of a client, and the destination id that the client has chosen.
type Key = (SocketAddr, Vec<u8>);

#[derive(Debug)]
struct Client {
    key: Key,
    since: Instant,
    datagrams: Vec<Vec<u8>>,
    /// Handshake bytes of `datagrams`, so that each datagram is decrypted once.
    crypto: CryptoStream,
}

/// Effect of a datagram with an Initial packet.
#[derive(Debug)]
pub(super) enum Arrival {
    /// The hello is complete. The datagrams must be forwarded in this order.
    Complete(Hello, Vec<Vec<u8>>),
    /// The datagram is kept until more of the hello arrives.
    Kept {
        /// Number of other clients that lost their places.
        displaced: usize,
    },
    /// The datagram is dropped.
    Bad(InitialError),
    /// The datagram is dropped, because this hello has too many datagrams.
    TooMany,
}

// === impl Hellos ===

impl Hellos {
    /// Creates the table of one of `parts` listeners.
    pub(super) fn new(parts: usize) -> Self {
        Self {
            clients: BTreeMap::new(),
            positions: HashMap::new(),
            sources: HashMap::new(),
            last: 0,
            bytes: 0,
            parts: parts.max(1),
        }
    }

    /// Takes a datagram with an Initial packet for the destination id `id`.
    pub(super) fn take(
        &mut self,
        from: SocketAddr,
        id: &[u8],
        datagram: &[u8],
        now: Instant,
    ) -> Arrival {
        let key = (from, id.to_vec());
        let position = self.positions.get(&key).copied();
        let known = position.and_then(|position| self.clients.get_mut(&position));
        // A wrong datagram leaves no trace in the client's handshake bytes.
        let mut crypto = known
            .as_ref()
            .map_or_else(CryptoStream::default, |it| it.crypto.clone());
        let read = crypto
            .add_datagram(id, datagram)
            .and_then(|()| crypto.hello());
        match (read, known) {
            (Err(error), _) => Arrival::Bad(error),
            (Ok(Some(hello)), _) => {
                let known = position.and_then(|position| self.remove(position));
                let mut datagrams = known.map_or_else(Vec::new, |client| client.datagrams);
                datagrams.push(datagram.to_vec());
                Arrival::Complete(hello, datagrams)
            }
            (Ok(None), Some(client)) => {
                if client.datagrams.len() + 1 >= MAX_DATAGRAMS {
                    return Arrival::TooMany;
                }
                self.bytes -= client.bytes();
                client.datagrams.push(datagram.to_vec());
                client.crypto = crypto;
                self.bytes += client.bytes();
                Arrival::Kept {
                    displaced: self.displace(),
                }
            }
            (Ok(None), None) => {
                self.last += 1;
                self.positions.insert(key.clone(), self.last);
                let of_source = self.sources.entry(source_of(from.ip())).or_default();
                of_source.insert(self.last);
                let is_full = of_source.len() > MAX_CLIENTS_OF_SOURCE.div_ceil(self.parts);
                let oldest = of_source.first().copied().filter(|_| is_full);
                let client = Client {
                    key,
                    since: now,
                    datagrams: vec![datagram.to_vec()],
                    crypto,
                };
                self.bytes += client.bytes();
                self.clients.insert(self.last, client);
                let lost = oldest.and_then(|oldest| self.remove(oldest));
                Arrival::Kept {
                    displaced: usize::from(lost.is_some()) + self.displace(),
                }
            }
        }
    }

    /// Removes hellos that did not become complete in time; returns their number.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        let is_late = |client: &Client| now.duration_since(client.since) >= DEADLINE;
        self.remove_while(|hellos| hellos.clients.values().next().is_some_and(is_late))
    }

    /// Removes the oldest clients that exceed the limits; returns their number.
    fn displace(&mut self) -> usize {
        self.remove_while(|hellos| {
            hellos.clients.len() > MAX_CLIENTS / hellos.parts
                || hellos.bytes > MAX_BYTES / hellos.parts
        })
    }

    fn remove_while(&mut self, condition: impl Fn(&Self) -> bool) -> usize {
        let mut removed = 0;
        while condition(self)
            && let Some(oldest) = self.clients.keys().next().copied()
        {
            self.remove(oldest);
            removed += 1;
        }
        removed
    }

    fn remove(&mut self, position: u64) -> Option<Client> {
        let client = self.clients.remove(&position)?;
        self.positions.remove(&client.key);
        self.bytes -= client.bytes();
        let source = source_of(client.key.0.ip());
        if let Some(of_source) = self.sources.get_mut(&source) {
            of_source.remove(&position);
            if of_source.is_empty() {
                self.sources.remove(&source);
            }
        }
        Some(client)
    }
}

// === impl Client ===

impl Client {
    /// Returns the memory of the client's datagrams and handshake bytes.
    fn bytes(&self) -> usize {
        let datagrams = self.datagrams.iter().map(Vec::len);
        datagrams.sum::<usize>() + self.crypto.memory()
    }
}

/// Returns the network of an address: /24 for IPv4, /56 for IPv6.
fn source_of(address: IpAddr) -> u64 {
    match address.to_canonical() {
        IpAddr::V4(v4) => u64::from(v4.to_bits() >> 8),
        IpAddr::V6(v6) => (v6.to_bits() >> 72) as u64 | 1 << 63,
    }
}

#[cfg(test)]
mod tests;
