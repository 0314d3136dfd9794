//! One case for each rule of KKP, and for each warning.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use crate::render::cluster::Cluster;
use crate::render::finding::Findings;
use crate::render::input;

use super::arguments::{OPENVPN, OWN_AGENT_FLAGS, OWN_SERVER_FLAGS};

/// Checks a cluster file; returns the errors and the warnings.
fn check(text: &str, old: Option<&str>) -> (Vec<String>, Vec<String>) {
    let mut findings = Findings::default();
    let old = old.map(|text| Cluster::stored(input::parse(text).unwrap()));
    let cluster = Cluster::new(input::parse(text).unwrap(), old.is_none(), &mut findings);
    super::check(&cluster, old.as_ref(), &mut findings);
    (
        findings.problems.iter().map(ToString::to_string).collect(),
        findings.warnings.iter().map(ToString::to_string).collect(),
    )
}

/// Checks a specification in YAML's flow style.
fn errors(spec: &str) -> Vec<String> {
    check(&format!("spec: {spec}"), None).0
}

fn network(network: &str) -> Vec<String> {
    errors(&format!("{{clusterNetwork: {network}}}"))
}

fn warnings(text: &str) -> Vec<String> {
    let (errors, warnings) = check(text, None);
    assert_eq!(errors, [""; 0], "{text}");
    warnings
}

/// Changes a specification, with labels; returns the errors.
fn change(old: &str, new: &str, labels: &str) -> Vec<String> {
    let new = format!("labels: {{{labels}}}\nspec: {new}");
    check(&new, Some(&format!("spec: {old}"))).0
}

#[test]
fn a_cluster_with_defaults_is_valid() {
    assert_eq!(check("", None), (vec![], vec![]));
    assert_eq!(
        errors(
            "{exposeStrategy: LoadBalancer, apiServerAllowedIPRanges: {cidrBlocks: [10.0.0.0/8]}}"
        ),
        [""; 0]
    );
    assert_eq!(
        errors("{exposeStrategy: Tunneling, clusterNetwork: {tunnelingAgentIP: 100.64.30.11}}"),
        [""; 0]
    );
    assert_eq!(network("{ipFamily: IPv4+IPv6}"), [""; 0]);
}

#[test]
fn expose_strategy_is_one_of_three() {
    assert_eq!(
        errors("{exposeStrategy: Ingress}"),
        [
            r#"spec.exposeStrategy: Unsupported value: "Ingress": supported values: "NodePort", "LoadBalancer", "Tunneling""#
        ]
    );
}

#[test]
fn tunneling_agent_ip_needs_the_strategy_tunneling() {
    assert_eq!(
        network("{tunnelingAgentIP: 100.64.30.10}"),
        [
            r#"spec.clusterNetwork.tunnelingAgentIP: Forbidden: "100.64.30.10": Tunneling agent IP can be configured only for Tunneling Expose strategy (KKP: spec.TunnelingAgentIP)"#
        ]
    );
}

#[test]
fn allowed_ip_ranges_need_the_strategy_load_balancer() {
    assert_eq!(
        errors("{apiServerAllowedIPRanges: {cidrBlocks: [10.0.0.0/8]}}"),
        [
            r#"spec.apiServerAllowedIPRanges.cidrBlocks: Forbidden: ["10.0.0.0/8"]: Access control for API server is supported only for LoadBalancer expose strategy (KKP: spec.APIServerAllowedIPRanges)"#
        ]
    );
}

#[test]
fn cni_plugin_and_its_version_are_known() {
    assert_eq!(
        errors("{cniPlugin: {type: flannel}}"),
        [
            r#"spec.cniPlugin.type: Unsupported value: "flannel": supported values: "canal", "cilium", "none""#
        ]
    );
    let found = errors("{cniPlugin: {type: cilium, version: 9.9.9}}");
    assert!(found[0].starts_with(
        r#"spec.cniPlugin.version: Unsupported value: "9.9.9": supported values: "v1.11", "#
    ));
    let extended = "cniVersions: [9.9.9]\nspec: {cniPlugin: {type: cilium, version: 9.9.9}}";
    assert_eq!(check(extended, None).0, [""; 0]);
}

#[test]
fn dual_stack_needs_canal_3_22() {
    assert_eq!(
        errors("{cniPlugin: {type: canal, version: v3.21}, clusterNetwork: {ipFamily: IPv4+IPv6}}"),
        [
            r#"spec.cniPlugin: Forbidden: "v3.21": dual-stack not allowed on Canal CNI version lower than 3.22"#
        ]
    );
}

#[test]
fn pods_and_services_have_at_most_two_networks_and_equally_many() {
    let three = "{cidrBlocks: [10.0.0.0/16, 'fd00::/48', 'fd03::/48']}";
    let found = network(&format!("{{pods: {three}, services: {three}}}"));
    let too_many = |field: &str| {
        format!(
            "spec.clusterNetwork.{field}.cidrBlocks: Too many: 3: must have at most 2 items (KKP: spec.networkConfig.{field}.cidrBlocks)"
        )
    };
    assert_eq!(found[..2], [too_many("pods"), too_many("services")]);
    assert_eq!(
        network(
            "{pods: {cidrBlocks: [10.0.0.0/16]}, services: {cidrBlocks: [10.1.0.0/16, 'fd00::/108']}}"
        ),
        [
            r#"spec.clusterNetwork.pods.cidrBlocks: Invalid value: ["10.0.0.0/16"]: 2 pod CIDRs must be provided (KKP: spec.networkConfig.pods.cidrBlocks)"#
        ]
    );
    let found = network(
        "{pods: {cidrBlocks: [10.0.0.0/16, 'fd00::/48']}, services: {cidrBlocks: [10.1.0.0/16]}}",
    );
    assert_eq!(
        found,
        [
            r#"spec.clusterNetwork.services.cidrBlocks: Invalid value: ["10.1.0.0/16"]: 2 services CIDRs must be provided (KKP: spec.networkConfig.services.cidrBlocks)"#
        ]
    );
}

#[test]
fn missing_networks_are_required() {
    // Defaults fill missing lists, so the rule applies to a cluster without defaults.
    let mut findings = Findings::default();
    let mut cluster = Cluster::new(input::parse("").unwrap(), true, &mut findings);
    cluster.network.pods.cidr_blocks.clear();
    cluster.network.services.cidr_blocks.clear();
    super::network::check(&cluster, &mut findings);
    let found: Vec<String> = findings.problems.iter().map(ToString::to_string).collect();
    assert_eq!(
        found[..2],
        [
            "spec.clusterNetwork.pods.cidrBlocks: Required value: pod CIDR must be provided (KKP: spec.networkConfig.pods.cidrBlocks)",
            "spec.clusterNetwork.services.cidrBlocks: Required value: service CIDR must be provided (KKP: spec.networkConfig.services.cidrBlocks)",
        ]
    );
}

#[test]
fn networks_parse_and_have_the_family_of_their_place() {
    assert_eq!(
        network("{pods: {cidrBlocks: [10.0.0.0]}}"),
        [
            r#"spec.clusterNetwork.pods.cidrBlocks[0]: Invalid value: "10.0.0.0": couldn't parse CIDR "10.0.0.0": invalid CIDR address: 10.0.0.0 (KKP: spec.networkConfig.pods.cidrBlocks[0])"#
        ]
    );
    let found = network("{services: {cidrBlocks: ['fd00::/108']}}");
    assert_eq!(
        found,
        [
            r#"spec.clusterNetwork.services.cidrBlocks[0]: Invalid value: "fd00::/108": invalid address family for primary CIDR "fd00::/108": has to be IPv4 (KKP: spec.networkConfig.services.cidrBlocks.pods.cidrBlocks[0])"#
        ]
    );
    let found = network("{pods: {cidrBlocks: [10.0.0.0/16, 10.1.0.0/16]}}");
    assert_eq!(
        found,
        [
            r#"spec.clusterNetwork.pods.cidrBlocks[1]: Invalid value: "10.1.0.0/16": invalid address family for secondary CIDR "10.1.0.0/16": has to be IPv6 (KKP: spec.networkConfig.pods.cidrBlocks.pods.cidrBlocks[1])"#
        ]
    );
}

#[test]
fn ip_family_matches_the_number_of_pod_networks() {
    let two = "pods: {cidrBlocks: [10.0.0.0/16, 'fd00::/48']}, services: {cidrBlocks: [10.1.0.0/16, 'fd01::/108']}";
    assert_eq!(
        network(&format!("{{ipFamily: IPv4, {two}}}")),
        [
            r#"spec.clusterNetwork.ipFamily: Invalid value: "IPv4": IP family "IPv4" does not match with provided pods CIDRs ["10.0.0.0/16", "fd00::/48"] (KKP: spec.networkConfig.ipFamily)"#
        ]
    );
    let one = "pods: {cidrBlocks: [10.0.0.0/16]}, services: {cidrBlocks: [10.1.0.0/16]}";
    assert_eq!(
        network(&format!("{{ipFamily: IPv4+IPv6, {one}}}")),
        [
            r#"spec.clusterNetwork.ipFamily: Invalid value: "IPv4+IPv6": IP family "IPv4+IPv6" does not match with provided pods CIDRs ["10.0.0.0/16"] (KKP: spec.networkConfig.ipFamily)"#
        ]
    );
    assert_eq!(
        network("{ipFamily: IPv6}"),
        [
            r#"spec.clusterNetwork.ipFamily: Unsupported value: "IPv6": supported values: "", "IPv4", "IPv4+IPv6" (KKP: spec.networkConfig.ipFamily)"#
        ]
    );
}

#[test]
fn node_masks_are_longer_than_the_pod_prefix() {
    assert_eq!(
        network("{nodeCidrMaskSizeIPv4: 16}"),
        [
            r#"spec.clusterNetwork.nodeCidrMaskSizeIPv4: Invalid value: 16: node CIDR mask size (16) must be longer than the mask size of the pod CIDR ("172.25.0.0/16") (KKP: spec.networkConfig.nodeCidrMaskSizeIPv4)"#
        ]
    );
    assert_eq!(
        network("{ipFamily: IPv4+IPv6, nodeCidrMaskSizeIPv6: 48}"),
        [
            r#"spec.clusterNetwork.nodeCidrMaskSizeIPv6: Invalid value: 48: node CIDR mask size (48) must be longer than the mask size of the pod CIDR ("fd01::/48") (KKP: spec.networkConfig.nodeCidrMaskSizeIPv6)"#
        ]
    );
}

#[test]
fn dns_domain_is_cluster_local() {
    assert_eq!(
        network("{dnsDomain: example.com}"),
        [
            r#"spec.clusterNetwork.dnsDomain: Invalid value: "example.com": dnsDomain must be 'cluster.local' (KKP: spec.networkConfig.dnsDomain)"#
        ]
    );
}

#[test]
fn proxy_mode_is_known_to_the_version_of_kkp() {
    assert_eq!(
        network("{proxyMode: userspace}"),
        [
            r#"spec.clusterNetwork.proxyMode: Unsupported value: "userspace": supported values: "ipvs", "iptables", "ebpf", "nftables" (KKP: spec.networkConfig.proxyMode)"#
        ]
    );
    let found = |version| {
        check(
            &format!("kkpVersion: '{version}'\nspec: {{clusterNetwork: {{proxyMode: nftables}}}}"),
            None,
        )
        .0
    };
    assert_eq!(found("2.30"), [""; 0]);
    assert_eq!(
        found("2.29"),
        [
            r#"spec.clusterNetwork.proxyMode: Unsupported value: "nftables": supported values: "ipvs", "iptables", "ebpf" (KKP: spec.networkConfig.proxyMode)"#
        ]
    );
}

#[test]
fn ebpf_needs_another_plugin_than_canal_and_konnectivity() {
    let canal = r#"spec.clusterNetwork.proxyMode: Invalid value: "ebpf": ebpf proxy mode is not valid for canal CNI (KKP: spec.networkConfig.proxyMode)"#;
    let konnectivity = r#"spec.clusterNetwork.proxyMode: Invalid value: "ebpf": ebpf proxy mode can be used only when Konnectivity is enabled (KKP: spec.networkConfig.proxyMode)"#;
    assert_eq!(
        errors("{cniPlugin: {type: canal}, clusterNetwork: {proxyMode: ebpf}}"),
        [canal]
    );
    assert_eq!(
        errors("{cniPlugin: {type: cilium}, clusterNetwork: {proxyMode: ebpf}}"),
        [""; 0]
    );
    assert_eq!(
        errors("{cniPlugin: {type: none}, clusterNetwork: {proxyMode: ebpf}}"),
        [""; 0]
    );
    // An update may leave the plugin out, and Konnectivity too if the network is not written in YAML.
    let old = "{clusterNetwork: {proxyMode: ebpf}}";
    let (found, _) = check(
        &format!("spec: {old}"),
        Some("kind: Cluster\napiVersion: kubermatic.k8c.io/v1"),
    );
    assert_eq!(found, [canal]);
    let found = check(
        "tunnel: openvpn\nspec: {clusterNetwork: {proxyMode: ebpf}}",
        None,
    )
    .0;
    assert_eq!(found, [konnectivity]);
    let mut findings = Findings::default();
    let spec = "spec: {clusterNetwork: {proxyMode: ebpf}}";
    let mut cluster = Cluster::new(input::parse(spec).unwrap(), true, &mut findings);
    cluster.network.konnectivity_enabled = None;
    super::network::check(&cluster, &mut findings);
    let found: Vec<String> = findings.problems.iter().map(ToString::to_string).collect();
    assert_eq!(found, [konnectivity]);
    let found = network("{proxyMode: ebpf, konnectivityEnabled: false}");
    assert!(found.contains(&konnectivity.to_owned()), "{found:?}");
}

#[test]
fn dual_stack_needs_ipv6_of_the_datacenter() {
    let text = |provider, seed| {
        format!(
            "provider: {provider}\nseed: {{datacenter: {{ipv6Enabled: {seed}}}}}\nspec: {{clusterNetwork: {{ipFamily: IPv4+IPv6}}}}"
        )
    };
    for provider in ["openstack", "vsphere"] {
        assert_eq!(
            check(&text(provider, false), None).0,
            [
                r#"spec.clusterNetwork.ipFamily: Invalid value: "IPv4+IPv6": IP family "IPv4+IPv6" requires ipv6 to be enabled for the datacenter (KKP: spec.networkConfig.ipFamily)"#
            ]
        );
        assert_eq!(check(&text(provider, true), None).0, [""; 0]);
    }
    assert_eq!(check(&text("aws", false), None).0, [""; 0]);
}

#[test]
fn konnectivity_cannot_be_disabled() {
    assert_eq!(
        network("{konnectivityEnabled: false}"),
        [
            "spec.clusterNetwork.konnectivityEnabled: Invalid value: false: Konnectivity can no longer be disabled; set tunnel to render the OpenVPN mode (KKP: spec.networkConfig.konnectivityEnabled)"
        ]
    );
}

#[test]
fn replicas_of_core_dns_agree() {
    let spec = |new| {
        format!(
            "{{componentsOverride: {{coreDNS: {{replicas: {new}}}}}, clusterNetwork: {{coreDNSReplicas: 2}}}}"
        )
    };
    assert_eq!(errors(&spec(2)), [""; 0]);
    assert_eq!(
        errors(&spec(3)),
        [
            "spec.componentsOverride.coreDNS.replicas: Invalid value: 3: both the new spec.componentsOverride.coreDNS.replicas and deprecated spec.clusterNetwork.coreDNSReplicas fields are set"
        ]
    );
}

#[test]
fn node_port_range_parses() {
    let range = |range: &str| {
        errors(&format!(
            "{{componentsOverride: {{apiserver: {{nodePortRange: '{range}'}}}}}}"
        ))
    };
    for valid in ["30000-32767", "30000+100", "30000"] {
        assert_eq!(range(valid), [""; 0], "{valid}");
    }
    let invalid = |value: &str, reason: &str| {
        format!(
            "spec.componentsOverride.apiserver.nodePortRange: Invalid value: \"{value}\": {reason} (KKP: componentsOverride.apiserver.nodePortRange)"
        )
    };
    assert_eq!(range("x"), [invalid("x", "unable to parse port range: x")]);
    assert_eq!(range("0-10"), [invalid("0-10", "invalid nodeport range")]);
    assert_eq!(
        range("9-1"),
        [invalid(
            "9-1",
            "the low port of a range is greater than the high port: 9 > 1"
        )]
    );
    assert_eq!(
        super::ranges::port_range("").unwrap_err(),
        "node port range is required"
    );
}

#[test]
fn settings_of_the_seed_are_checked() {
    let seed = |envoy: &str| {
        check(
            &format!("seed: {{nodeportProxy: {{envoy: {envoy}}}}}"),
            None,
        )
        .0
    };
    assert_eq!(
        seed("{connectionSettings: {sniListenerIdleTimeout: 0s, upstreamTCPKeepaliveTime: 1s}}"),
        [""; 0]
    );
    assert_eq!(
        seed(
            "{replicas: 0, connectionSettings: {sniListenerIdleTimeout: 500ms, downstreamTCPKeepaliveTime: x, downstreamTCPKeepaliveProbes: -1, upstreamTCPKeepaliveProbes: 0}, loadBalancerService: {sourceRanges: [10.0.0.1]}}"
        ),
        [
            r#"seed.nodeportProxy.envoy.connectionSettings.sniListenerIdleTimeout: Invalid value: "500ms": must be 0 or >= 1s (KKP: spec.nodeportProxy.envoy.connectionSettings.sniListenerIdleTimeout)"#,
            r#"seed.nodeportProxy.envoy.connectionSettings.downstreamTCPKeepaliveTime: Invalid value: "x": is not a duration, such as 30s (KKP: spec.nodeportProxy.envoy.connectionSettings.downstreamTCPKeepaliveTime)"#,
            "seed.nodeportProxy.envoy.connectionSettings.downstreamTCPKeepaliveProbes: Invalid value: -1: must be >= 1; leave the field out for the default (KKP: spec.nodeportProxy.envoy.connectionSettings.downstreamTCPKeepaliveProbes)",
            "seed.nodeportProxy.envoy.connectionSettings.upstreamTCPKeepaliveProbes: Invalid value: 0: must be >= 1; leave the field out for the default (KKP: spec.nodeportProxy.envoy.connectionSettings.upstreamTCPKeepaliveProbes)",
            "seed.nodeportProxy.envoy.replicas: Invalid value: 0: must be >= 1 (KKP: spec.nodeportProxy.envoy.replicas)",
            r#"seed.nodeportProxy.envoy.loadBalancerService.sourceRanges[0]: Invalid value: "10.0.0.1": couldn't parse CIDR "10.0.0.1": invalid CIDR address: 10.0.0.1 (KKP: spec.nodeportProxy.envoy.loadBalancerService.sourceRanges[0])"#,
        ]
    );
}

#[test]
fn every_duration_of_the_seed_is_0_or_at_least_a_second() {
    for field in [
        "sniListenerIdleTimeout",
        "tunnelingConnectionIdleTimeout",
        "tunnelingStreamIdleTimeout",
        "downstreamTCPKeepaliveTime",
        "downstreamTCPKeepaliveInterval",
        "upstreamTCPKeepaliveTime",
        "upstreamTCPKeepaliveInterval",
    ] {
        let found = check(
            &format!(
                "seed: {{nodeportProxy: {{envoy: {{connectionSettings: {{{field}: 999ms}}}}}}}}"
            ),
            None,
        )
        .0;
        let path = format!("nodeportProxy.envoy.connectionSettings.{field}");
        let error = format!(
            r#"seed.{path}: Invalid value: "999ms": must be 0 or >= 1s (KKP: spec.{path})"#
        );
        assert_eq!(found, [error]);
    }
}

#[test]
fn allowed_ranges_of_the_seed_are_networks() {
    assert_eq!(
        check(
            "seed: {defaultAPIServerAllowedIPRanges: [10.0.0.0/8, x]}",
            None
        )
        .0,
        [
            r#"seed.defaultAPIServerAllowedIPRanges[1]: Invalid value: "x": couldn't parse CIDR "x": invalid CIDR address: x (KKP: spec.defaultAPIServerAllowedIPRanges[1])"#
        ]
    );
}

#[test]
fn anti_affinity_is_preferred_or_required() {
    assert_eq!(
        errors(
            "{componentsOverride: {konnectivityProxy: {hostAntiAffinity: hard, zoneAntiAffinity: soft}}}"
        ),
        [
            r#"spec.componentsOverride.konnectivityProxy.hostAntiAffinity: Unsupported value: "hard": supported values: "", "preferred", "required""#,
            r#"spec.componentsOverride.konnectivityProxy.zoneAntiAffinity: Unsupported value: "soft": supported values: "", "preferred", "required""#,
        ]
    );
    for valid in ["preferred", "required", "''"] {
        let both = format!("{{hostAntiAffinity: {valid}, zoneAntiAffinity: {valid}}}");
        let spec = format!("{{componentsOverride: {{konnectivityProxy: {both}}}}}");
        assert_eq!(errors(&spec), [""; 0]);
    }
}

#[test]
fn versions_are_known() {
    assert_eq!(
        check("kkpVersion: '2.27'", None).0,
        [
            r#"kkpVersion: Unsupported value: "2.27": supported values: "2.28", "2.29", "2.30", "2.31""#
        ]
    );
    assert_eq!(
        errors("{version: 1.32.0}"),
        [
            r#"spec.version: Unsupported value: "1.32.0": supported values: "1.33", "1.34", "1.35", "1.36""#
        ]
    );
    assert_eq!(
        check("tunnel: wireguard", None).0,
        [r#"tunnel: Unsupported value: "wireguard": supported values: "konnectivity", "openvpn""#]
    );
}

#[test]
fn expose_strategy_changes_only_with_its_label() {
    let (old, new) = ("{exposeStrategy: NodePort}", "{exposeStrategy: Tunneling}");
    assert_eq!(
        change(old, new, ""),
        [r#"spec.exposeStrategy: Invalid value: "Tunneling": field is immutable"#]
    );
    assert_eq!(
        change(old, new, "unsafe-expose-strategy-migration: ''"),
        [""; 0]
    );
    let found = change(
        new,
        "{exposeStrategy: NodePort, clusterNetwork: {tunnelingAgentIP: 100.64.30.10}}",
        "unsafe-expose-strategy-migration: x",
    );
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0]
            .contains("Tunneling agent IP can be configured only for Tunneling Expose strategy")
    );
}

#[test]
fn network_is_immutable_once_set() {
    let old = "{clusterNetwork: {pods: {cidrBlocks: [10.0.0.0/16]}, services: {cidrBlocks: [10.1.0.0/20]}, nodeLocalDNSCacheEnabled: true}}";
    let new = "{clusterNetwork: {ipFamily: IPv4+IPv6, pods: {cidrBlocks: [10.2.0.0/16, 'fd00::/48']}, services: {cidrBlocks: [10.3.0.0/20, 'fd01::/108']}, nodeLocalDNSCacheEnabled: false}}";
    assert_eq!(
        change(old, new, "unsafe-cni-migration: x"),
        [
            r#"spec.clusterNetwork.ipFamily: Invalid value: "IPv4+IPv6": field is immutable"#,
            r#"spec.clusterNetwork.pods.cidrBlocks: Invalid value: ["10.2.0.0/16","fd00::/48"]: field is immutable"#,
            r#"spec.clusterNetwork.services.cidrBlocks: Invalid value: ["10.3.0.0/20","fd01::/108"]: field is immutable"#,
            "spec.clusterNetwork.nodeLocalDNSCacheEnabled: Invalid value: false: field is immutable",
        ]
    );
    let found = change("{}", "{clusterNetwork: {dnsDomain: x}}", "");
    assert!(
        found.contains(
            &r#"spec.clusterNetwork.dnsDomain: Invalid value: "x": field is immutable"#.to_owned()
        ),
        "{found:?}"
    );
    // A stored object without the fields accepts every value.
    let object = "{kind: Cluster, apiVersion: kubermatic.k8c.io/v1}";
    assert_eq!(check(&format!("spec: {old}"), Some(object)).0, [""; 0]);
}

#[test]
fn proxy_mode_changes_only_with_its_label() {
    let (old, new) = (
        "{clusterNetwork: {proxyMode: ipvs}}",
        "{clusterNetwork: {proxyMode: iptables}}",
    );
    assert_eq!(
        change(old, new, ""),
        [r#"spec.clusterNetwork.proxyMode: Invalid value: "iptables": field is immutable"#]
    );
    assert_eq!(change(old, new, "unsafe-cni-migration: ''"), [""; 0]);
}

#[test]
fn cni_plugin_changes_only_with_its_labels() {
    let plugin = |kind, version| format!("{{cniPlugin: {{type: {kind}, version: {version}}}}}");
    let old = plugin("canal", "v3.28");
    assert_eq!(
        change(&old, &plugin("cilium", "1.18.2"), ""),
        [
            r#"spec.cniPlugin.type: Forbidden: "cilium": cannot change CNI plugin type, unless unsafe-cni-migration label is present"#
        ]
    );
    assert_eq!(
        change(&old, &plugin("cilium", "1.18.2"), "unsafe-cni-migration: x"),
        [""; 0]
    );
    assert_eq!(
        change(&old, "{}", ""),
        ["spec.cniPlugin: Required value: CNI plugin settings cannot be removed"]
    );
    let far = plugin("canal", "v3.30");
    assert_eq!(
        change(&old, &far, ""),
        [
            r#"spec.cniPlugin.version: Forbidden: "v3.30": cannot upgrade CNI from v3.28 to v3.30, only one minor version difference is allowed unless unsafe-cni-upgrade label is present"#
        ]
    );
    assert_eq!(change(&old, &far, "unsafe-cni-upgrade: x"), [""; 0]);
    assert_eq!(change(&old, &plugin("canal", "v3.29"), ""), [""; 0]);
    assert_eq!(change(&old, &plugin("canal", "v3.27"), ""), [""; 0]);
    let major = plugin("canal", "v4.28");
    assert!(change(&old, &major, "").contains(
        &r#"spec.cniPlugin.version: Forbidden: "v4.28": cannot upgrade CNI from v3.28 to v4.28, only one minor version difference is allowed unless unsafe-cni-upgrade label is present"#
            .to_owned()
    ));
    let unknown = plugin("canal", "x");
    assert!(change(&old, &unknown, "").contains(
        &r#"spec.cniPlugin.version: Invalid value: "x": couldn't parse CNI version `x`: Invalid Semantic Version"#
            .to_owned()
    ));
}

#[test]
fn canal_may_skip_minor_versions_to_3_22() {
    let plugin =
        |version| format!("{{version: 1.36.1, cniPlugin: {{type: canal, version: {version}}}}}");
    assert_eq!(change(&plugin("v3.19"), &plugin("v3.22"), ""), [""; 0]);
    assert_eq!(
        change(&plugin("v3.19"), &plugin("v3.21"), ""),
        [
            r#"spec.cniPlugin.version: Forbidden: "v3.21": cannot upgrade CNI from v3.19 to v3.21, only one minor version difference is allowed unless unsafe-cni-upgrade label is present"#
        ]
    );
}

#[test]
fn node_port_range_is_immutable() {
    assert_eq!(
        change(
            "{}",
            "{componentsOverride: {apiserver: {nodePortRange: 31000-32000}}}",
            ""
        ),
        [
            r#"spec.componentsOverride.apiserver.nodePortRange: Invalid value: "31000-32000": field is immutable"#
        ]
    );
}

#[test]
fn all_errors_are_reported_at_once() {
    let found = errors(
        "{exposeStrategy: X, cniPlugin: {type: Y}, clusterNetwork: {dnsDomain: z, proxyMode: w, konnectivityEnabled: false}}",
    );
    assert_eq!(found.len(), 5, "{found:#?}");
}

#[test]
fn tunneling_agent_ip_is_an_address_outside_of_the_networks() {
    let warned = |address: &str| {
        warnings(&format!(
            "spec: {{exposeStrategy: Tunneling, clusterNetwork: {{tunnelingAgentIP: '{address}'}}}}"
        ))
    };
    let found = |address, reason| {
        [format!(
            "spec.clusterNetwork.tunnelingAgentIP: \"{address}\": {reason}"
        )]
    };
    assert_eq!(warned("100.64.30.10"), [""; 0]);
    assert_eq!(
        warned("nonsense"),
        found(
            "nonsense",
            "is not an IPv4 address; the node tunnel cannot listen on it"
        )
    );
    assert_eq!(
        warned("169.254.20.10"),
        found("169.254.20.10", "is the address of node-local-dns")
    );
    assert_eq!(
        warned("127.0.0.1"),
        found("127.0.0.1", "cannot be an address of an interface for pods")
    );
    assert_eq!(
        warned("172.25.0.9"),
        found(
            "172.25.0.9",
            "is inside the network of the pods, 172.25.0.0/16"
        )
    );
}

#[test]
fn overlaps_and_host_bits_are_warnings() {
    assert_eq!(
        warnings(
            "nodeNetworks: [10.0.5.0/24]\nspec: {clusterNetwork: {pods: {cidrBlocks: [10.0.0.1/16]}}}"
        ),
        [
            r#"spec.clusterNetwork.pods.cidrBlocks[0]: "10.0.0.1/16": has host bits; the network is 10.0.0.0/16"#,
            r#"nodeNetworks[0]: "10.0.5.0/24": overlaps 10.0.0.1/16 of spec.clusterNetwork.pods.cidrBlocks[0]"#,
        ]
    );
    assert_eq!(
        warnings("tunnel: openvpn\nnodeAccessNetwork: 172.25.0.0/16"),
        [
            r#"nodeAccessNetwork: "172.25.0.0/16": overlaps 172.25.0.0/16 of spec.clusterNetwork.pods.cidrBlocks[0]"#
        ]
    );
    assert_eq!(
        warnings("spec: {clusterNetwork: {services: {cidrBlocks: [10.9.9.9/32]}}}"),
        [
            r#"spec.clusterNetwork.services.cidrBlocks[0]: "10.9.9.9/32": has no room for the Services kubernetes and kube-dns"#
        ]
    );
}

#[test]
fn konnectivity_settings_that_fight_are_warnings() {
    assert_eq!(
        warnings(
            "nodes: 1\nspec: {componentsOverride: {konnectivityProxy: {keepaliveTime: 1 minute, args: [--ca-cert=x, x, --v=5]}}}"
        ),
        [
            r#"spec.componentsOverride.konnectivityProxy.keepaliveTime: "1 minute": is not a duration, such as 1m; server and agent do not start with it"#,
            r#"spec.componentsOverride.konnectivityProxy.args[0]: "--ca-cert=x": replaces --ca-cert of the rendered arguments"#,
            r#"spec.componentsOverride.konnectivityProxy.args[1]: "x": is not a flag, and has no effect"#,
            "nodes: 1: both agents run on the same node; a restart of the node ends the tunnel",
        ]
    );
    assert_eq!(
        warnings("spec: {clusterNetwork: {proxymode: ipvs}}"),
        [
            r#"spec.clusterNetwork.proxymode: "proxymode": KKP does not know this field and drops it"#
        ]
    );
}

#[test]
fn tunneling_needs_dns_for_two_names() {
    assert_eq!(
        warnings("externalName: a.seed.example.com\nspec: {exposeStrategy: Tunneling}"),
        [
            r#"externalName: "a.seed.example.com": DNS must also resolve konnectivity-server.a.seed.example.com; a wildcard record covers both names if a.seed.example.com itself has no record"#
        ]
    );
}

#[test]
fn defaults_follow_the_order_of_kkp() {
    let defaults =
        |text: &str| Cluster::new(input::parse(text).unwrap(), true, &mut Findings::default());
    let modes = |text: &str| defaults(text).network.proxy_mode;
    // A given network gets the default of the CRD, a missing one the default of the code.
    assert_eq!(modes("spec: {version: 1.36.1, clusterNetwork: {}}"), "ipvs");
    assert_eq!(modes("spec: {version: 1.36.1}"), "nftables");
    assert_eq!(modes("spec: {version: 1.34.1}"), "ipvs");
    assert_eq!(
        modes("provider: hetzner\nspec: {version: 1.36.1}"),
        "iptables"
    );
    assert_eq!(
        modes("provider: hetzner\nkkpVersion: '2.30'\nspec: {version: 1.35.1}"),
        "nftables"
    );
    let strategy = |text: &str| defaults(text).spec.expose_strategy;
    assert_eq!(strategy(""), "NodePort");
    assert_eq!(
        strategy("configuration: {exposeStrategy: LoadBalancer}"),
        "LoadBalancer"
    );
    let both = "seed: {exposeStrategy: Tunneling}\nconfiguration: {exposeStrategy: LoadBalancer}";
    assert_eq!(strategy(both), "Tunneling");
    assert_eq!(defaults(both).network.tunneling_agent_ip, "100.64.30.10");
    assert_eq!(defaults("").network.tunneling_agent_ip, "");
    assert_eq!(
        defaults("provider: kubevirt").network.pods.cidr_blocks,
        ["172.26.0.0/16"]
    );
    let dual = defaults("spec: {clusterNetwork: {ipFamily: IPv4+IPv6}}").network;
    assert_eq!(dual.services.cidr_blocks, ["10.240.16.0/20", "fd02::/108"]);
    assert_eq!(
        (dual.node_cidr_mask_size_ipv4, dual.node_cidr_mask_size_ipv6),
        (Some(24), Some(64))
    );
    assert_eq!(defaults("").network.node_cidr_mask_size_ipv6, None);
    assert_eq!(defaults("").network.konnectivity_enabled, Some(true));
    let edge = defaults("provider: edge").spec.cni_plugin.unwrap();
    assert_eq!(
        (edge.kind.as_str(), edge.version.as_str()),
        ("canal", "v3.31")
    );
    let cilium = defaults("kkpVersion: v2.28.3").spec.cni_plugin.unwrap();
    assert_eq!(
        (cilium.kind.as_str(), cilium.version.as_str()),
        ("cilium", "1.16.9")
    );
    let seed = "seed: {defaultComponentSettings: {konnectivityProxy: {keepaliveTime: 2m, args: [--a]}}}\nspec: {componentsOverride: {konnectivityProxy: {args: [--b]}}}";
    let proxy = defaults(seed).spec.components_override.konnectivity_proxy;
    assert_eq!(
        (proxy.keepalive_time.as_str(), proxy.args),
        ("2m", vec!["--b".to_owned()])
    );
}

#[test]
fn both_formats_and_mistakes_of_the_file_are_told_apart() {
    let object = "apiVersion: kubermatic.k8c.io/v1\nkind: Cluster\nmetadata: {name: abc, labels: {x: y}}\nspec: {version: 1.36.3, cloud: {providerName: aws, aws: {}}}\nstatus: {address: {externalName: n, ip: 192.0.2.1, port: 31000}}";
    let read = input::parse(object).unwrap();
    assert_eq!(read.facts.cluster_id.as_deref(), Some("abc"));
    assert_eq!(read.facts.node_ports.apiserver, Some(31000));
    // The status is that of Tunneling until the new strategy is in the cluster.
    let changed = object.replace("31000", "6443");
    let changed = input::parse(&changed).unwrap();
    assert_eq!(changed.facts.node_ports.apiserver, None);
    assert_eq!(read.spec.cloud.provider_name, "aws");
    assert!(read.labels.contains_key("x"));
    let error = |text| input::parse(text).unwrap_err().to_string();
    assert!(
        error("clusterIDs: a").contains("unknown field `clusterIDs`"),
        "{}",
        error("clusterIDs: a")
    );
    assert_eq!(
        error("kind: Seed\napiVersion: kubermatic.k8c.io/v1"),
        "kind Seed of apiVersion kubermatic.k8c.io/v1 is not a cluster; expected kind Cluster of kubermatic.k8c.io/v1, or a file without kind and apiVersion"
    );
    assert!(input::parse_facts("spec: {}").is_err());
    let two = "clusterID: a\n---\nclusterID: b";
    assert!(
        error(two).contains("more than one document"),
        "{}",
        error(two)
    );
}

#[test]
fn empty_documents_and_null_are_ignored() {
    let read = |text: &str| input::parse(text).unwrap();
    let plain = read("clusterID: a");
    for text in [
        "---\nclusterID: a\n---\n",
        "clusterID: a\nlabels: null\nnodePorts: null\nnodeNetworks: null\nseed: null\nimages: null\nspec: null",
    ] {
        assert_eq!(read(text), plain, "{text}");
    }
    let empty = read("spec: {clusterNetwork: {}}").spec;
    let null = "spec: {exposeStrategy: null, cloud: null, features: null, componentsOverride: null, \
                clusterNetwork: {ipFamily: null, pods: null, services: {cidrBlocks: null}}}";
    assert_eq!(read(null).spec, empty);
    let object = |labels: &str| {
        let text = format!(
            "apiVersion: kubermatic.k8c.io/v1\nkind: Cluster\nmetadata: {{labels: {labels}}}\nstatus: null"
        );
        read(&text)
    };
    assert_eq!(object("null"), object("{}"));
}

#[test]
fn agent_arguments_that_the_agents_do_not_know_are_errors() {
    let reason = |error: &str| {
        format!(
            "the agents get this list, and end with {error:?}; a list of the Seed applies to each Cluster without a list of \
             its own"
        )
    };
    let settings = |args: &str| format!("{{konnectivityProxy: {{args: [{args}]}}}}");
    let seed = |args: &str| format!("seed: {{defaultComponentSettings: {}}}", settings(args));
    let own = |args: &str| format!("spec: {{componentsOverride: {}}}", settings(args));
    let errors = |text: &str| check(text, None).0;
    let unknown = reason("unknown flag: --agent-quic-port");
    let list = r#"Invalid value: ["--agent-quic-port=8132"]"#;
    assert_eq!(
        errors(&seed("--agent-quic-port=8132")),
        [format!(
            "seed.defaultComponentSettings.konnectivityProxy.args: {list}: {unknown}"
        )]
    );
    assert_eq!(
        errors(&own("--agent-quic-port=8132")),
        [format!(
            "spec.componentsOverride.konnectivityProxy.args: {list}: {unknown}"
        )]
    );
    let found = errors(&own("--drain-timeout=soon"));
    assert!(found[0].contains("invalid argument"), "{found:?}");
    // The list of the Cluster replaces the list of the Seed.
    let both = format!("{}\n{}", seed("--agent-quic-port=8132"), own("--v=5"));
    for text in [both, seed("--graceful-shutdown-timeout=25s")] {
        assert_eq!(errors(&text), [""; 0], "{text}");
    }
}

#[test]
fn server_arguments_that_the_servers_do_not_know_are_errors() {
    let seed = |args: &str, more: &str| {
        format!(
            "{more}\nseed: {{defaultComponentSettings: {{konnectivityProxy: {{args: [{args}]}}}}}}"
        )
    };
    let errors = |args: &str, more: &str| check(&seed(args, more), None).0;
    let error = |args: &str, owner: &str, flag: &str| {
        format!(
            "seed.defaultComponentSettings.konnectivityProxy.args: Invalid value: [{args:?}]: {owner} get this list, and end \
             with \"unknown flag: {flag}\"; the agents of each Cluster without a list of its own get the list, too, so use \
             flags that both programs know"
        )
    };
    let drain = "--drain-timeout=20s";
    // The servers get the list of the Seed, also if the Cluster has a list of its own.
    let own = "spec: {componentsOverride: {konnectivityProxy: {args: [--v=5]}}}";
    for more in ["", "tunnel: openvpn", own] {
        assert_eq!(
            errors(drain, more),
            [error(drain, "the servers", "--drain-timeout")],
            "{more}"
        );
    }
    // The agents of OpenVPN get no list, and the servers get no list of the Cluster.
    assert_eq!(errors("--agent-quic-port=8132", "tunnel: openvpn"), [""; 0]);
    let own = "spec: {componentsOverride: {konnectivityProxy: {args: [--drain-timeout=20s]}}}";
    assert_eq!(errors("--v=5", own), [""; 0]);
    // Konnectivity's own servers know the flag from v0.35 on.
    let timeout = "--graceful-shutdown-timeout=25s";
    let images = |version: &str, server: &str| {
        format!("kubernetesVersion: {version}\nimages: {{server: '{server}'}}")
    };
    let refused = [error(
        timeout,
        "Konnectivity's own servers",
        "--graceful-shutdown-timeout",
    )];
    for (version, server) in [
        ("1.35.1", "stock"),
        ("1.36.3", "mirror.local:5000/a/proxy-server:v0.33.0"),
        ("1.36.3", "mirror.local/proxy-server:v0.34.0@sha256:0"),
    ] {
        let more = images(version, server);
        assert_eq!(errors(timeout, &more), refused, "{more}");
    }
    for (version, server) in [
        ("1.36.3", "stock"),
        ("1.33.1", "mirror.local/proxy-server:v0.35.0"),
        ("1.33.1", "mirror.local:5000/proxy-server@sha256:0"),
        ("1.33.1", "mirror.local/culvert-server:v0.1.0"),
    ] {
        let more = images(version, server);
        assert_eq!(errors(timeout, &more), [""; 0], "{more}");
    }
    let own = "--openvpn-network=10.0.0.0/24";
    let more = images("1.36.3", "stock");
    let found = errors(own, &more);
    assert!(
        found.contains(&error(
            own,
            "Konnectivity's own servers",
            "--openvpn-network"
        )),
        "{found:?}"
    );
}

#[test]
fn stock_agents_do_not_get_flags_that_only_our_agents_know() {
    let errors = |args: &str| {
        let more = "kubernetesVersion: 1.36.3\nimages: {agent: stock}";
        let list = format!("{{componentsOverride: {{konnectivityProxy: {{args: [{args}]}}}}}}");
        check(&format!("{more}\nspec: {list}"), None).0
    };
    for flag in ["--graceful-shutdown-timeout", "--drain-timeout"] {
        let found = errors(&format!("--v=5, {flag}=20s"));
        let end = format!(
            "Konnectivity's own agents get this list, and end with \"unknown flag: {flag}\"; a list of the Seed applies to each \
             Cluster without a list of its own"
        );
        assert!(found.len() == 1 && found[0].ends_with(&end), "{found:?}");
    }
    for accepted in ["--v=5", "--keepalive-time=2m, --sync-interval, 2s"] {
        assert_eq!(errors(accepted), [""; 0], "{accepted}");
    }
}

#[test]
fn flags_that_only_our_programs_know_are_marked_in_the_document() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(path.join("../../docs/compatibility.md")).unwrap();
    let marked = |title: &str| -> Vec<String> {
        let (_, section) = document.split_once(&format!("\n### {title}\n")).unwrap();
        let lines = section.lines().take_while(|line| !line.starts_with('#'));
        let rows = lines.filter_map(|line| line.strip_prefix("| `--")?.split_once("` | own |"));
        let names = rows.map(|(name, _)| name);
        let names = names.filter(|name| !name.starts_with(OPENVPN));
        names.map(str::to_owned).collect()
    };
    let logging = marked("Logging flags of both");
    for (title, flags) in [
        ("Server flags", OWN_SERVER_FLAGS),
        ("Agent flags", OWN_AGENT_FLAGS),
    ] {
        assert_eq!([marked(title), logging.clone()].concat(), flags, "{title}");
    }
}

#[test]
fn openvpn_networks_that_the_programs_refuse_are_errors() {
    let errors = |more: &str| check(&format!("tunnel: openvpn\n{more}"), None).0;
    for accepted in [
        "nodeAccessNetwork: 10.254.0.1/16",
        "nodeAccessNetwork: 10.0.0.0/8",
        "nodeNetworks: [10.0.0.1/16, 192.168.1.7]",
    ] {
        assert_eq!(errors(accepted), [""; 0], "{accepted}");
    }
    for network in ["10.254.0.0/24", "foo", "fd00::/8"] {
        let found = errors(&format!("nodeAccessNetwork: '{network}'"));
        let start = format!(
            "nodeAccessNetwork: Invalid value: {network:?}: is not an IPv4 network of /16 or larger; set a network such as"
        );
        assert!(
            found.len() == 1 && found[0].starts_with(&start),
            "{found:?}"
        );
    }
    for network in ["10.0.0.0/8", "fd00::/64", "foo"] {
        let found = errors(&format!("nodeNetworks: [10.1.0.0/16, '{network}']"));
        let start = format!(
            "nodeNetworks[1]: Invalid value: {network:?}: is neither an IPv4 address nor an IPv4 network of /16 or smaller"
        );
        assert!(
            found.len() == 1 && found[0].starts_with(&start),
            "{found:?}"
        );
    }
    // Agents of the Konnectivity tunnel do not get these values.
    let found = warnings("nodeAccessNetwork: foo\nnodeNetworks: [foo]");
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn node_ports_are_different_and_at_least_1024() {
    let ports = |ports: &str, strategy: &str| {
        check(
            &format!("nodePorts: {{{ports}}}\nspec: {{exposeStrategy: {strategy}}}"),
            None,
        )
    };
    let (errors, _) = ports("apiserver: 443, konnectivityServer: 31001", "NodePort");
    assert_eq!(
        errors,
        [
            "nodePorts.apiserver: Invalid value: 443: is below 1024; set the node port of the Service in the seed"
        ]
    );
    let (errors, _) = ports("apiserver: 31000, openvpnServer: 31000", "LoadBalancer");
    assert_eq!(
        errors,
        [
            "nodePorts.openvpnServer: Invalid value: 31000: is also the value of nodePorts.apiserver; each Service has its own node port"
        ]
    );
    let (errors, warnings) = ports("apiserver: 6443", "NodePort");
    assert_eq!(errors, [""; 0]);
    assert_eq!(
        warnings,
        [
            "nodePorts.apiserver: 6443: is outside of 30000-32767; the seed's --service-node-port-range must contain it"
        ]
    );
    assert_eq!(ports("apiserver: 443", "Tunneling"), (vec![], vec![]));
}

#[test]
fn numbers_of_replicas_have_a_lower_bound() {
    let errors = |text: &str| check(text, None).0;
    assert_eq!(
        errors("apiserverReplicas: -1"),
        ["apiserverReplicas: Invalid value: -1: must be at least 1"]
    );
    assert_eq!(
        errors("seed: {defaultComponentSettings: {apiserver: {replicas: 0}}}"),
        ["seed.defaultComponentSettings.apiserver.replicas: Invalid value: 0: must be at least 1"]
    );
    assert_eq!(
        errors("spec: {componentsOverride: {nodePortProxyEnvoy: {replicas: -1}}}"),
        [
            "spec.componentsOverride.nodePortProxyEnvoy.replicas: Invalid value: -1: must not be negative"
        ]
    );
}

#[test]
fn given_requests_do_not_exceed_given_limits() {
    let errors = |resources: &str| {
        let settings = format!("{{envoyAgent: {{resources: {resources}}}}}");
        check(&format!("spec: {{componentsOverride: {settings}}}"), None).0
    };
    let path = "spec.componentsOverride.envoyAgent.resources";
    assert_eq!(
        errors("{requests: {memory: 1Gi}, limits: {memory: 1G}}"),
        [format!(
            r#"{path}.requests.memory: Invalid value: "1Gi": is above the limit, 1G"#
        )]
    );
    assert_eq!(
        errors("{limits: {cpu: 2 cores}}"),
        [format!(
            r#"{path}.limits.cpu: Invalid value: "2 cores": is not a quantity, such as 100m or 64Mi"#
        )]
    );
    for accepted in [
        "{requests: {memory: 1024Mi, cpu: 1500m}, limits: {memory: 1Gi, cpu: 1.5}}",
        "{requests: {memory: 4Gi}}",
        "{limits: {memory: 1e9}}",
    ] {
        assert_eq!(errors(accepted), [""; 0], "{accepted}");
    }
}
