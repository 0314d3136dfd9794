//! The cost of the byte queue and of the pump, per chunk, on one thread and without sockets.

use bytes::Bytes;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use culvert_konnectivity::queue;
use culvert_stream::io::{ReadSource, WriteSink};
use culvert_stream::pump::{Direction, pump};
use culvert_stream::{CloseReason, HALF_OPEN_IDLE};
use metrics::Counter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, split};
use tokio::runtime::{Builder, Runtime};

/// Chunks that pass through the queue per iteration.
const CHUNKS: usize = 256;

/// Budget of the queue, in bytes.
const BUDGET: usize = 256 * 1024;

/// Bytes pumped per iteration, and the capacity of the pipes around the pump.
const PUMPED: usize = 8 << 20;
const PIPE: usize = 256 * 1024;

fn runtime() -> Runtime {
    let runtime = Builder::new_current_thread().build();
    runtime.unwrap_or_else(|error| panic!("cannot build the runtime: {error}"))
}

async fn through_queue(chunk: Bytes) -> usize {
    let (tx, mut rx) = queue::bounded(BUDGET);
    let send = async move {
        for _ in 0..CHUNKS {
            let len = chunk.len();
            assert!(tx.send(chunk.clone(), len).await.is_ok());
        }
    };
    let receive = async {
        let mut received = 0;
        while let Some(chunk) = rx.recv().await {
            received += chunk.len();
        }
        received
    };
    tokio::join!(send, receive).1
}

fn byte_queue(c: &mut Criterion) {
    let runtime = runtime();
    let mut group = c.benchmark_group("byte queue");
    group.throughput(Throughput::Elements(CHUNKS as u64));
    for len in [64, 64 * 1024] {
        let chunk = Bytes::from(vec![7; len]);
        group.bench_function(format!("{len} byte chunks"), |b| {
            b.iter(|| {
                let received = runtime.block_on(through_queue(chunk.clone()));
                assert_eq!(received, CHUNKS * len);
            });
        });
    }
    group.finish();
}

/// Returns the source and the sink of a side of the pump.
macro_rules! side {
    ($stream:expr, $lost:ident) => {{
        let (read, write) = split::<DuplexStream>($stream);
        (
            ReadSource::new(read, Bytes::new(), CloseReason::$lost),
            WriteSink::new(write, CloseReason::$lost),
        )
    }};
}

async fn through_pump(piece: &[u8]) -> u64 {
    let (mut client, near) = duplex(PIPE);
    let (far, mut endpoint) = duplex(PIPE);
    let (mut cs, mut ck) = side!(near, ClientLost);
    let (mut es, mut ek) = side!(far, EndpointLost);
    let [up, down] = [(); 2].map(|()| Direction::new(Counter::noop()));
    let run = pump(
        (&mut cs, &mut ck),
        (&mut es, &mut ek),
        [&up, &down],
        HALF_OPEN_IDLE,
    );
    let send = async {
        for _ in 0..PUMPED / piece.len() {
            assert!(endpoint.write_all(piece).await.is_ok());
        }
        assert!(endpoint.shutdown().await.is_ok());
    };
    let receive = async {
        let mut buffer = vec![0; PIPE];
        while client.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        assert!(client.shutdown().await.is_ok());
    };
    let (reason, (), ()) = tokio::join!(run, send, receive);
    assert_eq!(reason, CloseReason::Finished);
    down.bytes()
}

fn pumping(c: &mut Criterion) {
    let runtime = runtime();
    let mut group = c.benchmark_group("pump");
    group.throughput(Throughput::Bytes(PUMPED as u64));
    for len in [1024, 64 * 1024] {
        let piece = vec![7; len];
        group.bench_function(format!("{len} byte writes"), |b| {
            b.iter(|| assert_eq!(runtime.block_on(through_pump(&piece)), PUMPED as u64));
        });
    }
    group.finish();
}

criterion_group!(benches, byte_queue, pumping);
criterion_main!(benches);
