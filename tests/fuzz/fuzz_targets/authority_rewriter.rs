//! The `:authority` rewriter: the result does not depend on how the input is cut into pieces, the output is
//! bounded, and a second rewriter leaves the output of the first unchanged.
#![no_main]

use bytes::BytesMut;
use culvert_konnectivity::authority::{AuthorityRewriter, MAX_HEADER_BLOCK, RewriteError};
use culvert_fuzz::Cut;
use libfuzzer_sys::fuzz_target;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn rewrite<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> (BytesMut, Result<(), RewriteError>) {
    let mut rewriter = AuthorityRewriter::default();
    let mut output = BytesMut::new();
    let (mut taken, mut given) = (0, 0);
    for piece in pieces {
        let (passed, rest) = piece.split_at(rewriter.pass(piece));
        output.extend_from_slice(passed);
        let result = rewriter.rewrite(rest, &mut output);
        if result.is_err() {
            return (output, result);
        }
        taken += piece.len();
        given = output.len();
        assert!(
            taken.saturating_sub(given) <= MAX_HEADER_BLOCK,
            "the rewriter buffers more than a header block"
        );
    }
    rewriter.finish(&mut output);
    assert!(given <= output.len() && output.len() <= 2 * taken);
    (output, Ok(()))
}

fuzz_target!(|input: &[u8]| {
    let Some(cut) = Cut::new(input) else { return };
    let bytes = [PREFACE, cut.bytes].concat();
    let whole = rewrite(std::iter::once(&bytes[..]));

    let mut start = 0;
    let pieces = cut
        .ends(bytes.len())
        .map(|end| &bytes[std::mem::replace(&mut start, end)..end]);
    assert_eq!(rewrite(pieces), whole);

    let (output, _) = whole;
    if let (again, Ok(())) = rewrite(std::iter::once(&output[..])) {
        assert_eq!(again, output);
    }
});
