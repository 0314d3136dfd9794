//! Tests of OpenVPN with Debian's stock program in either role. Every test runs in separate network namespaces.
//!
//! | module | content |
//! |---|---|
//! | [`baseline`] | a stock server with stock clients, configured as on the platform; checks the test setup |
//! | [`support`] | a link between a stock peer and one of our sessions |
//! | [`matrix`] | the options of OpenVPN, one by one, with our sessions in either role |
//! | [`lifetime`] | renegotiations, exit notifications, and peers that stop, die and reconnect |
//! | [`platform`] | our sessions in place of the platform's server and client |
//! | [`refusal`] | refused certificates, and the resulting log texts |
//! | [`agent`] | our agent as the client of a stock server, with the platform's configuration |
//! | [`server`] | our server with stock clients, with the platform's configuration |
//! | [`pair`] | our server with our agent |
//! | [`switching`] | both tunnels of one server, and switches between the tunnels |
//! | [`ours`] | a program of ours in a namespace |
//! | [`abuse`] | links that repeat, damage and invent packets |
//! | [`flood`] | floods and tampered links in front of our programs |
//! | [`outages`] | programs that stop, die and restart |
//! | [`silence`] | a client that stops answering, beside a peer that answers |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod support;
mod switching;

mod abuse;
mod agent;
mod baseline;
mod flood;
mod lifetime;
mod matrix;
mod ours;
mod outages;
mod pair;
mod platform;
mod refusal;
mod server;
mod silence;
