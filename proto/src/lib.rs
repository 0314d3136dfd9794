//! The Konnectivity wire schema and its generated code.
//!
//! The `.proto` texts lie beside `src/`; the generated file is checked in, so that building needs
//! neither protoc nor a build script. `tests/generated.rs` regenerates it (set
//! `CULVERT_REGENERATE=1` to write the result) and fails when it is stale.

#[allow(missing_docs, clippy::all)]
#[rustfmt::skip]
mod generated;

pub use generated::*;
