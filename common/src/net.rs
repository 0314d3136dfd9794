//! Sockets: listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies,
//! reading ahead, waking late.

pub mod connect;
pub mod dial;
pub mod listen;
pub mod low_water;
pub mod proxy;
pub mod readahead;
