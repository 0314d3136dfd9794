//! What the targets share: input that says how it is to be cut into pieces, certificates, and the
//! simulation of the packet muxes.

pub mod mux;
pub mod pki;

/// An input as the fuzzer makes it: a count, that many piece lengths, and the bytes to feed.
pub struct Cut<'a> {
    lengths: &'a [u8],
    /// The bytes to feed, uncut.
    pub bytes: &'a [u8],
}

impl<'a> Cut<'a> {
    /// `None` if the lengths are not all there.
    pub fn new(input: &'a [u8]) -> Option<Self> {
        let (&count, rest) = input.split_first()?;
        let (lengths, bytes) = rest.split_at_checked(usize::from(count))?;
        Some(Self { lengths, bytes })
    }

    /// The ends of the pieces in `0..=len`, the last one being `len`. The lengths are used in turn,
    /// over and over; a length of 0 stands for 256. Without lengths there is one piece.
    pub fn ends(&self, len: usize) -> impl Iterator<Item = usize> {
        let mut lengths = self.lengths.iter().cycle();
        let mut end = 0;
        std::iter::from_fn(move || {
            if end == len {
                return None;
            }
            end = match lengths.next() {
                Some(0) => end + 256,
                Some(&length) => end + usize::from(length),
                None => len,
            };
            end = end.min(len);
            Some(end)
        })
    }
}
