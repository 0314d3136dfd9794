//! The command `culvert status`: shows a server's tunnels, peers and connections, and the progress of a
//! switch.

use std::fmt::Write as _;
use std::net::SocketAddr;

use culvert_server::switch::status::Status;

use crate::admin::{Admin, TIMEOUT};
use crate::description::facts;
use crate::stdout::printable;
use crate::web;

/// Flags of `culvert status`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// Print JSON.
    #[arg(long)]
    json: bool,

    /// Show the status as a page in the browser, until Ctrl-C. Prints the URL of the page. The address must be a
    /// loopback address, and port 0 is a free port.
    #[arg(
        long,
        value_name = "IP:PORT",
        num_args = 0..=1,
        default_missing_value = "127.0.0.1:0",
        value_parser = web::address,
        conflicts_with = "json"
    )]
    web: Option<SocketAddr>,
}

/// Runs the command.
///
/// # Errors
/// Fails if the server does not answer the request.
pub async fn run(options: &Options) -> anyhow::Result<()> {
    if let Some(address) = options.web {
        return web::run(&options.admin, address).await;
    }
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
    let problems = status.problems.iter().map(|text| printable(text));
    let problems = problems.map(|problem| ("problem", problem));
    for (name, value) in facts(status).into_iter().chain(problems) {
        let _ = writeln!(text, "{name:<12}{value}");
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

#[cfg(test)]
mod tests {
    use culvert_server::switch::SetBy;
    use culvert_server::switch::status::Progress;
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
}
