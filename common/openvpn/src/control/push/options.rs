//! Parsed values of pushed options.

use super::PushError;
use crate::compress::Framing;
use std::net::Ipv4Addr;
use std::str::{FromStr, SplitWhitespace};
use std::time::Duration;

/// Option that only this crate's server pushes, and only to this crate's client.
pub const OURS: &str = "culvert-peer";

/// Layout of the addresses in the VPN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// Every client has a /30 network.
    Net30,
    /// All clients are in one subnet.
    Subnet,
    /// Every client has a point-to-point link.
    P2p,
}

impl Topology {
    /// Returns the name used by flags and configuration files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Net30 => "net30",
            Self::Subnet => "subnet",
            Self::P2p => "p2p",
        }
    }

    /// Returns the topology called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = [Self::Net30, Self::Subnet, Self::P2p].into_iter();
        all.find(|topology| topology.name() == name)
    }
}

/// Address of the client in the VPN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ifconfig {
    /// Client's own address.
    pub local: Ipv4Addr,
    /// Netmask in [`Topology::Subnet`], otherwise the address of the other end.
    pub second: Ipv4Addr,
}

/// Pushed options, as far as this crate uses them. If a single-valued option occurs more than once, the last
/// occurrence is used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PushOptions {
    /// `ifconfig`.
    pub ifconfig: Option<Ifconfig>,
    /// `topology`; peers use [`Topology::Net30`] if missing.
    pub topology: Option<Topology>,
    /// `peer-id`; makes data packets V2.
    pub peer_id: Option<u32>,
    /// `cipher`, verbatim.
    pub cipher: Option<String>,
    /// `ping`: time without output after which a ping is sent.
    pub ping: Option<Duration>,
    /// `ping-restart`: time without input after which the client connects again. 0 means never.
    pub ping_restart: Option<Duration>,
    /// `ping-exit`: time without input after which the client exits. 0 means never.
    pub ping_exit: Option<Duration>,
    /// `protocol-flags tls-ekm` or `key-derivation tls-ekm`: data keys come from the TLS exporter.
    pub tls_ekm: bool,
    /// `protocol-flags cc-exit`: exit messages go through the control channel.
    pub cc_exit: bool,
    /// `tun-mtu`.
    pub tun_mtu: Option<u16>,
    /// `comp-lzo` or `compress`. Packets that the server compresses are dropped, see [`PushOptions::compresses`].
    pub framing: Option<Framing>,
    /// True if the pushed option names a compression algorithm. The server may then send compressed packets.
    pub compresses: bool,
    /// `auth-token`: password for renegotiations.
    pub auth_token: Option<String>,
    /// True if the server pushed [`OURS`].
    pub ours: bool,
}

impl PushOptions {
    /// Parses comma-separated options. Unknown options are ignored. Fails for an option that would leave both
    /// sides with incompatible data channels.
    pub fn parse(options: &str) -> Result<Self, PushError> {
        let mut push = Self::default();
        for option in options
            .split(',')
            .map(str::trim)
            .filter(|option| !option.is_empty())
        {
            push.apply(option)?;
        }
        Ok(push)
    }

    fn apply(&mut self, option: &str) -> Result<(), PushError> {
        let mut words = option.split_whitespace();
        let malformed = || PushError::Malformed(option.to_owned());
        let unsupported = || PushError::Unsupported(option.to_owned());
        match words.next().unwrap_or_default() {
            "ifconfig" => {
                let (local, second) = (parse(&mut words), parse(&mut words));
                let (local, second) = local.zip(second).ok_or_else(malformed)?;
                self.ifconfig = Some(Ifconfig { local, second });
            }
            "topology" => {
                let topology = words.next().and_then(Topology::from_name);
                self.topology = Some(topology.ok_or_else(malformed)?);
            }
            OURS => self.ours = true,
            "peer-id" => {
                let id = parse(&mut words).filter(|id| *id < 1 << 24);
                self.peer_id = Some(id.ok_or_else(malformed)?);
            }
            "cipher" => self.cipher = Some(words.next().ok_or_else(malformed)?.to_owned()),
            "ping" => self.ping = seconds(&mut words),
            "ping-restart" => self.ping_restart = seconds(&mut words),
            "ping-exit" => self.ping_exit = seconds(&mut words),
            "protocol-flags" => {
                for flag in words {
                    match flag {
                        "tls-ekm" => self.tls_ekm = true,
                        "cc-exit" => self.cc_exit = true,
                        // The server would use a feature that this client does not offer.
                        _ => return Err(PushError::Unsupported(format!("protocol-flags {flag}"))),
                    }
                }
            }
            "key-derivation" => match words.next() {
                Some("tls-ekm") => self.tls_ekm = true,
                _ => return Err(unsupported()),
            },
            "tun-mtu" => self.tun_mtu = parse(&mut words),
            "comp-lzo" => {
                self.framing = Some(Framing::Lzo);
                self.compresses = words.next() != Some("no");
            }
            "compress" => {
                let algorithm = words.next();
                self.framing = Some(Framing::of_compress(algorithm).ok_or_else(unsupported)?);
                self.compresses = Framing::without_compression(algorithm).is_some();
            }
            "fragment" => return Err(unsupported()),
            "auth-token" => self.auth_token = words.next().map(str::to_owned),
            _ => {}
        }
        Ok(())
    }
}

fn parse<T: FromStr>(words: &mut SplitWhitespace<'_>) -> Option<T> {
    words.next()?.parse().ok()
}

fn seconds(words: &mut SplitWhitespace<'_>) -> Option<Duration> {
    parse(words).map(|seconds: u32| Duration::from_secs(seconds.into()))
}
