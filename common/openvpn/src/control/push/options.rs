//! Pushed options as values.

use super::PushError;
use crate::compress::Framing;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::{FromStr, SplitWhitespace};
use std::time::Duration;

/// What only this crate's server pushes, and only to this crate's client.
pub const OURS: &str = "culvert-peer";

/// How addresses are laid out in the VPN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// Every client has a /30.
    Net30,
    /// Clients are in one subnet.
    Subnet,
    /// Every client has a point-to-point link.
    P2p,
}

/// The client's address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ifconfig {
    /// Of the client.
    pub local: Ipv4Addr,
    /// The netmask in [`Topology::Subnet`], otherwise the other end's address.
    pub second: Ipv4Addr,
}

/// Where the client is to send packets through the VPN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// An address, verbatim: it may be a name, as stock takes one.
    pub network: String,
    /// 255.255.255.255 if not given.
    pub netmask: Ipv4Addr,
    /// Verbatim; also `vpn_gateway` and the like.
    pub gateway: Option<String>,
}

/// What a server pushed, as far as anything depends on it. Of an option that may be there once, the last
/// counts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PushOptions {
    /// `ifconfig`.
    pub ifconfig: Option<Ifconfig>,
    /// `ifconfig-ipv6 ADDRESS/BITS`, the address.
    pub ifconfig_ipv6: Option<Ipv6Addr>,
    /// `topology`; [`Topology::Net30`] for peers if not given.
    pub topology: Option<Topology>,
    /// `route-gateway`.
    pub route_gateway: Option<Ipv4Addr>,
    /// `route`.
    pub routes: Vec<Route>,
    /// `peer-id`, which makes data packets V2.
    pub peer_id: Option<u32>,
    /// `cipher`, verbatim.
    pub cipher: Option<String>,
    /// `ping`: how often to give a sign of life.
    pub ping: Option<Duration>,
    /// `ping-restart`: how long without one until the client connects again. 0 is never.
    pub ping_restart: Option<Duration>,
    /// `ping-exit`: the same, but the client ends.
    pub ping_exit: Option<Duration>,
    /// `protocol-flags tls-ekm` or `key-derivation tls-ekm`: data keys come from TLS.
    pub tls_ekm: bool,
    /// `protocol-flags cc-exit`: goodbye is said in the control channel.
    pub cc_exit: bool,
    /// `tun-mtu`.
    pub tun_mtu: Option<u16>,
    /// `comp-lzo` or `compress`.
    pub framing: Option<Framing>,
    /// `socket-flags TCP_NODELAY`.
    pub tcp_nodelay: bool,
    /// `auth-token`, the password of renegotiations.
    pub auth_token: Option<String>,
    /// `explicit-exit-notify`.
    pub exit_notify: Option<u32>,
    /// `redirect-gateway`: all traffic is meant to go through the VPN.
    pub redirect_gateway: bool,
    /// [`OURS`].
    pub ours: bool,
}

impl PushOptions {
    /// Reads options between commas. Unknown ones are ignored; an error is what would leave
    /// a data channel in which neither side understands the other.
    pub fn parse(options: &str) -> Result<Self, PushError> {
        let mut push = Self::default();
        for option in options
            .split(',')
            .map(str::trim)
            .filter(|option| !option.is_empty())
        {
            push.take(option)?;
        }
        Ok(push)
    }

    fn take(&mut self, option: &str) -> Result<(), PushError> {
        let mut words = option.split_whitespace();
        let malformed = || PushError::Malformed(option.to_owned());
        let unsupported = || PushError::Unsupported(option.to_owned());
        match words.next().unwrap_or_default() {
            "ifconfig" => {
                let (local, second) = (parse(&mut words), parse(&mut words));
                let (local, second) = local.zip(second).ok_or_else(malformed)?;
                self.ifconfig = Some(Ifconfig { local, second });
            }
            "ifconfig-ipv6" => {
                let address = words
                    .next()
                    .map(|word| word.split_once('/').map_or(word, |(address, _)| address));
                self.ifconfig_ipv6 = address.and_then(|address| address.parse().ok());
            }
            "topology" => {
                self.topology = match words.next() {
                    Some("net30") => Some(Topology::Net30),
                    Some("subnet") => Some(Topology::Subnet),
                    Some("p2p") => Some(Topology::P2p),
                    _ => return Err(malformed()),
                }
            }
            OURS => self.ours = true,
            "route-gateway" => self.route_gateway = parse(&mut words),
            "route" => {
                if let Some(network) = words.next() {
                    // `default` stands for what there would be without the argument.
                    let netmask = parse(&mut words).unwrap_or(Ipv4Addr::BROADCAST);
                    let gateway = words
                        .next()
                        .filter(|word| *word != "default")
                        .map(str::to_owned);
                    self.routes.push(Route {
                        network: network.to_owned(),
                        netmask,
                        gateway,
                    });
                }
            }
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
                        // The peer would use what we did not offer.
                        _ => return Err(PushError::Unsupported(format!("protocol-flags {flag}"))),
                    }
                }
            }
            "key-derivation" => match words.next() {
                Some("tls-ekm") => self.tls_ekm = true,
                _ => return Err(unsupported()),
            },
            "tun-mtu" => self.tun_mtu = parse(&mut words),
            "comp-lzo" => self.framing = Some(Framing::Lzo),
            "compress" => {
                self.framing = Some(Framing::of_compress(words.next()).ok_or_else(unsupported)?);
            }
            "fragment" => return Err(unsupported()),
            "socket-flags" => self.tcp_nodelay |= words.any(|flag| flag == "TCP_NODELAY"),
            "auth-token" => self.auth_token = words.next().map(str::to_owned),
            "explicit-exit-notify" => self.exit_notify = Some(parse(&mut words).unwrap_or(1)),
            "redirect-gateway" => self.redirect_gateway = true,
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
