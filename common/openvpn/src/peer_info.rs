//! The peer info: lines of `IV_NAME=value` in a client's key method 2 message.

#[cfg(test)]
mod tests;

use crate::cipher::Cipher;

/// Bits of `IV_PROTO`: abilities of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Protocol(pub u32);

impl Protocol {
    /// Supports data packets with a peer id.
    pub const DATA_V2: Self = Self(1 << 1);
    /// Expects its configuration without a request.
    pub(crate) const REQUEST_PUSH: Self = Self(1 << 2);
    /// Can derive data keys with the TLS exporter.
    pub(crate) const TLS_KEY_EXPORT: Self = Self(1 << 3);
    /// Supports the exit message in the control channel, and the pushed option `protocol-flags`.
    pub(crate) const CC_EXIT_NOTIFY: Self = Self(1 << 7);
    /// Supports AUTH_FAILED,TEMP.
    pub const AUTH_FAIL_TEMP: Self = Self(1 << 8);

    /// Abilities of this crate's client.
    pub const OURS: Self = Self(
        Self::DATA_V2.0
            | Self::REQUEST_PUSH.0
            | Self::TLS_KEY_EXPORT.0
            | Self::CC_EXIT_NOTIFY.0
            | Self::AUTH_FAIL_TEMP.0,
    );

    pub(crate) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns true if all bits of `other` are set.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Peer info of a client, as far as this crate uses the lines. A malformed line counts as missing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerInfo {
    /// `IV_VER`, for logs, such as `2.5.2`.
    pub version: Option<String>,
    /// `IV_GUI_VER`, for logs: a program that uses OpenVPN's program or replaces it, such as `culvert/0.1.0`.
    pub program: Option<String>,
    /// `IV_PLAT`, for logs, such as `linux`.
    pub platform: Option<String>,
    /// `IV_PROTO`.
    pub protocol: Protocol,
    /// `IV_CIPHERS` without unsupported ciphers; `None` if the line is missing.
    pub ciphers: Option<Vec<Cipher>>,
    /// `IV_NCP`: 2 means AES-256-GCM and AES-128-GCM, for old clients without a list.
    pub ncp: u32,
    /// `IV_MTU`: largest `tun-mtu` that can be pushed.
    pub mtu: Option<u16>,
    /// `IV_COMP_STUBv2=1`: supports the framing `compress stub-v2`.
    pub stub_v2: bool,
}

impl PeerInfo {
    /// Parses the lines. The first line of each name counts, because a client's own settings may follow.
    pub fn parse(lines: &str) -> Self {
        let mut info = Self::default();
        let mut protocol = None;
        let mut ncp = None;
        for (name, value) in lines.lines().filter_map(|line| line.split_once('=')) {
            let value = value.trim_end();
            match name {
                "IV_VER" => _ = info.version.get_or_insert_with(|| printable(value)),
                "IV_GUI_VER" => _ = info.program.get_or_insert_with(|| printable(value)),
                "IV_PLAT" => _ = info.platform.get_or_insert_with(|| printable(value)),
                "IV_PROTO" => protocol = protocol.or(value.parse().ok()),
                "IV_CIPHERS" => _ = info.ciphers.get_or_insert_with(|| Cipher::known_in(value)),
                "IV_NCP" => ncp = ncp.or(value.parse().ok()),
                "IV_MTU" => info.mtu = info.mtu.or(value.parse().ok()),
                "IV_COMP_STUBv2" => info.stub_v2 |= value == "1",
                _ => {}
            }
        }
        info.protocol = Protocol(protocol.unwrap_or_default());
        info.ncp = ncp.unwrap_or_default();
        info
    }

    /// Returns true for this crate's client, which terminates connections in its own process.
    pub(crate) fn is_ours(&self) -> bool {
        let ours = |program: &String| program.starts_with(PROGRAM);
        self.version.is_none() && self.program.as_ref().is_some_and(ours)
    }

    /// Returns true if a cipher can be pushed to this client.
    pub fn can_negotiate(&self) -> bool {
        self.ciphers.is_some() || self.ncp >= 2
    }
}

/// Replaces everything outside printable ASCII by `_`, because the text of a peer must not control a terminal.
pub(crate) fn printable(text: &str) -> String {
    let safe = |char| match char {
        ' '..='~' => char,
        _ => '_',
    };
    text.chars().map(safe).collect()
}

/// Start of `IV_GUI_VER` in the lines of this crate's client.
const PROGRAM: &str = "culvert/";

/// Returns the lines of this crate's client with the abilities `protocol`.
pub(crate) fn client_lines(protocol: Protocol, ciphers: &[Cipher], tun_mtu: u16) -> String {
    let mut out = format!(
        "IV_GUI_VER={PROGRAM}{}\nIV_PLAT={}\nIV_TCPNL=1\nIV_MTU={tun_mtu}\nIV_CIPHERS={}\nIV_PROTO={}\n\
         IV_LZO_STUB=1\nIV_COMP_STUB=1\nIV_COMP_STUBv2=1\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::OS,
        Cipher::list(ciphers),
        protocol.0,
    );
    if ciphers.contains(&Cipher::Aes256Gcm) && ciphers.contains(&Cipher::Aes128Gcm) {
        out.push_str("IV_NCP=2\n");
    }
    out
}
