//! Tests of the real programs, in every mode, with valid and invalid input.
//!
//! | module | contents |
//! |---|---|
//! | [`support`] | waiting, metric values, an innocent connection that must always work |
//! | [`scripts`] | agents, front ends and servers whose every packet is decided by a test |
//! | [`endpoints`] | endpoints with awkward behavior |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod endpoints;
mod scripts;
mod support;

mod agent_streams;
mod bad_files;
mod bad_input;
mod closes;
mod congestion;
mod destinations;
mod dials;
mod foreign;
mod front_streams;
mod hops;
mod introductions;
mod isolation;
mod keepalive;
mod leaks;
mod leases;
mod link_ends;
mod links;
mod listeners;
mod native_lives;
mod nodes;
mod quic_links;
mod readiness;
mod resumes;
mod rolling;
mod rotation;
mod searching;
mod secrets;
mod shared_ids;
mod signals;
mod small_frames;
mod stalls;
mod status_page;
mod strangers;
mod streams_of_servers;
mod switching;
