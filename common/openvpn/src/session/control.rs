//! The control channel of a session: assigns packets to negotiations, and acts on the results.

use std::time::Instant;

use bytes::BytesMut;

use super::event::{Ended, Established, Event};
use super::keys::{Agreed, DataKey, Ids};
use super::timers::MAX_FAILURES;
use super::{Dropped, SealError, Session, Side, Slot, Transport, framed};
use crate::Role;
use crate::control::Message;
use crate::control::push::PushOptions;
use crate::negotiation::{Failure, Negotiation, Step};
use crate::packet::{ControlPacket, KeyId, Opcode, PacketError};
use crate::reliable::Received;
use crate::tls::{Channel, PeerIdentity, TlsError};
use crate::wrap::{OpenError, WRAP_HINT};

impl Session {
    /// Processes a control packet. Over TCP an invalid packet ends the session, because TCP does not damage
    /// packets by chance.
    pub(super) fn control(&mut self, packet: &mut [u8], now: Instant) -> Result<(), Dropped> {
        let is_first = self.ids.is_none();
        let result = match self.wrap.open(packet, now) {
            Ok(packet) => self
                .opened(&packet, now)
                .map_err(|dropped| (dropped, dropped.to_string())),
            Err(error) => Err((refusal(error), error.to_string())),
        };
        result.map_err(|(dropped, text)| {
            let harmless = matches!(
                dropped,
                Dropped::OutOfWindow | Dropped::WrongKey | Dropped::Ended
            );
            if self.side.common().transport == Transport::Tcp && !harmless {
                let is_mismatch = is_first && dropped != Dropped::Unsupported;
                self.end(
                    Ended::Protocol(match is_mismatch {
                        true => format!("first packet not readable ({text}): {WRAP_HINT}"),
                        false => text,
                    }),
                    now,
                );
            }
            dropped
        })
    }

    fn opened(&mut self, packet: &ControlPacket<'_>, now: Instant) -> Result<(), Dropped> {
        let reset = packet.opcode != Opcode::ControlV1 && packet.opcode != Opcode::AckV1;
        if packet.id.is_some_and(|id| reset != (id == 0)) {
            return Err(Dropped::Malformed);
        }
        self.check_session(packet, now)?;
        let slot = self.slot(packet, now)?;
        let side = self.side.clone();
        let open = move || open_channel(&side);
        let mut steps = Vec::new();
        let Some(negotiation) = self.negotiation(slot) else {
            return Err(Dropped::WrongKey);
        };
        let failed_before = negotiation.has_failed();
        let result = match negotiation.input(packet, now, &open, &mut steps) {
            Ok(Received::Refused) => Err(Dropped::OutOfWindow),
            Ok(Received::New | Received::Duplicate) => Ok(()),
            Err(failure) => {
                self.negotiation_failed(slot, failure, now);
                Ok(())
            }
        };
        if slot == Slot::Current && self.next.is_some() {
            // Send no acknowledgement for the old key while a new key is being negotiated: over TCP, stock
            // OpenVPN closes the connection when it receives such an acknowledgement.
            self.negotiation(slot).map(Negotiation::discard_acks);
        }
        for step in steps {
            if self.ended.is_some() || failed_before {
                break;
            }
            self.step(slot, step, now);
        }
        result
    }

    /// Checks both session ids. The peer's first packet sets the peer's id.
    fn check_session(&mut self, packet: &ControlPacket<'_>, now: Instant) -> Result<(), Dropped> {
        if packet.peer_session.is_some_and(|named| named != self.own) {
            return Err(Dropped::WrongSession);
        }
        let first = packet.key_id == KeyId::FIRST
            && match self.side {
                Side::Client(_) => packet.opcode == Opcode::HardResetServerV2,
                Side::Server(..) => packet.opcode == Opcode::HardResetClientV2,
            };
        let timers = self.side.common().timers;
        match self.ids {
            Some(ids) if ids.peer == packet.session => return Ok(()),
            _ if !first || self.ended.is_some() => return Err(Dropped::WrongSession),
            // A RESET without our session id may be left over from an earlier session, or forged. Until the
            // peer has acknowledged our own RESET, a RESET that echoes our id replaces the RESET accepted
            // earlier.
            Some(_) if packet.peer_session.is_some() && self.may_start_over() => {
                let reset =
                    Negotiation::new(Role::Client, KeyId::FIRST, true, timers.tls_timeout, now);
                self.current = Some(reset);
            }
            Some(_) => return Err(Dropped::WrongSession),
            None => {}
        }
        self.ids = Some(Ids {
            own: self.own,
            peer: packet.session,
        });
        self.current.get_or_insert_with(|| {
            Negotiation::new(Role::Server, KeyId::FIRST, false, timers.tls_timeout, now)
        });
        Ok(())
    }

    fn may_start_over(&self) -> bool {
        let begun = self
            .current
            .as_ref()
            .is_some_and(|current| current.channel().is_some());
        matches!(self.side, Side::Client(_)) && !begun
    }

    /// Returns the negotiation for a packet. A SOFT_RESET for the next key starts a renegotiation.
    fn slot(&mut self, packet: &ControlPacket<'_>, now: Instant) -> Result<Slot, Dropped> {
        if self
            .next
            .as_ref()
            .is_some_and(|next| next.key_id() == packet.key_id)
        {
            return Ok(Slot::Next);
        }
        let current = self.current.as_ref().ok_or(Dropped::WrongKey)?;
        if current.key_id() == packet.key_id {
            return Ok(Slot::Current);
        }
        let starts = packet.opcode == Opcode::SoftResetV1
            && packet.key_id == current.key_id().next()
            && self.next.is_none()
            && self.is_established()
            && self.permits_renegotiation(now);
        if !starts {
            return Err(Dropped::WrongKey);
        }
        self.renegotiate(false, now);
        Ok(Slot::Next)
    }

    pub(super) fn negotiation(&mut self, slot: Slot) -> Option<&mut Negotiation> {
        match slot {
            Slot::Current => self.current.as_mut(),
            Slot::Next => self.next.as_mut(),
        }
    }

    /// Starts the negotiation of the next key.
    pub(super) fn renegotiate(&mut self, initiated: bool, now: Instant) {
        let Some(current) = self.current.as_mut().filter(|_| self.next.is_none()) else {
            return;
        };
        current.discard_acks();
        self.clocks.renegotiated_at = Some(now);
        let key_id = current.key_id().next();
        let retry = self.side.common().timers.tls_timeout;
        self.next = Some(Negotiation::new(
            self.side.role(),
            key_id,
            initiated,
            retry,
            now,
        ));
    }

    fn step(&mut self, slot: Slot, step: Step, now: Instant) {
        let role = self.side.role();
        match step {
            Step::Secured if role == Role::Client => self.client_secured(slot, now),
            Step::Secured => {}
            Step::KeyMethod(message) if role == Role::Client => {
                self.server_key_method(slot, &message, now)
            }
            Step::KeyMethod(message) => self.client_key_method(slot, &message, now),
            Step::Complete if slot == Slot::Next => self.renegotiated(now),
            Step::Complete => {
                self.clocks.deadline = now + self.side.common().timers.hand_window;
                self.schedule_request(now);
                self.try_push(now);
            }
            Step::Text(text) if role == Role::Client => self.server_text(&text, now),
            Step::Text(text) => match Message::parse(&text) {
                Message::PushRequest => self.push_requested(now),
                Message::Exit => self.end(Ended::PeerExit, now),
                _ => self.peer_notice(&text, now),
            },
        }
    }

    /// Returns true if texts wait for the new key. During a renegotiation, a peer with the new key no longer reads the old
    /// key's control channel.
    pub(super) fn texts_wait(&self) -> bool {
        let next = self.next.as_ref();
        next.is_some_and(|next| next.sources().is_none())
    }

    /// Sends a text, at once or with the new key.
    pub(super) fn send_text(&mut self, text: &str, now: Instant) {
        let slot = match &self.next {
            Some(_) if self.texts_wait() => return self.texts.push_back(text.to_owned()),
            Some(_) => Slot::Next,
            None => Slot::Current,
        };
        let sent = self
            .negotiation(slot)
            .map(|negotiation| negotiation.send_text(text, now));
        if let Some(Err(failure)) = sent {
            self.negotiation_failed(slot, failure, now);
        }
    }

    /// Derives the next key when its material is complete. From now on packets with the next key are
    /// accepted.
    pub(super) fn prepare_next(&mut self, now: Instant) {
        let (Some(next), Some(agreed), Some(ids)) = (&self.next, &self.agreed, self.ids) else {
            return;
        };
        match DataKey::derive(self.side.role(), next, ids, agreed) {
            Ok(key) => self.keys.prepare(key),
            Err(failure) => self.negotiation_failed(Slot::Next, failure, now),
        }
    }

    /// Finishes a renegotiation.
    pub(super) fn renegotiated(&mut self, now: Instant) {
        let Some(mut next) = self.next.take() else {
            return;
        };
        next.completed();
        let timers = self.side.common().timers;
        let key_id = next.key_id().get();
        self.current = Some(next);
        self.keys.promote(timers.patience(), timers.tran_window);
        self.clocks.failures = 0;
        self.schedule_renegotiation(now);
        self.stats.rekeys += 1;
        self.events.push_back(Event::Rekeyed { key_id });
        self.send_waiting_texts(now);
    }

    /// Sends the texts that waited for the end of a renegotiation.
    fn send_waiting_texts(&mut self, now: Instant) {
        for text in std::mem::take(&mut self.texts) {
            self.send_text(&text, now);
        }
    }

    /// Derives and installs the first key. Returns false after a failure, which may end the session.
    pub(super) fn install_first_key(&mut self, agreed: &Agreed, now: Instant) -> bool {
        let (Some(current), Some(ids)) = (&self.current, self.ids) else {
            return false;
        };
        match DataKey::derive(self.side.role(), current, ids, agreed) {
            Ok(key) => self.keys.install(key),
            Err(failure) => {
                self.negotiation_failed(Slot::Current, failure, now);
                return false;
            }
        }
        true
    }

    /// Marks the session as established. `options` are the pushed options, and `pushed` are the parsed
    /// options of a client.
    pub(super) fn establish(
        &mut self,
        agreed: Agreed,
        identity: Option<PeerIdentity>,
        options: Vec<String>,
        pushed: Option<PushOptions>,
        now: Instant,
    ) {
        let channel = self.current.as_ref().and_then(Negotiation::channel);
        let established = Established {
            identity,
            options,
            push: pushed,
            cipher: agreed.cipher,
            exporter: agreed.exporter,
            peer_id: agreed.peer_id,
            tun_mtu: agreed.tun_mtu,
            ours: agreed.ours,
            tls: channel.map(Channel::describe).unwrap_or_default(),
        };
        self.agreed = Some(agreed);
        self.schedule_renegotiation(now);
        self.events
            .push_back(Event::Established(Box::new(established)));
    }

    /// Handles the failure of a negotiation. Over UDP anyone on the path can make a negotiation fail, so an
    /// established session tries again. A refused certificate always ends the session, because another
    /// attempt would fail, too.
    pub(super) fn negotiation_failed(&mut self, slot: Slot, failure: Failure, now: Instant) {
        let ended = match failure {
            Failure::Tls(error) => Ended::Tls(error),
            Failure::Protocol(text) => Ended::Protocol(text),
        };
        let forged = !matches!(ended, Ended::Tls(TlsError::Certificate { .. }));
        let spoilable = self.side.common().transport == Transport::Udp && self.is_established();
        match slot {
            _ if !(forged && spoilable) => self.end(ended, now),
            Slot::Next => self.abandon(&ended.to_string(), now),
            Slot::Current => {
                self.notice(&format!("{ended}; renegotiating the keys"), now);
                self.clocks.renegotiate_at = Some(now);
            }
        }
    }

    /// Gives up a renegotiation. The old keys stay in use, and a renegotiation that this side started is
    /// tried again.
    pub(super) fn abandon(&mut self, why: &str, now: Instant) {
        let initiated = self.next.take().is_some_and(|next| next.initiated());
        self.keys.abandon();
        self.send_waiting_texts(now);
        self.stats.rekeys_failed += 1;
        if !initiated {
            let text = format!("a renegotiation started by the peer failed: {why}");
            return self.notice(&text, now);
        }
        self.clocks.failures += 1;
        if self.clocks.failures >= MAX_FAILURES {
            let text = format!("{MAX_FAILURES} successive renegotiations failed: {why}");
            return self.end(Ended::Protocol(text), now);
        }
        self.clocks.renegotiate_at = Some(now + self.side.common().timers.patience());
        self.notice(&format!("a renegotiation failed: {why}"), now);
    }

    /// Appends the next control packet to `out`. Returns false if no packet is due.
    pub(super) fn control_output(&mut self, now: Instant, out: &mut BytesMut) -> bool {
        let transport = self.side.common().transport;
        let peer = self.ids.map(|ids| ids.peer);
        let Some(negotiation) = self.next.as_mut().or(self.current.as_mut()) else {
            return false;
        };
        if self.ended.as_ref().is_some_and(|end| end.over) {
            return false;
        }
        let Some(packet) = negotiation.transmit(self.own, peer, now) else {
            return false;
        };
        let wrapped = framed(transport, out, |out| {
            let sealed = self.wrap.seal(&packet, out);
            sealed.map_err(|_| SealError::Exhausted)
        });
        if wrapped.is_err() {
            self.end(
                Ended::Protocol("packet ids of the control channel are used up".into()),
                now,
            );
            return false;
        }
        self.clocks.sent(now);
        true
    }
}

fn open_channel(side: &Side) -> Result<Channel, TlsError> {
    match side {
        Side::Client(config) => config.tls.connect(),
        Side::Server(config, _) => config.tls.accept(),
    }
}

/// Returns the drop reason for a packet that the wrap rejected.
fn refusal(error: OpenError) -> Dropped {
    match error {
        OpenError::Packet(PacketError::KeyMethod1 | PacketError::TlsCryptV2) => {
            Dropped::Unsupported
        }
        OpenError::Packet(_) => Dropped::Malformed,
        OpenError::Authentication => Dropped::BadWrap,
        OpenError::Replay(_) => Dropped::ReplayedControl,
    }
}
