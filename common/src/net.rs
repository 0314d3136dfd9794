//! Sockets: listeners, dialing with Go-shaped errors, the CONNECT request head, outbound proxies.

pub mod connect;
pub mod dial;
pub mod listen;
pub mod proxy;
