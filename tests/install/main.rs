//! Tests of everything that installs the programs.
//!
//! | module | contents |
//! |---|---|
//! | [`images`] | the images, as files and with a container tool |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod images;
