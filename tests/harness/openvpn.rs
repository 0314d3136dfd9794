//! Stock OpenVPN as a peer, in private networks of a test.
//!
//! | module | contents |
//! |---|---|
//! | [`network`] | network namespaces inside the test's own namespaces, links between them, and sockets in them |
//! | [`pki`] | the certificates of a cluster, and invalid certificates |
//! | [`stock`] | the stock program in either role, with the options of an operator |
//! | [`kkp`] | command lines, files and packet filters of the platform that Culvert replaces |
//! | [`cluster`] | a user cluster behind a VPN client: pods, a Service, a node, and their services |
//! | [`endpoint`] | a session of our own with its flows on a socket, in either role |
//! | [`tamper`] | a UDP wire that adds repeated, damaged and invented datagrams |
//! | [`relay`] | the equivalent for TCP: repeated packets arrive on additional connections |
//! | [`scenario`] | the traffic that every tunnel must carry, whatever its ends are |
//!
//! Everything runs inside [`namespace::alone`](crate::namespace::alone) and ends with the test.

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
