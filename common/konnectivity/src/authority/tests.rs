#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

mod frames;
mod server;

use super::*;

/// Authority in the form that kube-apiserver's client sends.
const SOCKET: &[u8] = b"%2Frun%2Fproxy.socket";

const HEADERS: u8 = KIND_HEADERS;
const CONTINUATION: u8 = KIND_CONTINUATION;
const DATA: u8 = 0x0;
const SETTINGS: u8 = 0x4;
const END_STREAM: u8 = 0x01;
const END_HEADERS: u8 = FLAG_END_HEADERS;

/// `:method POST`, `:scheme http`, `:path /` as entries of the static table.
const REQUEST: &[u8] = &[0x83, 0x86, 0x84];

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    FrameHead {
        len: payload.len(),
        kind,
        flags,
        stream,
    }
    .write(&mut bytes);
    bytes.extend_from_slice(payload);
    bytes.to_vec()
}

/// Returns an uncompressed string of at most 126 bytes.
fn text(value: &[u8]) -> Vec<u8> {
    assert!(value.len() < 127);
    [&[value.len() as u8], value].concat()
}

/// Returns the first bytes of a connection: the preface and an empty SETTINGS frame.
fn opening() -> Vec<u8> {
    [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()
}

/// Runs a rewriter over `pieces`. The output includes the bytes that were buffered at the end.
fn rewrite_pieces<'a>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<u8>, Result<(), RewriteError>) {
    let mut rewriter = AuthorityRewriter::default();
    let mut output = BytesMut::new();
    for piece in pieces {
        if let Err(error) = rewriter.rewrite(piece, &mut output) {
            return (output.to_vec(), Err(error));
        }
    }
    rewriter.finish(&mut output);
    (output.to_vec(), Ok(()))
}

/// Returns the rewritten form of frames that follow the opening of a connection.
fn rewrite(frames: &[Vec<u8>]) -> Vec<u8> {
    let opening = opening();
    let input = [opening.clone(), frames.concat()].concat();
    let (output, result) = rewrite_pieces([&input[..]]);
    result.unwrap();
    output.strip_prefix(&opening[..]).unwrap().to_vec()
}

/// Returns the rewritten fields of a header block that follows the `earlier` blocks on the connection.
fn rewrite_block(earlier: &[&[u8]], block: &[u8]) -> Vec<u8> {
    let mut names = AuthorityNames::default();
    for block in earlier {
        names.rewrite(block, &mut BytesMut::new()).unwrap();
    }
    let mut output = BytesMut::new();
    names.rewrite(block, &mut output).unwrap();
    output.to_vec()
}

/// Returns every form of an `:authority` name that needs no dynamic table: the bytes before the value.
fn literal_names() -> Vec<Vec<u8>> {
    let raw = text(b":authority");
    let huffman = [
        &[0x80 | hpack::NAME_HUFFMAN.len() as u8],
        hpack::NAME_HUFFMAN,
    ]
    .concat();
    let mut names = Vec::new();
    for kind in [0x40, 0x00, 0x10] {
        names.push(vec![kind | 1]);
        names.push([&[kind][..], &raw].concat());
        names.push([&[kind][..], &huffman].concat());
    }
    names
}
