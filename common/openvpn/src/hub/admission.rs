//! Admission of new clients: the first packet gets an answer without a session, and a client that echoes the
//! answer gets a session.

use std::net::SocketAddr;
use std::time::Instant;

use bytes::BytesMut;

use super::{Entry, Hub, PeerId};
use crate::half_open::makes_room;
use crate::packet::{ControlHeader, ControlPacket, KeyId, Opcode, SessionId};
use crate::session::{Ended, Session, unix_time};
use crate::wrap::Wrap;

/// Largest number of answers to first packets that wait to be sent. Further answers are dropped, and the
/// clients retry.
pub(super) const MAX_ANSWERS: usize = 256;

/// Largest packet that may start a session, in bytes: a RESET, or the first TLS bytes.
const MAX_FIRST: usize = 2048;

impl Hub {
    /// Handles a control packet without a session. Returns a new session if the packet echoes an answer; a
    /// RESET gets an answer without a session.
    pub(super) fn unknown_session(
        &mut self,
        from: SocketAddr,
        header: ControlHeader,
        datagram: &[u8],
        now: Instant,
    ) -> Option<PeerId> {
        let first = matches!(
            header.opcode,
            Opcode::HardResetClientV2 | Opcode::ControlV1 | Opcode::AckV1
        );
        if !first || header.key_id != KeyId::FIRST || datagram.len() > MAX_FIRST {
            self.stats.unknown += 1;
            return None;
        }
        // The session opens the datagram a second time, so this check works on a copy.
        let mut copy = BytesMut::from(datagram);
        let Ok((packet, _)) = self.config.common.wrap.open(&mut copy) else {
            self.stats.bad_wrap += 1;
            return None;
        };
        match (packet.opcode, packet.peer_session, packet.id) {
            (Opcode::HardResetClientV2, None, Some(0)) => self.answer(from, header.session, now),
            // The echo was lost. Clients before 2.6 repeat the echo only after another answer.
            (Opcode::ControlV1, None, Some(1)) => self.answer(from, header.session, now),
            (Opcode::ControlV1 | Opcode::AckV1, Some(echoed), _) => {
                if self.cookies.check(from, header.session, echoed, now) {
                    return self.open(from, header.session, echoed, now);
                }
                self.stats.bad_cookies += 1;
            }
            _ => self.stats.unknown += 1,
        }
        None
    }

    /// Queues the RESET of the server, without keeping any state.
    fn answer(&mut self, to: SocketAddr, client: SessionId, now: Instant) {
        if self.answers.len() >= MAX_ANSWERS {
            self.stats.answers_dropped += 1;
            return;
        }
        let packet = ControlPacket {
            opcode: Opcode::HardResetServerV2,
            key_id: KeyId::FIRST,
            session: self.cookies.make(to, client, now),
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
        from: SocketAddr,
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
            address: from,
            client,
            fingerprint: None,
            scheduled: None,
            queued: false,
        };
        *self.slots.get_mut(peer.0 as usize)? = Some(Box::new(entry));
        self.live += 1;
        self.half_open.push_back(peer);
        self.by_client.insert((from, client), peer);
        Some(peer)
    }
}
