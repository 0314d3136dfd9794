//! The client role of the OpenVPN mode. This process is an OpenVPN client without a tun device: connections
//! that arrive through the tunnel are terminated in this process.
//!
//! ```text
//!  OpenVPN server === link: Session, flows ---> endpoint: target, dial ---> TCP
//!        ^                    |     (role: echo replies, datagrams, rejections)
//!        +---- search: tries the servers in turn, with pauses, until a tunnel is established
//! ```
//!
//! The stock client relies on the kernel for routes, masquerade, and the translation of the node access
//! network. This process does the same work itself: each flow is dialed from the pod's own address.

pub(crate) mod client;
pub(crate) mod endpoint;
mod material;
pub mod metrics;
pub mod nodes;
mod role;
pub(crate) mod tunnel;
mod udp;
