//! What a throw-away tunnel on one machine needs besides the two ends themselves.
//!
//! `culvert dev`, the integration tests and the benchmark program all build on these parts:
//!
//! | module | what it holds |
//! |---|---|
//! | [`pki`] | a certificate authority and one leaf per role, as files |
//! | [`services`] | small TCP services for the far end, each with one habit worth testing |
//! | [`client`] | front-end clients that speak as kube-apiserver does |
//! | [`check`] | traffic through a tunnelled stream, every byte verified |
//! | [`pattern`] | the bytes that services send and checks expect |
//!
//! Nothing here listens beyond 127.0.0.1, and none of it is meant for production traffic.

pub mod check;
pub mod client;
pub mod pattern;
pub mod pki;
pub mod services;
