//! What a packet costs between its typed form and its bytes, in both directions.

use std::hint::black_box;

use bytes::{Bytes, BytesMut};
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use culvert_common::wire::{ConnectId, DialId, MAX_DATA_BYTES, Message};
use culvert_proto::Packet;
use prost::Message as _;

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
    // A buffer that grows as it needs to takes any packet.
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
    for (name, message) in cases {
        let mut buffer = BytesMut::new();
        encode(message.clone(), &mut buffer);
        let encoded = buffer.clone().freeze();
        assert_eq!(decode(encoded.clone()).as_ref(), Some(&message));
        group.throughput(Throughput::Bytes(encoded.len() as u64));
        group.bench_function(format!("encode {name}"), |b| {
            let message = || message.clone();
            b.iter_batched(message, |m| encode(m, &mut buffer), BatchSize::SmallInput);
        });
        group.bench_function(format!("decode {name}"), |b| {
            b.iter(|| decode(black_box(encoded.clone())));
        });
    }
    group.finish();
}

criterion_group!(benches, packets);
criterion_main!(benches);
