//! Code shared by the fuzz targets: input that specifies its own cut into pieces, certificates, the memory of
//! the code under test, and the simulations. The property tests (`tests/properties`) include the modules of the
//! simulations.

pub mod control;
pub mod cut;
pub mod heads;
pub mod memory;
pub mod messages;
pub mod mux;
pub mod native;
pub mod pki;
pub mod resume;
pub mod streams;
pub mod words;

pub use cut::Cut;

/// The unread input. Reads past the end return zeros.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    /// Reads a byte.
    pub fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// Reads a length of one byte, and that many bytes.
    pub fn some(&mut self) -> Vec<u8> {
        let length = usize::from(self.byte()).min(self.0.len());
        let (bytes, rest) = self.0.split_at(length);
        self.0 = rest;
        bytes.to_vec()
    }
}
