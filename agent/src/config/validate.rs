//! The conversion from flags to [`Config`], with the stock agent's rules and error texts.
//!
//! The stock agent stops at the first problem. This code reports all problems.

use std::time::Duration;

use culvert_host::flags::{GoDuration, HostPort, Problems, StringSlice};
use culvert_host::net::destinations::{Destinations, Program};
use culvert_konnectivity::identifiers;

use super::flags::{CONTENT_TYPE, DestinationFlags, Flags, SERVER_HOST, ServerFlags, TunnelFlags};
use super::{
    ClientCert, Config, INTERVAL_FLOOR, KEEPALIVE_FLOOR, LeaseCount, LinkTransport,
    PACKET_KEEPALIVE_FLOOR, STOCK_PING_INTERVAL, ServerCountSource, XFR_CHANNEL_SIZE_MAX,
};

/// Default of `--drain-timeout`: fits Kubernetes' default grace period of 30 s.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(25);

/// Longest ALPN name, in bytes. The wire format has a one-byte length (RFC 7301).
const MAX_ALPN: usize = 255;

impl Flags {
    /// Returns the checked configuration, or all problems.
    pub(super) fn validate(self, mut problems: Problems) -> Result<Config, Vec<String>> {
        let p = &mut problems;
        let id = &self.identity;
        let pair = p.key_pair("agent", &id.agent_cert, &id.agent_key);
        let client_cert = pair.map(|(cert, key)| ClientCert { cert, key });
        let ca_cert = p.file("agent CA cert", &self.server.ca_cert);
        let openvpn = self.openvpn.validate(p);
        // The stock agent accepts an empty --ca-cert here and fails later, when it loads the bundle.
        p.require(ca_cert.is_some() || self.is_openvpn_only(), || {
            "--ca-cert must be set: the system's CAs are not used".to_owned()
        });
        let server_port = port(p, "proxy server", self.server.proxy_server_port);
        let ops = &self.operations;
        let health_port = port(p, "health server", ops.health_server_port);
        let health = HostPort::new(&ops.health_server_host, health_port);
        let admin_port = port(p, "admin server", ops.admin_server_port);
        let admin = HostPort::new(&ops.admin_bind_address, admin_port);
        p.distinct_ports(&[
            ("health-server-port", Some(&health)),
            ("admin-server-port", Some(&admin)),
        ]);
        p.profiling(ops.enable_profiling, ops.enable_contention_profiling);
        let (sync_interval, sync_interval_cap) = self.intervals(p);
        let keepalive = self.server.keepalive_time;
        let keepalive_time = p.at_least("keepalive-time", keepalive, KEEPALIVE_FLOOR);
        if keepalive_time < STOCK_PING_INTERVAL {
            let floor = GoDuration::from(PACKET_KEEPALIVE_FLOOR);
            p.warn(format!(
                "--keepalive-time={keepalive}: a stock server is pinged every {floor}, because a stock server closes \
                 connections that ping more often"
            ));
        }
        let drain_timeout = self.tunnel.drain_timeout(p);
        let drain_linger = p.not_negative("drain-linger", self.tunnel.drain_linger);
        let resume_grace = p.not_negative("resume-grace", self.tunnel.resume_grace);
        if let Some(warning) = culvert_native::resume::grace_warning(resume_grace) {
            p.warn(warning);
        }
        let token_path = p.file("service account token path", &id.service_account_token_path);
        if let Err(error) = identifiers::check(&id.agent_identifiers) {
            p.error(error.to_string());
        }
        let agent_identifiers = p.header_value("agent-identifiers", id.agent_identifiers.clone());
        let agent_id = p.header_value("agent-id", id.agent_id.clone());
        let size = self.tunnel.xfr_channel_size;
        let xfr_channel_size =
            p.channel_size("xfr-channel-size", "channel", size, XFR_CHANNEL_SIZE_MAX);
        let excess_buffer_bytes = p.bytes("excess-buffer-bytes", self.tunnel.excess_buffer_bytes);
        let stall_timeout = p.above_zero("stall-timeout", self.tunnel.stall_timeout);
        let server_count_source = self.server_count_source(p);
        let alpn = self.server.alpn(p);
        let transport = LinkTransport::from_name(&self.tunnel.transport).unwrap_or_else(|| {
            let given = &self.tunnel.transport;
            p.error(format!(
                "--transport must be auto, tcp or quic, not {given:?}"
            ));
            LinkTransport::default()
        });
        let destinations = self.destinations.validate(p);
        let kubeconfig = p.file("kubeconfig", &self.kubernetes.kubeconfig);
        self.note_unneeded(p);

        let kube = self.kubernetes;
        let leases = kube.count_server_leases.then_some(LeaseCount {
            namespace: kube.lease_namespace,
            selector: kube.lease_label_selector,
            kubeconfig,
        });
        let warnings = problems.finish()?;
        Ok(Config {
            server_host: self.server.proxy_server_host,
            server_port,
            server_address: None,
            ca_cert,
            client_cert,
            alpn,
            health,
            admin,
            agent_id,
            agent_identifiers,
            sync_interval,
            sync_interval_cap,
            keepalive_time,
            token_path,
            sync_forever: self.sync.sync_forever,
            xfr_channel_size,
            excess_buffer_bytes,
            stall_timeout,
            server_count_source,
            leases,
            drain_timeout,
            drain_linger,
            link_congestion: self.tunnel.link_congestion,
            transport,
            resume_grace,
            destinations,
            openvpn,
            logging: self.klog.log_config(),
            warnings,
        })
    }

    /// True if an OpenVPN client is configured and no flag indicates that the agent should look for servers
    /// too.
    fn is_openvpn_only(&self) -> bool {
        let (openvpn, server, identity) = (&self.openvpn, &self.server, &self.identity);
        let wanted = !openvpn.openvpn_config.is_empty() || !openvpn.openvpn_remote.is_empty();
        wanted
            && server.proxy_server_host == SERVER_HOST
            && identity.agent_cert.is_empty()
            && identity.service_account_token_path.is_empty()
    }

    fn intervals(&self, p: &mut Problems) -> (Duration, Duration) {
        let (interval, cap) = (self.sync.sync_interval, self.sync.sync_interval_cap);
        p.require(interval <= cap, || {
            format!("sync interval {interval} must be less than sync interval cap {cap}")
        });
        let floor = INTERVAL_FLOOR;
        let sync_interval = p.at_least("sync-interval", interval, floor);
        (sync_interval, cap.saturating().max(sync_interval))
    }

    fn server_count_source(&self, p: &mut Problems) -> ServerCountSource {
        match self.sync.server_count_source.as_str() {
            "" | "default" => ServerCountSource::Default,
            "max" => ServerCountSource::Max,
            other => {
                p.error(format!(
                    "--server-count-source must be one of '', 'default', 'max', got {other}"
                ));
                ServerCountSource::Default
            }
        }
    }

    fn note_unneeded(&self, p: &mut Problems) {
        let why = "a full buffer delays only its own connection; culvert_excess_buffer_bytes counts its bytes";
        let flag = "warn-on-channel-limit";
        p.unneeded(self.tunnel.warn_on_channel_limit, flag, why);
        let content_type = &self.kubernetes.kube_api_content_type;
        let flag = "kube-api-content-type";
        p.unneeded(content_type != CONTENT_TYPE, flag, "requests are JSON");
        self.klog.note_unneeded(p);
    }
}

impl DestinationFlags {
    fn validate(&self, p: &mut Problems) -> Destinations {
        let allow = StringSlice::concat(&self.allow_destinations);
        let deny = StringSlice::concat(&self.deny_destinations);
        let (destinations, problems) = Destinations::parse(Program::Agent, &allow, &deny);
        problems.into_iter().for_each(|problem| p.error(problem));
        destinations
            .warning()
            .into_iter()
            .for_each(|text| p.warn(text));
        destinations
    }
}

impl ServerFlags {
    /// Returns the ALPN names. Ignores `[]`: Go prints an empty list as `[]`, and some programs pass printed
    /// defaults back. No real ALPN name is `[]`.
    fn alpn(&self, p: &mut Problems) -> Vec<String> {
        let names: Vec<String> = StringSlice::concat(&self.alpn_proto)
            .into_iter()
            .filter(|name| name != "[]")
            .collect();
        for name in &names {
            p.require((1..=MAX_ALPN).contains(&name.len()), || {
                format!("--alpn-proto: a name must have 1 to {MAX_ALPN} bytes, got {name:?}")
            });
        }
        names
    }
}

impl TunnelFlags {
    /// Returns `--drain-timeout`, also under its name of the server.
    fn drain_timeout(&self, p: &mut Problems) -> Duration {
        match (self.drain_timeout, self.graceful_shutdown_timeout) {
            (Some(time), _) => p.not_negative("drain-timeout", time),
            (None, Some(time)) => p.not_negative("graceful-shutdown-timeout", time),
            (None, None) => DRAIN_TIMEOUT,
        }
    }
}

fn port(p: &mut Problems, whose: &str, port: i64) -> u16 {
    p.require(port > 0, || {
        format!("{whose} port {port} must be greater than 0")
    });
    p.require(port <= i64::from(u16::MAX), || {
        format!("{whose} port {port} must not be greater than 65535")
    });
    u16::try_from(port).unwrap_or(0)
}
