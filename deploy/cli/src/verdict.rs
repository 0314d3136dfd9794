//! The verdict about a server: ok, or the reasons why the server is degraded.

use std::time::{SystemTime, UNIX_EPOCH};

use culvert_server::switch::status::{Progress, Status};
use culvert_server::tunnel::{Health, TunnelStatus};

use crate::description::progress;
use crate::figures::{Figures, FileSet};
use crate::stdout::printable;

/// Time before the expiry of a certificate from which the certificate is a reason, in seconds: 14 days, as in the alerts of
/// docs/operations.md.
const SOON: f64 = 14.0 * 86_400.0;

/// As [`SOON`], for certificate revocation lists: one day.
const CRL_SOON: f64 = 86_400.0;

/// State of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// The certificate expires later.
    Valid,
    /// The certificate expires soon.
    Soon,
    /// The certificate has expired.
    Expired,
}

impl Expiry {
    /// Returns the state of a certificate that expires in `left` seconds.
    pub(crate) fn of(certificate: &str, left: f64) -> Self {
        let soon = if certificate == "crl" { CRL_SOON } else { SOON };
        match left {
            _ if left <= 0.0 => Self::Expired,
            _ if left < soon => Self::Soon,
            _ => Self::Valid,
        }
    }
}

/// Returns the verdict with these reasons.
pub(crate) fn verdict(reasons: &[String]) -> &'static str {
    match reasons {
        [] => "ok",
        _ => "degraded",
    }
}

/// Returns the time in Unix seconds.
pub(crate) fn clock() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

/// Returns the reasons why a server is degraded; no reason means ok. `now` is in Unix seconds.
pub(crate) fn reasons(status: &Status, figures: &Figures, now: f64) -> Vec<String> {
    let mut reasons = Vec::new();
    if status.draining {
        reasons.push("the server drains: it stops soon".to_owned());
    }
    peers(status, &mut reasons);
    if status.switch != Progress::Settled {
        reasons.push(format!("switch in progress: {}", progress(&status.switch)));
    }
    let problems = status.problems.iter();
    reasons.extend(problems.map(|problem| format!("problem: {}", printable(problem))));
    for set in &figures.file_sets {
        files(set, now, &mut reasons);
    }
    reasons
}

fn peers(status: &Status, reasons: &mut Vec<String>) {
    let used = |tunnel: &&TunnelStatus| status.new_dials.contains(&tunnel.tunnel);
    let mut healths = status
        .tunnels
        .iter()
        .filter(used)
        .map(|tunnel| tunnel.health);
    if !healths.any(|health| health == Health::Healthy) {
        reasons.push("no healthy peer for new dials".to_owned());
    }
    for tunnel in &status.tunnels {
        let all = tunnel.peers.len();
        let doubtful = tunnel.peers.iter();
        let doubtful = doubtful
            .filter(|peer| peer.health == Health::Doubtful)
            .count();
        if doubtful > 0 {
            let name = tunnel.tunnel.as_str();
            reasons.push(format!("{name}: {doubtful} of {all} peers doubtful"));
        }
    }
}

fn files(set: &FileSet, now: f64, reasons: &mut Vec<String>) {
    let files = printable(&set.files);
    for (certificate, expiry) in &set.expiries {
        let left = expiry - now;
        let name = format!("certificate {files} ({})", printable(certificate));
        match Expiry::of(certificate, left) {
            Expiry::Valid => {}
            Expiry::Soon => reasons.push(format!("{name} expires in {}", duration(left))),
            Expiry::Expired => {
                reasons.push(format!("{name} expired {} ago", duration(-left)));
            }
        }
    }
    if set.last_reload_ok == Some(false) {
        reasons.push(format!(
            "last reload of the files {files} failed: the last good content stays in use"
        ));
    }
}

/// Formats a time in its largest whole unit.
pub(crate) fn duration(seconds: f64) -> String {
    let (unit, name) = match seconds {
        _ if seconds >= 2.0 * 86_400.0 => (86_400.0, "days"),
        _ if seconds >= 2.0 * 3600.0 => (3600.0, "h"),
        _ if seconds >= 120.0 => (60.0, "min"),
        _ => (1.0, "s"),
    };
    format!("{:.0} {name}", (seconds / unit).floor().max(0.0))
}

#[cfg(test)]
mod tests {
    use culvert_server::switch::SetBy;
    use culvert_server::tunnel::{Kind, Mode, Peer};

    use super::*;

    fn healthy() -> Status {
        let peer = |name: &str| Peer {
            name: name.to_owned(),
            kind: "agent, native".to_owned(),
            health: Health::Healthy,
            connections: 1,
            address: None,
            identifiers: Vec::new(),
            more_identifiers: 0,
        };
        let tunnel = |tunnel, health, peers| TunnelStatus {
            tunnel,
            health,
            connections: 2,
            dials: 0,
            peers,
        };
        let peers = vec![peer("a"), peer("b")];
        Status {
            draining: false,
            server_id: None,
            version: None,
            link_congestion: None,
            mode: Mode::Konnectivity,
            set_by: SetBy::Flag,
            new_dials: vec![Kind::Konnectivity],
            switch: Progress::Settled,
            tunnels: vec![
                tunnel(Kind::Konnectivity, Health::Healthy, peers),
                tunnel(Kind::Openvpn, Health::Absent, Vec::new()),
            ],
            last_switch_seconds: None,
            problems: Vec::new(),
            unsaved: false,
        }
    }

    /// Returns the figures of a server with one certificate that expires at `expiry`.
    fn figures(certificate: &str, expiry: f64, last_reload_ok: bool) -> Figures {
        Figures {
            file_sets: vec![FileSet {
                files: "agent".to_owned(),
                expiries: vec![(certificate.to_owned(), expiry)],
                last_reload_ok: Some(last_reload_ok),
                reloads: 0.0,
                failed_reloads: 0.0,
            }],
            ..Figures::default()
        }
    }

    #[test]
    fn healthy_server_has_no_reason_although_an_unused_tunnel_has_no_peer() {
        let figures = figures("own", 1e9, true);
        let reasons = reasons(&healthy(), &figures, 0.0);
        assert_eq!(reasons, [""; 0]);
        assert_eq!(verdict(&reasons), "ok");
        assert_eq!(verdict(&["a reason".to_owned()]), "degraded");
    }

    #[test]
    fn every_state_of_a_server_is_a_reason() {
        let mut status = healthy();
        status.draining = true;
        status.problems = vec!["cannot save\n\"x\"".to_owned()];
        status.switch = Progress::Waiting {
            tunnel: Kind::Openvpn,
            seconds: 61.0,
        };
        if let Some(tunnel) = status.tunnels.first_mut() {
            tunnel.health = Health::Doubtful;
            tunnel
                .peers
                .iter_mut()
                .for_each(|peer| peer.health = Health::Doubtful);
        }
        assert_eq!(
            reasons(&status, &figures("own", 1e9, false), 0.0),
            [
                "the server drains: it stops soon",
                "no healthy peer for new dials",
                "konnectivity: 2 of 2 peers doubtful",
                "switch in progress: waiting for a healthy openvpn peer for 1m1s",
                "problem: cannot save\\n\"x\"",
                "last reload of the files agent failed: the last good content stays in use",
            ]
        );
    }

    #[test]
    fn certificates_are_reasons_before_and_after_their_expiry() {
        let day = 86_400.0;
        for (certificate, left, reason) in [
            ("own", 14.5 * day, None),
            (
                "own",
                13.5 * day,
                Some("certificate agent (own) expires in 13 days"),
            ),
            ("crl", 13.5 * day, None),
            (
                "crl",
                0.5 * day,
                Some("certificate agent (crl) expires in 12 h"),
            ),
            ("ca", -90.0, Some("certificate agent (ca) expired 90 s ago")),
        ] {
            let now = 1.8e9;
            let found = reasons(&healthy(), &figures(certificate, now + left, true), now);
            assert_eq!(found, reason.into_iter().collect::<Vec<_>>(), "{left}");
        }
    }
}
