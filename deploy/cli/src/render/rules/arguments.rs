//! Rules for the arguments that KKP appends to its own arguments of servers and agents. KKP accepts every argument, and the
//! programs end at a flag that they do not know.

use culvert_agent::config as agent;
use culvert_host::flags::Exit;
use culvert_server::config as server;

use crate::render::cluster::{Cluster, Tunnel};
use crate::render::finding::{Findings, Problem};
use crate::render::target::{Program, image, is_stock, version_of};

use super::programs::path;

/// Flags of our server that Konnectivity's own server does not know. docs/compatibility.md marks them. The flags with the
/// prefix [`OPENVPN`] are left out.
pub(super) const OWN_SERVER_FLAGS: &[&str] = &[
    "agent-quic-port",
    "agent-proxy-protocol-from",
    "link-congestion",
    "resume-grace",
    "agent-id-from",
    "ready-without-agents",
    "admin-uds",
    "admin-cert",
    "admin-key",
    "admin-ca-cert",
    "excess-buffer-bytes",
    "stall-timeout",
    "worker-threads",
    "drain-linger",
    "max-frontend-connections",
    "max-agents",
    "max-connections-per-agent",
    "max-pending-dials",
    "allow-destinations",
    "deny-destinations",
    "tunnel-mode",
    "tunnel-mode-file",
    "tunnel-state-file",
    "tunnel-drain",
    "log-format",
];

/// Flags of our agent that Konnectivity's own agent does not know, without the flags of OpenVPN.
pub(super) const OWN_AGENT_FLAGS: &[&str] = &[
    "link-congestion",
    "transport",
    "resume-grace",
    "excess-buffer-bytes",
    "stall-timeout",
    "drain-timeout",
    "graceful-shutdown-timeout",
    "drain-linger",
    "allow-destinations",
    "deny-destinations",
    "log-format",
];

/// Prefix of the flags for OpenVPN, which Konnectivity's own programs do not know.
pub(super) const OPENVPN: &str = "openvpn-";

/// Flag of Konnectivity's own server, and the first version of the server that knows the flag.
const GRACEFUL_SHUTDOWN: (&str, (u32, u32)) = ("graceful-shutdown-timeout", (0, 35));

pub(super) fn check(cluster: &Cluster, findings: &mut Findings) {
    servers(cluster, findings);
    // OpenVPN clients get no further arguments.
    if cluster.tunnel == Tunnel::Konnectivity {
        agents(cluster, findings);
    }
}

fn servers(cluster: &Cluster, findings: &mut Findings) {
    let settings = &cluster.facts().seed.default_component_settings;
    let args = &settings.konnectivity_proxy.args;
    let syntax = server::Config::check_syntax(line(server::PROGRAM, args));
    let Some(error) = refusal(cluster, Program::Server, args, syntax) else {
        return;
    };
    let reason = format!(
        "{} get this list, and end with {error:?}; the agents of each Cluster without a list of its own get the list, too, so \
         use flags that both programs know",
        owner(cluster, Program::Server, "servers")
    );
    let path = "seed.defaultComponentSettings.konnectivityProxy.args";
    findings.error(Problem::invalid(path, args, reason));
}

fn agents(cluster: &Cluster, findings: &mut Findings) {
    let args = &cluster.spec.components_override.konnectivity_proxy.args;
    let syntax = agent::Config::check_syntax(line(agent::PROGRAM, args));
    let Some(error) = refusal(cluster, Program::Agent, args, syntax) else {
        return;
    };
    let reason = format!(
        "{} get this list, and end with {error:?}; a list of the Seed applies to each Cluster without a list of its own",
        owner(cluster, Program::Agent, "agents")
    );
    let path = path(cluster, "konnectivityProxy.args", |it| {
        !it.konnectivity_proxy.args.is_empty()
    });
    findings.error(Problem::invalid(&path, args, reason));
}

/// Returns a command line with the name of its program.
fn line<'a>(program: &'a str, args: &'a [String]) -> impl Iterator<Item = &'a str> {
    std::iter::once(program).chain(args.iter().map(String::as_str))
}

/// Returns the programs with their origin, for an error.
fn owner(cluster: &Cluster, program: Program, programs: &str) -> String {
    match is_stock(cluster, program) {
        true => format!("Konnectivity's own {programs}"),
        false => format!("the {programs}"),
    }
}

/// Returns the error with which a program ends at one of the arguments; `None` if the program accepts all of them. `syntax` is
/// the answer of our program, which knows all flags of Konnectivity's own program.
fn refusal(
    cluster: &Cluster,
    program: Program,
    args: &[String],
    syntax: Result<(), Exit>,
) -> Option<String> {
    if let Err(exit) = syntax {
        let text = exit.text.lines().next().unwrap_or_default();
        return Some(text.trim_start_matches("Error: ").to_owned());
    }
    if !is_stock(cluster, program) {
        return None;
    }
    let image = image(cluster, program);
    let flags = args.iter().filter_map(|arg| arg.strip_prefix("--"));
    let mut names = flags.map(|flag| flag.split('=').next().unwrap_or(flag));
    let unknown = names.find(|name| !is_stock_flag(program, &image, name))?;
    Some(format!("unknown flag: --{unknown}"))
}

/// Returns true if Konnectivity's own program, in this image, knows a flag of our program. An image without a version is
/// assumed to have the newest one.
fn is_stock_flag(program: Program, image: &str, name: &str) -> bool {
    let (flag, since) = GRACEFUL_SHUTDOWN;
    if program == Program::Server && name == flag {
        return version_of(image).is_none_or(|version| version >= since);
    }
    let own = match program {
        Program::Agent => OWN_AGENT_FLAGS,
        _ => OWN_SERVER_FLAGS,
    };
    !name.starts_with(OPENVPN) && !own.contains(&name)
}
