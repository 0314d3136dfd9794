//! Two `Flows` connected by a simulated tunnel, in virtual time.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod bad_input;
mod life;
mod net;
mod path_mtu;
mod transfer;
