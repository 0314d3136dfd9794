//! Tests with hand-made frames: replaced values, unchanged bytes, and errors.

use proptest::prelude::*;

use super::*;

#[test]
fn the_huffman_form_of_the_name_follows_the_rfc() {
    // RFC 7541, appendix B.
    let code = |symbol| match symbol {
        b':' => "1011100",
        b'a' => "00011",
        b'u' => "101101",
        b't' => "01001",
        b'h' => "100111",
        b'o' => "00111",
        b'r' => "101100",
        b'i' => "00110",
        b'y' => "1111010",
        other => panic!("no code for {other}"),
    };
    let mut bits: String = b":authority".iter().map(|&symbol| code(symbol)).collect();
    while !bits.len().is_multiple_of(8) {
        bits.push('1');
    }
    let bytes: Vec<u8> = (0..bits.len() / 8)
        .map(|at| u8::from_str_radix(&bits[at * 8..at * 8 + 8], 2).unwrap())
        .collect();
    assert_eq!(bytes, hpack::NAME_HUFFMAN);
}

#[test]
fn every_kind_of_literal_is_replaced() {
    for name in literal_names() {
        for value in [
            text(SOCKET),
            text(b""),
            text(b"y"),
            vec![0x83, 1, 2, 3],
            long_string(5000),
        ] {
            let block = [REQUEST, &name, &value, &[0x90]].concat();
            let expected = [REQUEST, &name, &[1, b'x'], &[0x90]].concat();
            assert_eq!(rewrite_block(&[], &block), expected, "{name:x?}");
        }
    }
}

/// Returns a string with a length of several bytes.
fn long_string(len: usize) -> Vec<u8> {
    let rest = len - 127;
    let length = [127, 0x80 | (rest & 0x7f) as u8, (rest >> 7) as u8];
    [&length[..], &vec![b'a'; len]].concat()
}

#[test]
fn other_fields_are_unchanged() {
    let block = [
        REQUEST,
        &[0x41 + 1], // incremental, :method
        &text(b"PUT"),
        &[0x40],
        &text(b":authorities"),
        &text(SOCKET),
        &[0x0f, 0x2f], // without indexing, name of entry 62: the newest dynamic entry
        &text(SOCKET),
        &[0x81], // :authority with the static table's empty value
    ]
    .concat();
    assert_eq!(rewrite_block(&[], &block), block);
}

#[test]
fn a_name_in_the_dynamic_table_is_recognized() {
    let other = [&[0x40][..], &text(b"name"), &text(b"value")].concat();
    let insert = [&[0x41][..], &text(SOCKET)].concat();
    // After the insertion of an authority and then `others` fields, the authority is entry 62 + others.
    for others in [0, 1, 40, 127] {
        let earlier = [insert.clone(), other.repeat(others)].concat();
        for (prefix, kind) in [(63u8, 0x40), (15, 0x00), (15, 0x10)] {
            let name = |index: usize| {
                let rest = index - usize::from(prefix);
                match rest {
                    0..=127 => vec![kind | prefix, rest as u8],
                    _ => vec![kind | prefix, 0x80 | (rest & 0x7f) as u8, (rest >> 7) as u8],
                }
            };
            if 62 + others >= usize::from(prefix) {
                let block = [name(62 + others), text(SOCKET)].concat();
                let expected = [name(62 + others), vec![1, b'x']].concat();
                assert_eq!(
                    rewrite_block(&[&earlier], &block),
                    expected,
                    "{others} {kind:x}"
                );
            }
            if others > 1 {
                let block = [name(61 + others), text(SOCKET)].concat();
                assert_eq!(
                    rewrite_block(&[&earlier], &block),
                    block,
                    "{others} {kind:x}"
                );
            }
        }
    }
}

#[test]
fn literals_without_insertion_do_not_shift_the_table() {
    let insert = [&[0x41][..], &text(SOCKET)].concat();
    let passing = [
        &[0x00][..],
        &text(b"a"),
        &text(b"b"),
        &[0x10],
        &text(b"c"),
        &text(b"d"),
        &[0xbe],
    ]
    .concat();
    let size_update = [0x3f, 0xe1, 0x1f];
    let again = [&[0x7e][..], &text(SOCKET)].concat();
    assert_eq!(
        rewrite_block(&[&insert, &passing, &size_update], &again),
        [0x7e, 1, b'x']
    );
}

#[test]
fn every_header_block_of_the_connection_is_rewritten() {
    let block = |name: u8| [REQUEST, &[name], &text(SOCKET)].concat();
    let expected = |name: u8| [REQUEST, &[name, 1, b'x']].concat();
    let frames = [
        frame(HEADERS, END_HEADERS, 1, &block(0x41)),
        frame(DATA, 0, 1, &[7; 100]),
        frame(HEADERS, END_HEADERS, 3, &block(0x11)),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &block(0x01)),
        frame(0x8, 0, 0, &[0, 0, 1, 0]),
        frame(
            HEADERS,
            END_HEADERS | END_STREAM,
            5,
            &[0x83, 0x86, 0x84, 0xbe],
        ),
    ];
    let mut wanted = frames.clone();
    wanted[0] = frame(HEADERS, END_HEADERS, 1, &expected(0x41));
    wanted[2] = frame(HEADERS, END_HEADERS, 3, &expected(0x11));
    wanted[3] = frame(HEADERS, END_HEADERS | END_STREAM, 1, &expected(0x01));
    assert_eq!(rewrite(&frames), wanted.concat());
}

#[test]
fn padding_is_removed_and_priority_is_kept() {
    let fields = [REQUEST, &[0x41], &text(SOCKET)].concat();
    let expected = [REQUEST, &[0x41, 1, b'x']].concat();
    let priority = [0x80, 0, 0, 3, 200];
    let flags = END_HEADERS | END_STREAM;
    assert_eq!(
        rewrite(&[frame(
            HEADERS,
            flags | FLAG_PADDED,
            1,
            &[&[4], &fields[..], &[0; 4]].concat()
        )]),
        frame(HEADERS, flags, 1, &expected)
    );
    assert_eq!(
        rewrite(&[frame(
            HEADERS,
            flags | FLAG_PRIORITY,
            1,
            &[&priority, &fields[..]].concat()
        )]),
        frame(
            HEADERS,
            flags | FLAG_PRIORITY,
            1,
            &[&priority, &expected[..]].concat()
        )
    );
    let both = [&[2], &priority[..], &fields, &[0; 2]].concat();
    assert_eq!(
        rewrite(&[frame(
            HEADERS,
            flags | FLAG_PADDED | FLAG_PRIORITY,
            1,
            &both
        )]),
        frame(
            HEADERS,
            flags | FLAG_PRIORITY,
            1,
            &[&priority, &expected[..]].concat()
        )
    );
}

#[test]
fn a_block_may_straddle_frames_anywhere() {
    let fields = [
        REQUEST,
        &[0x40],
        &text(b":authority"),
        &text(SOCKET),
        &[0x90],
    ]
    .concat();
    let expected = [REQUEST, &[0x40], &text(b":authority"), &[1, b'x', 0x90]].concat();
    for at in 0..=fields.len() {
        let (first, second) = fields.split_at(at);
        let frames = [
            // The padding belongs to this frame only.
            frame(HEADERS, FLAG_PADDED, 1, &[&[2], first, &[0; 2]].concat()),
            frame(CONTINUATION, 0, 1, &[]),
            frame(CONTINUATION, END_HEADERS, 1, second),
        ];
        assert_eq!(
            rewrite(&frames),
            frame(HEADERS, END_HEADERS, 1, &expected),
            "cut at {at}"
        );
    }
}

#[test]
fn a_large_block_is_cut_into_legal_frames() {
    let other = [&[0x00][..], &text(b"name"), &long_string(15_000)].concat();
    let fields = [REQUEST, &[0x41], &text(SOCKET), &other, &other, &other].concat();
    let expected = [REQUEST, &[0x41, 1, b'x'], &other, &other, &other].concat();
    let priority = [0, 0, 0, 3, 200];
    let frames = [
        frame(
            HEADERS,
            FLAG_PRIORITY | END_STREAM,
            1,
            &[&priority, &fields[..9]].concat(),
        ),
        frame(CONTINUATION, 0, 1, &fields[9..16_000]),
        frame(CONTINUATION, 0, 1, &fields[16_000..32_000]),
        frame(CONTINUATION, END_HEADERS, 1, &fields[32_000..]),
    ];
    let (first, rest) = expected.split_at(MAX_FRAME - priority.len());
    let wanted = [
        frame(
            HEADERS,
            FLAG_PRIORITY | END_STREAM,
            1,
            &[&priority, first].concat(),
        ),
        frame(CONTINUATION, 0, 1, &rest[..MAX_FRAME]),
        frame(CONTINUATION, END_HEADERS, 1, &rest[MAX_FRAME..]),
    ];
    assert_eq!(rewrite(&frames), wanted.concat());
}

#[test]
fn malformed_frames_end_the_rewriting() {
    let fields = [REQUEST, &[0x41], &text(SOCKET)].concat();
    let good = frame(HEADERS, END_HEADERS, 1, &fields);
    let blocks: [&[u8]; 7] = [
        &[0x80],                                  // index 0
        &[0x41],                                  // no value
        &[0x41, 0x05, b'a'],                      // a value that ends early
        &[0x41, 0x7f, 0x80, 0x80, 0x80, 0x80, 0], // a length of six bytes
        &[0xff, 0xff],                            // an index that ends early
        &[0xff, 0x40],                            // an index beyond both tables
        &[0x7f, 0x7f, 0],                         // the same for a name
    ];
    for block in blocks {
        let block = [&fields[..], block].concat();
        let frames = [frame(HEADERS, END_HEADERS, 1, &block), good.clone()];
        assert_eq!(rewrite(&frames), frames.concat(), "{block:x?}");
    }
    let continued = frame(HEADERS, 0, 1, &fields);
    let broken = [
        frame(
            HEADERS,
            END_HEADERS | FLAG_PADDED,
            1,
            &[&[200], &fields[..]].concat(),
        ),
        frame(HEADERS, END_HEADERS | FLAG_PADDED, 1, &[]),
        frame(HEADERS, END_HEADERS | FLAG_PRIORITY, 1, &[0; 4]),
        [continued.clone(), frame(DATA, 0, 1, &[1, 2, 3])].concat(),
        [
            continued.clone(),
            frame(CONTINUATION, END_HEADERS, 3, &[0x90]),
        ]
        .concat(),
        [continued.clone(), good.clone()].concat(),
    ];
    for bad in broken {
        let frames = [bad, good.clone()];
        assert_eq!(rewrite(&frames), frames.concat());
    }
}

#[test]
fn the_end_of_the_connection_releases_buffered_bytes() {
    let block = frame(HEADERS, 0, 1, &[REQUEST, &[0x41], &text(SOCKET)].concat());
    for frames in [
        block.clone(),
        block[..12].to_vec(),
        block[..5].to_vec(),
        vec![0],
    ] {
        assert_eq!(rewrite(std::slice::from_ref(&frames)), frames);
    }
}

#[test]
fn a_header_block_is_bounded() {
    let mut fitting = frame(HEADERS, 0, 1, REQUEST);
    while fitting.len() + FRAME_HEAD <= MAX_HEADER_BLOCK {
        fitting.extend(frame(CONTINUATION, 0, 1, &[]));
    }
    let flood = [opening(), fitting, frame(CONTINUATION, 0, 1, &[])].concat();
    let huge = [
        opening(),
        frame(HEADERS, END_HEADERS, 1, &vec![0x90; MAX_HEADER_BLOCK]),
    ]
    .concat();
    for input in [flood, huge] {
        let whole = rewrite_pieces([&input[..]]);
        assert_eq!(whole, (opening(), Err(RewriteError::HeaderBlockTooLarge)));
        assert_eq!(rewrite_pieces(input.chunks(1)), whole);
    }
}

#[test]
fn an_error_repeats_and_buffers_no_more_bytes() {
    let mut rewriter = AuthorityRewriter::default();
    let mut output = BytesMut::new();
    rewriter.rewrite(&opening(), &mut output).unwrap();
    let huge = frame(HEADERS, END_HEADERS, 1, &vec![0x90; MAX_HEADER_BLOCK]);
    for _ in 0..3 {
        let result = rewriter.rewrite(&huge, &mut output);
        assert_eq!(result, Err(RewriteError::HeaderBlockTooLarge));
    }
    assert_eq!(output, opening());
    assert_eq!(rewriter.held.len(), FRAME_HEAD);
}

#[test]
fn anything_but_http2_goes_on_unchanged() {
    let block = frame(
        HEADERS,
        END_HEADERS,
        1,
        &[REQUEST, &[0x41], &text(SOCKET)].concat(),
    );
    for start in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    ] {
        let input = [start, &block].concat();
        assert_eq!(rewrite_pieces([&input[..]]), (input.clone(), Ok(())));
        assert_eq!(rewrite_pieces(input.chunks(1)), (input.clone(), Ok(())));
    }
}

#[test]
fn payload_passes_in_place() {
    let mut rewriter = AuthorityRewriter::default();
    let data = frame(DATA, 0, 1, &vec![HEADERS; 40_000]);
    let input = [opening(), data.clone(), data].concat();
    for chunk in input.chunks(30_000) {
        assert_eq!(rewriter.pass(chunk), chunk.len());
    }
    // A part of a frame head may start a header block, so it waits.
    assert_eq!(rewriter.pass(&[0, 0, 1, HEADERS]), 0);
}

/// Returns the bytes of a connection with every kind of frame.
fn mixed() -> Vec<u8> {
    let fields = [REQUEST, &[0x41], &text(SOCKET)].concat();
    [
        opening(),
        frame(
            HEADERS,
            END_HEADERS | FLAG_PADDED,
            1,
            &[&[3], &fields[..], &[0; 3]].concat(),
        ),
        frame(DATA, 0, 1, b"some payload"),
        frame(
            HEADERS,
            FLAG_PRIORITY,
            3,
            &[&[0, 0, 0, 1, 9], &fields[..5]].concat(),
        ),
        frame(CONTINUATION, 0, 3, &fields[5..12]),
        frame(CONTINUATION, END_HEADERS, 3, &fields[12..]),
        frame(DATA, END_STREAM, 3, &[]),
        frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0x90, 0x91]),
        frame(HEADERS, 0, 5, &fields),
    ]
    .concat()
}

#[test]
fn the_output_does_not_depend_on_the_read_sizes() {
    let input = mixed();
    let whole = rewrite_pieces([&input[..]]);
    assert_eq!(rewrite_pieces(input.chunks(1)), whole);
    for at in 0..=input.len() {
        assert_eq!(
            rewrite_pieces([&input[..at], &input[at..]]),
            whole,
            "cut at {at}"
        );
    }
}

proptest! {
    #[test]
    fn no_input_causes_a_panic(
        mut tail in proptest::collection::vec(prop_oneof![any::<u8>(), 0u8..10], 0..600),
        change in any::<proptest::sample::Index>(),
        size in 1usize..40,
    ) {
        let mut input = mixed();
        let at = change.index(input.len());
        input.truncate(at);
        input.append(&mut tail);
        let whole = rewrite_pieces([&input[..]]);
        prop_assert!(whole.0.len() <= 2 * input.len());
        prop_assert_eq!(rewrite_pieces(input.chunks(size)), whole);
    }
}
