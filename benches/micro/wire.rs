//! The cost of converting packets between typed form and bytes, and between typed form and the DATA frames of
//! a call, in both directions; compared with prost and tonic.

use std::hint::black_box;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use culvert_konnectivity::grpc::{self, PacketBody, Reader};
use culvert_konnectivity::message::{ConnectId, DialId, MAX_DATA_BYTES, Message};
use culvert_proto::Packet;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Body, Frame};
use prost::Message as _;
use tonic::Status;
use tonic::codec::{EncodeBody, SingleMessageCompressionOverride, Streaming};
use tonic_prost::{ProstDecoder, ProstEncoder};

/// Warm-up and measurement time of one benchmark. Short, because the measured operations need only
/// microseconds and there are many benchmarks.
const WARM_UP: Duration = Duration::from_millis(500);
const MEASUREMENT: Duration = Duration::from_millis(1500);

fn data(len: usize) -> Message {
    Message::Data {
        connection: ConnectId(4711),
        bytes: Bytes::from(vec![7; len]),
    }
}

fn dial() -> Message {
    Message::DialRequest {
        protocol: "tcp".to_owned(),
        address: "10.96.0.1:10250".to_owned(),
        dial: DialId(0x1234_5678_9abc_def0),
    }
}

fn encode(message: Message, buffer: &mut BytesMut) {
    buffer.clear();
    // The buffer grows as needed, so encoding cannot fail.
    let encoded = Packet::from(message).encode(buffer);
    assert_eq!(encoded, Ok(()));
}

fn decode(bytes: Bytes) -> Option<Message> {
    Packet::decode(bytes).ok().map(Message::from)
}

fn packets(c: &mut Criterion) {
    let cases = [
        ("dial request", dial()),
        ("data 64 B", data(64)),
        ("data 4 KiB", data(4096)),
        ("data 64 KiB", data(MAX_DATA_BYTES)),
    ];
    let mut group = c.benchmark_group("wire");
    group.warm_up_time(WARM_UP).measurement_time(MEASUREMENT);
    for (name, message) in cases {
        let mut buffer = BytesMut::new();
        encode(message.clone(), &mut buffer);
        let encoded = buffer.clone().freeze();
        assert_eq!(decode(encoded.clone()).as_ref(), Some(&message));
        group.throughput(Throughput::Bytes(encoded.len() as u64));
        group.bench_function(format!("encode {name}, prost"), |b| {
            let message = || message.clone();
            b.iter_batched(message, |m| encode(m, &mut buffer), BatchSize::SmallInput);
        });
        group.bench_function(format!("encode {name}, ours"), |b| {
            let mut buffer = Vec::new();
            let message = || message.clone();
            let encode = |message| {
                buffer.clear();
                grpc::encode(message, &mut buffer);
            };
            b.iter_batched(message, encode, BatchSize::SmallInput);
        });
        group.bench_function(format!("decode {name}, prost"), |b| {
            b.iter(|| decode(black_box(encoded.clone())));
        });
        group.bench_function(format!("decode {name}, ours"), |b| {
            b.iter(|| grpc::decode(black_box(encoded.clone())));
        });
    }
    group.finish();
}

/// Stream of messages, all of them ready at once.
type Ready = stream::Iter<std::vec::IntoIter<Result<Message, Status>>>;

fn ready(messages: &[Message]) -> Ready {
    let messages: Vec<_> = messages.iter().cloned().map(Ok).collect();
    stream::iter(messages)
}

fn body_of_ours(messages: Ready) -> PacketBody<Ready> {
    PacketBody::response(messages)
}

fn body_of_tonic(messages: Ready) -> impl Body<Data = Bytes, Error = Status> {
    let encoder = ProstEncoder::<Packet>::default();
    let packets = messages.map(|message| message.map(Packet::from));
    let compression = SingleMessageCompressionOverride::default();
    EncodeBody::new_server(encoder, packets, None, compression, None)
}

/// Reads all frames of a body that never waits, and returns the number of bytes.
fn drained<B: Body>(body: B) -> usize {
    let mut body = Box::pin(body);
    let mut total = 0;
    while let Some(Some(Ok(frame))) = body.frame().now_or_never() {
        total += black_box(frame).data_ref().map_or(0, Buf::remaining);
    }
    total
}

/// Returns the bytes of a call as frames of at most `size` bytes, as one of our programs sends them.
fn frames(messages: &[Message], size: usize) -> Vec<Bytes> {
    let mut body = body_of_ours(ready(messages));
    let mut frames = Vec::new();
    while let Some(Some(Ok(frame))) = body.frame().now_or_never() {
        let Ok(mut piece) = frame.into_data() else {
            break;
        };
        while piece.has_remaining() {
            frames.push(piece.copy_to_bytes(piece.remaining().min(size)));
        }
    }
    frames
}

fn received(frames: &[Bytes]) -> impl Body<Data = Bytes, Error = Status> + Unpin + use<> {
    let frames: Vec<_> = frames.iter().cloned().map(Frame::data).map(Ok).collect();
    StreamBody::new(stream::iter(frames))
}

fn read_by_us(body: impl Body<Data = Bytes, Error = Status> + Unpin) -> usize {
    let mut reader = Reader::request(body);
    // Messages wait in queues in practice, so no buffer is reusable at once.
    let mut messages = Vec::new();
    while let Some(Ok(Some(message))) = reader.message().now_or_never() {
        messages.push(message);
    }
    black_box(messages).len()
}

fn read_by_tonic(body: impl Body<Data = Bytes, Error = Status> + Unpin + Send + 'static) -> usize {
    let decoder = ProstDecoder::<Packet>::default();
    let mut reader = Streaming::new_request(decoder, body, None, None);
    let mut messages = Vec::new();
    while let Some(Ok(Some(packet))) = reader.message().now_or_never() {
        messages.push(Message::from(packet));
    }
    black_box(messages).len()
}

fn framing(c: &mut Criterion) {
    let cases = [
        ("64 B x 256", data(64), 256, 16 * 1024),
        ("4 KiB x 64", data(4096), 64, 16 * 1024),
        ("64 KiB x 16", data(MAX_DATA_BYTES), 16, 64 * 1024),
        (
            "64 KiB x 16, frames of 16 KiB",
            data(MAX_DATA_BYTES),
            16,
            16 * 1024,
        ),
    ];
    let mut group = c.benchmark_group("framing");
    group.warm_up_time(WARM_UP).measurement_time(MEASUREMENT);
    for (name, message, count, frame) in cases {
        let messages = vec![message; count];
        let frames = frames(&messages, frame);
        let bytes = frames.iter().map(Bytes::len).sum::<usize>();
        group.throughput(Throughput::Bytes(bytes as u64));
        assert_eq!(drained(body_of_ours(ready(&messages))), bytes);
        assert_eq!(drained(body_of_tonic(ready(&messages))), bytes);
        group.bench_function(format!("write {name}, ours"), |b| {
            let body = || body_of_ours(ready(&messages));
            b.iter_batched(body, drained, BatchSize::SmallInput);
        });
        group.bench_function(format!("write {name}, tonic"), |b| {
            let body = || body_of_tonic(ready(&messages));
            b.iter_batched(body, drained, BatchSize::SmallInput);
        });
        assert_eq!(read_by_us(received(&frames)), count);
        assert_eq!(read_by_tonic(received(&frames)), count);
        group.bench_function(format!("read {name}, ours"), |b| {
            b.iter_batched(|| received(&frames), read_by_us, BatchSize::SmallInput);
        });
        group.bench_function(format!("read {name}, tonic"), |b| {
            b.iter_batched(|| received(&frames), read_by_tonic, BatchSize::SmallInput);
        });
    }
    group.finish();
}

criterion_group!(benches, packets, framing);
criterion_main!(benches);
