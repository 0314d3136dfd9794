//! The TLS flags: Go's names of versions and cipher suites, and the subset that this server supports.

use culvert_host::flags::{Problems, StringSlice};
use culvert_host::tls::{MinVersion, SuiteSupport, TlsOptions, go_suite};

use super::flags::TlsFlags;

impl TlsFlags {
    pub(super) fn validate(&self, problems: &mut Problems) -> TlsOptions {
        let min_version = self.min_version(problems);
        TlsOptions {
            min_version,
            cipher_suites: self.suites(min_version, problems),
        }
    }

    fn min_version(&self, problems: &mut Problems) -> MinVersion {
        let name = self.tls_min_version.as_str();
        match name {
            "" => MinVersion::default(),
            "VersionTLS10" | "VersionTLS11" => {
                problems.warn(format!(
                    "--tls-min-version={name} is below TLS 1.2, which is the lowest version spoken here"
                ));
                MinVersion::Tls12
            }
            "VersionTLS12" => MinVersion::Tls12,
            "VersionTLS13" => MinVersion::Tls13,
            _ => {
                problems.error(format!(
                    "unsupported TLS version {name:?}, supported values are: VersionTLS10, VersionTLS11, \
                     VersionTLS12, VersionTLS13"
                ));
                MinVersion::default()
            }
        }
    }

    fn suites(&self, min_version: MinVersion, problems: &mut Problems) -> Vec<String> {
        let mut available = Vec::new();
        let mut unavailable = Vec::new();
        for name in StringSlice::concat(&self.cipher_suites) {
            match go_suite(&name) {
                SuiteSupport::Supported(_) if available.contains(&name) => {}
                SuiteSupport::Supported(_) => available.push(name),
                SuiteSupport::KnownButUnsupported => unavailable.push(name),
                SuiteSupport::Unknown => problems.error(format!(
                    "cipher suite {name} not supported, doesn't exist or considered as insecure"
                )),
            }
        }
        if unavailable.is_empty() {
            return available;
        }
        let names = unavailable.join(", ");
        if available.is_empty() && min_version != MinVersion::Tls13 {
            problems.error(format!(
                "none of the cipher suites of --cipher-suites is available here ({names}); name one with GCM or \
                 CHACHA20 and ECDHE, or leave the flag out"
            ));
        } else {
            problems.warn(format!(
                "cipher suites not available here, left out: {names}"
            ));
        }
        available
    }
}
