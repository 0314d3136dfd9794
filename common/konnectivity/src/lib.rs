//! The packet dialect of Konnectivity: messages, gRPC framing, both state machines and the buffers
//! of packet streams.
//!
//! | module | contents |
//! |---|---|
//! | [`message`] | typed messages over the generated packets |
//! | [`grpc`] | gRPC calls whose bodies are packets |
//! | [`authority`] | the rewriter of the `:authority` header that kube-apiserver sends |
//! | [`identifiers`] | addresses and networks that an agent serves |
//! | [`server_mux`], [`agent_mux`] | the state machine of one packet stream at either end, without I/O |
//! | [`queue`], [`inbox`], [`excess`] | byte-bounded buffers in front of and behind a packet stream |
//! | [`small_traffic`] | the detector of small messages |
//! | [`memory`] | the bound of all these buffers together |
//! | [`metrics`] | series about packet streams that server and agent share |

pub mod agent_mux;
pub mod authority;
pub mod excess;
pub mod grpc;
pub mod identifiers;
pub mod inbox;
pub mod memory;
pub mod message;
pub mod metrics;
pub mod queue;
pub mod server_mux;
pub mod small_traffic;
