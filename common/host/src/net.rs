//! Sockets: listeners, the PROXY protocol, admission and shares of peers, dialing with Go's error texts, the policy
//! for destinations, the CONNECT request head, outbound proxies, read-ahead, socket options, congestion control, and
//! detection of dead peers.

pub mod admission;
pub mod congestion;
pub mod connect;
pub mod destinations;
pub mod dial;
pub mod listen;
pub mod literal;
pub mod long_path;
pub mod loss;
pub mod networks;
pub mod options;
pub mod proxy;
pub mod proxy_protocol;
pub mod readahead;
pub mod shares;
pub mod silence;
