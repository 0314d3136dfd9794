//! Tests of two sessions connected to each other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod certificates;
mod ends;
mod handshake;
mod hostile;
mod loss;
mod renegotiation;

pub(super) use super::sim::*;
pub(super) use super::*;

pub(super) const BOTH: [Transport; 2] = [Transport::Tcp, Transport::Udp];
