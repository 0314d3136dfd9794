//! The properties of a server, as text for people.

use std::time::Duration;

use culvert_host::flags::GoDuration;
use culvert_server::switch::status::{Progress, Status};
use culvert_server::tunnel::Peer;

use crate::stdout::printable;

/// Returns the properties of the server with their names, for people.
pub(crate) fn facts(status: &Status) -> Vec<(&'static str, String)> {
    let dials: Vec<&str> = status.new_dials.iter().map(|kind| kind.as_str()).collect();
    let mode = format!("{} (set by {})", status.mode, status.set_by.name());
    let mut facts = Vec::new();
    if status.draining {
        facts.push(("server", "draining: it stops soon".to_owned()));
    }
    if let Some(id) = &status.server_id {
        facts.push(("server id", printable(id)));
    }
    facts.extend([
        ("mode", mode),
        ("new dials", dials.join(", else ")),
        ("switch", progress(&status.switch)),
    ]);
    if let Some(seconds) = status.last_switch_seconds {
        facts.push(("last switch", format!("took {}", span(seconds))));
    }
    if let Some(congestion) = &status.link_congestion {
        let congestion = printable(congestion);
        facts.push(("agent links", format!("congestion control {congestion}")));
    }
    facts
}

/// Returns the address of a peer, or an empty text.
pub(crate) fn address(peer: &Peer) -> String {
    let address = peer.address.map(|address| address.to_string());
    address.unwrap_or_default()
}

/// Describes the progress of a switch, for people.
pub(crate) fn progress(progress: &Progress) -> String {
    match progress {
        Progress::Settled => "none in progress".to_owned(),
        Progress::Waiting { tunnel, seconds } => format!(
            "waiting for a healthy {} peer for {}",
            tunnel.as_str(),
            span(*seconds)
        ),
        Progress::Draining {
            tunnel,
            left,
            seconds_left,
            ..
        } if *seconds_left > 0.0 => format!(
            "draining {}: {left} left, closed in {}",
            tunnel.as_str(),
            span(*seconds_left)
        ),
        Progress::Draining { tunnel, left, .. } => format!(
            "draining {}: {left} left, kept until the other tunnel has a healthy peer",
            tunnel.as_str()
        ),
    }
}

/// Formats a time for people: in whole seconds, and below one second in tenths.
fn span(seconds: f64) -> String {
    if seconds < 1.0 {
        return format!("{seconds:.1}s");
    }
    let whole = Duration::from_secs_f64(seconds.clamp(0.0, 1e9)).as_secs();
    GoDuration::from(Duration::from_secs(whole)).to_string()
}

#[cfg(test)]
mod tests {
    use culvert_server::tunnel::Kind;

    use super::*;

    #[test]
    fn every_phase_of_a_switch_is_described() {
        let waiting = Progress::Waiting {
            tunnel: Kind::Openvpn,
            seconds: 61.5,
        };
        assert_eq!(
            progress(&waiting),
            "waiting for a healthy openvpn peer for 1m1s"
        );
        let overdue = Progress::Draining {
            tunnel: Kind::Openvpn,
            seconds: 400.0,
            left: 2,
            seconds_left: 0.0,
        };
        assert!(progress(&overdue).ends_with("kept until the other tunnel has a healthy peer"));
        assert_eq!(progress(&Progress::Settled), "none in progress");
    }
}
