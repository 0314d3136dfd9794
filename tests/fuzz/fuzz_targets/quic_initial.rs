//! The first packets of a QUIC client, as datagrams and as decrypted frames: connection ids have a bounded length,
//! repeated packets do not matter, and a hello within the limit has a valid name or none.
//!
//! An odd first byte means datagrams, an even one frames. The rest is cut into pieces.
#![no_main]

use culvert_door::client_hello::Hello;
use culvert_door::quic::initial::{
    CryptoStream, Header, InitialError, MAX_HELLO_BYTES, MAX_ID_BYTES,
};
use culvert_fuzz::Cut;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((&kind, rest)) = input.split_first() else {
        return;
    };
    match kind % 2 {
        1 => datagrams(rest),
        _ => {
            if let Some(cut) = Cut::new(rest) {
                frames(&cut);
            }
        }
    }
});

/// Feeds the input as one datagram, and as two.
fn datagrams(input: &[u8]) {
    let Some(header) = Header::parse(input) else {
        return;
    };
    let Header::Long {
        destination,
        source,
        ..
    } = header
    else {
        return;
    };
    assert!(destination.len() <= MAX_ID_BYTES && source.len() <= MAX_ID_BYTES);
    let whole = read_hello(destination, [input]);
    let twice = read_hello(destination, [input, input]);
    assert_eq!(twice, whole);
    let (first, last) = input.split_at(input.len() / 2);
    let _ = read_hello(destination, [last, first]);
}

fn read_hello<'a>(
    id: &[u8],
    datagrams: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Option<Hello>, InitialError> {
    let mut stream = CryptoStream::default();
    for datagram in datagrams {
        stream.add_datagram(id, datagram)?;
    }
    stream.hello()
}

/// Feeds each piece as the frames of one packet.
fn frames(cut: &Cut<'_>) {
    let mut stream = CryptoStream::default();
    for piece in cut.pieces() {
        if let Err(error) = stream.add_frames(piece) {
            assert!(matches!(
                error,
                InitialError::Malformed | InitialError::TooLarge
            ));
            return;
        }
    }
    let hello = stream.hello();
    let last = cut.pieces().last().unwrap_or_default();
    // The last packet again changes nothing.
    stream.add_frames(last).unwrap();
    assert_eq!(stream.hello(), hello);
    if let Ok(Some(hello)) = hello {
        assert!(cut.bytes.len() >= 4);
        let name = hello.server_name.unwrap_or_else(|| "none".to_owned());
        assert!((1..=253).contains(&name.len()) && name.len() < MAX_HELLO_BYTES);
        assert!(name.parse::<std::net::IpAddr>().is_err());
    }
}
