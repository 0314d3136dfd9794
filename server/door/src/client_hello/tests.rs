//! Hellos built by hand, and hellos from rustls. rustls is also the reference for hellos with a flipped bit.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::sync::Arc;

use proptest::prelude::*;
use rustls::server::Acceptor;
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConfig, ClientConnection, NamedGroup, RootCertStore, SupportedProtocolVersion};
use rustls_pki_types::ServerName;

use super::*;

type Outcome = Result<Option<Hello>, HelloError>;

const NAMELESS: Outcome = Ok(Some(Hello { server_name: None }));

fn named(name: &str) -> Outcome {
    Ok(Some(Hello {
        server_name: Some(name.to_owned()),
    }))
}

fn read(received: &[u8]) -> Outcome {
    HelloReader::default().read(received)
}

/// Returns the first result other than `Ok(None)` of a reader that receives `bytes` up to each of `ends` in
/// turn.
fn read_to(bytes: &[u8], ends: impl IntoIterator<Item = usize>) -> Outcome {
    let mut reader = HelloReader::default();
    ends.into_iter()
        .map(|end| reader.read(&bytes[..end]))
        .find(|outcome| *outcome != Ok(None))
        .unwrap_or(Ok(None))
}

fn vector16(body: &[u8]) -> Vec<u8> {
    let len = u16::try_from(body.len()).unwrap().to_be_bytes();
    [&len[..], body].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector16(body)].concat()
}

/// Encodes a name of any type as an entry of a `server_name` extension.
fn entry(kind: u8, name: &[u8]) -> Vec<u8> {
    [&[kind][..], &vector16(name)].concat()
}

fn server_name(entries: &[Vec<u8>]) -> Vec<u8> {
    extension(SERVER_NAME, &vector16(&entries.concat()))
}

fn example() -> Vec<u8> {
    server_name(&[entry(HOST_NAME, b"a.example")])
}

/// Encodes the body of a hello without extensions.
fn bare() -> Vec<u8> {
    let version_and_random = [3u8; VERSION_AND_RANDOM_BYTES];
    let session_id_suites_and_compression = [2u8, 8, 8, 0, 4, 0x13, 1, 0xc0, 0x2b, 1, 0];
    [&version_and_random[..], &session_id_suites_and_compression].concat()
}

fn body(extensions: &[Vec<u8>]) -> Vec<u8> {
    [bare(), vector16(&extensions.concat())].concat()
}

fn message(body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[CLIENT_HELLO][..], &len[1..], body].concat()
}

/// Encodes a message of `len` bytes for `a.example`.
fn message_of(len: usize) -> Vec<u8> {
    let padded_by = |len| message(&body(&[extension(21, &vec![0u8; len]), example()]));
    padded_by(len - padded_by(0).len())
}

/// Splits a message into records of `size` bytes.
fn records(message: &[u8], size: usize) -> Vec<u8> {
    let record = |payload: &[u8]| [&[HANDSHAKE, 3, 1][..], &vector16(payload)].concat();
    message.chunks(size).flat_map(record).collect()
}

fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
    records(&message(&body(extensions)), MAX_RECORD_BYTES)
}

/// Encodes a ClientHello with a server name.
pub(crate) fn hello_for(name: &[u8]) -> Vec<u8> {
    hello(&[server_name(&[entry(HOST_NAME, name)])])
}

#[test]
fn name_is_in_lower_case_without_a_final_dot() {
    let longest = "a.".repeat(126) + "a";
    for (sent, name) in [
        ("a.example", "a.example"),
        ("API.Cluster-1.Example.COM", "api.cluster-1.example.com"),
        ("a.example.", "a.example"),
        ("localhost", "localhost"),
        ("xn--bcher-kva._tcp.10.a", "xn--bcher-kva._tcp.10.a"),
        (longest.as_str(), longest.as_str()),
    ] {
        assert_eq!(read(&hello_for(sent.as_bytes())), named(name));
    }
}

#[test]
fn names_that_are_not_host_names_are_refused() {
    for name in [
        "",
        ".",
        ".a",
        "a..b",
        "a\0.example",
        "a.example\n",
        "a b.example",
        "bücher.example",
        "*.example",
        "a.example:443",
        "127.0.0.1",
        "::1",
        "[::1]",
        &"a.".repeat(127),
        &"a".repeat(64),
    ] {
        assert_eq!(read(&hello_for(name.as_bytes())), Err(BadName), "{name:?}");
    }
    assert_eq!(read(&hello_for(b"a\xff")), Err(BadName));
}

#[test]
fn a_hello_may_lack_a_name() {
    assert_eq!(read(&records(&message(&bare()), 100)), NAMELESS);
    assert_eq!(read(&hello(&[])), NAMELESS);
    assert_eq!(read(&hello(&[extension(16, b"\0\x03\x02h2")])), NAMELESS);
    assert_eq!(read(&hello(&[server_name(&[])])), NAMELESS);
    assert_eq!(read(&hello(&[server_name(&[entry(1, b"a")])])), NAMELESS);
}

#[test]
fn other_extensions_and_other_types_of_names_are_skipped() {
    let names = [
        entry(1, b"b.example"),
        entry(HOST_NAME, b"a.example"),
        entry(255, b""),
    ];
    let extensions = [
        extension(0x0a0a, b""), // GREASE
        extension(0xfe0d, &[0; 200]),
        server_name(&names),
        extension(0xfafa, b"\0"), // GREASE
        extension(0xffff, &[255; 9]),
    ];
    assert_eq!(read(&hello(&extensions)), named("a.example"));
}

#[test]
fn a_hello_may_come_in_any_pieces() {
    let small = message_of(100);
    // As large as with post-quantum key shares: more than fits into one segment.
    let large = message_of(1_800);
    let in_records = (1..=10)
        .map(|size| records(&small, size))
        .chain([700, 1_799, 1_800].map(|size| records(&large, size)));
    for bytes in in_records {
        let len = bytes.len();
        for middle in 0..len {
            assert_eq!(read(&bytes[..middle]), Ok(None));
            assert_eq!(read_to(&bytes, [middle, len]), named("a.example"));
        }
        assert_eq!(read_to(&bytes, 0..=len), named("a.example"));
    }
}

#[test]
fn every_byte_of_the_largest_hello_is_processed_once() {
    let bytes = records(&message_of(MAX_HELLO_BYTES), 6);
    let mut reader = HelloReader::default();
    for end in 0..bytes.len() {
        assert_eq!(reader.read(&bytes[..end]), Ok(None));
        assert!(end - reader.seen < RECORD_HEAD_BYTES);
    }
    assert_eq!(reader.read(&bytes), named("a.example"));
    let whole = records(&message_of(MAX_HELLO_BYTES), MAX_RECORD_BYTES);
    assert_eq!(read(&whole), named("a.example"));
}

#[test]
fn too_large_hello_is_refused() {
    let larger = records(&message_of(MAX_HELLO_BYTES + 1), MAX_RECORD_BYTES);
    assert_eq!(read(&larger), Err(TooLarge));

    let largest_in_bytes = records(&message_of(5_461), 1);
    assert_eq!(read(&largest_in_bytes), named("a.example"));
    let larger_in_bytes = records(&message_of(5_462), 1);
    assert_eq!(read(&larger_in_bytes), Err(TooLarge));
    let at_limit = &larger_in_bytes[..MAX_RECEIVED_BYTES];
    assert_eq!(read(at_limit), Err(TooLarge));
    assert_eq!(read(&at_limit[..MAX_RECEIVED_BYTES - 1]), Ok(None));
}

#[test]
fn invalid_hello_is_refused_at_the_first_wrong_byte() {
    let cases: &[(&[u8], HelloError)] = &[
        (b"G", NotTls),
        (b"\0", NotTls),
        (b"\x80", NotTls), // an SSL 2.0 hello
        (&[22, 2], NotTls),
        (&[20], NotHandshake),
        (&[21], NotHandshake),
        (&[23], NotHandshake),
        (&[22, 3, 1, 0, 50, 2], NotHandshake), // a ServerHello
        (&[22, 3, 1, 0, 0], Malformed),
        (&[22, 3, 1, 0x40, 1], TooLarge),
        (&[22, 3, 1, 0, 50, 1, 0, 0x3f, 0xfd], TooLarge),
        (&[22, 3, 1, 0, 50, 1, 1, 0, 0], TooLarge),
        // Bytes after the hello in the same record.
        (&[22, 3, 1, 0, 50, 1, 0, 0, 45], Malformed),
        // The same errors in later records.
        (&[22, 3, 1, 0, 1, 1, b'G'], NotTls),
        (&[22, 3, 1, 0, 1, 1, 22, 2], NotTls),
        (&[22, 3, 1, 0, 1, 1, 21], NotHandshake),
        (&[22, 3, 1, 0, 1, 1, 22, 3, 1, 0, 0], Malformed),
        (&[22, 3, 1, 0, 4, 1, 0, 0, 45, 22, 3, 1, 0, 46], Malformed),
    ];
    for &(bytes, error) in cases {
        let (_, before) = bytes.split_last().unwrap();
        let mut reader = HelloReader::default();
        assert_eq!(reader.read(before), Ok(None), "{before:?}");
        assert_eq!(reader.read(bytes), Err(error), "{bytes:?}");
        assert_eq!(reader.read(bytes), Err(error), "{bytes:?} again");
        let and_more = [bytes, &[22; 100]].concat();
        assert_eq!(read(&and_more), Err(error), "{bytes:?} and more");
    }
}

#[test]
fn lengths_that_disagree_are_malformed() {
    let whole = body(&[example()]);
    for len in 0..whole.len() {
        let expected = if len == bare().len() {
            NAMELESS
        } else {
            Err(Malformed)
        };
        assert_eq!(read(&records(&message(&whole[..len]), 200)), expected);
    }
    let longer = message(&[&whole[..], &[0]].concat());
    assert_eq!(read(&records(&longer, 200)), Err(Malformed));

    let entry = entry(HOST_NAME, b"a.example");
    for len in 1..entry.len() {
        let cut_entry = server_name(&[entry[..len].to_vec()]);
        assert_eq!(read(&hello(&[cut_entry])), Err(Malformed));
    }
    let list = vector16(&entry);
    for len in 0..list.len() {
        let cut_list = extension(SERVER_NAME, &list[..len]);
        assert_eq!(read(&hello(&[cut_list])), Err(Malformed));
    }
    let longer = extension(SERVER_NAME, &[&list[..], &[0]].concat());
    assert_eq!(read(&hello(&[longer])), Err(Malformed));
}

#[test]
fn a_second_name_is_refused() {
    let entry = entry(HOST_NAME, b"a.example");
    let two_entries = server_name(&[entry.clone(), entry]);
    assert_eq!(read(&hello(&[two_entries])), Err(Malformed));
    assert_eq!(read(&hello(&[example(), example()])), Err(Malformed));
}

#[test]
fn later_records_are_ignored() {
    let hello = hello_for(b"a.example");
    let early_data = [&hello[..], &[23, 3, 3, 0, 1, 9], &[0; MAX_RECEIVED_BYTES]].concat();
    let mut reader = HelloReader::default();
    for received in [&hello, &early_data] {
        assert_eq!(reader.read(received), named("a.example"));
        assert_eq!(read(received), named("a.example"));
    }
}

/// Returns the hello of a rustls client that offers `versions` and writes records of up to `record` bytes.
fn hello_of_rustls(
    name: &str,
    versions: &[&'static SupportedProtocolVersion],
    alpn: &[&[u8]],
    post_quantum: bool,
    record: Option<usize>,
) -> Vec<u8> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    // A client sends key shares for its first group.
    provider
        .kx_groups
        .sort_by_key(|group| (group.name() == NamedGroup::X25519MLKEM768) != post_quantum);
    let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|protocol| protocol.to_vec()).collect();
    config.max_fragment_size = record;
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    while client.wants_write() {
        client.write_tls(&mut hello).unwrap();
    }
    hello
}

#[test]
fn the_hellos_of_rustls_are_read() {
    let offers: [&[&SupportedProtocolVersion]; 3] = [&[&TLS12], &[&TLS13], &[&TLS13, &TLS12]];
    let http: &[&[u8]] = &[b"h2", b"http/1.1"];
    for (sent, outcome) in [
        ("a.example", named("a.example")),
        ("API.Example.COM", named("api.example.com")),
        ("a.example.", named("a.example")),
        ("127.0.0.1", NAMELESS),
        ("::1", NAMELESS),
    ] {
        for versions in offers {
            for (alpn, record) in [(http, None), (http, Some(64)), (&http[..0], None)] {
                let hello = hello_of_rustls(sent, versions, alpn, false, record);
                assert_eq!(read(&hello), outcome, "{sent} {versions:?} {record:?}");
            }
        }
    }
    let post_quantum = hello_of_rustls("a.example", &[&TLS13], &[], true, None);
    assert!(post_quantum.len() > 1_300);
    assert_eq!(read(&post_quantum), named("a.example"));
}

/// Returns the name according to rustls; `None` if rustls refuses the hello, waits for more, or finds no
/// name.
fn name_by_rustls(mut hello: &[u8]) -> Option<String> {
    let mut acceptor = Acceptor::default();
    while !hello.is_empty() {
        acceptor.read_tls(&mut hello).unwrap();
    }
    let accepted = acceptor.accept().ok()??;
    let name = accepted.client_hello().server_name()?.to_owned();
    Some(name)
}

#[test]
fn hellos_with_a_flipped_bit_are_read_as_by_rustls() {
    for versions in [&[&TLS12][..], &[&TLS13, &TLS12][..]] {
        let hello = hello_of_rustls("api.example", versions, &[b"h2"], false, None);
        let name = hello
            .windows(11)
            .position(|bytes| bytes == b"api.example")
            .unwrap();
        // Skip the length of the name: with a shorter name, the remaining bytes become a name of another
        // type, which rustls ignores without checking its length.
        let name_len = name - 2..name;
        let mut compared = 0;
        for at in (0..hello.len()).filter(|at| !name_len.contains(at)) {
            for bit in 0..8 {
                let mut flipped = hello.clone();
                flipped[at] ^= 1 << bit;
                let Some(name) = name_by_rustls(&flipped) else {
                    continue;
                };
                compared += 1;
                let outcome = named(name.trim_end_matches('.'));
                assert_eq!(read(&flipped), outcome, "bit {bit} of byte {at}: {hello:?}");
            }
        }
        // The random field alone has 256 bits.
        assert!(compared > 256, "{compared}");
    }
}

/// Generates noise, and hellos in records of all sizes with some bytes overwritten.
fn received() -> impl Strategy<Value = Vec<u8>> {
    let overwritten = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    let hellos = (1..=100usize, overwritten).prop_map(|(size, overwritten)| {
        let mut bytes = records(&message_of(100), size);
        for (index, byte) in overwritten {
            *index.get_mut(&mut bytes) = byte;
        }
        bytes
    });
    prop_oneof![prop::collection::vec(any::<u8>(), 0..50), hellos]
}

proptest! {
    #[test]
    fn result_does_not_depend_on_how_the_input_is_split(received in received(), size in 1usize..50) {
        let len = received.len();
        let in_pieces = read_to(&received, (size..len).step_by(size).chain([len]));
        prop_assert_eq!(in_pieces, read(&received));
    }
}
