//! The command `culvert status`: shows a server's tunnels, peers and connections, and the progress of a
//! switch.

use std::fmt::Write as _;
use std::net::SocketAddr;

use culvert_server::switch::status::Status;
use culvert_server::tunnel::Peer;

use crate::admin::{Admin, TIMEOUT};
use crate::description::{address, facts};
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
    let version = status.version.iter();
    let version = version.map(|version| ("version", printable(version)));
    for (name, value) in facts(status).into_iter().chain(version).chain(problems) {
        let _ = writeln!(text, "{name:<12}{value}");
    }
    text.push('\n');
    add_table(&mut text, status);
    text
}

/// Adds a table of the tunnels and their peers. Leaves out the columns for addresses and identifiers if no peer has any.
fn add_table(text: &mut String, status: &Status) {
    let width = |cell: fn(&Peer) -> String| {
        let peers = status.tunnels.iter().flat_map(|tunnel| &tunnel.peers);
        let lengths = peers.map(|peer| cell(peer).chars().count());
        lengths.max().unwrap_or(0)
    };
    // The peer chooses its own name, and an OpenVPN client the name of its program.
    let names = width(name).clamp(24, 66);
    let addresses = match width(address) {
        0 => 0,
        longest => longest.max("ADDRESS".len()) + 2,
    };
    let kinds = match width(identifiers) {
        0 => 0,
        _ => width(kind).min(40),
    };
    let mut add = |cells: [&str; 7]| {
        let [name, health, connections, dials, address, kind, identifiers] = cells;
        let line = format!(
            "{name:<names$} {health:<10}{connections:>12}{dials:>8}  {address:<addresses$}{kind:<kinds$}  {identifiers}"
        );
        text.push_str(line.trim_end());
        text.push('\n');
    };
    add([
        "TUNNEL, PEER",
        "HEALTH",
        "CONNECTIONS",
        "DIALS",
        if addresses > 0 { "ADDRESS" } else { "" },
        "KIND",
        if kinds > 0 { "IDENTIFIERS" } else { "" },
    ]);
    for tunnel in &status.tunnels {
        add([
            tunnel.tunnel.as_str(),
            tunnel.health.as_str(),
            &tunnel.connections.to_string(),
            &tunnel.dials.to_string(),
            "",
            "",
            "",
        ]);
        for peer in &tunnel.peers {
            add([
                &name(peer),
                peer.health.as_str(),
                &peer.connections.to_string(),
                "",
                &address(peer),
                &kind(peer),
                &identifiers(peer),
            ]);
        }
    }
}

fn name(peer: &Peer) -> String {
    format!("  {}", printable(&peer.name))
}

fn kind(peer: &Peer) -> String {
    printable(&peer.kind)
}

fn identifiers(peer: &Peer) -> String {
    printable(&peer.describe_identifiers())
}

#[cfg(test)]
mod tests {
    use culvert_server::switch::SetBy;
    use culvert_server::switch::status::Progress;
    use culvert_server::tunnel::{Health, Kind, Mode, TunnelStatus};

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
            address: Some(([192, 0, 2, 1], 40_000).into()),
            identifiers: vec!["default-route=true".to_owned(), "host=a\nb".to_owned()],
            more_identifiers: 3,
        };
        let client = Peer {
            name: "client 10.20.0.6".to_owned(),
            kind: "OpenVPN, TCP".to_owned(),
            health: Health::Healthy,
            connections: 3,
            address: None,
            identifiers: Vec::new(),
            more_identifiers: 0,
        };
        let status = Status {
            draining: true,
            server_id: Some("server\n0".to_owned()),
            version: Some("0.1.0".to_owned()),
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
                tunnel(Kind::Openvpn, 3, vec![client]),
            ],
            last_switch_seconds: Some(0.25),
            problems: vec!["cannot save \"a\u{9b}2J\"".to_owned()],
            unsaved: false,
        };
        let expected = "\
server      draining: it stops soon
server id   server\\n0
mode        openvpn (set by switch)
new dials   openvpn, else konnectivity
switch      draining konnectivity: 12 left, closed in 3m51s
last switch took 0.2s
agent links congestion control bbr
version     0.1.0
problem     cannot save \"a\\u{9b}2J\"

TUNNEL, PEER             HEALTH     CONNECTIONS   DIALS  ADDRESS          KIND                    IDENTIFIERS
konnectivity             healthy             11       1
  agent\\n1               draining            11          192.0.2.1:40000  agent, \\u{1b}[2Jnative  default-route=true, host=a\\nb, and 3 more
openvpn                  healthy              3       1
  client 10.20.0.6       healthy              3                           OpenVPN, TCP
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
            address: None,
            identifiers: Vec::new(),
            more_identifiers: 0,
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
            server_id: None,
            version: None,
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
