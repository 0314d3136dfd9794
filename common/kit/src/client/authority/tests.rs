#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;

#[test]
fn encode_matches_grpc_go() {
    assert_eq!(encode("/etc/k8s/a_b.socket"), "%2Fetc%2Fk8s%2Fa_b.socket");
    assert_eq!(encode("127.0.0.1:80"), "127.0.0.1:80");
    assert_eq!(encode("[::1]:80"), "[::1]:80");
    assert_eq!(encode("a b%ü"), "a%20b%25%C3%BC");
}

/// Upper-cases complete words of four bytes and leaves the rest in `input`.
fn shout(input: &mut BytesMut, output: &mut BytesMut) -> io::Result<()> {
    while input.len() >= 4 {
        output.extend_from_slice(&input.split_to(4).to_ascii_uppercase());
    }
    Ok(())
}

#[tokio::test]
async fn written_bytes_are_rewritten_and_read_bytes_are_not() {
    // The socket accepts 3 bytes at a time.
    let (near, mut far) = tokio::io::duplex(3);
    let mut stream = Rewriting::new(near, shout);
    let writing = async {
        for byte in b"abcdefgh" {
            stream.write_all(&[*byte]).await.unwrap();
        }
        let parts = [IoSlice::new(b"ij"), IoSlice::new(b"kl")];
        assert_eq!(stream.write_vectored(&parts).await.unwrap(), 4);
        stream.flush().await.unwrap();
        let mut answer = [0; 2];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"ok");
        stream.shutdown().await.unwrap();
    };
    let reading = async {
        let mut seen = [0; 12];
        far.read_exact(&mut seen).await.unwrap();
        assert_eq!(&seen, b"ABCDEFGHIJKL");
        far.write_all(b"ok").await.unwrap();
        assert_eq!(far.read(&mut seen).await.unwrap(), 0);
    };
    tokio::join!(writing, reading);
}

#[tokio::test]
async fn large_writes_are_accepted_in_bounded_pieces() {
    let (near, mut far) = tokio::io::duplex(4096);
    let mut stream = Rewriting::new(near, shout);
    let body = vec![b'x'; 4 * CHUNK_BYTES];
    assert_eq!(stream.write(&body).await.unwrap(), CHUNK_BYTES);
    let rest = &body[CHUNK_BYTES..];
    let writing = async {
        stream.write_all(rest).await.unwrap();
        stream.shutdown().await.unwrap();
    };
    let mut seen = Vec::new();
    let (_, read) = tokio::join!(writing, far.read_to_end(&mut seen));
    read.unwrap();
    assert_eq!(seen, body.to_ascii_uppercase());
}

/// Sends a request through the rewriting to an HTTP/2 server, `step` bytes at a time. Returns the authority
/// and the marker header that the server received.
async fn request_through(authority: &str, step: usize) -> (String, String) {
    let (near, far) = tokio::io::duplex(step);
    let io = Rewriting::new(near, replace_with(authority.to_owned()));
    let client = async {
        let (client, connection) = h2::client::handshake(io).await.unwrap();
        let request = http::Request::post("http://localhost/ProxyService/Proxy")
            .header("x-marker", "is still there")
            .body(())
            .unwrap();
        let (_response, mut stream) = client
            .ready()
            .await
            .unwrap()
            .send_request(request, false)
            .unwrap();
        stream
            .send_data(bytes::Bytes::from_static(&[7; 100]), true)
            .unwrap();
        connection.await.ok();
    };
    let server = async {
        let mut connection = h2::server::handshake(far).await.unwrap();
        let (request, _respond) = connection.accept().await.unwrap().unwrap();
        let (head, mut body) = request.into_parts();
        let reading = async {
            let mut received = 0;
            while let Some(data) = body.data().await {
                received += data.unwrap().len();
            }
            received
        };
        tokio::select! {
            received = reading => assert_eq!(received, 100),
            _ = connection.accept() => panic!("the body is missing"),
        }
        (
            head.uri.authority().unwrap().to_string(),
            head.headers["x-marker"].to_str().unwrap().to_owned(),
        )
    };
    tokio::select! {
        seen = server => seen,
        () = async { client.await; std::future::pending().await } => unreachable!(),
    }
}

#[tokio::test]
async fn request_arrives_with_the_new_authority() {
    let long = format!("{}.example", "long".repeat(40));
    for authority in ["a", "somewhere.else:1234", &long] {
        for step in [1, 5, 1000] {
            let (seen, marker) = request_through(authority, step).await;
            assert_eq!(seen, authority);
            assert_eq!(marker, "is still there");
        }
    }
}

#[test]
fn percent_encoded_authority_is_written_unchanged() {
    // POST, http, a Huffman-coded authority of one byte, an indexed field.
    let frame = b"\0\0\x06\x01\x04\0\0\0\x01\x83\x86\x41\x81\x1f\x84";
    let mut output = BytesMut::new();
    rewrite_headers(frame, "%2Fa", &mut output).unwrap();
    assert_eq!(
        output.as_ref(),
        b"\0\0\x09\x01\x04\0\0\0\x01\x83\x86\x41\x04%2Fa\x84"
    );
}

#[test]
fn written_lengths_can_be_read_back() {
    for len in [0, 1, 126, 127, 128, 254, 255, 300, 16_000] {
        let mut coded = BytesMut::new();
        put_length(len, &mut coded);
        assert_eq!(take_length(&mut coded.as_ref()), Some(len));
    }
}

#[test]
fn other_header_forms_are_rejected() {
    let frames: [&[u8]; 5] = [
        // In order: no END_HEADERS flag; padding; a literal before the authority; truncated; no authority.
        b"\0\0\x04\x01\0\0\0\0\x01\x83\x41\x01x",
        b"\0\0\x04\x01\x0c\0\0\0\x01\x83\x41\x01x",
        b"\0\0\x04\x01\x04\0\0\0\x01\x44\x01x\x83",
        b"\0\0\x03\x01\x04\0\0\0\x01\x83\x41\x09",
        b"\0\0\x01\x01\x04\0\0\0\x01\x83",
    ];
    for frame in frames {
        assert!(rewrite_headers(frame, "y", &mut BytesMut::new()).is_none());
    }
}
