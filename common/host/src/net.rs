//! Sockets: listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies,
//! reading ahead, options, pacing, peers that are gone.

pub mod connect;
pub mod dial;
pub mod listen;
pub mod options;
pub mod pacing;
pub mod proxy;
pub mod readahead;
pub mod silence;
