//! Runs the fuzz targets' simulations as property tests, for machines without a fuzzer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
#![allow(unreachable_pub, reason = "the fuzz targets share the modules")]

#[path = "../fuzz/src/cut.rs"]
mod cut;
#[path = "../fuzz/src/heads.rs"]
mod heads;
#[path = "../fuzz/src/messages.rs"]
mod messages;
#[path = "../fuzz/src/mux.rs"]
mod mux;
#[path = "../fuzz/src/native.rs"]
mod native;
#[path = "../fuzz/src/resume.rs"]
mod resume;
#[path = "../fuzz/src/streams.rs"]
mod streams;
#[path = "../fuzz/src/words.rs"]
mod words;

use std::path::Path;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn packet_muxes_never_mix_up_connections(input in prop::collection::vec(any::<u8>(), 0..900)) {
        mux::run(&input);
    }

    /// Only operations without forged packets, so that the stricter invariants are always checked.
    #[test]
    fn muxes_without_forged_packets_deliver_every_byte_to_its_own_connection(
        input in prop::collection::vec((0..9_u8, any::<u8>(), any::<u8>()), 0..300)
    ) {
        let input: Vec<u8> = input.into_iter().flat_map(|(k, a, b)| [k, a, b]).collect();
        mux::run(&input);
    }

    #[test]
    fn resumed_streams_have_every_byte_once_wherever_the_transports_break(
        operations in prop::collection::vec((0..10_u8, any::<u8>()), 0..400)
    ) {
        let input: Vec<u8> = operations.into_iter().flat_map(|(kind, count)| [kind, count]).collect();
        resume::run(&input);
    }

    #[test]
    fn resumable_link_survives_a_hostile_peer(
        frames in prop::collection::vec((prop::sample::select(LENGTHS), 0..12_u64, any::<u8>()), 0..20),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let frames = frames.into_iter().flat_map(|(length, received, byte)| {
            let head = [&length.to_be_bytes()[..], &received.to_be_bytes()].concat();
            let bytes = usize::try_from(length).unwrap().min(40);
            [head, vec![byte; bytes]].concat()
        });
        resume::run_hostile(&frames.chain(tail).collect::<Vec<u8>>());
    }

    /// Pieces of an HTTP head, so that many inputs are nearly valid.
    #[test]
    fn heads_are_read_to_their_empty_line_and_no_further(
        lengths in prop::collection::vec(any::<u8>(), 0..9),
        parts in prop::collection::vec(prop::sample::select(HEAD_PARTS), 0..12),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let input = [vec![lengths.len() as u8], lengths, parts.concat(), tail].concat();
        heads::run_native(&input);
        heads::run_proxy(&input);
    }

    #[test]
    fn words_do_not_depend_on_the_cut_into_pieces(
        lengths in prop::collection::vec(any::<u8>(), 0..9),
        parts in prop::collection::vec(prop::sample::select(WORD_PARTS), 0..40),
    ) {
        let input = [vec![lengths.len() as u8], lengths, parts.concat()].concat();
        words::run(&input);
    }

    #[test]
    fn messages_do_not_depend_on_the_cut_into_frames(
        lengths in prop::collection::vec(any::<u8>(), 0..9),
        parts in prop::collection::vec(prop::sample::select(MESSAGE_PARTS), 0..12),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let input = [vec![lengths.len() as u8], lengths, parts.concat(), tail].concat();
        messages::run(&input);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn native_connection_survives_a_hostile_peer(
        input in prop::collection::vec(any::<u8>(), 0..600)
    ) {
        native::run(&input);
    }

    /// Only operations that keep the connection open, so that more streams are open.
    #[test]
    fn native_streams_stay_within_their_windows(
        first in any::<u8>(),
        input in prop::collection::vec((0..6_u8, any::<u8>(), any::<u8>()), 0..300)
    ) {
        let operations = input.into_iter().flat_map(|(k, a, b)| [k, a, b]);
        let input: Vec<u8> = std::iter::once(first).chain(operations).collect();
        native::run(&input);
    }

    #[test]
    fn flows_deliver_every_byte_in_order_within_their_bounds(
        input in prop::collection::vec(any::<u8>(), 0..1500)
    ) {
        streams::run(&input);
    }

    /// Without damage, so that more bytes arrive.
    #[test]
    fn flows_of_a_good_network_stay_within_their_bounds(
        input in prop::collection::vec((prop::sample::select(CALM), any::<u8>(), any::<u8>()), 0..500)
    ) {
        let input: Vec<u8> = input.into_iter().flat_map(|(k, a, b)| [k, a, b]).collect();
        streams::run(&input);
    }
}

/// Lengths of frames of a resumable link.
const LENGTHS: &[u32] = &[0, 1, 30, 40, 262_144, 262_145, u32::MAX];

/// Parts of heads: of an agent, of a server, and of a proxy.
const HEAD_PARTS: &[&[u8]] = &[
    b"GET /agent HTTP/1.1\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 403 Forbidden\r\n",
    b"HTTP/1.0 407 ",
    b"HTTP/1.1 409 Conflict\r\n",
    b"agentid: a\r\n",
    b"culvert-server: s\r\n",
    b"culvert-resume: over\r\n",
    RESUME_LINE,
    b"culvert-received: 17.18446744073709551615\r\n",
    PROCESS_LINE,
    b"authorization: Bearer x\n",
    b"name :\t",
    b"\r\n",
    b"\n",
    b"\xff\0",
];

/// Request to resume a session.
const RESUME_LINE: &[u8] = b"culvert-resume: 00112233445566778899aabbccddeeff.\
    000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f.17\r\n";

/// Identity of a process.
const PROCESS_LINE: &[u8] =
    b"culvert-process: 00112233445566778899AABBCCDDEEFF.ffeeddccbbaa99887766554433221100\r\n";

/// Parts of words on the control stream of a QUIC link.
const WORD_PARTS: &[&[u8]] = &[
    b"prefer ",
    b"quic",
    b"tcp",
    b"end ",
    b"4 ",
    b"18446744073709551615 ",
    b"18446744073709551616",
    b"slow",
    b"ping",
    b"pong",
    b"\n",
    b"\n",
    b"\xff",
];

/// Prefixes of messages, and packets: data in the usual and in an unusual form, and a dial.
const MESSAGE_PARTS: &[&[u8]] = &[
    &[0, 0, 0, 0, 9, 0x08, 4, 0x22, 5, 0x08, 7, 0x1a, 1, 9],
    &[0, 0, 0, 0, 9, 0x22, 5, 0x1a, 1, 9, 0x08, 7, 0x08, 4],
    &[0, 0, 0, 0, 0],
    &[0, 0, 0, 1, 0],
    &[1, 0, 0, 0, 0],
    &[0, 0xff, 0, 0, 0],
    &[0x08, 4, 0x22, 5],
];

/// Operations of the flows without loss, damage and garbage, and without ends of handles.
const CALM: &[u8] = &[0, 1, 2, 3, 4, 5, 7, 8, 12, 13];

/// Runs a simulation with every seed of its fuzz target.
fn seeds(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/seeds")
        .join(target);
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
    assert!(!files.is_empty());
    for file in files {
        run(&std::fs::read(file.unwrap().path()).unwrap());
    }
}

#[test]
fn simulations_pass_with_the_seeds_of_their_targets() {
    seeds("native_hello", heads::run_native);
    seeds("proxy_answer", heads::run_proxy);
    seeds("grpc_reader", messages::run);
    seeds("native_link", native::run);
    seeds("openvpn_streams", streams::run);
    seeds("quic_words", words::run);
    seeds("resume", |input| match input.split_first() {
        Some((0..128, operations)) => resume::run(operations),
        Some((_, bytes)) => resume::run_hostile(bytes),
        None => {}
    });
}
