//! Tests of everything that installs the programs.
//!
//! | module | contents |
//! |---|---|
//! | [`charts`] | charts, kustomize components and manifests, without a cluster |
//! | [`images`] | the images, as files and with a container tool |
//! | [`monitoring`] | alerts and dashboards, with the real Prometheus |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod charts;
mod images;
mod monitoring;

use culvert_tests::charts::root;
