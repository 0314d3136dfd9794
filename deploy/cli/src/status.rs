//! The command `culvert status`: shows a server's tunnels, peers and connections, and the progress of a
//! switch.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use culvert_host::flags::GoDuration;
use culvert_kit::metrics::Metrics;
use culvert_server::switch::status::Status;
use culvert_server::tunnel::Peer;
use serde::Serialize;

use crate::admin::{Admin, TIMEOUT, duration};
use crate::description::{address, facts};
use crate::figures::Figures;
use crate::stdout::printable;
use crate::verdict::{clock, reasons, verdict};
use crate::web;

/// Exit code of `--check` for a verdict that is not ok. Code 1 is an error, and 2 a wrong flag.
const NOT_OK: u8 = 3;

/// Flags of `culvert status`.
#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    admin: Admin,

    /// Print JSON.
    #[arg(long)]
    json: bool,

    /// Exit with code 3 if the verdict is not ok. Without the flag, the code is 0 once the server has answered. An error,
    /// such as a server that does not answer, has code 1, and a wrong flag code 2.
    #[arg(long)]
    check: bool,

    /// Longest time for the answers of the server. 30s by default.
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    timeout: Option<GoDuration>,

    /// Show the status as a page in the browser, until Ctrl-C. Prints the URL of the page. The address must be a
    /// loopback address, and port 0 is a free port.
    #[arg(
        long,
        value_name = "IP:PORT",
        num_args = 0..=1,
        default_missing_value = "127.0.0.1:0",
        value_parser = web::address,
        conflicts_with_all = ["json", "check", "timeout"]
    )]
    web: Option<SocketAddr>,
}

/// Output of `--json`: the answer of the server, and the verdict about it.
#[derive(Serialize)]
struct Report<'a> {
    verdict: &'static str,
    /// Reasons of the verdict; empty if the verdict is ok.
    reasons: &'a [String],
    #[serde(flatten)]
    status: &'a Status,
}

/// Runs the command and returns its exit code.
///
/// # Errors
/// Fails if the server does not answer the requests.
pub async fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if let Some(address) = options.web {
        web::run(&options.admin, address).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let limit = options.timeout.map_or(TIMEOUT, GoDuration::saturating);
    let (status, metrics) = options.admin.status_and_metrics(limit).await?;
    let reasons = all_reasons(&status, metrics, clock());
    if options.json {
        let report = Report {
            verdict: verdict(&reasons),
            reasons: &reasons,
            status: &status,
        };
        say!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        say!("{}", render(&status, &reasons).trim_end());
    }
    Ok(match options.check && !reasons.is_empty() {
        true => ExitCode::from(NOT_OK),
        false => ExitCode::SUCCESS,
    })
}

/// Returns the reasons why a server is degraded. Unreadable metrics are a reason, because certificates cannot be judged then.
fn all_reasons(status: &Status, metrics: anyhow::Result<Metrics>, now: f64) -> Vec<String> {
    let (figures, unreadable) = match metrics {
        Ok(metrics) => (Figures::read(&metrics), None),
        Err(why) => {
            let text = format!(
                "the metrics cannot be read: {}",
                printable(&format!("{why:#}"))
            );
            (Figures::default(), Some(text))
        }
    };
    let mut reasons = reasons(status, &figures, now);
    reasons.extend(unreadable);
    reasons
}

/// Formats the status and the reasons of the verdict as text for people. The verdict is the first line.
fn render(status: &Status, reasons: &[String]) -> String {
    let mut text = String::new();
    let verdict = [("verdict", verdict(reasons).to_owned())];
    let reasons = reasons.iter().map(|reason| ("reason", reason.clone()));
    let version = status.version.iter();
    let version = version.map(|version| ("version", printable(version)));
    let rows = verdict.into_iter().chain(reasons);
    for (name, value) in rows.chain(facts(status)).chain(version) {
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
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]

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
        let reasons = reasons(&status, &Figures::default(), 0.0);
        let expected = "\
verdict     degraded
reason      the server drains: it stops soon
reason      switch in progress: draining konnectivity: 12 left, closed in 3m51s
reason      problem: cannot save \"a\\u{9b}2J\"
server      draining: it stops soon
server id   server\\n0
mode        openvpn (set by switch)
new dials   openvpn, else konnectivity
switch      draining konnectivity: 12 left, closed in 3m51s
last switch took 0.2s
agent links congestion control bbr
version     0.1.0

TUNNEL, PEER             HEALTH     CONNECTIONS   DIALS  ADDRESS          KIND                    IDENTIFIERS
konnectivity             healthy             11       1
  agent\\n1               draining            11          192.0.2.1:40000  agent, \\u{1b}[2Jnative  default-route=true, host=a\\nb, and 3 more
openvpn                  healthy              3       1
  client 10.20.0.6       healthy              3                           OpenVPN, TCP
";
        assert_eq!(render(&status, &reasons), expected);
        let report = Report {
            verdict: verdict(&reasons),
            reasons: &reasons,
            status: &status,
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["verdict"], "degraded");
        assert_eq!(json["reasons"][0], "the server drains: it stops soon");
        let read: Status = serde_json::from_value(json).unwrap();
        assert_eq!(read, status);
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
        let reasons = all_reasons(&status, Ok(Metrics::default()), 0.0);
        let text = render(&status, &reasons);
        assert!(text.starts_with("verdict     ok\nmode "), "{text}");
        let unreadable = Err(anyhow::anyhow!("no answer"));
        let reasons = all_reasons(&status, unreadable, 0.0);
        assert_eq!(reasons, ["the metrics cannot be read: no answer"]);
        let rows = text
            .lines()
            .filter(|line| line.contains("ealthy") || line.contains("HEALTH"));
        let columns = rows.map(|row| row.to_lowercase().find("health"));
        let columns: Vec<Option<usize>> = columns.collect();
        assert_eq!(columns, [Some(37); 4], "{text}");
    }
}
