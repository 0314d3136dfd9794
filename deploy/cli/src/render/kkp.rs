//! Versions of KKP: the Kubernetes versions, defaults and arguments of each.

use std::fmt;

/// A version of KKP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kkp {
    V2_28,
    V2_29,
    V2_30,
    V2_31,
}

/// The known versions, the oldest first.
pub(crate) const VERSIONS: [&str; 4] = ["2.28", "2.29", "2.30", "2.31"];

/// CNI plugins of KKP.
pub(crate) const CNI_PLUGINS: [&str; 3] = ["canal", "cilium", "none"];

/// Versions of Canal that KKP accepts, including the deprecated ones.
const CANAL: [&str; 11] = [
    "v3.21", "v3.22", "v3.23", "v3.24", "v3.25", "v3.26", "v3.27", "v3.28", "v3.29", "v3.30",
    "v3.31",
];

/// Versions of Cilium that KKP accepts, including the deprecated ones.
const CILIUM: [&str; 24] = [
    "v1.11", "v1.12", "1.13.0", "1.13.3", "1.13.4", "1.13.6", "1.13.7", "1.13.8", "1.13.14",
    "1.14.1", "1.14.2", "1.14.3", "1.14.9", "1.14.16", "1.15.3", "1.15.10", "1.15.16", "1.16.6",
    "1.16.9", "1.17.7", "1.17.16", "1.18.2", "1.18.10", "1.19.4",
];

impl Kkp {
    /// Parses a version such as `2.31` or `v2.31.4`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match minor_version(text)? {
            (2, 28) => Some(Self::V2_28),
            (2, 29) => Some(Self::V2_29),
            (2, 30) => Some(Self::V2_30),
            (2, 31) => Some(Self::V2_31),
            _ => None,
        }
    }

    /// Returns the oldest and the newest minor version of Kubernetes 1 for user clusters.
    pub(crate) fn kubernetes(self) -> (u32, u32) {
        match self {
            Self::V2_28 => (30, 33),
            Self::V2_29 => (31, 34),
            Self::V2_30 => (32, 35),
            Self::V2_31 => (33, 36),
        }
    }

    /// Returns the version of the Konnectivity images for a minor version of Kubernetes.
    pub(crate) fn konnectivity_version(self, kubernetes_minor: u32) -> &'static str {
        match (self, kubernetes_minor) {
            (Self::V2_28, ..=29) => "v0.29.3",
            (Self::V2_28 | Self::V2_29, ..=30) => "v0.30.3",
            (Self::V2_28 | Self::V2_29, _) => "v0.31.0",
            (_, ..=32) => "v0.32.1",
            (_, 33) => "v0.33.1",
            (Self::V2_30, _) | (_, 34 | 35) => "v0.34.0",
            (Self::V2_31, _) => "v0.35.0",
        }
    }

    /// True if KKP sets `--admin-bind-address` and `--xfr-channel-size`.
    pub(crate) fn has_tuned_konnectivity(self) -> bool {
        self >= Self::V2_30
    }

    /// Returns the values of `proxyMode`.
    pub(crate) fn proxy_modes(self) -> &'static [&'static str] {
        match self {
            Self::V2_28 | Self::V2_29 => &["ipvs", "iptables", "ebpf"],
            Self::V2_30 | Self::V2_31 => &["ipvs", "iptables", "ebpf", "nftables"],
        }
    }

    /// Returns the default of `proxyMode` in KKP's own code.
    pub(crate) fn default_proxy_mode(self, provider: &str, kubernetes_minor: u32) -> &'static str {
        let has_nftables = self >= Self::V2_30 && kubernetes_minor >= 35;
        match provider {
            // 2.30 chose nftables before it looked at the provider.
            "hetzner" if !(self == Self::V2_30 && has_nftables) => "iptables",
            _ if has_nftables => "nftables",
            _ => "ipvs",
        }
    }

    /// Returns the default version of a CNI plugin. The defaults of Canal before KKP 2.31 were not compared with KKP.
    pub(crate) fn default_cni_version(self, plugin: &str) -> &'static str {
        match (plugin, self) {
            ("cilium", Self::V2_28) => "1.16.9",
            ("cilium", Self::V2_29 | Self::V2_30) => "1.18.2",
            ("cilium", Self::V2_31) => "1.19.4",
            ("canal", Self::V2_28) => "v3.29",
            ("canal", Self::V2_29 | Self::V2_30) => "v3.30",
            ("canal", Self::V2_31) => "v3.31",
            _ => "",
        }
    }
}

/// Returns the versions of a CNI plugin that KKP accepts.
pub(crate) fn cni_versions(plugin: &str) -> &'static [&'static str] {
    match plugin {
        "canal" => &CANAL,
        "cilium" => &CILIUM,
        _ => &[""],
    }
}

/// Parses major and minor of a version, with or without a leading `v`.
pub(crate) fn minor_version(text: &str) -> Option<(u32, u32)> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let text = text.split(['-', '+']).next()?;
    let mut parts = text.split('.').map(str::parse::<u32>);
    let (major, minor) = (parts.next()?.ok()?, parts.next()?.ok()?);
    parts.all(|part| part.is_ok()).then_some((major, minor))
}

impl fmt::Display for Kkp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V2_28 => "2.28",
            Self::V2_29 => "2.29",
            Self::V2_30 => "2.30",
            Self::V2_31 => "2.31",
        })
    }
}
