#![allow(clippy::unwrap_used)]

use std::pin::pin;

use bytes::Bytes;
use culvert_konnectivity::identifiers::Identifiers;
use culvert_konnectivity::inbox::PACE;
use culvert_konnectivity::message::{AGENT_DATA_BYTES, ConnectId, DialId, STOCK_DATA_BYTES};
use culvert_stream::connection::run_connection;
use culvert_stream::io::{ReadSource, WriteSink};
use culvert_stream::{CLOSE_STALL, HALF_OPEN_IDLE, Sink, Source};
use metrics::{Counter, Gauge};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, ReadHalf, duplex, split};
use tokio::time::timeout;

use super::*;

const STALL: Duration = Duration::from_secs(10);
const CHUNK: Bytes = Bytes::from_static(&[7; 60 * 1024]);

struct Agent {
    stream: Arc<AgentStream>,
    hears: queue::Receiver<Message>,
    cut: CancellationToken,
    excess: Arc<OverflowBudget>,
}

impl Agent {
    fn connected() -> Self {
        let excess = OverflowBudget::new(256 * 1024, Gauge::noop(), Gauge::noop());
        let limits = Limits {
            connection_bytes: 128 * 1024,
            stall: STALL,
            excess: excess.clone(),
        };
        let hello = Hello {
            agent_id: "a".into(),
            half_close: false,
            identifiers: Identifiers::default(),
        };
        let carrier = Carrier::default();
        let cut = carrier.cut.clone();
        let metrics = Arc::new(ServerMetrics::new(&[]).unwrap());
        let (stream, hears) = AgentStream::new(hello, limits, carrier, metrics);
        Self {
            stream,
            hears,
            cut,
            excess,
        }
    }

    async fn open(&mut self, id: i64) -> (FromAgent, ToAgent) {
        let dial = Dial {
            protocol: "tcp".into(),
            address: "10.0.0.1:443".into(),
        };
        let answers = async {
            let Some(Message::DialRequest { dial, .. }) = self.hears.recv().await else {
                panic!("not a dial");
            };
            self.stream.on_message(opened(dial, id)).await;
        };
        let deadline = Instant::now() + STALL;
        let (dialed, ()) = tokio::join!(self.stream.dial(&dial, deadline), answers);
        dialed.unwrap()
    }
}

fn opened(dial: DialId, id: i64) -> Message {
    Message::DialResponse {
        dial,
        connection: ConnectId(id),
        error: String::new(),
    }
}

fn data(id: i64) -> Message {
    Message::Data {
        connection: ConnectId(id),
        bytes: CHUNK,
    }
}

/// Sends until the agent's queue is full.
async fn fill(sink: &mut impl Sink) {
    let filling = async { while sink.send(CHUNK).await.is_ok() {} };
    assert!(timeout(PEER_STALL / 2, filling).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn stalled_client_loses_its_connection_and_other_connections_do_not_wait() {
    let mut agent = Agent::connected();
    let stalled = agent.open(1).await;
    let mut other = agent.open(2).await;
    let started = Instant::now();
    for _ in 0..4 {
        agent.stream.on_message(data(1)).await;
        agent.stream.on_message(data(2)).await;
        assert_eq!(other.0.recv().await, Ok(Some(CHUNK)));
    }
    // The reader waits once, to find out whether the client still accepts bytes.
    assert_eq!(started.elapsed(), PACE);
    assert!(agent.excess.used() > 0);
    assert_eq!(stalled.1.cut().due().await, CloseReason::Stalled);
    assert_eq!(started.elapsed(), STALL);
    drop(stalled);
    assert_eq!(agent.excess.used(), 0);
    let close = Message::CloseRequest {
        connection: ConnectId(1),
    };
    assert_eq!(agent.hears.recv().await, Some(close));
    agent.stream.on_message(data(2)).await;
    assert_eq!(other.0.recv().await, Ok(Some(CHUNK)));
}

#[tokio::test(start_paused = true)]
async fn close_that_a_stuck_agent_does_not_answer_is_no_fault_of_the_client() {
    let mut agent = Agent::connected();
    let (mut source, mut sink) = agent.open(1).await;
    let (client, near) = duplex(64);
    let (read, write) = split(near);
    let mut client_source = ReadSource::new(read, Bytes::new(), CloseReason::ClientLost);
    let mut client_sink = WriteSink::new(write, CloseReason::ClientLost);
    let cut = sink.cut();
    let (_client_read, mut client_write) = split(client);
    client_write.shutdown().await.unwrap();
    let started = Instant::now();
    let ended = run_connection(
        (&mut client_source, &mut client_sink),
        (&mut source, &mut sink),
        [Counter::noop(), Counter::noop()],
        HALF_OPEN_IDLE,
        pin!(cut.due()),
    )
    .await;
    assert_eq!(ended.reason, CloseReason::ClientClosed);
    assert!(!ended.is_overdue());
    assert_eq!(started.elapsed(), CLOSE_STALL);
    let close = Message::CloseRequest {
        connection: ConnectId(1),
    };
    assert_eq!(agent.hears.recv().await, Some(close));
}

#[tokio::test(start_paused = true)]
async fn client_that_ends_and_reads_nothing_is_stalled() {
    let started = Instant::now();
    let (reason, received) = download_to(|_| async { 0 }).await;
    assert_eq!((reason, received), (CloseReason::Stalled, 0));
    assert_eq!(started.elapsed(), CLOSE_STALL);
}

#[tokio::test(start_paused = true)]
async fn client_that_ends_and_reads_slowly_gets_all_bytes() {
    let started = Instant::now();
    let slowly = |mut client: ReadHalf<DuplexStream>| async move {
        let (mut all, mut piece) = (0, [0; 4096]);
        loop {
            tokio::time::sleep(CLOSE_STALL - Duration::from_secs(1)).await;
            match client.read(&mut piece).await.unwrap() {
                0 => return all,
                count => all += count,
            }
        }
    };
    let (reason, received) = download_to(slowly).await;
    let wanted = (CloseReason::EndpointClosed, 2 * CHUNK.len());
    assert_eq!((reason, received), wanted);
    assert!(started.elapsed() > CLOSE_STALL * 10);
}

/// Sends two chunks and the close of the endpoint to a client that has ended and reads with `read`.
async fn download_to<R: Future<Output = usize>>(
    read: impl FnOnce(ReadHalf<DuplexStream>) -> R,
) -> (CloseReason, usize) {
    let mut agent = Agent::connected();
    let (mut source, mut sink) = agent.open(1).await;
    for _ in 0..2 {
        agent.stream.on_message(data(1)).await;
    }
    let closed = Message::CloseResponse {
        connection: ConnectId(1),
        error: String::new(),
    };
    agent.stream.on_message(closed).await;
    let (client, near) = duplex(4096);
    let (client_read, mut client_write) = split(client);
    client_write.shutdown().await.unwrap();
    let run = async {
        let (read, write) = split(near);
        let mut client_source = ReadSource::new(read, Bytes::new(), CloseReason::ClientLost);
        let mut client_sink = WriteSink::new(write, CloseReason::ClientLost);
        let cut = sink.cut();
        let (client, endpoint) = (
            (&mut client_source, &mut client_sink),
            (&mut source, &mut sink),
        );
        let bytes = [Counter::noop(), Counter::noop()];
        run_connection(client, endpoint, bytes, HALF_OPEN_IDLE, pin!(cut.due())).await
    };
    let (ended, received) = tokio::join!(run, read(client_read));
    (ended.reason, received)
}

#[tokio::test(start_paused = true)]
async fn a_client_that_empties_the_pool_is_closed_at_once() {
    let mut agent = Agent::connected();
    let greedy = agent.open(1).await;
    let mut other = agent.open(2).await;
    let started = Instant::now();
    for _ in 0..100 {
        agent.stream.on_message(data(1)).await;
    }
    assert_eq!(greedy.1.cut().due().await, CloseReason::BufferExceeded);
    assert_eq!(started.elapsed(), PACE);
    assert_eq!(agent.excess.used(), 0);
    agent.stream.on_message(data(2)).await;
    assert_eq!(other.0.recv().await, Ok(Some(CHUNK)));
}

#[tokio::test(start_paused = true)]
async fn full_outgoing_queue_drops_only_replies_that_can_be_repeated() {
    let mut agent = Agent::connected();
    let mut connection = agent.open(1).await;
    fill(&mut connection.1).await;
    // The remaining room is less than one chunk, and a thousand replies fill it.
    for _ in 0..2000 {
        agent.stream.on_message(data(98)).await;
    }
    agent.stream.on_message(opened(DialId(5), 99)).await;
    let mut answers = Vec::new();
    while let Some(message) = agent.hears.try_recv() {
        if !matches!(message, Message::Data { .. }) {
            answers.push(message);
        }
    }
    let close = |id| Message::CloseRequest {
        connection: ConnectId(id),
    };
    assert!(answers.len() < 1000, "{} answers", answers.len());
    assert_eq!(answers.pop(), Some(close(99)));
    assert!(answers.iter().all(|answer| *answer == close(98)));
    agent.stream.on_message(data(98)).await;
    assert_eq!(agent.hears.recv().await, Some(close(98)));
}

#[tokio::test]
async fn packets_to_an_agent_are_no_larger_than_those_of_the_stock_server() {
    let mut agent = Agent::connected();
    let mut connection = agent.open(1).await;
    connection.1.send(CHUNK).await.unwrap();
    let mut sizes = Vec::new();
    while let Some(Message::Data { bytes, .. }) = agent.hears.try_recv() {
        sizes.push(bytes.len());
    }
    let rest = CHUNK.len() - AGENT_DATA_BYTES;
    assert_eq!(sizes, [AGENT_DATA_BYTES, rest]);
    assert!(sizes.iter().all(|size| *size <= STOCK_DATA_BYTES));
}

#[tokio::test(start_paused = true)]
async fn agent_that_accepts_no_packets_loses_its_stream() {
    let mut agent = Agent::connected();
    let mut connection = agent.open(1).await;
    let started = Instant::now();
    fill(&mut connection.1).await;
    assert!(!agent.cut.is_cancelled());
    let sent = connection.1.send(CHUNK).await;
    assert_eq!(sent, Err(CloseReason::Stalled));
    assert_eq!(started.elapsed(), PEER_STALL);
    assert!(agent.cut.is_cancelled());
    agent.stream.retired().await;
}

#[tokio::test(start_paused = true)]
async fn agent_that_accepts_no_packets_loses_its_stream_although_every_dial_gives_up_earlier() {
    let mut agent = Agent::connected();
    let mut connection = agent.open(1).await;
    fill(&mut connection.1).await;
    drop(connection);
    let dial = Dial {
        protocol: "tcp".into(),
        // Longer than the rest of the room.
        address: "a".repeat(AGENT_DATA_BYTES),
    };
    let patience = PEER_STALL / 3;
    for expected in [StreamDialError::NotSent, StreamDialError::AgentLost] {
        let dialed = agent.stream.dial(&dial, Instant::now() + patience).await;
        assert_eq!(dialed.err(), Some(expected));
    }
    assert!(agent.cut.is_cancelled());
}
