//! A program of ours in a test's namespace, without privileges: HTTP answers, metrics and log.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;
use std::process::Command;

use culvert_tests::metrics::Metrics;
use culvert_tests::openvpn::Namespace;
use culvert_tests::topology::PATIENCE;
use culvert_tests::{Program, eventually, process};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Arguments of `setpriv` for the user nobody without capabilities.
const UNPRIVILEGED: [&str; 6] = [
    "--reuid=65534",
    "--regid=65534",
    "--clear-groups",
    "--inh-caps=-all",
    "--bounding-set=-all",
    "--no-new-privs",
];

/// A running program.
pub(crate) struct Ours {
    pub program: Program,
    at: Namespace,
    health: SocketAddrV4,
    /// Prefix of the program's OpenVPN metrics.
    series: &'static str,
}

impl Ours {
    pub(crate) fn start(
        at: &Namespace,
        name: &str,
        health_port: u16,
        series: &'static str,
        flags: &[String],
    ) -> Self {
        let program = process::ours(name);
        let words = UNPRIVILEGED.map(str::to_owned).into_iter();
        let words = words.chain([program.to_str().unwrap().to_owned(), "--v=4".to_owned()]);
        let words: Vec<String> = words.chain(flags.iter().cloned()).collect();
        Self {
            program: at.spawn(Path::new("/usr/bin/setpriv"), &words),
            at: at.clone(),
            health: SocketAddrV4::new(Ipv4Addr::LOCALHOST, health_port),
            series,
        }
    }

    /// Returns head and body of an answer of the program's health listener.
    pub(crate) async fn get(&self, path: &str) -> std::io::Result<String> {
        let mut stream = self.at.connect(self.health).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    pub(crate) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let answer = self.get("/metrics").await.unwrap();
        let (_, page) = answer.split_once("\r\n\r\n").unwrap();
        let metrics = Metrics::parse(page).unwrap();
        let value = metrics.value(&format!("{}{name}", self.series), labels);
        value.unwrap_or_else(|| panic!("no {name} in {page}"))
    }

    pub(crate) async fn says(&self, text: &str) {
        eventually(
            &format!("the log contains {text:?}"),
            PATIENCE,
            async || {
                let log = self.program.log();
                log.contains(text).then_some(()).ok_or(log)
            },
        )
        .await;
    }

    /// Asserts that the program runs as the user nobody without capabilities. Also asserts that no tun device
    /// exists, not even under the platform's name.
    pub(crate) fn has_no_privileges(&self) {
        assert_eq!(self.status("Uid:"), ["65534"; 4]);
        for set in ["CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(self.status(set), ["0000000000000000"], "{set}");
        }
        let devices = self.at.ip("-br link");
        for device in ["tun", "kube"] {
            assert!(!devices.contains(device), "{devices}");
        }
    }

    /// Returns the words in one line of the program's `/proc/PID/status`.
    fn status(&self, name: &str) -> Vec<String> {
        let path = format!("/proc/{}/status", self.program.pid());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let words = line.unwrap().split_whitespace();
        words.map(str::to_owned).collect()
    }
}

/// Makes files readable for all users, because our programs run as the user nobody.
pub(crate) fn readable(paths: &[&Path]) {
    for path in paths {
        let status = Command::new("chmod")
            .args(["-R", "a+rX"])
            .arg(path)
            .status();
        assert!(status.unwrap().success());
    }
}
