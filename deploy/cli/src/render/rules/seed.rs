//! Rules of the seed's settings.

use culvert_host::flags::GoDuration;

use crate::render::cluster::Cluster;
use crate::render::finding::{Findings, Problem};

use super::ranges::cidr;

/// Path of the front door's settings in KKP's Seed.
const PATH: &str = "seed.nodeportProxy.envoy";

/// One second, in nanoseconds.
const SECOND: i64 = 1_000_000_000;

pub(super) fn check(cluster: &Cluster, findings: &mut Findings) {
    let seed = &cluster.facts().seed;
    let envoy = &seed.nodeport_proxy.envoy;
    let settings = &envoy.connection_settings;
    for (field, _, value) in settings.durations() {
        let Some(value) = value else { continue };
        let path = format!("{PATH}.connectionSettings.{field}");
        let duration: Option<GoDuration> = value.parse().ok();
        let reason = match duration.map(GoDuration::nanos) {
            None => "is not a duration, such as 30s",
            Some(0 | SECOND..) => continue,
            Some(_) => "must be 0 or >= 1s",
        };
        findings.error(Problem::invalid(&path, value, reason).named_by_kkp(&named(&path)));
    }
    for (field, _, value) in settings.probes() {
        if let Some(value) = value.filter(|value| *value < 1) {
            let path = format!("{PATH}.connectionSettings.{field}");
            let reason = "must be >= 1; leave the field out for the default";
            findings.error(Problem::invalid(&path, value, reason).named_by_kkp(&named(&path)));
        }
    }
    if let Some(replicas) = envoy.replicas.filter(|replicas| *replicas < 1) {
        let path = format!("{PATH}.replicas");
        let problem = Problem::invalid(&path, replicas, "must be >= 1");
        findings.error(problem.named_by_kkp(&named(&path)));
    }
    let source = &envoy.load_balancer_service.source_ranges;
    let allowed = &seed.default_api_server_allowed_ip_ranges;
    for (path, ranges) in [
        (format!("{PATH}.loadBalancerService.sourceRanges"), source),
        ("seed.defaultAPIServerAllowedIPRanges".to_owned(), allowed),
    ] {
        for (at, range) in ranges.iter().enumerate() {
            if let Err(reason) = cidr(range) {
                let path = format!("{path}[{at}]");
                let problem = Problem::invalid(&path, range, reason);
                findings.error(problem.named_by_kkp(&named(&path)));
            }
        }
    }
}

/// Returns the path in KKP's Seed object.
fn named(path: &str) -> String {
    path.replacen("seed.", "spec.", 1)
}
