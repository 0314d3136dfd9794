//! Sockets: listeners, dialing with Go's error texts, the CONNECT request head, outbound proxies, read-ahead,
//! socket options, pacing, and detection of dead peers.

pub mod admission;
pub mod connect;
pub mod dial;
pub mod listen;
pub mod options;
pub mod pacing;
pub mod proxy;
pub mod readahead;
pub mod silence;
