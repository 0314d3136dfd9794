//! The mode as a file says it: one word, or the value of `konnectivityEnabled` alone or in YAML or
//! JSON, as a hosting platform's cluster has it.

use serde::Deserialize;

use super::Mode;

/// The longest file that is read, in bytes. A whole Cluster object fits.
pub const MAX_BYTES: u64 = 1 << 20;

/// What to do about an empty file.
pub const IF_EMPTY: &str = "write a tunnel mode, such as konnectivity";

/// The places where a document may say the mode; all others are left alone.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    tunnel_mode: Option<String>,
    konnectivity_enabled: Option<bool>,
    cluster_network: Option<Box<Document>>,
    spec: Option<Box<Document>>,
}

/// Reads the text of a mode file.
///
/// # Errors
/// When it says no mode, an unknown one, or two; the text says which.
pub fn parse(text: &str) -> Result<Mode, String> {
    let word = text.trim();
    match word {
        // A ConfigMap's key `konnectivityEnabled`, mounted as a file.
        "true" => return Ok(enabled(true)),
        "false" => return Ok(enabled(false)),
        _ if !word.contains([':', '{', '\n']) => {
            return word
                .parse()
                .map_err(|error: super::UnknownMode| error.to_string());
        }
        _ => {}
    }
    let document: Document = serde_saphyr::from_str(text).map_err(|error| {
        // The rest of the text is a picture of the place.
        let why = error.to_string();
        why.lines().next().unwrap_or_default().to_owned()
    })?;
    let mut modes = Vec::new();
    document.collect(&mut modes)?;
    modes.dedup();
    match modes.as_slice() {
        [mode] => Ok(*mode),
        // Not even for a cluster where an absent value stands for OpenVPN: a key that was lost must
        // not take a cluster down.
        [] => Err("it says neither tunnelMode nor konnectivityEnabled".to_owned()),
        [one, other, ..] => Err(format!("it says {one} in one place and {other} in another")),
    }
}

fn enabled(konnectivity: bool) -> Mode {
    match konnectivity {
        true => Mode::Konnectivity,
        false => Mode::Openvpn,
    }
}

impl Document {
    fn collect(&self, modes: &mut Vec<Mode>) -> Result<(), String> {
        if let Some(word) = &self.tunnel_mode {
            let mode = word
                .parse()
                .map_err(|error: super::UnknownMode| error.to_string())?;
            modes.push(mode);
        }
        modes.extend(self.konnectivity_enabled.map(enabled));
        let inner = [&self.cluster_network, &self.spec];
        for document in inner.into_iter().flatten() {
            document.collect(modes)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_form_of_a_mode() {
        for (text, mode) in [
            ("konnectivity", Mode::Konnectivity),
            ("openvpn\n", Mode::Openvpn),
            ("  prefer-konnectivity\r\n", Mode::PreferKonnectivity),
            ("prefer-openvpn", Mode::PreferOpenvpn),
            ("true", Mode::Konnectivity),
            ("false\n", Mode::Openvpn),
            ("konnectivityEnabled: true\n", Mode::Konnectivity),
            ("{\"konnectivityEnabled\": false}", Mode::Openvpn),
            ("tunnelMode: prefer-openvpn", Mode::PreferOpenvpn),
            (
                "{\"tunnelMode\":\"konnectivity\",\"konnectivityEnabled\":true}",
                Mode::Konnectivity,
            ),
            (
                "apiVersion: kubermatic.k8c.io/v1\nkind: Cluster\nspec:\n  clusterNetwork:\n    \
                 konnectivityEnabled: false\n    proxyMode: ipvs\n",
                Mode::Openvpn,
            ),
        ] {
            assert_eq!(parse(text), Ok(mode), "{text:?}");
        }
    }

    #[test]
    fn what_says_no_mode_is_refused() {
        for (text, why) in [
            ("OpenVPN", "no tunnel mode"),
            ("", "no tunnel mode"),
            ("tunnelMode: vpn", "no tunnel mode"),
            ("proxyMode: ipvs", "neither"),
            ("konnectivityEnabled:", "neither"),
            ("konnectivityEnabled: \"maybe\"", "bool"),
            ("konnectivityEnabled: [", ""),
            (
                "tunnelMode: openvpn\nkonnectivityEnabled: true",
                "in another",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }
}
