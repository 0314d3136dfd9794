//! Two ends of a resumable link over transports that break anywhere, and hostile frames and introductions.

use std::collections::VecDeque;
use std::io::IoSlice;

use culvert_native::hello;
use culvert_native::resume::{Core, SLICES, offer, ticket};

/// Bytes that an end keeps for its peer.
const REPLAY: usize = 300;

/// One end with the stream that it writes, the stream that it reads, and the bytes in transit to the peer.
struct End {
    core: Core,
    written: u64,
    read: u64,
    wire: VecDeque<u8>,
}

/// Returns the byte at an offset of either stream.
fn byte(offset: u64) -> u8 {
    (offset ^ (offset >> 8)) as u8
}

impl End {
    fn new() -> Self {
        Self {
            core: Core::new(REPLAY),
            written: 0,
            read: 0,
            wire: VecDeque::new(),
        }
    }

    fn write(&mut self, count: usize) {
        let bytes: Vec<u8> = (self.written..).take(count).map(byte).collect();
        let room = self.core.room();
        let (near, far) = bytes.split_at(count / 2);
        let written = self.core.write(&[IoSlice::new(near), IoSlice::new(far)]);
        assert_eq!(written, count.min(room));
        self.written += written as u64;
        assert!(self.core.kept() <= REPLAY as u64);
    }

    /// Sends at most `count` bytes.
    fn send(&mut self, count: usize) {
        let mut slices = [IoSlice::new(&[]); SLICES];
        let slices_used = self.core.output(&mut slices);
        let slices = slices[..slices_used].iter();
        let mut bytes: Vec<u8> = slices.flat_map(|slice| slice.to_vec()).collect();
        bytes.truncate(count);
        self.core.sent(bytes.len());
        self.wire.extend(bytes);
    }

    fn receive(&mut self, mut bytes: Vec<u8>) {
        let kept = self.core.input(&mut bytes).expect("an honest peer");
        for got in &bytes[..kept] {
            assert_eq!(*got, byte(self.read));
            self.read += 1;
        }
        assert_eq!(self.read, self.core.received());
    }
}

/// Delivers at most `count` bytes.
fn deliver(from: &mut End, to: &mut End, count: usize) {
    let count = count.min(from.wire.len());
    to.receive(from.wire.drain(..count).collect());
}

/// Runs the input as operations on two honest ends.
pub fn run(input: &[u8]) {
    let mut ends = [End::new(), End::new()];
    for operation in input.chunks_exact(2) {
        let [agent, server] = &mut ends;
        let count = usize::from(operation[1]);
        match operation[0] % 10 {
            0 => agent.write(count),
            1 => server.write(count),
            2 => agent.send(count),
            3 => server.send(count),
            4 => deliver(agent, server, count),
            5 => deliver(server, agent, count),
            6 => {
                agent.core.acknowledge();
                server.core.acknowledge();
            }
            kind => resume(agent, server, kind, count),
        }
    }
    let [agent, server] = &mut ends;
    loop {
        let before = (
            agent.read,
            server.read,
            agent.core.kept() + server.core.kept(),
        );
        for _ in 0..2 {
            agent.core.acknowledge();
            server.core.acknowledge();
            for _ in 0..4 {
                agent.send(usize::MAX);
                server.send(usize::MAX);
            }
            deliver(agent, server, usize::MAX);
            deliver(server, agent, usize::MAX);
        }
        if before
            == (
                agent.read,
                server.read,
                agent.core.kept() + server.core.kept(),
            )
        {
            break;
        }
    }
    assert_eq!((agent.read, server.read), (server.written, agent.written));
    assert_eq!((agent.core.kept(), server.core.kept()), (0, 0));
}

/// Moves both ends to another transport; the bytes in transit on the earlier transport are lost.
fn resume(agent: &mut End, server: &mut End, kind: u8, count: usize) {
    let told = agent.core.received();
    if kind == 8 {
        // Both ends still use the earlier transport after the request.
        deliver(server, agent, count);
        agent.core.acknowledge();
        agent.send(count);
        deliver(agent, server, count);
    }
    agent.wire.clear();
    server.wire.clear();
    let answered = server.core.received();
    let from = server.core.attach(answered, told).expect("an honest agent");
    assert!((told..=agent.core.received()).contains(&from));
    if kind == 9 {
        // The answer is lost, so the agent asks again, perhaps on another transport.
        server.send(count);
        server.wire.clear();
        return resume(agent, server, 7, count);
    }
    let attached = agent.core.attach(from, answered);
    assert_eq!(attached, Ok(answered));
}

/// Runs the input as bytes of a hostile peer: frames at one end, and the heads of both introductions.
pub fn run_hostile(input: &[u8]) {
    let mut core = Core::new(REPLAY);
    core.write(&[IoSlice::new(b"some bytes")]);
    let mut slices = [IoSlice::new(&[]); SLICES];
    let count = core.output(&mut slices);
    let sent = slices[..count].iter().map(|slice| slice.len()).sum();
    core.sent(sent);
    for piece in input.chunks(50) {
        let mut bytes = piece.to_vec();
        let before = core.received();
        let Ok(kept) = core.input(&mut bytes) else {
            break;
        };
        assert!(kept <= piece.len());
        assert_eq!(core.received(), before + kept as u64);
    }
    let before: &[u8] = b"GET /agent HTTP/1.1\r\nculvert-server: s\r\nculvert-resume: ";
    let head = [before, input, b"\r\n\r\n"].concat();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let read = runtime.unwrap().block_on(hello::read(&mut head.as_slice()));
    if let Ok(headers) = read {
        let _ = (offer(&headers), ticket(&headers));
    }
}
