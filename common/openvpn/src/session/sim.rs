//! Simulation of two sessions and the network between them, in virtual time. A seed decides the fate of every
//! packet.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf, BytesMut};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::tls::tests::PKI;

/// Behaviour of the network.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Net {
    pub(crate) loss: f64,
    pub(crate) duplicate: f64,
    /// Transit time of a packet. A random time of up to `jitter` is added, so packets overtake each other.
    pub(crate) delay: Duration,
    pub(crate) jitter: Duration,
}

pub(crate) const CLEAN: Net = Net {
    loss: 0.0,
    duplicate: 0.0,
    delay: Duration::from_millis(10),
    jitter: Duration::ZERO,
};

pub(crate) const LOSSY: Net = Net {
    loss: 0.1,
    duplicate: 0.1,
    delay: Duration::from_millis(10),
    jitter: Duration::from_millis(50),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Client,
    Server,
}

impl To {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// One of the two sessions, with its events and the inner packets that it delivered.
pub(crate) struct Endpoint {
    pub(crate) session: Session,
    pub(crate) events: Vec<Event>,
    pub(crate) inner: Vec<Vec<u8>>,
    stream: BytesMut,
}

impl Endpoint {
    fn new(session: Session) -> Self {
        Self {
            session,
            events: Vec::new(),
            inner: Vec::new(),
            stream: BytesMut::new(),
        }
    }

    pub(crate) fn ended(&self) -> Option<&Ended> {
        self.events.iter().find_map(|event| match event {
            Event::Ended(reason) => Some(reason),
            _ => None,
        })
    }

    pub(crate) fn established(&self) -> &Established {
        let found = self.events.iter().find_map(|event| match event {
            Event::Established(established) => Some(established),
            _ => None,
        });
        found.unwrap_or_else(|| panic!("not established: {:?}", self.events))
    }

    pub(crate) fn rekeys(&self) -> usize {
        self.events
            .iter()
            .filter(|event| matches!(event, Event::Rekeyed { .. }))
            .count()
    }
}

pub(crate) struct Sim {
    pub(crate) now: Instant,
    pub(crate) client: Endpoint,
    pub(crate) server: Endpoint,
    pub(crate) net: Net,
    /// True if the server's owner accepts every client.
    pub(crate) accept: bool,
    /// All packets sent while `record` is true.
    pub(crate) sent: Vec<(To, Vec<u8>)>,
    pub(crate) record: bool,
    /// Control packets of this end are lost.
    pub(crate) mute: Option<To>,
    transport: Transport,
    rng: StdRng,
    flying: BTreeMap<(Instant, u64), (To, BytesMut)>,
    serial: u64,
    stalls: u32,
}

pub(crate) fn server_config(transport: Transport) -> ServerConfig {
    ServerConfig::new(transport, PKI.server_tls())
}

pub(crate) fn client_config(transport: Transport) -> ClientConfig {
    ClientConfig::new(transport, PKI.client_tls("user-cluster-client"))
}

pub(crate) fn push() -> Push {
    let options = [
        "route 10.20.0.1",
        "topology net30",
        "ifconfig 10.20.0.6 10.20.0.5",
    ];
    Push {
        options: options.map(str::to_owned).to_vec(),
    }
}

impl Sim {
    pub(crate) fn new(client: ClientConfig, server: ServerConfig, net: Net, seed: u64) -> Self {
        let now = Instant::now();
        let transport = client.common.transport;
        Self {
            now,
            client: Endpoint::new(Session::client(Arc::new(client), now)),
            server: Endpoint::new(Session::server(Arc::new(server), 7, now)),
            net,
            accept: true,
            sent: Vec::new(),
            record: false,
            mute: None,
            transport,
            rng: StdRng::seed_from_u64(seed),
            flying: BTreeMap::new(),
            serial: 0,
            stalls: 0,
        }
    }

    pub(crate) fn default(transport: Transport) -> Self {
        Self::new(client_config(transport), server_config(transport), CLEAN, 1)
    }

    pub(crate) fn end(&mut self, which: To) -> &mut Endpoint {
        match which {
            To::Client => &mut self.client,
            To::Server => &mut self.server,
        }
    }

    fn fly(&mut self, to: To, bytes: &[u8]) {
        if self.record {
            self.sent.push((to, bytes.to_vec()));
        }
        let is_mute = self.mute == Some(to.other()) && DataHeader::parse(bytes).is_none();
        let copies = match self.transport {
            Transport::Tcp => 1,
            _ if is_mute => 0,
            _ if self.rng.random_bool(self.net.loss) => 0,
            _ if self.rng.random_bool(self.net.duplicate) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let jitter = match self.transport {
                Transport::Tcp => Duration::ZERO,
                Transport::Udp => self.net.jitter.mul_f64(self.rng.random_range(0.0..=1.0)),
            };
            self.serial += 1;
            self.flying.insert(
                (self.now + self.net.delay + jitter, self.serial),
                (to, bytes.into()),
            );
        }
    }

    /// Sends all output of both sessions, and collects their events.
    pub(crate) fn settle(&mut self) {
        for which in [To::Client, To::Server] {
            let now = self.now;
            loop {
                let accept = self.accept;
                let end = self.end(which);
                while let Some(event) = end.session.poll_event() {
                    if accept && matches!(event, Event::Authenticated(_)) {
                        end.session.accept(push(), now).unwrap();
                    }
                    end.events.push(event);
                }
                let mut out = BytesMut::new();
                if !end.session.poll_output(now, &mut out) {
                    break;
                }
                self.fly(which.other(), &out);
            }
        }
    }

    /// Sends an inner packet. Returns false if the session refuses the packet.
    pub(crate) fn send(&mut self, from: To, inner: &[u8]) -> bool {
        let now = self.now;
        let mut out = BytesMut::new();
        let sealed = self.end(from).session.seal(inner, now, &mut out).is_ok();
        if sealed {
            self.fly(from.other(), &out);
        }
        sealed
    }

    /// Passes bytes to a session as if they came from the network.
    pub(crate) fn deliver(&mut self, to: To, bytes: &[u8]) -> Result<(), Dropped> {
        let (now, transport) = (self.now, self.transport);
        let Endpoint {
            session,
            inner,
            stream,
            ..
        } = self.end(to);
        let mut take = |packet: &[u8]| inner.push(packet.to_vec());
        match transport {
            Transport::Udp => session.input(&mut bytes.to_vec(), now, &mut take),
            Transport::Tcp => {
                stream.extend_from_slice(bytes);
                let mut result = Ok(());
                while let Some(mut packet) = framing::take_first(stream, 10_000).unwrap() {
                    result = result.and(session.input(&mut packet, now, &mut take));
                }
                assert!(!stream.has_remaining(), "whole packets only");
                result
            }
        }
    }

    /// Advances the time to the next arrival or timeout, at most to `until`.
    pub(crate) fn step(&mut self, until: Instant) {
        self.settle();
        let arrival = self.flying.keys().next().map(|(at, _)| *at);
        let timeouts = [
            self.client.session.poll_timeout(),
            self.server.session.poll_timeout(),
        ];
        let at = timeouts
            .into_iter()
            .chain([arrival, Some(until)])
            .flatten()
            .min()
            .unwrap();
        self.stalls = if at > self.now || arrival == Some(at) {
            0
        } else {
            self.stalls + 1
        };
        assert!(
            self.stalls < 5,
            "repeated timeouts without any effect: {timeouts:?}"
        );
        self.now = at.max(self.now);
        while let Some(entry) = self
            .flying
            .first_entry()
            .filter(|entry| entry.key().0 <= self.now)
        {
            let (to, bytes) = entry.remove();
            let _ = self.deliver(to, &bytes);
        }
        for which in [To::Client, To::Server] {
            let now = self.now;
            self.end(which).session.handle_timeout(now);
        }
        self.settle();
    }

    pub(crate) fn run(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.step(until);
        }
    }

    /// Runs until both ends are established. Panics if an end ends, or after 200 s.
    pub(crate) fn connect(&mut self) {
        let until = self.now + Duration::from_secs(200);
        while self.now < until && self.client.ended().is_none() && self.server.ended().is_none() {
            if self.client.session.is_established() && self.server.session.is_established() {
                return;
            }
            self.step(until);
        }
        panic!(
            "client: {:?}\nserver: {:?}",
            self.client.events, self.server.events
        );
    }

    /// Sends `packets` packets in each direction, at intervals of `every`. Returns the number of refused
    /// packets.
    pub(crate) fn traffic(&mut self, packets: u32, every: Duration) -> u32 {
        let mut refused = 0;
        for number in 0..packets {
            for from in [To::Client, To::Server] {
                let mut inner = vec![0x45; 100];
                inner[4..8].copy_from_slice(&number.to_be_bytes());
                refused += u32::from(!self.send(from, &inner));
            }
            self.run(every);
        }
        refused
    }
}
