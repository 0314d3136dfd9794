//! The client role of the OpenVPN mode: this process is an OpenVPN client without a tun device, and
//! the connections that come out of the tunnel end here.
//!
//! ```text
//!  OpenVPN server === link: Session, flows ---> endpoint: target, dial ---> TCP
//!        ^                    |     (role: echo replies, datagrams, what nobody wants)
//!        +---- search: servers in turn, pauses, until established
//! ```
//!
//! What the stock client needs the kernel for (routes, masquerade, the translation of the node access
//! network) is done in this process: a flow is dialed from the pod's own address.

pub mod client;
pub mod endpoint;
mod halves;
pub mod metrics;
pub mod nodes;
mod role;
mod udp;
