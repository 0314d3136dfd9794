//! OpenVPN, with Debian's stock program in either role, in networks that each test makes for itself.
//!
//! | module | what it holds |
//! |---|---|
//! | [`baseline`] | the stock program with itself, as the platform runs it: the lab's own check |
//! | [`support`] | a stock peer and one of ours with a wire between them |
//! | [`matrix`] | the options of OpenVPN, one by one, with our sessions in either role |
//! | [`lifetime`] | renegotiations, goodbyes, and peers that stop, die and come back |
//! | [`platform`] | our sessions in the places of the platform's server and client |
//! | [`refusal`] | certificates that are not let in, and what is said about them |
//! | [`agent`] | the agent as the client of a stock server, as the platform configures it |
//! | [`server`] | the server with stock clients, as the platform configures them |
//! | [`pair`] | our server and our agent with each other |
//! | [`switching`] | both tunnels of one server, and the way from one to the other |
//! | [`ours`] | a program of ours in a namespace |
//! | [`abuse`] | wires that repeat, damage and invent packets |
//! | [`flood`] | such wires, and floods, in front of our programs |
//! | [`outages`] | programs that stop, die and come back |
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
