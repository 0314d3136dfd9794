//! The words on the control stream of a QUIC link, as received from a hostile peer.
//!
//! The words do not depend on the cut into pieces, and each has its own line. A word that is sent again is the same word.

use culvert_native::quic::words::{Word, WordReader};

use crate::cut::Cut;

/// Returns the words in these pieces.
fn words<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<Word> {
    let (mut reader, mut words) = (WordReader::default(), Vec::new());
    for piece in pieces {
        reader.push(piece, |word| words.push(word));
    }
    words
}

/// Reads the bytes in one piece and in the pieces of the cut.
///
/// # Panics
/// If a property does not hold.
pub fn run(input: &[u8]) {
    let Some(cut) = Cut::new(input) else { return };
    let read = words(std::iter::once(cut.bytes));
    assert_eq!(words(cut.pieces()), read);
    let lines = cut.bytes.iter().filter(|byte| **byte == b'\n').count();
    assert!(read.len() <= lines);
    let sent: Vec<u8> = read.iter().flat_map(|word| word.to_line()).collect();
    assert_eq!(words(std::iter::once(sent.as_slice())), read);
}
