//! The lab: everything that a throw-away tunnel on one machine needs, except the tunnel's two ends.
//!
//! `culvert dev`, the integration tests and the benchmarks use these parts:
//!
//! | module | contents |
//! |---|---|
//! | [`pki`] | a certificate authority and one leaf certificate per role, as files |
//! | [`services`] | small TCP services for the far end, each with one behaviour worth testing |
//! | [`client`] | front-end clients that behave like kube-apiserver |
//! | [`check`] | traffic through a tunnelled stream, every byte verified |
//! | [`metrics`] | a parser of the Prometheus text format |
//! | [`pattern`] | the bytes that services send and checks expect |
//!
//! The parts listen only on 127.0.0.1, and are not meant for production traffic.

pub mod check;
pub mod client;
pub mod metrics;
pub mod pattern;
pub mod pki;
pub mod services;
