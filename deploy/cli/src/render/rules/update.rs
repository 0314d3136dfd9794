//! Rules for changes of a cluster.

use serde::Serialize;

use crate::render::cluster::Cluster;
use crate::render::finding::{Findings, Problem};
use crate::render::kkp::minor_version;

/// Label that permits a change of the expose strategy.
pub(super) const EXPOSE_LABEL: &str = "unsafe-expose-strategy-migration";
/// Label that permits a change of the CNI plugin and of the proxy mode.
const CNI_LABEL: &str = "unsafe-cni-migration";
/// Label that permits larger steps of the version of the CNI plugin.
const CNI_UPGRADE_LABEL: &str = "unsafe-cni-upgrade";

pub(super) fn check(new: &Cluster, old: &Cluster, findings: &mut Findings) {
    let has = |label| new.input.labels.contains_key(label);
    let (before, after) = (&old.spec, &new.spec);
    let mut same = Unchanged { findings };
    if !has(EXPOSE_LABEL) {
        let (before, after) = (&before.expose_strategy, &after.expose_strategy);
        same.check("spec.exposeStrategy", before.is_empty(), before, after);
    }
    let range = |cluster: &Cluster| {
        let apiserver = &cluster.spec.components_override.apiserver;
        apiserver.node_port_range.clone()
    };
    let path = "spec.componentsOverride.apiserver.nodePortRange";
    same.check(path, range(old).is_empty(), &range(old), &range(new));
    let (before, after) = (&old.network, &new.network);
    let path = |field| format!("spec.clusterNetwork.{field}");
    for (field, before, after) in [
        ("ipFamily", &before.ip_family, &after.ip_family),
        ("dnsDomain", &before.dns_domain, &after.dns_domain),
    ] {
        same.check(&path(field), before.is_empty(), before, after);
    }
    for (field, before, after) in [
        ("pods.cidrBlocks", &before.pods, &after.pods),
        ("services.cidrBlocks", &before.services, &after.services),
    ] {
        let (before, after) = (&before.cidr_blocks, &after.cidr_blocks);
        same.check(&path(field), before.is_empty(), before, after);
    }
    let (old_dns, new_dns) = (
        before.node_local_dns_cache_enabled,
        after.node_local_dns_cache_enabled,
    );
    same.check(
        &path("nodeLocalDNSCacheEnabled"),
        old_dns.is_none(),
        &old_dns,
        &new_dns,
    );
    if !has(CNI_LABEL) {
        let (before, after) = (&before.proxy_mode, &after.proxy_mode);
        same.check(&path("proxyMode"), before.is_empty(), before, after);
    }
    cni(new, old, findings);
}

/// Reports changed values of fields that must not change.
struct Unchanged<'a> {
    findings: &'a mut Findings,
}

impl Unchanged<'_> {
    /// A field that was empty before may get a value.
    fn check<T: PartialEq + Serialize>(&mut self, path: &str, was_empty: bool, old: &T, new: &T) {
        if !was_empty && old != new {
            self.findings.error(Problem::immutable(path, new));
        }
    }
}

fn cni(new: &Cluster, old: &Cluster, findings: &mut Findings) {
    // A plugin that only the defaults add is not part of the object.
    let (Some(before), after) = (&old.input.spec.cni_plugin, &new.input.spec.cni_plugin) else {
        return;
    };
    let Some(after) = after else {
        let reason = "CNI plugin settings cannot be removed";
        findings.error(Problem::required("spec.cniPlugin", reason));
        return;
    };
    let has = |label| new.input.labels.contains_key(label);
    if after.kind != before.kind {
        if !has(CNI_LABEL) {
            let reason =
                format!("cannot change CNI plugin type, unless {CNI_LABEL} label is present");
            findings.error(Problem::forbidden(
                "spec.cniPlugin.type",
                &after.kind,
                reason,
            ));
        }
        return;
    }
    if after.version == before.version {
        return;
    }
    let path = "spec.cniPlugin.version";
    let mut parse = |text: &String| {
        let version = minor_version(text);
        if version.is_none() {
            let reason = format!("couldn't parse CNI version `{text}`: Invalid Semantic Version");
            findings.error(Problem::invalid(path, text, reason));
        }
        version
    };
    let (Some(from), Some(to)) = (parse(&before.version), parse(&after.version)) else {
        return;
    };
    let is_small = from.0 == to.0 && from.1.abs_diff(to.1) <= 1;
    let is_known_step = after.kind == "canal"
        && from < (3, 22)
        && to == (3, 22)
        && new.kubernetes_minor.is_some_and(|minor| minor >= 23);
    if !is_small && !is_known_step && !has(CNI_UPGRADE_LABEL) {
        let reason = format!(
            "cannot upgrade CNI from {} to {}, only one minor version difference is allowed unless \
             {CNI_UPGRADE_LABEL} label is present",
            before.version, after.version
        );
        findings.error(Problem::forbidden(path, &after.version, reason));
    }
}
