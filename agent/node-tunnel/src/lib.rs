//! The node's end of the tunnel to a seed: connections to an address of the node reach a Service of the seed.
//!
//! The program listens on addresses of the node. Each TCP connection becomes one HTTP/2 CONNECT stream over a
//! few persistent connections to the seed's nodeport-proxy. Either end may be Envoy instead.
//!
//! | module | contents |
//! |---|---|
//! | `pool` | connections to the proxy: dialed once for all waiting clients, kept, replaced |
//! | `reach` | the way to the proxy: TCP, an HTTP proxy, TLS |
//! | `client` | one client: stream, bytes, end |
//! | [`files`] | the TLS files that the program follows |
//! | [`interface`] | optional network interface with the listen addresses: created and maintained |
//! | [`metrics`] | metrics, including series under Envoy's names |
//! | [`config`], [`cli`], [`app`] | flags, program, wiring |

pub mod app;
pub mod cli;
mod client;
pub mod config;
pub mod files;
pub mod interface;
pub mod metrics;
mod pool;
mod reach;
