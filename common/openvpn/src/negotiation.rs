//! One key negotiation: RESETs, the TLS handshake, the key-method messages, and then the texts of the control
//! channel.
//!
//! A session has one negotiation in use, and a second negotiation during a renegotiation. The VPN client is
//! always the TLS client, even if the server starts the negotiation.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::BytesMut;

use crate::Role;
use crate::control;
use crate::key_method::KeyMethod2;
use crate::keys::KeySource;
use crate::packet::{ControlPacket, KeyId, MAX_ACKS, Opcode, SessionId};
use crate::reliable::{MAX_PIGGYBACK, Received, Reliable};
use crate::tls::{Channel, TlsError};

/// Largest number of TLS bytes in one packet. Peers up to 2.5 accept packets of 1250 bytes, and the largest
/// wrap adds 72.
const MAX_CHUNK: usize = 1100;

/// Progress of a negotiation, reported to the session.
#[derive(Debug)]
pub(crate) enum Step {
    /// The TLS handshake is complete on this side. A client sends its key-method message now.
    Secured,
    /// Key-method message of the peer. A server answers with its own message now.
    KeyMethod(Box<KeyMethod2>),
    /// Both key-method messages are exchanged, and the peer has acknowledged all messages of this side.
    Complete,
    /// Text of the control channel.
    Text(String),
}

/// Reason why a negotiation failed.
#[derive(Debug)]
pub(crate) enum Failure {
    Tls(TlsError),
    Protocol(String),
}

impl From<TlsError> for Failure {
    fn from(error: TlsError) -> Self {
        Self::Tls(error)
    }
}

/// Control channel of one key.
pub(crate) struct Negotiation {
    key_id: KeyId,
    began: Instant,
    peer_role: Role,
    /// True if this side started the negotiation.
    initiated: bool,
    reliable: Reliable<Opcode>,
    channel: Option<Channel>,
    reset_received: bool,
    secured: bool,
    /// This side's part of the key material, once sent.
    own: Option<KeySource>,
    /// Peer's part of the key material, once received.
    peer: Option<KeySource>,
    complete: bool,
    /// Set when TLS has failed. Outstanding messages are still sent.
    failed: bool,
    records: VecDeque<Vec<u8>>,
    /// Received part of an incomplete message.
    text: BytesMut,
}

impl Negotiation {
    /// Starts a negotiation with a RESET: a client's first packet, a server's answer, or a SOFT_RESET.
    pub(crate) fn new(
        role: Role,
        key_id: KeyId,
        initiated: bool,
        first_retry: Duration,
        now: Instant,
    ) -> Self {
        let opcode = match (key_id == KeyId::FIRST, role) {
            (false, _) => Opcode::SoftResetV1,
            (true, Role::Client) => Opcode::HardResetClientV2,
            (true, Role::Server) => Opcode::HardResetServerV2,
        };
        let mut reliable = Reliable::new(first_retry);
        reliable.push(opcode, Vec::new(), now);
        Self::with(role, key_id, initiated, reliable, now)
    }

    /// Creates the first negotiation of a server after a stateless exchange of the RESETs.
    pub(crate) fn after_cookie(first_retry: Duration, now: Instant) -> Self {
        let reliable = Reliable::after_reset(first_retry, 1);
        let mut this = Self::with(Role::Server, KeyId::FIRST, false, reliable, now);
        this.reset_received = true;
        this
    }

    fn with(
        role: Role,
        key_id: KeyId,
        initiated: bool,
        reliable: Reliable<Opcode>,
        now: Instant,
    ) -> Self {
        Self {
            key_id,
            began: now,
            peer_role: role.peer(),
            initiated,
            reliable,
            channel: None,
            reset_received: false,
            secured: false,
            own: None,
            peer: None,
            complete: false,
            failed: false,
            records: VecDeque::new(),
            text: BytesMut::new(),
        }
    }

    pub(crate) fn key_id(&self) -> KeyId {
        self.key_id
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    pub(crate) fn initiated(&self) -> bool {
        self.initiated
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.complete
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(crate) fn channel(&self) -> Option<&Channel> {
        self.channel.as_ref()
    }

    /// Returns the key material of this side and of the peer, once both are known.
    pub(crate) fn sources(&self) -> Option<(&KeySource, &KeySource)> {
        Some((self.own.as_ref()?, self.peer.as_ref()?))
    }

    /// Describes the progress, with hints for operators on why the negotiation stopped.
    pub(crate) fn stage(&self) -> &'static str {
        match (self.reset_received, self.secured, &self.peer) {
            (false, ..) => {
                "no answer at all: check address, port and firewall, and that both sides use the same tls-auth or tls-crypt key and direction"
            }
            (true, false, _) => {
                "the TLS handshake did not finish: the peer may refuse our certificate silently (its log says why), or larger packets may get lost"
            }
            (true, true, None) => {
                "the peer sent no key-method message: the peer may refuse our certificate silently (its log says why), or expect a user and a password"
            }
            (true, true, Some(_)) => "the peer did not acknowledge our key-method message",
        }
    }

    /// Processes an opened packet of this key. `open` creates the TLS connection when needed. After a failure
    /// only acknowledgements are processed.
    pub(crate) fn input(
        &mut self,
        packet: &ControlPacket<'_>,
        now: Instant,
        open: &dyn Fn() -> Result<Channel, TlsError>,
        steps: &mut Vec<Step>,
    ) -> Result<Received, Failure> {
        for &id in &packet.acks {
            self.reliable.acknowledged(id);
        }
        let received = packet.id.map_or(Received::New, |id| {
            self.reliable.receive(id, packet.opcode, packet.payload)
        });
        if self.failed {
            while self.reliable.deliver().is_some() {}
        } else if let Err(failure) = self.progress(now, open, steps) {
            self.fail(now);
            return Err(failure);
        }
        Ok(received)
    }

    /// Ends TLS after a failure. Pending TLS output, such as an alert, is still sent.
    pub(crate) fn fail(&mut self, now: Instant) {
        self.flush(now);
        self.failed = true;
    }

    fn progress(
        &mut self,
        now: Instant,
        open: &dyn Fn() -> Result<Channel, TlsError>,
        steps: &mut Vec<Step>,
    ) -> Result<(), Failure> {
        while let Some((opcode, payload)) = self.reliable.deliver() {
            if opcode != Opcode::ControlV1 {
                self.reset_received = true;
                continue;
            }
            let channel = match &mut self.channel {
                Some(channel) => channel,
                slot => slot.insert(open()?),
            };
            channel.receive(&payload, &mut self.records)?;
        }
        // Open TLS only after the peer has acknowledged our RESET. Earlier, the peer may not know about the
        // new key.
        if self.channel.is_none() && self.reset_received && self.reliable.is_acknowledged() {
            self.channel = Some(open()?);
        }
        self.flush(now);
        if !self.secured && self.channel.as_ref().is_some_and(Channel::is_established) {
            self.secured = true;
            steps.push(Step::Secured);
        }
        while let Some(record) = self.records.pop_front() {
            self.record(&record, steps)?;
        }
        self.check_complete(steps);
        Ok(())
    }

    /// Processes the plaintext of one TLS record from the peer.
    fn record(&mut self, record: &[u8], steps: &mut Vec<Step>) -> Result<(), Failure> {
        self.text.extend_from_slice(record);
        if self.peer.is_none() {
            let parsed = KeyMethod2::parse(self.peer_role, &self.text)
                .map_err(|error| Failure::Protocol(error.to_string()))?;
            let Some((message, len)) = parsed else {
                return Ok(());
            };
            drop(self.text.split_to(len));
            self.peer = Some(message.source.clone());
            steps.push(Step::KeyMethod(Box::new(message)));
        }
        while let Some(text) = control::take_text(&mut self.text)
            .map_err(|error| Failure::Protocol(error.to_string()))?
        {
            steps.push(Step::Text(text));
        }
        Ok(())
    }

    /// Sends this side's key-method message. Called once per negotiation.
    pub(crate) fn send_key_method(
        &mut self,
        role: Role,
        message: &KeyMethod2,
        now: Instant,
    ) -> Result<(), Failure> {
        let mut bytes = BytesMut::new();
        message
            .write(role, &mut bytes)
            .map_err(|error| Failure::Protocol(error.to_string()))?;
        self.send(&bytes, now)?;
        self.own = Some(message.source.clone());
        Ok(())
    }

    /// Sends a text of the control channel as one TLS record.
    pub(crate) fn send_text(&mut self, text: &str, now: Instant) -> Result<(), Failure> {
        let mut bytes = Vec::with_capacity(text.len() + 1);
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
        self.send(&bytes, now)
    }

    fn send(&mut self, message: &[u8], now: Instant) -> Result<(), Failure> {
        if self.failed {
            return Ok(());
        }
        if let Some(channel) = &mut self.channel {
            channel.send(message)?;
        }
        self.flush(now);
        Ok(())
    }

    /// Moves TLS output into the send window.
    fn flush(&mut self, now: Instant) {
        let Some(channel) = &mut self.channel else {
            return;
        };
        while channel.has_output() && self.reliable.window() > 0 {
            let chunk = channel.take_output(MAX_CHUNK);
            self.reliable.push(Opcode::ControlV1, chunk, now);
        }
    }

    fn check_complete(&mut self, steps: &mut Vec<Step>) {
        if !self.complete && self.sources().is_some() && self.is_drained() {
            self.complete = true;
            steps.push(Step::Complete);
        }
    }

    /// Records that the peer has all key material, even if acknowledgements are missing. No
    /// [`Step::Complete`] follows.
    pub(crate) fn completed(&mut self) {
        self.complete = true;
    }

    /// Returns true if all output is sent and acknowledged.
    pub(crate) fn is_drained(&self) -> bool {
        self.reliable.is_acknowledged() && !self.channel.as_ref().is_some_and(Channel::has_output)
    }

    pub(crate) fn has_pending_acks(&self) -> bool {
        self.reliable.has_pending_acks()
    }

    pub(crate) fn discard_acks(&mut self) {
        self.reliable.discard_acks();
    }

    /// Returns the time at which the next message is due.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.reliable.timeout()
    }

    /// Returns the next due packet, if any, and counts the packet as sent.
    pub(crate) fn transmit(
        &mut self,
        session: SessionId,
        peer: Option<SessionId>,
        now: Instant,
    ) -> Option<ControlPacket<'_>> {
        let due = self.reliable.timeout().is_some_and(|at| at <= now);
        if !due && !self.reliable.has_pending_acks() {
            return None;
        }
        let most = if due { MAX_PIGGYBACK } else { MAX_ACKS };
        let acks = peer
            .map(|_| self.reliable.take_acks(most))
            .unwrap_or_default();
        let key_id = self.key_id;
        if !due {
            let opcode = Opcode::AckV1;
            return (!acks.is_empty()).then_some(ControlPacket {
                opcode,
                key_id,
                session,
                acks,
                peer_session: peer,
                id: None,
                payload: &[],
            });
        }
        let message = self.reliable.transmit(now)?;
        Some(ControlPacket {
            opcode: message.kind,
            key_id,
            session,
            peer_session: peer.filter(|_| !acks.is_empty()),
            acks,
            id: Some(message.id),
            payload: message.payload,
        })
    }
}
