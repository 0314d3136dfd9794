//! The node's end of the tunnel to a seed: what connects to an address of the node reaches a
//! Service of the seed.
//!
//! It listens on addresses of the node, and carries each TCP connection as one HTTP/2 CONNECT
//! stream over a few kept connections to the seed's nodeport-proxy. Either end may be Envoy
//! instead: the other does not notice.
//!
//! | module | what it holds |
//! |---|---|
//! | [`pool`] | the connections to the proxy: dialed once for all who wait, kept, replaced |
//! | [`carry`] | one client: its stream, its bytes, its end |
//! | [`interface`] | the interface that has the listeners' addresses: made and kept, if asked for |
//! | [`metrics`] | its series, and those under Envoy's names |
//! | [`config`], [`cli`], [`app`] | flags, program, wiring |

pub mod app;
pub mod carry;
pub mod cli;
pub mod config;
pub mod interface;
pub mod metrics;
pub mod pool;
