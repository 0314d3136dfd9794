//! The harness for tests that run the real programs as processes.
//!
//! | module | contents |
//! |---|---|
//! | [`topology`] | a whole connected tunnel: servers, agents, certificates and ports |
//! | [`process`] | a program, its log, and its figures from the kernel |
//! | [`wait`] | [`eventually`], the only way to wait |
//! | [`metrics`] | scraping, and plain HTTP to the programs' own listeners |
//! | [`namespace`] | a private network for a test |
//! | [`ports`] | port numbers that no other test process uses |
//! | [`rolling`] | traffic during a rolling update |
//! | [`balancer`] | a TCP load balancer that picks a backend at random |
//! | [`link`] | a link with delay, loss and a limited rate |
//! | [`congestion`] | congestion controls of connections |
//! | [`black_hole`](mod@black_hole) | an address where connects hang |
//! | [`interop`] | the stock programs and the Go driver |
//! | [`envoy`], [`haproxy`] | front doors of other projects |
//! | [`charts`] | the charts, and the programs that judge them |
//! | [`openvpn`] | stock OpenVPN, its certificates, and the networks that it connects |
//! | [`hello`] | the first message of a TLS client |
//! | [`rotation`] | files that change while a program runs |
//! | [`kube_api`] | a Kubernetes API under the control of a test |
//!
//! The harness reports failures by panicking, with a text that has the expected and the observed state.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

pub mod balancer;
pub mod black_hole;
pub mod charts;
pub mod congestion;
pub mod envoy;
pub mod haproxy;
pub mod hello;
pub mod interop;
pub mod kube_api;
pub mod link;
pub mod metrics;
pub mod namespace;
pub mod openvpn;
pub mod ports;
pub mod process;
pub mod rolling;
pub mod rotation;
pub mod skip;
pub mod topology;
pub mod wait;

pub use self::black_hole::{BlackHole, black_hole};
pub use self::process::{Program, Signal};
pub use self::topology::{Executable, Mode, Topology, Transport};
pub use self::wait::eventually;
