//! The mode file: contains a single word, or the value of `konnectivityEnabled`, alone or in YAML or JSON,
//! as in a hosting platform's Cluster object.

use culvert_host::yaml;
use serde::Deserialize;

use crate::tunnel::Mode;

/// Largest mode file, in bytes. A whole Cluster object fits.
pub const MAX_BYTES: u64 = 1 << 20;

/// Advice for an empty file.
pub const IF_EMPTY: &str = "write a tunnel mode, such as konnectivity";

/// Fields of a document that may contain the mode. Other fields are ignored.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    tunnel_mode: Option<String>,
    konnectivity_enabled: Option<bool>,
    cluster_network: Option<Box<Document>>,
    spec: Option<Box<Document>>,
}

/// Parses the text of a mode file.
///
/// # Errors
/// Fails if the text has no mode, an unknown mode, or two modes; the error text names the problem.
pub fn parse(text: &str) -> Result<Mode, String> {
    let word = text.trim();
    match word {
        // A ConfigMap's key `konnectivityEnabled`, mounted as a file.
        "true" => return Ok(enabled(true)),
        "false" => return Ok(enabled(false)),
        _ if !word.contains([':', '{', '\n']) => {
            return word
                .parse()
                .map_err(|error: crate::tunnel::UnknownMode| error.to_string());
        }
        _ => {}
    }
    let document: Document = serde_saphyr::from_str(text).map_err(|error| {
        let why = yaml::explain(&error, text);
        format!("{why}; write a mode, or konnectivityEnabled with true or false")
    })?;
    let mut modes = Vec::new();
    document.collect(&mut modes)?;
    modes.dedup();
    match modes.as_slice() {
        [mode] => Ok(*mode),
        // A missing value is an error even for a cluster where absence stands for OpenVPN: a lost key must
        // not take a cluster down.
        [] => Err("neither tunnelMode nor konnectivityEnabled is set".to_owned()),
        [one, other, ..] => Err(format!(
            "two different modes: {one} in one place, {other} in another"
        )),
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
                .map_err(|error: crate::tunnel::UnknownMode| error.to_string())?;
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
    fn every_form_of_a_mode_is_parsed() {
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
    fn text_without_a_valid_mode_is_refused() {
        for (text, why) in [
            ("OpenVPN", "unknown tunnel mode"),
            ("", "unknown tunnel mode"),
            ("tunnelMode: vpn", "unknown tunnel mode"),
            ("proxyMode: ipvs", "neither"),
            ("konnectivityEnabled:", "neither"),
            ("konnectivityEnabled: \"maybe\"", "bool"),
            ("konnectivityEnabled: [", ""),
            (
                "konnectivityEnabled: true\nkonnectivityEnabled: false",
                "duplicate mapping key: konnectivityEnabled at line 2, ",
            ),
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
