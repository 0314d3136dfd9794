//! Settings that several parts share.

use std::time::Duration;

use culvert_agent::config as agent_config;
use culvert_host::flags::HostPort;
use culvert_host::net::congestion::LinkCongestion;
use culvert_host::net::destinations::Destinations;
use culvert_host::telemetry::logging::LogConfig;

/// Pause between an agent's attempts to connect. Short, because a person is waiting.
const SYNC_INTERVAL: Duration = Duration::from_millis(50);

/// Returns the settings of an agent that looks for no server.
pub(super) fn agent_settings(id: &str) -> agent_config::Config {
    agent_config::Config {
        server_host: "127.0.0.1".to_owned(),
        server_port: 0,
        server_address: None,
        ca_cert: None,
        client_cert: None,
        alpn: Vec::new(),
        health: any_port(),
        admin: any_port(),
        agent_id: id.to_owned(),
        agent_identifiers: String::new(),
        sync_interval: SYNC_INTERVAL,
        sync_interval_cap: SYNC_INTERVAL * 10,
        keepalive_time: Duration::from_secs(3600),
        link_congestion: LinkCongestion::System,
        transport: agent_config::LinkTransport::Tcp,
        resume_grace: Duration::ZERO,
        token_path: None,
        sync_forever: false,
        xfr_channel_size: 150,
        excess_buffer_bytes: 8 * 1024 * 1024,
        stall_timeout: Duration::from_secs(10),
        server_count_source: agent_config::ServerCountSource::Default,
        leases: None,
        drain_timeout: Duration::ZERO,
        drain_linger: Duration::ZERO,
        destinations: Destinations::of_agent(),
        openvpn: None,
        logging: LogConfig::default(),
        warnings: Vec::new(),
    }
}

/// Returns a loopback address with port 0: the system chooses the port.
pub(super) fn any_port() -> HostPort {
    HostPort::new("127.0.0.1", 0)
}
