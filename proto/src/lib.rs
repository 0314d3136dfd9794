//! The Konnectivity wire schema and the code generated from it.
//!
//! The `.proto` files are next to `src/`. The generated file is checked in, so a build needs neither protoc
//! nor a build script. `tests/generated.rs` generates the code again and fails if the checked-in file is
//! stale; with `CULVERT_REGENERATE=1` the test writes the result to the file.

#[allow(missing_docs, clippy::all)]
#[rustfmt::skip]
mod generated;

pub use generated::*;
