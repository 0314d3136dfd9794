//! Files that change while a program runs, and the program's reports about the changes.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use culvert_host::tls::earliest_expiry_in_pem;
use culvert_kit::pki::Pair;

use crate::metrics::scrape;
use crate::wait::eventually;

/// Time limit for a reload.
const LIMIT: Duration = Duration::from_secs(60);

/// Replaces the content of a file in one step.
///
/// # Panics
/// If the file cannot be replaced.
pub fn install(content: &[u8], file: &Path) {
    let next = file.with_extension("next");
    std::fs::write(&next, content).expect("writing a file");
    std::fs::rename(&next, file).expect("replacing a file");
}

/// Replaces a certificate and its key.
///
/// # Panics
/// If a file cannot be read or replaced.
pub fn install_pair(from: &Pair, to: &Pair) {
    install(&read(&from.cert), &to.cert);
    install(&read(&from.key), &to.key);
}

/// Returns the content of a file.
///
/// # Panics
/// If the file cannot be read.
pub fn read(file: &Path) -> Vec<u8> {
    std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// Counts of reloads before a change.
#[derive(Debug)]
pub struct Reloads(Vec<(SocketAddr, &'static str, f64)>);

impl Reloads {
    /// Remembers the counts of file sets; each set is an address with metrics, and the name of the set.
    pub async fn before(sets: &[(SocketAddr, &'static str)]) -> Self {
        let mut counts = Vec::new();
        for (address, files) in sets {
            counts.push((*address, *files, count(*address, files, "ok").await));
        }
        Self(counts)
    }

    /// Waits until every set was reloaded.
    ///
    /// # Panics
    /// If a set is not reloaded in time.
    pub async fn happen(self) {
        for (address, files, before) in self.0 {
            eventually(&format!("{files} is reloaded"), LIMIT, async || {
                let now = count(address, files, "ok").await;
                (now > before).then_some(()).ok_or(now)
            })
            .await;
        }
    }
}

/// Returns the number of reloads of a file set with a result, or 0 if the program does not answer.
pub async fn count(address: SocketAddr, files: &str, result: &str) -> f64 {
    let labels = [("files", files), ("result", result)];
    let metrics = scrape(address).await.unwrap_or_default();
    let count = metrics.value("culvert_reloads_total", &labels);
    count.unwrap_or_default()
}

/// Waits until a program uses the certificates of a file set, by the expiry of its own certificate and its CAs.
///
/// # Panics
/// If the program does not report the expiry in time.
pub async fn uses(address: SocketAddr, files: &str, own: Option<&Path>, ca: Option<&Path>) {
    for (kind, path) in [("own", own), ("ca", ca)] {
        let Some(path) = path else {
            continue;
        };
        let expected = earliest_expiry_in_pem(&read(path)).expect("a certificate") as f64;
        let labels = [("files", files), ("certificate", kind)];
        eventually(
            &format!("{files} uses {}", path.display()),
            LIMIT,
            async || {
                let metrics = scrape(address).await.unwrap_or_default();
                let shown = metrics.value("culvert_certificate_expiry_seconds", &labels);
                (shown == Some(expected))
                    .then_some(())
                    .ok_or(format!("{shown:?} instead of {expected}"))
            },
        )
        .await;
    }
    let labels = [("files", files)];
    eventually(&format!("{files} are in use"), LIMIT, async || {
        let metrics = scrape(address).await.unwrap_or_default();
        metrics.value("culvert_last_reload_successful", &labels) == Some(1.0)
    })
    .await;
}
