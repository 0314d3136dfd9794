//! How much memory a program's buffers may take: the bound that docs/architecture.md states,
//! computed from the numbers that the buffers are made with.

use tracing::info;

use crate::message::{MAX_DATA_BYTES, MAX_MESSAGE_BYTES};

/// The buffers on the way of tunnelled bytes, in bytes. Sockets' own buffers are the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// What may wait for one connection's receiver without borrowing.
    pub connection_budget: usize,
    /// What a client that is a gRPC stream of its own holds besides; 0 without such clients.
    pub client: Stream,
    /// One packet stream between a server and an agent.
    pub stream: Stream,
    /// What all connections together may hold beyond their budgets.
    pub excess: usize,
    /// Bound for one connection of a native peer, without the stream of its client.
    pub native_connection: usize,
    /// Bytes that all connections of one native peer may keep for receivers that do not read, before
    /// each connection is limited to its smallest window.
    pub native_held: usize,
}

/// The buffers of one gRPC stream, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    /// What the peer may send ahead of our reading.
    pub window: usize,
    /// What is queued to be sent.
    pub outgoing: usize,
    /// What HTTP/2 has taken to send.
    pub http: usize,
}

impl Buffers {
    /// Tells the operator what to expect.
    pub fn log(&self) {
        info!(
            connection = self.per_connection(),
            stream_of_packets = self.per_stream(),
            excess = self.excess,
            native_connection = self.per_native_connection(),
            native_peer = self.native_held,
            with_100_connections = self.total(1, 100),
            with_1000_connections = self.total(1, 1000),
            "buffers take at most, in bytes: with stock peers connections x connection + streams \
             of packets x stream_of_packets + excess; with our own connections x native_connection \
             + peers x native_peer"
        );
    }

    /// The bound for one connection: its budget, a chunk in hand each way, a read buffer, and its
    /// client's stream.
    pub fn per_connection(&self) -> usize {
        self.connection_budget + 3 * MAX_DATA_BYTES + self.client.bytes()
    }

    /// The bound for one connection of a native peer: its own buffers and its client's stream.
    pub fn per_native_connection(&self) -> usize {
        self.native_connection + self.client.bytes()
    }

    /// The bound for one packet stream.
    pub fn per_stream(&self) -> usize {
        self.stream.bytes()
    }

    /// The bound for all, with that many packet streams and connections.
    pub fn total(&self, streams: usize, connections: usize) -> usize {
        let streams = streams.saturating_mul(self.per_stream());
        let connections = connections.saturating_mul(self.per_connection());
        self.excess
            .saturating_add(streams)
            .saturating_add(connections)
    }
}

impl Stream {
    /// With the message that is being put together from what was read.
    fn bytes(&self) -> usize {
        match self.window {
            0 => 0,
            window => window + MAX_MESSAGE_BYTES + self.outgoing + self.http,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1024;
    const CHUNKS: usize = 3 * MAX_DATA_BYTES;

    #[test]
    fn every_buffer_counts_once_for_what_it_belongs_to() {
        let buffers = Buffers {
            connection_budget: 320 * KIB,
            client: Stream::default(),
            stream: Stream {
                window: 8192 * KIB,
                outgoing: 768 * KIB,
                http: 400 * KIB,
            },
            excess: 65_536 * KIB,
            native_connection: 1088 * KIB,
            native_held: 65_536 * KIB,
        };
        assert_eq!(buffers.per_connection(), 320 * KIB + CHUNKS);
        assert_eq!(buffers.per_stream(), (8192 + 4097 + 768 + 400) * KIB);
        assert_eq!(buffers.total(0, 0), 65_536 * KIB);
        assert_eq!(
            buffers.total(2, 100),
            (65_536 + 2 * 13_457 + 100 * 320) * KIB + 100 * CHUNKS
        );
        let with_clients = Buffers {
            client: Stream {
                window: 1024 * KIB,
                outgoing: 256 * KIB,
                http: 400 * KIB,
            },
            ..buffers
        };
        assert_eq!(
            with_clients.per_connection(),
            (320 + 1024 + 4097 + 256 + 400) * KIB + CHUNKS
        );
        assert_eq!(buffers.total(usize::MAX, 1), usize::MAX);
        assert_eq!(buffers.per_native_connection(), 1088 * KIB);
    }
}
