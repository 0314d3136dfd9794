//! Simulation of the server's and the agent's packet mux, connected by two queues. The input selects any
//! sequence of actions that the programs around the muxes can perform, and of packets that no correct peer
//! sends. The fuzz target and its property test share this module.

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::Bytes;
use culvert_konnectivity::agent_mux as agent;
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_konnectivity::server_mux as server;

/// Serial number of a connection. Its dial carries the number as the target address, and every packet carries
/// the number as data, so bytes that arrive under another number have crossed between connections.
type Serial = u64;

#[derive(Default)]
struct Pair {
    server: server::Mux<Serial>,
    agent: agent::Mux<Serial>,
    to_agent: VecDeque<Message>,
    to_server: VecDeque<Message>,
    /// Pending dials and open connections, as the server sees both.
    pending: HashMap<Serial, DialId>,
    open: HashMap<Serial, ConnectId>,
    /// Dials in progress and connected endpoints, as the agent sees both.
    dialing: HashMap<Serial, (DialId, ConnectId)>,
    endpoints: HashMap<Serial, ConnectId>,
    outcomes: HashSet<Serial>,
    last: Serial,
    /// Set once the input has forged a packet. From then on, an answer may name an id that was never
    /// assigned, but a packet must still reach only the connection that the packet names.
    forged: bool,
}

/// Runs the operations that the bytes encode, three bytes per operation.
///
/// # Panics
/// If an invariant does not hold.
pub fn run(input: &[u8]) {
    let mut pair = Pair::default();
    for operation in input.chunks_exact(3) {
        let [kind, a, b] = [operation[0], operation[1], operation[2]];
        pair.step(kind % 11, a, b);
        pair.check();
    }
    let (pending, open) = pair.server.end();
    assert_eq!(pending.len(), pair.pending.len());
    assert_eq!(open.len(), pair.open.len());
    assert_eq!(pair.server.counts(), (0, 0));
}

impl Pair {
    fn step(&mut self, kind: u8, a: u8, b: u8) {
        match kind {
            0 => self.dial(),
            1 => self.deliver_to_agent(),
            2 => self.deliver_to_server(),
            3 => self.dialed(a, b.is_multiple_of(2)),
            4 => {
                if let Some((serial, id)) = pick(&self.open, a) {
                    self.to_agent.push_back(data(id, serial));
                }
            }
            5 => {
                if let Some((serial, id)) = pick(&self.endpoints, a) {
                    self.to_server.push_back(data(id, serial));
                }
            }
            6 => {
                if let Some((serial, dial)) = pick(&self.pending, a) {
                    let message = self.server.cancel(dial);
                    assert!(message.is_some(), "a pending dial can be cancelled");
                    self.to_agent.extend(message);
                    self.pending.remove(&serial);
                }
            }
            7 => {
                if let Some((serial, id)) = pick(&self.open, a) {
                    let message = self.server.close(id);
                    assert!(message.is_some(), "an open connection can be closed");
                    self.to_agent.extend(message);
                    self.open.remove(&serial);
                }
            }
            8 => {
                if let Some((serial, id)) = pick(&self.endpoints, a) {
                    self.agent.remove(id);
                    self.to_server.push_back(agent::closed(id, ""));
                    self.endpoints.remove(&serial);
                }
            }
            9 => {
                self.forged = true;
                self.to_server.push_back(forge(a, b));
            }
            _ => {
                self.forged = true;
                self.to_agent.push_back(forge(a, b));
            }
        }
    }

    /// Every dial gets a new id: the server draws dial ids from 63 random bits.
    fn dial(&mut self) {
        self.last += 1;
        let (serial, dial) = (self.last, DialId(self.last.cast_signed()));
        self.server.dial(dial, serial).expect("a fresh id");
        assert_eq!(self.server.dial(dial, serial), Err(serial), "an id in use");
        self.pending.insert(serial, dial);
        self.to_agent.push_back(Message::DialRequest {
            protocol: "tcp".into(),
            address: serial.to_string(),
            dial,
        });
    }

    fn deliver_to_agent(&mut self) {
        let Some(message) = self.to_agent.pop_front() else {
            return;
        };
        let expected = self.receiver(&message, &self.endpoints);
        let effect = self.agent.on_message(message);
        if let Some(expected) = expected {
            let is_passed_on =
                matches!(&effect, agent::Effect::Data(serial, ..) if *serial == expected);
            assert!(is_passed_on, "bytes of an open connection are lost");
        }
        match effect {
            agent::Effect::Dial(dial, connection, request) => {
                // A forged request has no serial number as its address.
                let serial = request.address.parse().unwrap_or_else(|_| {
                    self.last += 1;
                    self.last
                });
                assert!(connection.0 > 0);
                self.agent.insert(dial, connection, serial);
                self.dialing.insert(serial, (dial, connection));
            }
            agent::Effect::Cancelled(serial) => {
                assert!(
                    self.dialing.remove(&serial).is_some(),
                    "only a dial in progress is cancelled"
                );
            }
            agent::Effect::Data(serial, connection, bytes) => {
                self.arrived(serial, &bytes);
                let known = self.endpoints.get(&serial).copied();
                let known = known.or(self.dialing.get(&serial).map(|dialing| dialing.1));
                assert_eq!(known, Some(connection));
            }
            agent::Effect::HalfClosed(serial) => assert!(self.knows(serial)),
            agent::Effect::Closed(serial) => {
                assert!(self.knows(serial), "a connection is closed once");
                if self.endpoints.remove(&serial).is_some() {
                    let id = ConnectId(0);
                    self.to_server.push_back(agent::closed(id, ""));
                }
                self.dialing.remove(&serial);
            }
            agent::Effect::Stray(reply) | agent::Effect::Answer(reply) => {
                self.to_server.push_back(reply);
            }
            agent::Effect::Ignored => {}
        }
    }

    fn dialed(&mut self, which: u8, succeeded: bool) {
        let Some((serial, (dial, connection))) = pick(&self.dialing, which) else {
            return;
        };
        self.dialing.remove(&serial);
        self.agent.dialed(dial, connection);
        let error = if succeeded { "" } else { "refused" };
        if succeeded {
            self.endpoints.insert(serial, connection);
        } else {
            self.agent.remove(connection);
        }
        self.to_server.push_back(Message::DialResponse {
            dial,
            connection: if succeeded { connection } else { ConnectId(0) },
            error: error.into(),
        });
    }

    fn deliver_to_server(&mut self) {
        let Some(message) = self.to_server.pop_front() else {
            return;
        };
        let expected = self.receiver(&message, &self.open);
        let effect = self.server.on_message(message);
        if let Some(expected) = expected {
            let is_passed_on =
                matches!(&effect, server::Effect::Data(serial, ..) if *serial == expected);
            assert!(is_passed_on, "bytes of an open connection are lost");
        }
        match effect {
            server::Effect::Opened(serial, connection) => {
                self.outcome(serial);
                assert!(self.open.values().all(|open| *open != connection));
                self.open.insert(serial, connection);
            }
            server::Effect::Refused(serial, text) => {
                assert!(!text.is_empty());
                self.outcome(serial);
            }
            server::Effect::Abandoned(serial) => self.outcome(serial),
            server::Effect::Data(serial, connection, bytes) => {
                self.arrived(serial, &bytes);
                assert_eq!(self.open.get(&serial), Some(&connection));
            }
            server::Effect::HalfClosed(serial) => assert!(self.open.contains_key(&serial)),
            server::Effect::Closed(serial, _) => assert!(self.open.remove(&serial).is_some()),
            server::Effect::Unrecognized(Some(Message::CloseRequest { connection }))
            | server::Effect::Stray(Message::CloseRequest { connection }) => {
                assert!(self.open.values().all(|open| *open != connection));
                self.to_agent
                    .push_back(Message::CloseRequest { connection });
            }
            server::Effect::Unrecognized(_) | server::Effect::Stray(_) => {}
            server::Effect::Drain | server::Effect::Ignored => {}
        }
    }

    fn outcome(&mut self, serial: Serial) {
        assert!(
            self.pending.remove(&serial).is_some(),
            "only a pending dial has an outcome"
        );
        assert!(self.outcomes.insert(serial), "a dial has one outcome");
    }

    /// Returns the connection of `open` that must get the message, if the message is data. After a forged packet, an id may
    /// name two connections.
    fn receiver(&self, message: &Message, open: &HashMap<Serial, ConnectId>) -> Option<Serial> {
        let Message::Data { connection, .. } = message else {
            return None;
        };
        let mut open = open.iter().filter(|_| !self.forged);
        open.find_map(|(serial, id)| (id == connection).then_some(*serial))
    }

    /// Checks that bytes reach the connection that sent them. After a forged packet, a dial may carry the id
    /// of another connection, so the contents are no longer checked.
    fn arrived(&self, serial: Serial, bytes: &Bytes) {
        if !self.forged {
            assert_eq!(bytes.as_ref(), serial.to_be_bytes(), "bytes have crossed");
        }
    }

    fn knows(&self, serial: Serial) -> bool {
        self.dialing.contains_key(&serial) || self.endpoints.contains_key(&serial)
    }

    fn check(&self) {
        assert_eq!(self.server.counts(), (self.pending.len(), self.open.len()));
        assert_eq!(self.agent.len(), self.dialing.len() + self.endpoints.len());
    }
}

fn data(connection: ConnectId, serial: Serial) -> Message {
    let bytes = Bytes::copy_from_slice(&serial.to_be_bytes());
    Message::Data { connection, bytes }
}

/// Returns a packet that no correct peer sends at this point. Its ids may be in use.
fn forge(kind: u8, id: u8) -> Message {
    let (dial, connection) = (DialId(i64::from(id % 16)), ConnectId(i64::from(id % 8)));
    match kind % 8 {
        0 => Message::DialRequest {
            protocol: "udp".into(),
            address: "forged".into(),
            dial,
        },
        1 => Message::DialResponse {
            dial,
            connection: ConnectId(i64::from(kind / 8 % 8)),
            error: String::new(),
        },
        2 => data(connection, 0),
        3 => Message::HalfClose { connection },
        4 => Message::CloseRequest { connection },
        5 => Message::CloseResponse {
            connection,
            error: "forged".into(),
        },
        6 => Message::CloseDial { dial },
        _ => Message::Unknown(i32::from(kind)),
    }
}

/// Returns an entry of the map; the same map and number always give the same entry.
fn pick<V: Copy>(map: &HashMap<Serial, V>, which: u8) -> Option<(Serial, V)> {
    let mut serials: Vec<Serial> = map.keys().copied().collect();
    serials.sort_unstable();
    let index = usize::from(which).checked_rem(serials.len())?;
    let serial = serials[index];
    map.get(&serial).map(|value| (serial, *value))
}
