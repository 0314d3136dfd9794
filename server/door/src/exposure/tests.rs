#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::super::annotations::EXPOSE_ANNOTATION;
use super::*;

/// Creates a Service in namespace `test`, of type `ClusterIP`.
fn service(name: &str, expose: &str, ports: &[ServicePort]) -> Service {
    Service {
        namespace: "test".to_owned(),
        name: name.to_owned(),
        uid: name.to_owned(),
        created: 1000,
        is_node_port: false,
        has_cluster_ip: true,
        annotations: [(EXPOSE_ANNOTATION.to_owned(), expose.to_owned())].into(),
        ports: ports.to_vec(),
    }
}

fn node_port_service(name: &str, expose: &str, ports: &[ServicePort]) -> Service {
    let mut service = service(name, expose, ports);
    service.is_node_port = true;
    service
}

fn sni_service(name: &str, mapping: &str, ports: &[ServicePort]) -> Service {
    let mut service = service(name, "SNI", ports);
    annotate(&mut service, PORT_MAPPING_ANNOTATION, mapping);
    service
}

fn annotate(service: &mut Service, key: &str, value: &str) {
    let annotations = &mut service.annotations;
    annotations.insert(key.to_owned(), value.to_owned());
}

fn port(name: &str, port: u16, node_port: u16) -> ServicePort {
    ServicePort {
        name: name.to_owned(),
        is_tcp: true,
        port,
        node_port,
    }
}

/// Creates a slice with one ready endpoint for each address.
fn slice(service: &str, ports: &[(&str, u16)], addresses: &[&str]) -> Slice {
    let port = |&(name, port): &(&str, u16)| (name.to_owned(), port);
    Slice {
        namespace: "test".to_owned(),
        service: service.to_owned(),
        ports: ports.iter().map(port).collect(),
        ready: addresses.iter().map(|ip| ip.parse().unwrap()).collect(),
    }
}

/// Creates a slice with one endpoint at `172.16.0.1:8443`, for the port `https`.
fn https_slice(service: &str) -> Slice {
    slice(service, &[("https", 8443)], &["172.16.0.1"])
}

fn options() -> Options {
    Options {
        annotation: EXPOSE_ANNOTATION.to_owned(),
        server_names: true,
        authorities: true,
    }
}

/// Returns the routes as lines of text, and the problems.
fn plan(services: &[Service], slices: &[Slice], options: &Options) -> (Vec<String>, Vec<String>) {
    let (routes, problems) = expose(services.iter(), slices.iter(), options);
    let mut lines = Vec::new();
    for (key, backend) in &routes.upstreams {
        let endpoints = backend.endpoints.iter().map(ToString::to_string);
        let mut texts: Vec<String> = endpoints.collect();
        texts.extend(backend.header.map(|version| format!("{version:?}")));
        let allowed = backend.allowed.as_ref();
        texts.extend(allowed.map(|networks| format!("from [{networks}]")));
        lines.push(format!("{key} = {}", texts.join(" ")));
    }
    let node_ports = routes.node_ports.iter();
    lines.extend(node_ports.map(|(port, key)| format!("{port} -> {key}")));
    for names in [&routes.server_names, &routes.authorities] {
        lines.extend(names.iter().map(|(name, key)| format!("{name} -> {key}")));
    }
    (lines, problems)
}

/// Returns the routes of Services without problems.
fn routes(services: &[Service], slices: &[Slice]) -> Vec<String> {
    let (routes, problems) = plan(services, slices, &options());
    assert!(problems.is_empty(), "{problems:?}");
    routes
}

#[test]
fn a_node_port_service_listens_for_each_of_its_ports() {
    let ports = [port("https", 443, 32000), port("http", 80, 32001)];
    let slice = slice(
        "a",
        &[("https", 8443), ("http", 8080)],
        &["172.16.0.2", "172.16.0.1"],
    );
    for expose in ["true", "NodePort"] {
        let services = [node_port_service("a", expose, &ports)];
        let expected = [
            "test/a-http = 172.16.0.1:8080 172.16.0.2:8080",
            "test/a-https = 172.16.0.1:8443 172.16.0.2:8443",
            "32000 -> test/a-https",
            "32001 -> test/a-http",
        ];
        assert_eq!(routes(&services, std::slice::from_ref(&slice)), expected);
    }
}

#[test]
fn endpoint_that_is_not_ready_is_left_out() {
    let services = [node_port_service(
        "a",
        "NodePort",
        &[port("http", 80, 32001)],
    )];
    let mut slices = [slice("a", &[("http", 8080)], &["172.16.0.1", "172.16.0.2"])];
    slices[0].ready.pop();
    let expected = ["test/a-http = 172.16.0.1:8080", "32001 -> test/a-http"];
    assert_eq!(routes(&services, &slices), expected);
    slices[0].ready.pop();
    assert!(routes(&services, &slices).is_empty());
}

#[test]
fn a_service_needs_the_annotation_and_pods() {
    let ports = [port("http", 80, 32001)];
    let mut services = [node_port_service("a", "NodePort", &ports)];
    assert!(routes(&services, &[]).is_empty());
    assert!(routes(&services, &[slice("b", &[("http", 8080)], &["172.16.0.1"])]).is_empty());

    let slices = [slice("a", &[("http", 8080)], &["172.16.0.1"])];
    services[0].annotations.clear();
    assert!(routes(&services, &slices).is_empty());

    let annotation = "example.com/expose".to_owned();
    annotate(&mut services[0], &annotation, "true");
    let options = Options {
        annotation,
        ..options()
    };
    assert_eq!(plan(&services, &slices, &options).0.len(), 2);
}

#[test]
fn endpoints_come_from_all_slices_of_both_families_and_each_once() {
    let services = [service("a", "Tunneling", &[port("https", 443, 0)])];
    let mut other = slice("a", &[("https", 8443)], &["172.16.0.9"]);
    other.namespace = "other".to_owned();
    let slices = [
        slice("a", &[("https", 8443)], &["fd00::1", "172.16.0.2"]),
        slice("a", &[("https", 9443), ("http", 80)], &["172.16.0.1"]),
        slice("a", &[("https", 8443)], &["172.16.0.2"]),
        other,
    ];
    let expected = [
        "test/a-https = 172.16.0.1:9443 172.16.0.2:8443 [fd00::1]:8443",
        "a.test.svc.cluster.local:443 -> test/a-https",
    ];
    assert_eq!(routes(&services, &slices), expected);
}

#[test]
fn port_without_a_name_uses_all_tcp_ports_of_the_endpoints() {
    let services = [sni_service("a", r#"{"": "host.com"}"#, &[port("", 443, 0)])];
    let slices = [slice("a", &[("", 8443), ("x", 80)], &["172.16.0.1"])];
    let expected = [
        "test/a = 172.16.0.1:80 172.16.0.1:8443",
        "host.com -> test/a",
    ];
    assert_eq!(routes(&services, &slices), expected);
}

#[test]
fn a_port_without_endpoints_is_not_served() {
    let ports = [port("https", 443, 32000), port("http", 80, 32001)];
    let services = [node_port_service("a", "NodePort,Tunneling", &ports)];
    let slices = [https_slice("a")];
    let expected = [
        "test/a-https = 172.16.0.1:8443",
        "32000 -> test/a-https",
        "a.test.svc.cluster.local:443 -> test/a-https",
    ];
    assert_eq!(routes(&services, &slices), expected);
}

#[test]
fn server_names_lead_to_the_mapped_ports_only() {
    let ports = [
        port("http", 80, 0),
        port("https", 8080, 0),
        port("admin", 6443, 0),
    ];
    let targets = [("http", 8080), ("https", 8443), ("admin", 6443)];
    let slices = [slice("a", &targets, &["172.16.0.1", "172.16.0.2"])];
    let one = [sni_service("a", r#"{"https": "host.com"}"#, &ports)];
    let expected = [
        "test/a-https = 172.16.0.1:8443 172.16.0.2:8443",
        "host.com -> test/a-https",
    ];
    assert_eq!(routes(&one, &slices), expected);

    let mapping = r#"{"https": "Host.com", "admin": "*.admin.host.com"}"#;
    let two = [sni_service("a", mapping, &ports)];
    let expected = [
        "test/a-admin = 172.16.0.1:6443 172.16.0.2:6443",
        "test/a-https = 172.16.0.1:8443 172.16.0.2:8443",
        "*.admin.host.com -> test/a-admin",
        "host.com -> test/a-https",
    ];
    assert_eq!(routes(&two, &slices), expected);
    assert!(routes(&[sni_service("a", "{}", &ports)], &slices).is_empty());
}

#[test]
fn tunneling_and_sni_share_an_upstream_and_need_their_listeners() {
    let mut service = service("a", "SNI, Tunneling", &[port("https", 443, 0)]);
    annotate(
        &mut service,
        PORT_MAPPING_ANNOTATION,
        r#"{"https": "host.com"}"#,
    );
    let services = [service];
    let slices = [https_slice("a")];
    let upstream = "test/a-https = 172.16.0.1:8443";
    let name = "host.com -> test/a-https";
    let authority = "a.test.svc.cluster.local:443 -> test/a-https";
    for (server_names, authorities, expected) in [
        (true, true, vec![upstream, name, authority]),
        (true, false, vec![upstream, name]),
        (false, true, vec![upstream, authority]),
        (false, false, vec![]),
    ] {
        let options = Options {
            server_names,
            authorities,
            ..options()
        };
        let (lines, problems) = plan(&services, &slices, &options);
        assert_eq!(lines, expected);
        assert!(problems.is_empty(), "{problems:?}");
    }
}

#[test]
fn the_older_service_keeps_a_host_name_whatever_the_order() {
    let ports = [port("https", 443, 0), port("admin", 444, 0)];
    let targets = [("https", 8443), ("admin", 8444)];
    let mapping = r#"{"https": "Host.com", "admin": "admin.host.com"}"#;
    let mut newer = sni_service("newer", mapping, &ports);
    newer.created = 2000;
    annotate(&mut newer, EXPOSE_ANNOTATION, "SNI,Tunneling");
    let older = sni_service("older", r#"{"https": "host.com"}"#, &ports);
    let mut slices = [
        slice("newer", &targets[..1], &["172.16.0.1"]),
        slice("older", &targets, &["172.16.0.2"]),
    ];
    let expected = [
        "test/newer-https = 172.16.0.1:8443",
        "test/older-https = 172.16.0.2:8443",
        "host.com -> test/older-https",
        "newer.test.svc.cluster.local:443 -> test/newer-https",
    ];
    let problem = "Service test/newer: host name \"host.com\" is already taken by Service \
                   test/older, so none of this Service's host names is served: change annotation \
                   nodeport-proxy.k8s.io/port-mapping of one of the two Services";
    for services in [
        [newer.clone(), older.clone()],
        [older.clone(), newer.clone()],
    ] {
        let (lines, problems) = plan(&services, &slices, &options());
        assert_eq!(lines, expected);
        assert_eq!(problems, [problem]);
    }

    // Without a ready endpoint the older Service reserves nothing.
    slices[1].ready.pop();
    let lines = routes(&[newer, older], &slices);
    assert!(
        lines.contains(&"host.com -> test/newer-https".to_owned()),
        "{lines:?}"
    );
}

#[test]
fn services_created_in_the_same_second_are_ordered_by_uid() {
    let ports = [port("https", 443, 0)];
    let mapping = r#"{"https": "host.com"}"#;
    let mut first = sni_service("z", mapping, &ports);
    first.uid = "a".to_owned();
    let mut second = sni_service("a", mapping, &ports);
    second.uid = "b".to_owned();
    let slices = ["a", "z"].map(https_slice);
    let (lines, problems) = plan(&[second, first], &slices, &options());
    assert_eq!(lines[1], "host.com -> test/z-https");
    assert!(problems[0].starts_with("Service test/a: "), "{problems:?}");
}

#[test]
fn bad_mapping_disables_server_names_but_not_tunneling() {
    let slices = [https_slice("a")];
    let mut udp = port("dns", 53, 0);
    udp.is_tcp = false;
    for (mapping, hint) in [
        (
            r#"{"http": "host.com"}"#,
            r#""http" is not the name of a TCP port of the Service; it has ["https"]"#,
        ),
        (
            r#"{"dns": "host.com"}"#,
            r#""dns" is not the name of a TCP port"#,
        ),
        (
            r#"{"https": "no name"}"#,
            r#""no name" of port "https" is not a DNS name"#,
        ),
        ("{sdf: a}", "it has to be a JSON object"),
    ] {
        let mut service = service("a", "SNI,Tunneling", &[port("https", 443, 0), udp.clone()]);
        annotate(&mut service, PORT_MAPPING_ANNOTATION, mapping);
        let (lines, problems) = plan(&[service], &slices, &options());
        assert_eq!(lines[1..], ["a.test.svc.cluster.local:443 -> test/a-https"]);
        assert_eq!(problems.len(), 1);
        let start = format!("Service test/a: annotation {PORT_MAPPING_ANNOTATION}: {hint}");
        assert!(problems[0].starts_with(&start), "{problems:?}");
    }
}

#[test]
fn mistakes_are_reported_before_there_are_pods() {
    let ports = [port("https", 443, 32000)];
    let services = [
        service("c", "tru", &ports),
        service("b", "NodePort", &ports),
        service("a", "SNI", &ports),
    ];
    let (lines, problems) = plan(&services, &[], &options());
    assert!(lines.is_empty());
    assert_eq!(problems.len(), 3);
    for (problem, hint) in problems.iter().zip([
        "Service test/a: annotation nodeport-proxy.k8s.io/port-mapping: it is missing",
        "Service test/b: annotation nodeport-proxy.k8s.io/expose asks for NodePort, but",
        "Service test/c: annotation nodeport-proxy.k8s.io/expose: \"tru\" is not accepted",
    ]) {
        assert!(problem.starts_with(hint), "{problem}");
    }
}

#[test]
fn service_of_another_type_gets_no_node_port_but_its_other_routes() {
    let services = [service(
        "a",
        "NodePort,Tunneling",
        &[port("https", 443, 32000)],
    )];
    let slices = [https_slice("a")];
    let (lines, problems) = plan(&services, &slices, &options());
    assert_eq!(lines[1..], ["a.test.svc.cluster.local:443 -> test/a-https"]);
    assert_eq!(problems.len(), 1);
}

#[test]
fn udp_ports_are_ignored() {
    let mut udp = port("udp", 1025, 32000);
    udp.is_tcp = false;
    let services = [node_port_service(
        "a",
        "NodePort,Tunneling",
        std::slice::from_ref(&udp),
    )];
    let mut slices = [slice("a", &[("udp", 1025)], &["172.16.0.1"])];
    assert!(routes(&services, &slices).is_empty());

    slices[0].ports.clear();
    udp.is_tcp = true;
    let services = [node_port_service("a", "NodePort,Tunneling", &[udp])];
    assert!(routes(&services, &slices).is_empty());
}

#[test]
fn the_older_service_keeps_a_node_port() {
    let ports = [port("https", 443, 32000)];
    let mut newer = node_port_service("a", "true", &ports);
    newer.created = 2000;
    let services = [newer, node_port_service("b", "true", &ports)];
    let slices = ["a", "b"].map(https_slice);
    let (lines, problems) = plan(&services, &slices, &options());
    assert_eq!(
        lines,
        ["test/b-https = 172.16.0.1:8443", "32000 -> test/b-https"]
    );
    assert!(
        problems[0].starts_with("Service test/a: node port 32000"),
        "{problems:?}"
    );
    assert!(problems[0].contains("test/b-https"), "{problems:?}");
}

#[test]
fn two_ports_with_equal_keys_do_not_mix() {
    let mut newer = service("a", "Tunneling", &[port("b-c", 443, 0)]);
    newer.created = 2000;
    let services = [newer, service("a-b", "Tunneling", &[port("c", 443, 0)])];
    let slices = [
        slice("a", &[("b-c", 8443)], &["172.16.0.1"]),
        slice("a-b", &[("c", 8443)], &["172.16.0.2"]),
    ];
    let (lines, problems) = plan(&services, &slices, &options());
    let expected = [
        "test/a-b-c = 172.16.0.2:8443",
        "a-b.test.svc.cluster.local:443 -> test/a-b-c",
    ];
    assert_eq!(lines, expected);
    assert!(
        problems[0].starts_with("Service test/a: port \"b-c\" is not served"),
        "{problems:?}"
    );
}

#[test]
fn conditions_of_a_service_come_from_its_annotations() {
    let ports = [port("https", 443, 32000)];
    let slices = [https_slice("a")];
    let conditions = |networks: Option<&str>, version: Option<&str>| {
        let mut service = node_port_service("a", "NodePort", &ports);
        for (key, value) in [
            (ALLOWED_NETWORKS_ANNOTATION, networks),
            (PROXY_PROTOCOL_ANNOTATION, version),
        ] {
            if let Some(value) = value {
                annotate(&mut service, key, value);
            }
        }
        let (lines, problems) = plan(&[service], &slices, &options());
        let start = "test/a-https = 172.16.0.1:8443";
        let conditions = lines[0].strip_prefix(start).unwrap().to_owned();
        assert_eq!(lines[1], "32000 -> test/a-https");
        (conditions, problems.concat())
    };
    let good = |networks, version| {
        let (conditions, problems) = conditions(networks, version);
        assert_eq!(problems, "");
        conditions
    };
    assert_eq!(good(None, None), "");
    assert_eq!(good(None, Some("v1")), " V1");
    let networks = Some("192.0.2.0/24, 2001:db8::1");
    let expected = " V2 from [192.0.2.0/24,2001:db8::1/128]";
    assert_eq!(good(networks, Some("v2")), expected);
    // A wrong annotation permits no client.
    for networks in ["", "192.0.2.0/24,", "192.0.2.0/33", "example.com"] {
        let (conditions, problem) = conditions(Some(networks), None);
        assert_eq!(conditions, " from []", "{networks:?}");
        let named = problem.contains(ALLOWED_NETWORKS_ANNOTATION);
        assert!(named && problem.contains("is not a network"), "{problem}");
    }
    for version in ["", "V2", "3"] {
        let (conditions, problem) = conditions(Some("192.0.2.0/24"), Some(version));
        assert_eq!(conditions, " from []", "{version:?}");
        assert!(problem.contains(PROXY_PROTOCOL_ANNOTATION), "{problem}");
    }
}

#[test]
fn quic_port_comes_from_the_annotation_and_needs_a_server_name() {
    let ports = [port("https", 443, 0), port("other", 444, 0)];
    let slices = [slice(
        "a",
        &[("https", 8443), ("other", 8444)],
        &["172.16.0.1"],
    )];
    let quic_of = |value: &str| {
        let mut service = sni_service("a", r#"{"https": "a.example.com"}"#, &ports);
        annotate(&mut service, EXPOSE_ANNOTATION, "SNI,Tunneling");
        annotate(&mut service, QUIC_PORT_ANNOTATION, value);
        let (routes, problems) = expose([service].iter(), slices.iter(), &options());
        let backend = |port| &routes.upstreams[&UpstreamKey::of_service("test", "a", port)];
        assert_eq!(backend("other").quic_port, None);
        let https = backend("https");
        let address = https.quic_address(https.endpoints[0]);
        (address.map(|address| address.port()), problems.concat())
    };
    assert_eq!(quic_of("same"), (Some(8443), String::new()));
    assert_eq!(quic_of("8133"), (Some(8133), String::new()));
    for wrong in ["", "0", "65536", "Same", "true"] {
        let (port, problem) = quic_of(wrong);
        assert_eq!(port, None);
        let named = problem.contains(QUIC_PORT_ANNOTATION) && problem.contains("expected");
        assert!(named, "{problem}");
    }
}

#[test]
fn equal_keys_with_different_conditions_are_not_merged() {
    let mut open = node_port_service("a-b", "NodePort", &[port("c", 443, 32000)]);
    let mut closed = node_port_service("a", "NodePort", &[port("b-c", 443, 32001)]);
    (open.created, closed.created) = (2, 1);
    annotate(&mut closed, ALLOWED_NETWORKS_ANNOTATION, "192.0.2.0/24");
    let slices = [
        slice("a-b", &[("c", 443)], &["172.16.0.1"]),
        slice("a", &[("b-c", 443)], &["172.16.0.1"]),
    ];
    let (lines, problems) = plan(&[open, closed], &slices, &options());
    let expected = [
        "test/a-b-c = 172.16.0.1:443 from [192.0.2.0/24]",
        "32001 -> test/a-b-c",
    ];
    assert_eq!(lines, expected);
    assert_eq!(problems.len(), 1, "{problems:?}");
}
