//! The options of both roles.

use std::time::Duration;

use culvert_host::flags::Problems;
use culvert_openvpn::cipher::{Cipher, Digest};
use culvert_openvpn::compress::Framing;
use culvert_openvpn::options::Transport;
use culvert_openvpn::session;
use culvert_openvpn::tls::{MinVersion, NameCheck};
use culvert_openvpn::wrap::KeyDirection;

use super::lexer::Directive;
use super::{Context, Material, Outcome, Taken, ciphers, note, port, seconds, value, word};

/// Key and direction of tls-auth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsAuth {
    /// The static key.
    pub key: Material,
    /// Direction on this side.
    pub direction: KeyDirection,
}

/// Options of both roles. `None` means that the file does not contain the option.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Common {
    /// `ca`.
    pub ca: Option<Material>,
    /// `cert`.
    pub cert: Option<Material>,
    /// `key`.
    pub key: Option<Material>,
    /// `remote-cert-tls`: the peer's certificate must contain key usage and extended key usage.
    pub require_usage: bool,
    /// `verify-x509-name`.
    pub name: Option<NameCheck>,
    /// `tls-auth`; the direction comes from its second argument or from `key-direction`.
    pub tls_auth: Option<TlsAuth>,
    /// `tls-crypt`.
    pub tls_crypt: Option<Material>,
    /// `data-ciphers`.
    pub ciphers: Option<Vec<Cipher>>,
    /// `data-ciphers-fallback`.
    pub fallback: Option<Cipher>,
    /// `cipher`.
    pub cipher: Option<Cipher>,
    /// `ncp-disable`.
    pub ncp_disable: bool,
    /// `auth`.
    pub digest: Digest,
    /// `comp-lzo` and `compress`.
    pub framing: Framing,
    /// `tun-mtu`, or `link-mtu` minus its overhead.
    pub tun_mtu: Option<u16>,
    /// `tls-version-min`.
    pub min_version: MinVersion,
    /// `port`, or `lport` for a server and `rport` for a client.
    pub port: Option<u16>,
    /// `hand-window`, `tls-timeout`, `tran-window`, `reneg-sec`, `ping` and `ping-restart`, or their defaults.
    /// `keepalive` sets the last two. A ping time of 0 disables pings or the restart.
    pub timers: session::Timers,
    key_direction: Option<KeyDirection>,
    dev: Option<String>,
    dev_type: Option<String>,
}

/// Largest overhead that `link-mtu` includes, in bytes: AES-256-GCM over TCP, as calculated by OpenVPN 2.5.
const LINK_OVERHEAD: u16 = 123;

impl Common {
    /// Returns the key that wraps control packets.
    pub fn wrap_key(&self) -> Option<&Material> {
        let auth = self.tls_auth.as_ref().map(|auth| &auth.key);
        self.tls_crypt.as_ref().or(auth)
    }

    /// Overrides `tls-auth` of the file with the flags: a key, and the value of `--openvpn-key-direction`.
    /// Empty flags change nothing.
    pub fn lay_tls_auth(&mut self, key: Option<Material>, direction: &str, p: &mut Problems) {
        if let Some(key) = key {
            let direction = KeyDirection::Both;
            self.tls_auth = Some(TlsAuth { key, direction });
        }
        if direction.is_empty() {
            return;
        }
        match (&mut self.tls_auth, parse_direction(direction)) {
            (Some(auth), Some(direction)) => auth.direction = direction,
            (None, Some(_)) => p.error("--openvpn-key-direction needs --openvpn-tls-auth"),
            (_, None) => p.error(format!(
                "--openvpn-key-direction must be 0 or 1, got {direction:?}"
            )),
        }
    }

    pub(super) fn take(&mut self, context: &Context<'_>, directive: &Directive) -> Outcome {
        match directive.name.as_str() {
            "ca" => set(&mut self.ca, context.material(directive)?),
            "cert" => set(&mut self.cert, context.material(directive)?),
            "key" => set(&mut self.key, context.material(directive)?),
            "tls-crypt" => set(&mut self.tls_crypt, context.material(directive)?),
            "tls-auth" => {
                if let Some(key) = context.material(directive)? {
                    let direction = KeyDirection::Both;
                    self.tls_auth = Some(TlsAuth { key, direction });
                }
                if directive.argument(1).is_some() {
                    self.key_direction = Some(direction(directive, 1)?);
                }
            }
            "key-direction" => self.key_direction = Some(direction(directive, 0)?),
            "verify-x509-name" => self.name = Some(name_check(directive)?),
            "cipher" => self.cipher = Some(cipher(directive)?),
            "data-ciphers-fallback" => self.fallback = Some(cipher(directive)?),
            "data-ciphers" | "ncp-ciphers" => return self.data_ciphers(directive),
            "ncp-disable" => self.ncp_disable = true,
            "auth" => self.digest = value(directive, 0, "a digest that is supported here")?,
            "comp-lzo" => {
                self.framing = Framing::Lzo;
                if directive.argument(0) != Some("no") {
                    return note(
                        "framing only: compressed packets from the peer are dropped, so the peer needs `comp-lzo no`",
                    );
                }
            }
            "compress" => {
                if directive.argument(0) == Some("migrate") {
                    return note(
                        "not needed: clients with compression are told to use framing without compression",
                    );
                }
                let algorithm = directive.argument(0);
                self.framing = Framing::of_compress(algorithm)
                    .ok_or("unknown compression; use `compress stub-v2`")?;
                if let Some(option) = Framing::without_compression(algorithm) {
                    return note(format!(
                        "framing only: compressed packets from the peer are dropped, so the peer needs `{option}`"
                    ));
                }
            }
            "dev" => self.dev = Some(word(directive, 0, "a device")?.to_owned()),
            "dev-type" => self.dev_type = Some(word(directive, 0, "tun or tap")?.to_owned()),
            "tun-mtu" => {
                let mtu = value(directive, 0, "a number of bytes")?;
                if !(576..=9000).contains(&mtu) {
                    return Err(format!("{mtu} is not between 576 and 9000"));
                }
                self.tun_mtu = Some(mtu);
            }
            "link-mtu" => {
                let mtu: u16 = value(directive, 0, "a number of bytes")?;
                let inner = mtu.saturating_sub(LINK_OVERHEAD);
                if !(576..=9000).contains(&inner) {
                    return Err(format!("{mtu} is not between 699 and 9123"));
                }
                self.tun_mtu = Some(self.tun_mtu.unwrap_or(inner));
                return note(format!("used as tun-mtu {inner}"));
            }
            "tls-version-min" => {
                self.min_version = match word(directive, 0, "a TLS version")? {
                    "1.0" | "1.1" | "1.2" => MinVersion::Tls12,
                    "1.3" => MinVersion::Tls13,
                    other => return Err(format!("{other:?} is not a TLS version")),
                };
            }
            "tls-version-max" => match word(directive, 0, "a TLS version")? {
                "1.3" => {}
                "1.2" => return Ok(Taken::Note("ignored: TLS 1.3 stays enabled".into())),
                _ => return Err("only TLS 1.2 and 1.3 are supported".into()),
            },
            "port" => self.port = Some(port(directive, 0)?),
            "reneg-sec" => self.timers.reneg = seconds(directive, 0)?,
            "reneg-bytes" | "reneg-pkts" => {
                return note("keys are renewed by time (reneg-sec), and before they are used up");
            }
            "hand-window" => self.timers.hand_window = positive(directive)?,
            "tran-window" => self.timers.tran_window = positive(directive)?,
            "tls-timeout" => self.timers.tls_timeout = positive(directive)?,
            "ping" => self.timers.ping = Some(seconds(directive, 0)?),
            "ping-restart" => self.timers.ping_restart = Some(seconds(directive, 0)?),
            "ping-exit" => {
                self.timers.ping_restart = Some(seconds(directive, 0)?);
                return note("used as ping-restart: the process does not exit, but connects again");
            }
            _ => return Ok(Taken::No),
        }
        Ok(Taken::Yes)
    }

    fn data_ciphers(&mut self, directive: &Directive) -> Outcome {
        let (known, unknown) = ciphers(word(directive, 0, "a list of ciphers")?);
        let unknown = unknown.join(", ");
        if known.is_empty() {
            let all = Cipher::list(&Cipher::ALL);
            return Err(format!("no supported cipher listed; supported: {all}"));
        }
        self.ciphers = Some(known);
        match unknown.is_empty() {
            true => Ok(Taken::Yes),
            false => note(format!("not supported, and left out: {unknown}")),
        }
    }

    /// Applies settings that depend on several options, after the last line.
    pub(super) fn finish(&mut self) -> Vec<String> {
        let mut problems = Vec::new();
        if let (Some(tls_auth), Some(direction)) = (&mut self.tls_auth, self.key_direction) {
            tls_auth.direction = direction;
        }
        if self.tls_auth.is_some() && self.tls_crypt.is_some() {
            problems.push("tls-auth and tls-crypt exclude each other".into());
        }
        if self.cert.is_some() != self.key.is_some() {
            problems.push("cert and key need each other".into());
        }
        // A device name that starts with "tap" means a tap device, unless dev-type overrides the name.
        let device = self.dev_type.as_ref().or(self.dev.as_ref());
        if let Some(device) = device.filter(|device| device.starts_with("tap")) {
            problems.push(format!(
                "dev {device}: Ethernet frames are not carried; use `dev tun` on both sides"
            ));
        }
        problems
    }

    /// Overrides the defaults of a session with the options of the file, except key material.
    pub fn apply(&self, to: &mut session::Common) {
        if let Some(ciphers) = &self.ciphers {
            to.ciphers.clone_from(ciphers);
        }
        if let Some(cipher) = self.cipher {
            // As in OpenVPN 2.5, the cipher of `cipher` is offered in addition to the list.
            if self.ncp_disable {
                to.ciphers = vec![cipher];
            } else if !to.ciphers.contains(&cipher) {
                to.ciphers.push(cipher);
            }
        }
        to.fallback = self.fallback.or(self.cipher);
        to.digest = self.digest;
        to.framing = self.framing;
        if let Some(mtu) = self.tun_mtu {
            (to.tun_mtu, to.max_tun_mtu) = (mtu, mtu);
        }
        to.tls_auth = self.tls_auth.as_ref().map(|tls_auth| tls_auth.direction);
        to.timers = self.timers;
    }

    /// Parses `proto` for a role.
    pub(super) fn proto(directive: &Directive, role: &str) -> Result<Transport, String> {
        super::proto(word(directive, 0, "a protocol")?, role)
    }
}

fn set<T>(slot: &mut Option<T>, value: Option<T>) {
    if value.is_some() {
        *slot = value;
    }
}

fn positive(directive: &Directive) -> Result<Duration, String> {
    let time = seconds(directive, 0)?;
    match time.is_zero() {
        true => Err("must be more than 0".into()),
        false => Ok(time),
    }
}

/// Parses the cipher of the data channel.
fn cipher(directive: &Directive) -> Result<Cipher, String> {
    let cipher = value(directive, 0, "a cipher that is supported here");
    cipher.map_err(|error| {
        format!(
            "{error}; remove the line, so that both sides agree on AES-GCM, or name one of {}",
            Cipher::list(&Cipher::ALL)
        )
    })
}

fn direction(directive: &Directive, index: usize) -> Result<KeyDirection, String> {
    let word = word(directive, index, "0 or 1")?;
    parse_direction(word).ok_or_else(|| format!("{word:?} is not a key direction; use 0 or 1"))
}

fn parse_direction(word: &str) -> Option<KeyDirection> {
    match word {
        "0" => Some(KeyDirection::Normal),
        "1" => Some(KeyDirection::Inverse),
        _ => None,
    }
}

fn name_check(directive: &Directive) -> Result<NameCheck, String> {
    let name = word(directive, 0, "a name")?.to_owned();
    match directive.argument(1) {
        None | Some("subject") => Ok(NameCheck::Subject(name)),
        Some("name") => Ok(NameCheck::CommonName(name)),
        Some("name-prefix") => Ok(NameCheck::CommonNamePrefix(name)),
        Some(other) => Err(format!(
            "{other:?} is not one of subject, name, name-prefix"
        )),
    }
}
