//! CoreDNS in the seed: the names of the Services, and public names.

use std::path::{Path, PathBuf};

use culvert_tests::Program;

use super::super::SEED;
use super::super::control_plane::Credentials;

/// The DNS server. Dropping the value ends the program.
pub(crate) struct Names {
    program: Program,
    /// Public names, in the format of `/etc/hosts`.
    hosts: PathBuf,
}

impl Names {
    /// Starts CoreDNS at port 53 of the seed.
    pub(super) fn serve(programs: &Path, dir: &Path, files: &Credentials) -> Self {
        let (hosts, config) = (dir.join("names"), dir.join("Corefile"));
        std::fs::write(&hosts, "").expect("a file");
        let text = format!(
            ".:53 {{
    bind {SEED}
    errors
    hosts {} {{
        reload 100ms
        ttl 1
        fallthrough
    }}
    kubernetes cluster.local {{
        kubeconfig {}
        ttl 1
    }}
}}
",
            hosts.display(),
            files.admin.display()
        );
        std::fs::write(&config, text).expect("a file");
        let args = ["-conf".as_ref(), config.as_os_str()];
        Self {
            program: Program::spawn(programs.join("coredns"), args, &[]),
            hosts,
        }
    }

    /// Replaces all public names. `names` are pairs of a name and an address.
    pub(crate) fn set(&self, names: &[(&str, &str)]) {
        let lines = names
            .iter()
            .map(|(name, address)| format!("{address} {name}\n"));
        std::fs::write(&self.hosts, lines.collect::<String>()).expect("a file");
    }

    /// Returns the program.
    pub(super) fn program(&self) -> &Program {
        &self.program
    }
}
