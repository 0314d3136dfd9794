//! The flags of every server and agent, in the form that operators use.

use std::path::Path;

use culvert_kit::pki::{Pair, Pki};

use super::{Mode, Transport};

/// Returns the flags of a server's front end: mode and listener.
pub(super) fn front(
    mode: Mode,
    transport: Transport,
    pki: &Pki,
    socket: &Path,
    port: u16,
) -> Vec<String> {
    let mode = match mode {
        Mode::Grpc => "grpc",
        Mode::HttpConnect => "http-connect",
    };
    let mut args = vec![format!("--mode={mode}")];
    match transport {
        Transport::Uds => args.extend([
            format!("--uds-name={}", socket.display()),
            "--server-port=0".to_owned(),
        ]),
        Transport::Tcp => {
            args.extend([
                format!("--server-port={port}"),
                "--server-bind-address=127.0.0.1".to_owned(),
                format!("--server-ca-cert={}", pki.ca.display()),
            ]);
            args.extend(pair("server", &pki.server));
        }
    }
    args
}

/// Returns the remaining flags of a server: agents (authenticated by certificate), admin, health, identity.
pub(super) fn server(
    pki: &Pki,
    index: usize,
    server_count: usize,
    [agent_port, admin_port, health_port]: [u16; 3],
) -> Vec<String> {
    let mut args = pair("cluster", &pki.cluster).to_vec();
    args.extend([
        format!("--cluster-ca-cert={}", pki.ca.display()),
        format!("--agent-port={agent_port}"),
        "--agent-bind-address=127.0.0.1".to_owned(),
        format!("--admin-port={admin_port}"),
        "--admin-bind-address=127.0.0.1".to_owned(),
        format!("--health-port={health_port}"),
        "--health-bind-address=127.0.0.1".to_owned(),
        format!("--server-id=server-{index}"),
        format!("--server-count={server_count}"),
        // The default of the stock server logs every packet.
        "--v=2".to_owned(),
    ]);
    args
}

/// Returns the flags of an agent that reaches its servers at a single port of this machine.
pub(super) fn agent(
    pki: &Pki,
    index: usize,
    [server_port, admin_port, health_port]: [u16; 3],
) -> Vec<String> {
    let mut args = pair("agent", &pki.agent).to_vec();
    args.extend([
        format!("--ca-cert={}", pki.ca.display()),
        "--proxy-server-host=127.0.0.1".to_owned(),
        format!("--proxy-server-port={server_port}"),
        format!("--admin-server-port={admin_port}"),
        "--admin-bind-address=127.0.0.1".to_owned(),
        format!("--health-server-port={health_port}"),
        "--health-server-host=127.0.0.1".to_owned(),
        format!("--agent-id=agent-{index}"),
        "--sync-interval=100ms".to_owned(),
        "--sync-interval-cap=1s".to_owned(),
        "--probe-interval=100ms".to_owned(),
        "--v=2".to_owned(),
    ]);
    args
}

fn pair(prefix: &str, pair: &Pair) -> [String; 2] {
    [
        format!("--{prefix}-cert={}", pair.cert.display()),
        format!("--{prefix}-key={}", pair.key.display()),
    ]
}
