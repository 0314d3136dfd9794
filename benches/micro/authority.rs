//! The cost of the authority rewriter: for bytes that pass in place, for copied bytes, and for rewritten
//! requests.

use std::hint::black_box;

use bytes::{BufMut, BytesMut};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use culvert_konnectivity::authority::AuthorityRewriter;

/// Frames of each kind per iteration.
const FRAMES: u32 = 64;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const END_HEADERS: u8 = 4;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8], output: &mut BytesMut) {
    output.put_uint(payload.len() as u64, 3);
    output.put_u8(kind);
    output.put_u8(flags);
    output.put_u32(stream);
    output.put_slice(payload);
}

/// Returns the first bytes of a client: the preface and an empty SETTINGS frame.
fn opening() -> BytesMut {
    let mut bytes = BytesMut::from(&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..]);
    frame(SETTINGS, 0, 0, &[], &mut bytes);
    bytes
}

/// Returns the DATA frames of a busy stream.
fn data() -> BytesMut {
    let mut bytes = BytesMut::new();
    for _ in 0..FRAMES {
        frame(DATA, 0, 1, &[7; 16_384], &mut bytes);
    }
    bytes
}

/// Returns requests as grpc-go sends them over a Unix socket: fields of the static table by index, and the
/// authority (the path of the socket) as a literal with insertion into the dynamic table.
fn requests() -> BytesMut {
    let authority = b"%2Fetc%2Fkubernetes%2Fkonnectivity-server%2Fkonnectivity-server.socket";
    let mut fields = BytesMut::from(&[0x83, 0x86, 0x41, authority.len() as u8][..]);
    fields.put_slice(authority);
    fields.put_slice(b"\x44\x13/ProxyService/Proxy");
    fields.put_slice(b"\x5f\x10application/grpc");
    let mut bytes = opening();
    for request in 0..FRAMES {
        frame(HEADERS, END_HEADERS, 2 * request + 1, &fields, &mut bytes);
    }
    bytes
}

/// Returns a rewriter after the opening bytes.
fn rewriter() -> AuthorityRewriter {
    let mut rewriter = AuthorityRewriter::default();
    let opening = opening();
    assert_eq!(rewriter.pass(&opening), opening.len());
    rewriter
}

fn rewriting(c: &mut Criterion) {
    let mut group = c.benchmark_group("authority rewriter");
    let (data, requests) = (data(), requests());

    group.throughput(Throughput::Bytes(data.len() as u64));
    let mut passing = rewriter();
    group.bench_function("data frames, in place", |b| {
        b.iter(|| passing.pass(black_box(&data)));
    });
    assert_eq!(passing.pass(&data), data.len());
    let mut output = BytesMut::with_capacity(data.len());
    group.bench_function("data frames, copied", |b| {
        b.iter(|| {
            output.clear();
            passing.rewrite(black_box(&data), &mut output)
        });
    });
    assert_eq!(output, data);

    group.throughput(Throughput::Elements(u64::from(FRAMES)));
    group.bench_function("requests", |b| {
        let fresh = || {
            (
                AuthorityRewriter::default(),
                BytesMut::with_capacity(16_384),
            )
        };
        b.iter_batched(
            fresh,
            |(mut rewriter, mut output)| {
                let result = rewriter.rewrite(black_box(&requests), &mut output);
                (result, output)
            },
            BatchSize::SmallInput,
        );
    });
    let mut output = BytesMut::new();
    let rewritten = AuthorityRewriter::default().rewrite(&requests, &mut output);
    assert!(rewritten.is_ok() && output.len() < requests.len());
    group.finish();
}

criterion_group!(benches, rewriting);
criterion_main!(benches);
