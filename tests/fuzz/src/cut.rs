//! Input that specifies its own cut into pieces.

/// Input as the fuzzer generates it: a count, that number of piece lengths, and the bytes to feed.
pub struct Cut<'a> {
    lengths: &'a [u8],
    /// The bytes to feed, in one piece.
    pub bytes: &'a [u8],
}

impl<'a> Cut<'a> {
    /// Splits the input; `None` if the input is too short for its lengths.
    pub fn new(input: &'a [u8]) -> Option<Self> {
        let (&count, rest) = input.split_first()?;
        let (lengths, bytes) = rest.split_at_checked(usize::from(count))?;
        Some(Self { lengths, bytes })
    }

    /// Returns the ends of the pieces in `0..=len`; the last end is `len`. The lengths repeat from the start
    /// as often as needed, and a length of 0 means 256. Without lengths there is a single piece.
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

impl Cut<'_> {
    /// Returns the pieces, in order. No piece is empty.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.ends(self.bytes.len()).map(move |end| {
            let piece = &self.bytes[start..end];
            start = end;
            piece
        })
    }
}
