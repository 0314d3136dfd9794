//! Admission of new clients: the first packet gets an answer without a session, and a client that echoes the
//! answer waits for a session. Sessions start at a limited rate, so that TLS handshakes leave time for the data
//! of established clients.

use std::net::IpAddr;
use std::time::Instant;

use bytes::BytesMut;

use super::{Entry, Hub, Path, PeerId};
use crate::half_open::{makes_room, next_in_line};
use crate::packet::{ControlHeader, ControlPacket, KeyId, Opcode, SessionId};
use crate::session::{Ended, Session, unix_time};
use crate::wrap::Wrap;

/// Largest number of answers to first packets that wait to be sent. Further answers are dropped, and the
/// clients retry.
pub(super) const MAX_ANSWERS: usize = 256;

/// Largest packet that may start a session, in bytes: a RESET, or the first TLS bytes.
const MAX_FIRST: usize = 2048;

/// Rate of new sessions per second, and number of new sessions after a pause. A TLS handshake with a key of
/// RSA-2048 takes about 1 ms, so handshakes use at most about a tenth of the thread. The burst lets all clients
/// of a restarted server return at once.
pub(super) const RATE: u32 = 100;
pub(super) const BURST: u32 = 100;

/// Largest number of sessions that start in one call. Bounds the delay of data packets between two calls.
pub(super) const MAX_STARTS: usize = 4;

/// Largest number of packets that wait for a session, of at most [`MAX_FIRST`] bytes each.
pub(super) const MAX_WAITING: usize = 256;

/// Client that waits for a session.
pub(super) struct Start {
    from: Path,
    client: SessionId,
    /// Session id of the server, which the client has echoed.
    own: SessionId,
    datagram: Vec<u8>,
}

impl Hub {
    /// Handles a control packet without a session. A packet that echoes an answer waits for a session; a RESET
    /// gets an answer without a session.
    pub(super) fn unknown_session(
        &mut self,
        from: Path,
        header: ControlHeader,
        datagram: &[u8],
        now: Instant,
    ) {
        let first = matches!(
            header.opcode,
            Opcode::HardResetClientV2 | Opcode::ControlV1 | Opcode::AckV1
        );
        if !first || header.key_id != KeyId::FIRST || datagram.len() > MAX_FIRST {
            self.stats.unknown += 1;
            return;
        }
        // The session opens the datagram a second time, so this check works on a copy.
        let mut copy = BytesMut::from(datagram);
        let Ok((packet, _)) = self.config.common.wrap.open(&mut copy) else {
            return self.mismatch(from);
        };
        match (packet.opcode, packet.peer_session, packet.id) {
            (Opcode::HardResetClientV2, None, Some(0)) => self.answer(from, header.session, now),
            // The first RESET acknowledges nothing, and its id is 0. Without a wrap here, the bytes of the client's wrap look
            // like acknowledgements or another id.
            (Opcode::HardResetClientV2, ..) => self.mismatch(from),
            // The echo was lost. Clients before 2.6 repeat the echo only after another answer.
            (Opcode::ControlV1, None, Some(1)) => self.answer(from, header.session, now),
            // A client that acknowledges a later packet had a session before. Its TLS handshake cannot continue in a new
            // session.
            (Opcode::ControlV1 | Opcode::AckV1, Some(echoed), _)
                if packet.acks.iter().all(|id| *id == 0) =>
            {
                if self.cookies.check(from.remote, header.session, echoed, now) {
                    self.wait(Start {
                        from,
                        client: header.session,
                        own: echoed,
                        datagram: datagram.to_vec(),
                    });
                } else {
                    self.stats.bad_cookies += 1;
                }
            }
            _ => self.stats.unknown += 1,
        }
    }

    pub(super) fn mismatch(&mut self, from: Path) {
        self.stats.bad_wrap += 1;
        self.mismatched = Some(from.remote);
    }

    fn wait(&mut self, start: Start) {
        if self.waiting.len() >= MAX_WAITING
            && let Some(displaced) = makes_room(self.waiting_hosts())
        {
            self.waiting.remove(displaced);
            self.stats.starts_dropped += 1;
        }
        self.waiting.push_back(start);
    }

    fn waiting_hosts(&self) -> impl Iterator<Item = (usize, IpAddr)> + Clone {
        let hosts = self.waiting.iter().map(|start| start.from.remote.ip());
        hosts.enumerate()
    }

    /// Starts sessions for waiting clients, within the limits of the rate and of one call. The host with the
    /// fewest waiting clients is first.
    pub(super) fn start_sessions(&mut self, now: Instant) {
        let mut started = 0;
        while started < MAX_STARTS
            && let Some(next) = next_in_line(self.waiting_hosts())
        {
            let known = self.waiting.get(next).and_then(|start| {
                self.by_client
                    .get(&(start.from.remote, start.client))
                    .copied()
            });
            // The second packet of a client costs no session.
            if known.is_none() && !self.starts.allows(now) {
                return;
            }
            let Some(mut start) = self.waiting.remove(next) else {
                return;
            };
            let opened = known.or_else(|| {
                started += 1;
                self.open(start.from, start.client, start.own, now)
            });
            if let Some(peer) = opened {
                self.known_session(peer, &mut start.datagram, now);
            }
        }
    }

    /// Queues the RESET of the server, without keeping any state.
    fn answer(&mut self, to: Path, client: SessionId, now: Instant) {
        if self.answers.len() >= MAX_ANSWERS {
            self.stats.answers_dropped += 1;
            return;
        }
        let packet = ControlPacket {
            opcode: Opcode::HardResetServerV2,
            key_id: KeyId::FIRST,
            session: self.cookies.make(to.remote, client, now),
            acks: vec![0],
            peer_session: Some(client),
            id: Some(0),
            payload: &[],
        };
        let mut out = BytesMut::new();
        // The session, if one follows, continues with the next packet id.
        if Wrap::new(self.config.common.wrap.clone(), unix_time())
            .seal(&packet, &mut out)
            .is_ok()
        {
            self.stats.answers += 1;
            self.answers.push_back((to, out.freeze()));
        }
    }

    /// Starts a session for a client with a proven address.
    fn open(
        &mut self,
        from: Path,
        client: SessionId,
        own: SessionId,
        now: Instant,
    ) -> Option<PeerId> {
        if self.half_open.len() >= self.limits.half_open.max(1) || self.live >= self.limits.sessions
        {
            let waiting = self.half_open.iter();
            let waiting = waiting.filter_map(|peer| Some((*peer, self.get(*peer)?.address.ip())));
            let Some(displaced) = makes_room(waiting) else {
                self.stats.full += 1;
                return None;
            };
            self.stats.evicted += 1;
            self.drop_session(displaced, Ended::Evicted);
        }
        // Ids are reused late, so that late packets of an old session do not reach a new session.
        let peer = match self.slots.len() < 2 * self.limits.sessions {
            true => {
                self.slots.push(None);
                PeerId(u32::try_from(self.slots.len() - 1).ok()?)
            }
            false => self.free.pop_front()?,
        };
        let session = Session::after_cookie(self.config.clone(), peer.0, own, client, now);
        let entry = Entry {
            session,
            address: from.remote,
            local: from.local,
            client,
            fingerprint: None,
            scheduled: None,
            queued: false,
        };
        *self.slots.get_mut(peer.0 as usize)? = Some(Box::new(entry));
        self.live += 1;
        self.half_open.push_back(peer);
        self.by_client.insert((from.remote, client), peer);
        Some(peer)
    }
}
