//! The cost of the server's connection table, per packet and per connection: nearly empty and full.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_konnectivity::server_mux::{Effect, Mux};

/// Handle of a connection; cheap to clone, as in the server.
type Handle = Arc<()>;

fn opened(connection: i64) -> Message {
    Message::DialResponse {
        dial: DialId(connection),
        connection: ConnectId(connection),
        error: String::new(),
    }
}

/// Returns a table with connections 1 to `count`.
fn mux(count: i64) -> Mux<Handle> {
    let mut mux = Mux::default();
    for id in 1..=count {
        assert!(mux.dial(DialId(id), Handle::default()).is_ok());
        assert!(matches!(mux.on_message(opened(id)), Effect::Opened(..)));
    }
    mux
}

fn connections(c: &mut Criterion) {
    let mut group = c.benchmark_group("server mux");
    group.throughput(Throughput::Elements(1));
    let bytes = Bytes::from(vec![7; 4096]);
    for count in [1, 10_000] {
        let mut full = mux(count);
        group.bench_function(format!("data, {count} open"), |b| {
            let mut id = 0;
            b.iter(|| {
                id = id % count + 1;
                full.on_message(black_box(Message::Data {
                    connection: ConnectId(id),
                    bytes: bytes.clone(),
                }))
            });
        });
        group.bench_function(format!("dial, open, close, {count} open"), |b| {
            let mut id = count;
            b.iter(|| {
                id += 1;
                let connection = ConnectId(id);
                let dialled = full.dial(DialId(id), Handle::default());
                let effect = full.on_message(opened(id));
                let close = full.close(connection);
                let closed = full.on_message(Message::CloseResponse {
                    connection,
                    error: String::new(),
                });
                (dialled, effect, close, closed)
            });
        });
        assert_eq!(full.counts(), (0, count as usize));
    }
    group.finish();
}

criterion_group!(benches, connections);
criterion_main!(benches);
