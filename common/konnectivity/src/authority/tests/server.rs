//! Tests of the rewriter in front of a real HTTP/2 server.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf, duplex};

use super::*;

/// Request without its authority.
#[derive(Debug, Clone, PartialEq)]
struct Message {
    path: String,
    headers: HeaderMap,
    body: Vec<u8>,
    trailers: Option<HeaderMap>,
}

/// Serves until `count` requests have arrived completely. Returns the requests ordered by path.
async fn serve(io: DuplexStream, count: usize) -> Vec<Message> {
    let mut connection = h2::server::handshake(AuthorityStream::new(io))
        .await
        .unwrap();
    let mut handlers = tokio::task::JoinSet::new();
    let mut seen = Vec::new();
    while seen.len() < count {
        tokio::select! {
            accepted = connection.accept() => {
                let (request, mut respond) = accepted.expect("client is there").unwrap();
                handlers.spawn(async move {
                    assert_eq!(request.uri().authority().unwrap(), "x");
                    let (head, mut stream) = request.into_parts();
                    let mut body = Vec::new();
                    while let Some(data) = stream.data().await {
                        body.extend_from_slice(&data.unwrap());
                    }
                    let trailers = stream.trailers().await.unwrap();
                    respond.send_response(Response::new(()), true).unwrap();
                    Message { path: head.uri.path().into(), headers: head.headers, body, trailers }
                });
            }
            Some(message) = handlers.join_next() => seen.push(message.unwrap()),
        }
    }
    // The answers are sent; the client leaves once it has all of them.
    assert!(!matches!(connection.accept().await, Some(Ok(_))));
    seen.sort_by(|a, b| a.path.cmp(&b.path));
    seen
}

/// Sends all messages on one connection, message `i` to `authorities[i]`, and waits for the answers.
async fn send(io: DuplexStream, authorities: &[String], messages: &[Message]) {
    let (mut requests, connection) = h2::client::handshake(io).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut answers = Vec::new();
    for (authority, message) in authorities.iter().zip(messages) {
        let mut request = Request::post(format!("http://{authority}{}", message.path));
        *request.headers_mut().unwrap() = message.headers.clone();
        requests = requests.ready().await.unwrap();
        let (answer, mut stream) = requests
            .send_request(request.body(()).unwrap(), false)
            .unwrap();
        stream
            .send_data(
                Bytes::from(message.body.clone()),
                message.trailers.is_none(),
            )
            .unwrap();
        if let Some(trailers) = &message.trailers {
            stream.send_trailers(trailers.clone()).unwrap();
        }
        answers.push(answer);
    }
    for answer in answers {
        assert!(answer.await.unwrap().status().is_success());
    }
    drop(requests);
    connection.abort();
}

fn headers() -> impl Strategy<Value = HeaderMap> {
    let name = prop_oneof!["[a-d]", "x-[a-z]{1,12}", Just("user-agent".to_owned())];
    let value =
        prop_oneof!["[ -~]{0,40}", "[a-z]{1000,2500}"].prop_map(|text| text.trim().to_owned());
    proptest::collection::vec((name, value, any::<bool>()), 0..12).prop_map(|fields| {
        let mut map = HeaderMap::new();
        for (name, value, sensitive) in fields {
            let mut value = HeaderValue::from_str(&value).unwrap();
            value.set_sensitive(sensitive);
            map.append(HeaderName::try_from(name).unwrap(), value);
        }
        map
    })
}

fn exchange() -> impl Strategy<Value = Vec<(String, Message)>> {
    let body = prop_oneof![
        Just(Vec::new()),
        proptest::collection::vec(any::<u8>(), 1..200),
        Just(vec![HEADERS; 3000])
    ];
    let one = (
        "[a-z]{1,20}(:[1-9][0-9]{0,3})?",
        headers(),
        body,
        proptest::option::of(headers()),
    );
    proptest::collection::vec(one, 1..12).prop_map(|all| {
        let message = |(at, (authority, headers, body, trailers))| {
            (
                authority,
                Message {
                    path: format!("/{at:02}"),
                    headers,
                    body,
                    trailers,
                },
            )
        };
        all.into_iter().enumerate().map(message).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // The pipe must have room for the preface and SETTINGS: both ends write these bytes before they read.
    #[test]
    fn all_headers_arrive(exchange in exchange(), pipe in prop_oneof![64usize..200, Just(65_536)]) {
        let (authorities, messages): (Vec<_>, Vec<_>) = exchange.into_iter().unzip();
        let (client, server) = duplex(pipe);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (seen, ()) = runtime.block_on(async {
            tokio::join!(serve(server, messages.len()), send(client, &authorities, &messages))
        });
        prop_assert_eq!(seen, messages);
    }
}

/// Returns a request with `authority` after the other fields of its header block.
fn request(stream: u32, authority: &[u8]) -> Vec<u8> {
    frame(
        HEADERS,
        END_HEADERS | END_STREAM,
        stream,
        &[REQUEST, authority].concat(),
    )
}

#[tokio::test]
async fn a_socket_path_is_accepted_in_every_form() {
    let mut authorities: Vec<_> = literal_names()
        .into_iter()
        .map(|name| [name, text(SOCKET)].concat())
        .collect();
    authorities.extend([
        // The newest entry of the table, and the name of that entry with another value.
        vec![0xbe],
        [&[0x0f, 62 - 15][..], &text(SOCKET)].concat(),
        // The same two forms after another insertion; the second form inserts the authority again.
        [&[0xbe, 0x40][..], &text(b"name"), &text(b"value")].concat(),
        [&[0x7f, 63 - 63][..], &text(SOCKET)].concat(),
        vec![0xbe],
    ]);
    let requests = (1..)
        .step_by(2)
        .zip(&authorities)
        .flat_map(|(id, form)| request(id, form));
    let input: Vec<u8> = opening().into_iter().chain(requests).collect();
    let (mut client, server) = duplex(1 << 20);
    client.write_all(&input).await.unwrap();
    let mut connection = h2::server::handshake(AuthorityStream::new(server))
        .await
        .unwrap();
    for _ in authorities {
        let (request, _) = connection.accept().await.unwrap().unwrap();
        assert_eq!(request.uri(), "http://x/");
    }
}

#[tokio::test]
async fn without_the_rewriter_a_socket_path_is_refused() {
    let input = [
        opening(),
        request(1, &[&[0x41][..], &text(SOCKET)].concat()),
    ]
    .concat();
    let (mut client, server) = duplex(1 << 20);
    client.write_all(&input).await.unwrap();
    client.shutdown().await.unwrap();
    let mut connection = h2::server::handshake(server).await.unwrap();
    assert!(!matches!(connection.accept().await, Some(Ok(_))));
}

#[tokio::test]
async fn an_endless_header_block_fails_the_read() {
    let (mut client, server) = duplex(1 << 20);
    let block = frame(HEADERS, END_HEADERS, 1, &vec![0x90; MAX_HEADER_BLOCK]);
    client
        .write_all(&[opening(), block].concat())
        .await
        .unwrap();
    let mut read = Vec::new();
    let error = AuthorityStream::new(server)
        .read_to_end(&mut read)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn the_end_of_the_stream_loses_no_bytes() {
    let cut = request(1, &[&[0x41][..], &text(SOCKET)].concat());
    let input = [&opening()[..], &request(1, &[0x41, 1, b'a']), &cut[..20]].concat();
    let (mut client, server) = duplex(1 << 20);
    client.write_all(&input).await.unwrap();
    drop(client);
    let mut stream = AuthorityStream::new(server);
    let mut read = Vec::new();
    stream.read_to_end(&mut read).await.unwrap();
    let expected = [&opening()[..], &request(1, &[0x41, 1, b'x']), &cut[..20]].concat();
    assert_eq!(read, expected);
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    assert_eq!(stream.ready.capacity() + stream.rewriter.held.capacity(), 0);
}

/// Sink that records all writes.
#[derive(Default)]
struct Sink {
    vectored: usize,
    written: Vec<u8>,
    shut_down: bool,
}

impl AsyncWrite for Sink {
    fn poll_write(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.written.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.vectored += 1;
        bufs.iter()
            .for_each(|buf| self.written.extend_from_slice(buf));
        Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shut_down = true;
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn writes_reach_the_socket_unchanged() {
    let mut stream = AuthorityStream::new(Sink::default());
    assert!(stream.is_write_vectored());
    let parts = [IoSlice::new(b"head "), IoSlice::new(b"payload")];
    assert_eq!(stream.write_vectored(&parts).await.unwrap(), 12);
    assert_eq!(stream.inner.vectored, 1);
    stream.write_all(b", more").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(stream.inner.vectored, 1);
    assert_eq!(stream.inner.written, b"head payload, more");
    assert!(stream.inner.shut_down);
    let (plain, _other) = duplex(1);
    let vectored = plain.is_write_vectored();
    assert_eq!(AuthorityStream::new(plain).is_write_vectored(), vectored);
}

/// Reader that returns as many bytes as fit, and counts the reads.
struct Source {
    bytes: Bytes,
    reads: usize,
}

impl tokio::io::AsyncRead for Source {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.reads += 1;
        let count = self.bytes.len().min(buf.remaining());
        buf.put_slice(&self.bytes.split_to(count));
        Poll::Ready(Ok(()))
    }
}

#[tokio::test]
async fn payload_is_read_into_the_callers_buffer() {
    let data = frame(DATA, 0, 1, &vec![1; 50_000]);
    let bytes = Bytes::from([opening(), data].concat());
    let mut stream = AuthorityStream::new(Source {
        bytes: bytes.clone(),
        reads: 0,
    });
    let mut buffer = vec![0; 64 * 1024];
    assert_eq!(stream.read(&mut buffer).await.unwrap(), bytes.len());
    assert_eq!(buffer[..bytes.len()], bytes);
    assert_eq!(stream.inner.reads, 1);
    assert_eq!(stream.ready.capacity() + stream.rewriter.held.capacity(), 0);
}
