//! Stock OpenVPN as a peer, in networks of a test's own.
//!
//! | module | what it holds |
//! |---|---|
//! | [`network`] | network namespaces within those of a test, the links between them, and sockets in them |
//! | [`pki`] | the certificates of a cluster, and wrong ones |
//! | [`stock`] | the stock program in either role, started with what an operator writes |
//! | [`kkp`] | the command lines, files and packet filters of the platform that is taken over from |
//! | [`cluster`] | a user cluster behind a VPN client: pods, a Service, a node, and what they serve |
//! | [`endpoint`] | a session of our own and its flows on a socket, in either role |
//! | [`tamper`] | a wire on which datagrams are repeated, damaged and invented |
//! | [`relay`] | the same for TCP, where packets are repeated beside the connection that they belong to |
//! | [`scenario`] | what has to pass through a tunnel, whoever its ends are |
//!
//! All of it runs within [`namespace::alone`](crate::namespace::alone) and ends with that.

pub mod cluster;
pub mod endpoint;
pub mod kkp;
pub mod network;
pub mod pki;
pub mod relay;
pub mod scenario;
pub mod stock;
pub mod tamper;

pub use self::cluster::Cluster;
pub use self::endpoint::{Endpoint, Link};
pub use self::network::Namespace;
pub use self::pki::Pki;
pub use self::stock::{OpenVpn, Stock};
