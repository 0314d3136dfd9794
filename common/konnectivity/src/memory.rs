//! The bound on the memory of a program's buffers, as stated in docs/architecture.md and computed from the
//! constants that size the buffers.

use culvert_stream::io::LARGE_READ_BYTES;
use tracing::info;

use crate::message::{MAX_DATA_BYTES, MAX_MESSAGE_BYTES, STOCK_DATA_BYTES};

/// Range of the budget of one connection, in bytes, whatever `--xfr-channel-size` is.
const CONNECTION_BYTES: std::ops::RangeInclusive<usize> = 256 * 1024..=16 * 1024 * 1024;

/// Converts `--xfr-channel-size`, a number of packets in the stock programs, to the budget of one connection
/// in bytes.
pub fn connection_bytes(packets: usize) -> usize {
    packets
        .saturating_mul(STOCK_DATA_BYTES)
        .clamp(*CONNECTION_BYTES.start(), *CONNECTION_BYTES.end())
}

/// Buffers for tunnelled bytes, in bytes. The kernel's socket buffers are not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffers {
    /// Bytes that may wait for a connection's receiver without a loan.
    pub connection_budget: usize,
    /// Additional buffers of a client with its own gRPC stream; 0 without such clients.
    pub client: Stream,
    /// Buffers of a packet stream between a server and an agent.
    pub stream: Stream,
    /// Bytes beyond the budgets of connections, for all connections together.
    pub excess: usize,
    /// Bound for one connection of a native peer, in bytes, without the stream of its client.
    pub native_connection: usize,
    /// Unread bytes of all connections of a native peer together. Beyond this amount, every connection is
    /// limited to the smallest flow-control window.
    pub native_held: usize,
}

/// Buffers of a gRPC stream, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    /// Bytes that the peer may send ahead of our reads.
    pub window: usize,
    /// Bytes queued for sending.
    pub outgoing: usize,
    /// Bytes in HTTP/2's send buffer.
    pub http: usize,
}

impl Buffers {
    /// Logs the bounds for the operator.
    pub fn log(&self) {
        info!(
            connection = self.per_connection(),
            stream_of_packets = self.per_stream(),
            excess = self.excess,
            native_connection = self.per_native_connection(),
            native_peer = self.native_held,
            with_100_connections = self.total(1, 100),
            with_1000_connections = self.total(1, 1000),
            "buffers use at most this many bytes: with stock peers, connections x connection + streams \
             of packets x stream_of_packets + excess; with our own peers, connections x native_connection \
             + peers x native_peer"
        );
    }

    /// Returns the bound for a connection: the budget, a chunk from a packet, a chunk read from a socket, and the stream of
    /// the client. A socket is not read while its chunk is in transit.
    pub fn per_connection(&self) -> usize {
        self.connection_budget + MAX_DATA_BYTES + LARGE_READ_BYTES + self.client.bytes()
    }

    /// Returns the bound for a connection through a native peer: the smallest flow-control window, HTTP/2's
    /// send queue, a chunk in transit, a chunk being read, and the stream of the client. The connection's
    /// share of `native_held` comes on top.
    pub fn per_native_connection(&self) -> usize {
        self.native_connection + self.client.bytes()
    }

    /// Returns the bound for a packet stream.
    pub fn per_stream(&self) -> usize {
        self.stream.bytes()
    }

    /// Returns the bound for a program with `streams` packet streams and `connections` connections.
    pub fn total(&self, streams: usize, connections: usize) -> usize {
        let streams = streams.saturating_mul(self.per_stream());
        let connections = connections.saturating_mul(self.per_connection());
        self.excess
            .saturating_add(streams)
            .saturating_add(connections)
    }
}

impl Stream {
    /// Returns the sum of the buffers and of a message being assembled from received frames.
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
    const CHUNKS: usize = 5 * MAX_DATA_BYTES;

    #[test]
    fn the_budget_of_a_connection_follows_the_flag_within_its_range() {
        for (packets, bytes) in [(0, 256), (10, 320), (150, 4800), (usize::MAX, 16_384)] {
            assert_eq!(connection_bytes(packets), bytes * KIB);
        }
    }

    #[test]
    fn each_buffer_counts_once_in_the_bound_of_its_owner() {
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
