//! The client role in the control channel: sends the key-method message, requests the options, and applies
//! them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::debug;

use super::event::{Ended, Event};
use super::keys::Agreed;
use super::{ClientConfig, Common, Session, Side, Slot};
use crate::Role;
use crate::cipher::Cipher;
use crate::control::push::{self, Assembler, PushOptions};
use crate::control::{Message, PUSH_REQUEST};
use crate::key_method::KeyMethod2;
use crate::keys::KeySource;
use crate::ncp;
use crate::negotiation::Negotiation;
use crate::options::{LocalOptions, PeerOptions, Transport};
use crate::peer_info::{self, Protocol};
use crate::tls::{Channel, ClientTls};

/// Pause before the first request. A 2.4 server ignores requests that arrive before the server is ready.
const FIRST_REQUEST: Duration = Duration::from_secs(1);

const NEXT_REQUEST: Duration = Duration::from_secs(5);

/// Default of `ping-restart` over UDP if the server pushes no value. TCP has no default.
const UDP_PING_RESTART: Duration = Duration::from_secs(120);

/// Maximum length of a peer's text in the log, in characters. Longer than the URLs that servers send for web logins.
const MAX_PEER_NOTICE: usize = 512;

/// Client's state about its server.
#[derive(Default)]
pub(super) struct Server {
    options: PeerOptions,
    /// Deadline for the server's first answer; `None` without `connect-timeout`.
    pub(super) answer_by: Option<Instant>,
    /// Time of the next request for the options.
    pub(super) request_at: Option<Instant>,
    assembler: Assembler,
    /// Options received so far, verbatim.
    raw: Vec<String>,
    /// Password for renegotiations.
    pub(super) token: Option<String>,
}

impl Session {
    /// Replaces the CAs that the server's certificate is verified with (client role), from the next negotiation on. The
    /// session keeps its own certificate, because servers refuse another one in a renegotiation.
    pub fn set_authorities(&mut self, newer: &ClientTls) {
        if let Side::Client(config) = &mut self.side {
            let mut renewed = ClientConfig::clone(config);
            renewed.tls = Arc::new(config.tls.with_checks_of(newer));
            *config = Arc::new(renewed);
        }
    }

    /// Sends the client's key-method message after the TLS handshake.
    pub(super) fn client_secured(&mut self, slot: Slot, now: Instant) {
        let Side::Client(config) = &self.side else {
            return;
        };
        let common = &config.common;
        let (username, password) = config.credentials.clone().unwrap_or_default();
        let message = KeyMethod2 {
            source: KeySource::random(Role::Client, &mut rand::rng()),
            options: self.options(common),
            username,
            password: self.server.token.clone().unwrap_or(password),
            peer_info: self.peer_info(),
        };
        let Some(negotiation) = self.negotiation(slot) else {
            return;
        };
        if let Err(failure) = negotiation.send_key_method(Role::Client, &message, now) {
            self.negotiation_failed(slot, failure, now);
        }
    }

    fn options(&self, common: &Common) -> String {
        #[cfg(test)]
        if let Some(options) = &self.pretended_options {
            return options.clone();
        }
        let first = common.ciphers.first().copied();
        LocalOptions {
            role: Role::Client,
            transport: common.transport,
            tun_mtu: common.tun_mtu,
            cipher: common.fallback.or(first).unwrap_or(Cipher::Aes256Gcm),
            digest: common.digest,
            framing: common.framing,
            tls_auth: common.tls_auth,
        }
        .build()
    }

    fn peer_info(&self) -> String {
        #[cfg(test)]
        if let Some(lines) = &self.pretended {
            return lines.clone();
        }
        let common = self.side.common();
        let protocol = match common.exporter {
            true => Protocol::OURS,
            false => Protocol::OURS.without(Protocol::TLS_KEY_EXPORT),
        };
        peer_info::client_lines(protocol, &common.ciphers, common.max_tun_mtu)
    }

    /// Processes the server's key-method message of the first negotiation or of a renegotiation.
    pub(super) fn server_key_method(&mut self, slot: Slot, message: &KeyMethod2, now: Instant) {
        match slot {
            Slot::Current => self.server.options = PeerOptions::parse(&message.options),
            Slot::Next => self.prepare_next(now),
        }
    }

    /// Schedules the first request for the options, after the first negotiation.
    pub(super) fn schedule_request(&mut self, now: Instant) {
        if matches!(self.side, Side::Client(_)) {
            self.server.request_at = Some(now + FIRST_REQUEST);
        }
    }

    /// Requests the options if a request is due.
    pub(super) fn request_push(&mut self, now: Instant) {
        if self.server.request_at.is_some_and(|at| at <= now) {
            self.server.request_at = Some(now + NEXT_REQUEST);
            self.send_text(PUSH_REQUEST, now);
        }
    }

    pub(super) fn server_text(&mut self, text: &str, now: Instant) {
        match Message::parse(text) {
            Message::PushReply(options) => self.push_reply(options, now),
            Message::AuthFailed { temporary, reason } => {
                // The token may have expired; the next session sends the password.
                let temporary = temporary || self.server.token.is_some();
                let reason = reason.into();
                self.end(Ended::AuthFailed { reason, temporary }, now);
            }
            Message::Restart {
                next_server,
                reason,
            } => {
                let reason = reason.into();
                let ended = Ended::Restart {
                    next_server,
                    reason,
                };
                self.end(ended, now);
            }
            Message::Halt(reason) => self.end(Ended::Halt(reason.into()), now),
            Message::Exit => self.end(Ended::PeerExit, now),
            _ => self.peer_notice(text, now),
        }
    }

    fn push_reply(&mut self, options: &str, now: Instant) {
        let complete = self.current.as_ref().is_some_and(Negotiation::is_complete);
        if self.agreed.is_some() || !complete {
            // Ignore a repeated reply to a request that crossed the first reply, and a premature reply. A server also sends
            // a reply with a new token, before the old token expires (`resend_auth_token_renegotiation` in auth_token.c).
            let mut options = options.split(',').rev();
            if let Some(token) =
                options.find_map(|option| option.trim().strip_prefix("auth-token "))
            {
                self.server.token = Some(token.to_owned());
            }
            return;
        }
        debug!(options = push::for_log(options.split(',')), "push reply");
        let received = options.split(',').filter(|option| !option.is_empty());
        let received = received.filter(|option| !option.starts_with("push-continuation"));
        self.server.raw.extend(received.map(str::to_owned));
        match self.server.assembler.push(options) {
            Ok(None) => {}
            Ok(Some(push)) => self.apply_options(push, now),
            Err(error) => self.end(Ended::Negotiation(error.to_string()), now),
        }
    }

    fn apply_options(&mut self, push: PushOptions, now: Instant) {
        let Side::Client(config) = &self.side else {
            return;
        };
        let config = config.clone();
        let common = &config.common;
        let unsupported = match &self.server.options {
            options if options.tap => {
                Some("the server uses dev tap, which is not supported: use dev tun")
            }
            options if options.mtu_dynamic => {
                Some("the server uses the option fragment, which is not supported: remove it there")
            }
            _ => None,
        };
        if let Some(text) = unsupported {
            return self.end(Ended::Negotiation(text.into()), now);
        }
        let cipher = match ncp::choose_as_client(
            &common.ciphers,
            push.cipher.as_deref(),
            &self.server.options,
        ) {
            Ok(cipher) => cipher,
            Err(error) => {
                let allowed = Cipher::list(&common.ciphers);
                let text = format!("{error}; allowed ciphers: {allowed}");
                return self.end(Ended::Negotiation(text), now);
            }
        };
        let agreed = Agreed {
            cipher,
            digest: common.digest,
            exporter: push.tls_ekm,
            peer_id: push.peer_id,
            framing: push.framing.unwrap_or(common.framing),
            tun_mtu: push
                .tun_mtu
                .unwrap_or(common.tun_mtu)
                .min(common.max_tun_mtu),
            cc_exit: push.cc_exit,
            ours: push.ours,
        };
        if !self.install_first_key(&agreed, now) {
            return;
        }
        self.server.request_at = None;
        self.server.token = push.auth_token.clone();
        let default_restart = (common.transport == Transport::Udp).then_some(UDP_PING_RESTART);
        let ping = push
            .ping
            .or(common.timers.ping)
            .filter(|every| !every.is_zero());
        let ping_restart = push
            .ping_restart
            .or(push.ping_exit)
            .or(common.timers.ping_restart)
            .or(default_restart)
            .filter(|after| !after.is_zero());
        self.clocks.established(ping, ping_restart, now);
        let channel = self.current.as_ref().and_then(Negotiation::channel);
        let identity = channel.and_then(Channel::identity);
        let options = std::mem::take(&mut self.server.raw);
        self.establish(agreed, identity, options, Some(push), now);
    }

    /// Queues the beginning of a peer's text for the log.
    pub(super) fn peer_notice(&mut self, text: &str, now: Instant) {
        let beginning: String = text.chars().take(MAX_PEER_NOTICE).collect();
        self.notice(&beginning, now);
    }

    /// Queues a text for the log. The rate is limited, because the peer causes most texts.
    pub(super) fn notice(&mut self, text: &str, now: Instant) {
        if !text.is_empty() && self.notices.allows(now) {
            self.events.push_back(Event::Notice(text.to_owned()));
        }
    }
}
