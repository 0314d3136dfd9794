//! Sockets: listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies,
//! reading ahead.

pub mod connect;
pub mod dial;
pub mod listen;
pub mod proxy;
pub mod readahead;
