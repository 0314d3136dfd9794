//! The command `culvert status`: shows a server's tunnels, peers and connections, and the progress of a
//! switch.

use std::fmt::Write as _;

use culvert_server::switch::status::{Progress, Status};

use crate::admin::{Admin, TIMEOUT};
use crate::stdout::printable;

/// Flags of `culvert status`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// Fails if the server does not answer the request.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    let status = options.admin.status(TIMEOUT).await?;
    if options.json {
        say!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        say!("{}", render(&status).trim_end());
    }
    Ok(())
}

/// Formats the status as text for people.
pub fn render(status: &Status) -> String {
    let mut text = String::new();
    let dials: Vec<&str> = status.new_dials.iter().map(|kind| kind.as_str()).collect();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12}{value}");
    };
    if status.draining {
        line("server", "draining: it stops soon".to_owned());
    }
    line(
        "mode",
        format!("{} (set by {})", status.mode, status.set_by.name()),
    );
    line("new dials", dials.join(", else "));
    line("switch", progress(&status.switch));
    if let Some(seconds) = status.last_switch_seconds {
        line("last switch", format!("took {}", span(seconds)));
    }
    if let Some(congestion) = &status.link_congestion {
        let congestion = printable(congestion);
        line("agent links", format!("congestion control {congestion}"));
    }
    for problem in &status.problems {
        line("problem", printable(problem));
    }
    let peers = status.tunnels.iter().flat_map(|tunnel| &tunnel.peers);
    // The peer chooses its own name, and an OpenVPN client the name of its program.
    let lengths = peers.map(|peer| printable(&peer.name).chars().count());
    let width = lengths.max().unwrap_or(0).clamp(22, 64);
    let all = width + 2;
    let _ = writeln!(
        text,
        "\n{:<all$} {:<10}{:>12}{:>8}  KIND",
        "TUNNEL, PEER", "HEALTH", "CONNECTIONS", "DIALS"
    );
    for tunnel in &status.tunnels {
        let _ = writeln!(
            text,
            "{:<all$} {:<10}{:>12}{:>8}",
            tunnel.tunnel.as_str(),
            tunnel.health.as_str(),
            tunnel.connections,
            tunnel.dials
        );
        for peer in &tunnel.peers {
            let _ = writeln!(
                text,
                "  {:<width$} {:<10}{:>12}{:>8}  {}",
                printable(&peer.name),
                peer.health.as_str(),
                peer.connections,
                "",
                printable(&peer.kind)
            );
        }
    }
    text
}

/// Describes the progress of a switch, for people.
pub fn progress(progress: &Progress) -> String {
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
    let whole = std::time::Duration::from_secs_f64(seconds.clamp(0.0, 1e9)).as_secs();
    culvert_host::flags::GoDuration::from(std::time::Duration::from_secs(whole)).to_string()
}

#[cfg(test)]
mod tests {
    use culvert_server::switch::SetBy;
    use culvert_server::tunnel::{Health, Kind, Mode, Peer, TunnelStatus};

    use super::*;

    #[test]
    fn every_field_is_shown_without_control_characters() {
        let tunnel = |tunnel, connections, peers| TunnelStatus {
            tunnel,
            health: Health::Healthy,
            connections,
            dials: 1,
            peers,
        };
        let peer = Peer {
            name: "agent\n1".to_owned(),
            kind: "agent, \u{1b}[2Jnative".to_owned(),
            health: Health::Draining,
            connections: 11,
        };
        let status = Status {
            draining: true,
            link_congestion: Some("bbr".to_owned()),
            mode: Mode::Openvpn,
            set_by: SetBy::Switch,
            new_dials: vec![Kind::Openvpn, Kind::Konnectivity],
            switch: Progress::Draining {
                tunnel: Kind::Konnectivity,
                seconds: 69.0,
                left: 12,
                seconds_left: 231.4,
            },
            tunnels: vec![
                tunnel(Kind::Konnectivity, 11, vec![peer]),
                tunnel(Kind::Openvpn, 3, vec![]),
            ],
            last_switch_seconds: Some(0.25),
            problems: vec!["cannot save \"a\u{9b}2J\"".to_owned()],
            unsaved: false,
        };
        let expected = "\
server      draining: it stops soon
mode        openvpn (set by switch)
new dials   openvpn, else konnectivity
switch      draining konnectivity: 12 left, closed in 3m51s
last switch took 0.2s
agent links congestion control bbr
problem     cannot save \"a\\u{9b}2J\"

TUNNEL, PEER             HEALTH     CONNECTIONS   DIALS  KIND
konnectivity             healthy             11       1
  agent\\n1               draining            11          agent, \\u{1b}[2Jnative
openvpn                  healthy              3       1
";
        assert_eq!(render(&status), expected);
    }

    #[test]
    fn columns_are_as_wide_as_the_longest_name() {
        let peer = |name: &str| Peer {
            name: name.to_owned(),
            kind: "agent".to_owned(),
            health: Health::Healthy,
            connections: 1,
        };
        let tunnel = TunnelStatus {
            tunnel: Kind::Konnectivity,
            health: Health::Healthy,
            connections: 1,
            dials: 1,
            peers: vec![peer("konnectivity-agent-5c9f7d6b8-x2v4q"), peer("b")],
        };
        let status = Status {
            draining: false,
            link_congestion: None,
            mode: Mode::Konnectivity,
            set_by: SetBy::Flag,
            new_dials: vec![Kind::Konnectivity],
            switch: Progress::Settled,
            tunnels: vec![tunnel],
            last_switch_seconds: None,
            problems: Vec::new(),
            unsaved: false,
        };
        let text = render(&status);
        let rows = text
            .lines()
            .filter(|line| line.contains("ealthy") || line.contains("HEALTH"));
        let columns = rows.map(|row| row.to_lowercase().find("health"));
        let columns: Vec<Option<usize>> = columns.collect();
        assert_eq!(columns, [Some(37); 4], "{text}");
    }

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
