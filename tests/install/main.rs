//! Tests of everything that installs the programs.
//!
//! | module | contents |
//! |---|---|
//! | [`charts`] | charts, kustomize components and manifests, without a cluster |
//! | [`images`] | the images, as files and with a container tool |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod charts;
mod images;

use std::path::PathBuf;

/// Returns the top folder of the repository.
fn root() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap().to_owned()
}
