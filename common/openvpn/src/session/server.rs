//! The server role in the control channel: reports clients to the owner, chooses the parameters, and sends
//! the PUSH_REPLY.

use std::time::{Duration, Instant};

use rand::Rng as _;
use tracing::debug;

use super::event::{Authenticated, Ended, Event};
use super::keys::Agreed;
use super::{Push, ServerConfig, Session, Side, Slot};
use crate::Role;
use crate::cipher::Cipher;
use crate::compress::Framing;
use crate::control::push::{self, NotPushable, OURS};
use crate::control::{AUTH_FAILED, RESTART};
use crate::key_method::KeyMethod2;
use crate::keys::KeySource;
use crate::ncp;
use crate::negotiation::Negotiation;
use crate::options::{self, PeerOptions, Transport};
use crate::peer_info::{PeerInfo, Protocol};
use crate::tls::PeerIdentity;

/// Shortest pause between two answers to requests for the options.
const PUSH_AGAIN: Duration = Duration::from_secs(5);

/// Smallest `ping_restart` of a session, in ping intervals of its client.
const MISSED_PINGS: u32 = 3;

/// Server's state about its client.
#[derive(Default)]
pub(super) struct Client {
    /// Certificate of the first negotiation. Renegotiations must use the same certificate and user name.
    identity: Option<PeerIdentity>,
    username: String,
    info: PeerInfo,
    options: PeerOptions,
    choice: Option<ncp::Choice>,
    /// Options from the owner; `None` until the owner has accepted the client.
    accepted: Option<Push>,
    push_requested: bool,
    pushed_at: Option<Instant>,
}

impl Client {
    /// Describes why the session is not established although TLS and the keys are ready.
    pub(super) fn stage(&self) -> &'static str {
        if self.accepted.is_none() {
            "the server neither accepted nor rejected the client"
        } else {
            "the client never requested its options: is `client` or `pull` missing in its configuration?"
        }
    }
}

impl Session {
    /// Returns the server's options string for a client with these options.
    fn mirrored(&self, options: &str) -> String {
        #[cfg(test)]
        if let Some(options) = &self.pretended_options {
            return options.clone();
        }
        options::mirror(options)
    }

    /// Processes the client's key-method message of the first negotiation or of a renegotiation.
    pub(super) fn client_key_method(&mut self, slot: Slot, message: &KeyMethod2, now: Instant) {
        let reply = KeyMethod2 {
            source: KeySource::random(Role::Server, &mut rand::rng()),
            options: self.mirrored(&message.options),
            username: String::new(),
            password: String::new(),
            peer_info: String::new(),
        };
        let Some(negotiation) = self.negotiation(slot) else {
            return;
        };
        let identity = negotiation.channel().and_then(|channel| channel.identity());
        if let Err(failure) = negotiation.send_key_method(Role::Server, &reply, now) {
            return self.negotiation_failed(slot, failure, now);
        }
        let Some(identity) = identity else {
            return self.refuse("the certificate has no common name", now);
        };
        match slot {
            Slot::Current => self.report_client(identity, message, now),
            Slot::Next => self.check_again(&identity, message, now),
        }
    }

    fn report_client(&mut self, identity: PeerIdentity, message: &KeyMethod2, now: Instant) {
        let info = PeerInfo::parse(&message.peer_info);
        let options = PeerOptions::parse(&message.options);
        let common = self.side.common();
        let choice = ncp::choose_as_server(&common.ciphers, common.fallback, &info, &options);
        self.client = Client {
            identity: Some(identity.clone()),
            username: message.username.clone(),
            info: info.clone(),
            options,
            choice,
            ..std::mem::take(&mut self.client)
        };
        if self.client.options.tap {
            return self.refuse("dev tap is not supported, use dev tun", now);
        }
        if self.client.options.mtu_dynamic {
            return self.refuse("the option fragment is not supported, remove it", now);
        }
        if choice.is_none() {
            let ended = Ended::NoSharedCipher {
                offered: ncp::offered(&message.peer_info, &info, &self.client.options),
                allowed: Cipher::list(&self.side.common().ciphers),
            };
            self.send_text(&format!("{AUTH_FAILED},{}", ncp::NO_SHARED_CIPHER), now);
            return self.end(ended, now);
        }
        self.events
            .push_back(Event::Authenticated(Box::new(Authenticated {
                identity,
                peer_info: info,
                username: message.username.clone(),
                password: message.password.clone(),
            })));
    }

    /// Checks that a renegotiation uses the same certificate and user name as the first negotiation.
    fn check_again(&mut self, identity: &PeerIdentity, message: &KeyMethod2, now: Instant) {
        let locked = self.client.identity.as_ref();
        if locked.is_none_or(|locked| locked.fingerprint != identity.fingerprint) {
            return self.refuse("a renegotiation has to use the same certificate", now);
        }
        if self.client.username != message.username {
            return self.refuse("a renegotiation has to use the same user name", now);
        }
        self.prepare_next(now);
    }

    /// Sends AUTH_FAILED with a reason, and ends the session.
    pub(super) fn refuse(&mut self, reason: &str, now: Instant) {
        let reason: String = reason
            .chars()
            .map(|c| if matches!(c, ' '..='~') { c } else { '_' })
            .take(256)
            .collect();
        let text = if reason.is_empty() {
            AUTH_FAILED.to_owned()
        } else {
            format!("{AUTH_FAILED},{reason}")
        };
        self.send_text(&text, now);
        self.end(Ended::Rejected(reason), now);
    }

    /// Accepts the client after [`Event::Authenticated`] (server role). Fails without any effect if an option
    /// cannot be pushed.
    pub fn accept(&mut self, push: Push, now: Instant) -> Result<(), NotPushable> {
        push::build(&push.options)?;
        if self.client.identity.is_some() && self.client.accepted.is_none() && !self.is_ended() {
            self.client.accepted = Some(push);
            self.try_push(now);
        }
        Ok(())
    }

    /// Rejects the client with AUTH_FAILED and `reason`, after [`Event::Authenticated`] or later (server
    /// role).
    pub fn reject(&mut self, reason: &str, now: Instant) {
        let known = self.client.identity.is_some();
        if matches!(self.side, Side::Server(..)) && known && !self.is_ended() {
            self.refuse(reason, now);
        }
    }

    /// Sends the client a request to connect again, to the next server of its list if `next_server` is true,
    /// and ends the session with [`Ended::Closed`] (server role). Used for a shutdown over UDP; over TCP
    /// closing the connection is enough. A client in a renegotiation may get OCC's EXIT instead.
    pub fn restart(&mut self, next_server: bool, now: Instant) {
        if !matches!(self.side, Side::Server(..)) || self.is_ended() {
            return;
        }
        // The texts of an ended session never get the new key.
        let waits = self.texts_wait();
        if !waits {
            let flags = if next_server { ",[N]" } else { "" };
            self.send_text(&format!("{RESTART}{flags}"), now);
        }
        self.end(Ended::Closed, now);
        if waits && self.side.common().transport == Transport::Udp {
            self.send_exits();
        }
    }

    pub(super) fn push_requested(&mut self, now: Instant) {
        self.client.push_requested = true;
        let paused = |at| now >= at + PUSH_AGAIN;
        // The control channel is reliable, so the client received the first answer but did not use it: send
        // the answer again. An answer that was not acknowledged or still waits for a renegotiation is enough.
        let delivered = self.texts.is_empty() && self.active().is_some_and(Negotiation::is_drained);
        if delivered && self.client.pushed_at.is_some_and(paused) {
            self.client.pushed_at = Some(now);
            for text in self.reply.clone() {
                self.send_text(&text, now);
            }
        }
        self.try_push(now);
    }

    /// Sends the PUSH_REPLY as soon as the keys, the owner's decision and the client's request are present.
    pub(super) fn try_push(&mut self, now: Instant) {
        let Side::Server(config, peer_id) = &self.side else {
            return;
        };
        let (config, peer_id) = (config.clone(), *peer_id);
        let client = &mut self.client;
        let wanted = client.push_requested || client.info.protocol.has(Protocol::REQUEST_PUSH);
        let complete = self.current.as_ref().is_some_and(Negotiation::is_complete);
        if !wanted || !complete || client.pushed_at.is_some() || self.ended.is_some() {
            return;
        }
        let (Some(choice), Some(push)) = (client.choice, client.accepted.as_ref()) else {
            return;
        };
        let (agreed, additions) = agree(&config, peer_id, choice, &client.info, &client.options);
        let all: Vec<String> = push.options.iter().cloned().chain(additions).collect();
        client.pushed_at = Some(now);
        let texts = match push::build(&all) {
            Ok(texts) => texts,
            Err(error) => return self.end(Ended::Negotiation(error.to_string()), now),
        };
        if !self.install_first_key(&agreed, now) {
            return;
        }
        let options = push::for_log(all.iter().map(String::as_str));
        debug!(options, "push reply");
        for text in &texts {
            self.send_text(text, now);
        }
        self.reply = texts;
        let timers = config.common.timers;
        let ping_restart = match push::ping(&all) {
            Some(ping) if ping.is_zero() => None,
            Some(ping) => timers.ping_restart.map(|own| own.max(MISSED_PINGS * ping)),
            None => timers.ping_restart,
        };
        self.clocks.established(timers.ping, ping_restart, now);
        let identity = self.client.identity.clone();
        self.establish(agreed, identity, all, None, now);
    }

    /// Returns a random time of up to 10 % of `reneg`. Clients are often started together, and should not
    /// renegotiate together.
    pub(super) fn jitter(reneg: Duration) -> Duration {
        reneg.mul_f64(rand::rng().random_range(0.0..0.1))
    }
}

/// Chooses the parameters for a client with these abilities, and returns them with the options to be pushed.
fn agree(
    config: &ServerConfig,
    peer_id: u32,
    choice: ncp::Choice,
    info: &PeerInfo,
    options: &PeerOptions,
) -> (Agreed, Vec<String>) {
    let common = &config.common;
    let mut push = Vec::new();
    let peer_id = info.protocol.has(Protocol::DATA_V2).then_some(peer_id);
    if let Some(id) = peer_id {
        push.push(format!("peer-id {id}"));
    }
    if choice.push {
        push.push(format!("cipher {}", choice.cipher));
    }
    let exporter = common.exporter && info.protocol.has(Protocol::TLS_KEY_EXPORT);
    let cc_exit = info.protocol.has(Protocol::CC_EXIT_NOTIFY);
    match (cc_exit, exporter) {
        (true, true) => push.push("protocol-flags cc-exit tls-ekm".into()),
        (true, false) => push.push("protocol-flags cc-exit".into()),
        (false, true) => push.push("key-derivation tls-ekm".into()),
        (false, false) => {}
    }
    let ours = info.is_ours();
    if ours && common.transport == Transport::Udp {
        push.push(OURS.into());
    }
    let tun_mtu = match (info.mtu, options.tun_mtu) {
        (Some(most), _) => {
            let mtu = match ours && most >= common.max_tun_mtu {
                true => common.max_tun_mtu,
                false => most.min(common.tun_mtu),
            };
            push.push(format!("tun-mtu {mtu}"));
            mtu
        }
        // The client is too old for a pushed MTU: use its own MTU as the limit.
        (None, Some(own)) => own.min(common.tun_mtu),
        (None, None) => common.tun_mtu,
    };
    // A client with any compression setting frames its packets. The best framing for both sides is the
    // cheapest framing, as in stock's `compress migrate`.
    let framing = match (options.comp_lzo, info.stub_v2) {
        (false, _) => Framing::None,
        (true, true) => {
            push.push("compress stub-v2".into());
            Framing::StubV2
        }
        (true, false) => {
            push.push("comp-lzo no".into());
            Framing::Lzo
        }
    };
    let agreed = Agreed {
        cipher: choice.cipher,
        digest: common.digest,
        exporter,
        peer_id,
        framing,
        tun_mtu,
        cc_exit,
        ours,
    };
    (agreed, push)
}
