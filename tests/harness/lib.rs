//! The harness for tests that run the real programs as processes.
//!
//! | module | what it holds |
//! |---|---|
//! | [`topology`] | servers and agents of any make, certificates, ports: a whole tunnel, connected |
//! | [`process`] | a program, its log, and what the kernel knows about it |
//! | [`wait`] | [`eventually`], the only way to wait |
//! | [`metrics`] | scraping, and plain HTTP to the programs' own listeners |
//! | [`namespace`] | a network of a test's own |
//! | [`ports`] | port numbers that no other test process uses |
//! | [`balancer`] | a TCP load balancer that picks a backend at random |
//! | [`black_hole`](mod@black_hole) | an address whose connects never end |
//! | [`interop`] | the stock programs and the Go driver |
//! | [`envoy`], [`haproxy`] | foreign doors |
//! | [`openvpn`] | stock OpenVPN, its certificates, and the networks that it connects |
//! | [`hello`] | what a TLS client says first |
//! | [`kube_api`] | a Kubernetes API that does as a test wants |
//!
//! A harness reports by panicking, with a text that says what was expected and what was seen.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

pub mod balancer;
pub mod black_hole;
pub mod envoy;
pub mod haproxy;
pub mod hello;
pub mod interop;
pub mod kube_api;
pub mod metrics;
pub mod namespace;
pub mod openvpn;
pub mod ports;
pub mod process;
pub mod topology;
pub mod wait;

pub use self::black_hole::{BlackHole, black_hole};
pub use self::process::{Program, Signal};
pub use self::topology::{Executable, Mode, Topology, Transport};
pub use self::wait::eventually;
