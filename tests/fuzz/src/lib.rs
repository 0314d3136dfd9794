//! Code shared by the fuzz targets: input that specifies its own cut into pieces, certificates, and the
//! simulations. The property tests (`tests/properties`) include the modules of the simulations.

pub mod cut;
pub mod heads;
pub mod messages;
pub mod mux;
pub mod native;
pub mod pki;
pub mod streams;

pub use cut::Cut;
