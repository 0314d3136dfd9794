#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::super::annotations::EXPOSE_ANNOTATION;
use super::super::exposure::ServicePort;
use super::*;

/// Creates a Service in namespace `cluster` with one port, 443.
fn service(name: &str, expose: &str, node_port: u16) -> Service {
    Service {
        namespace: "cluster".to_owned(),
        name: name.to_owned(),
        uid: String::new(),
        created: 0,
        is_node_port: true,
        has_cluster_ip: true,
        annotations: [(EXPOSE_ANNOTATION.to_owned(), expose.to_owned())].into(),
        ports: vec![ServicePort {
            name: String::new(),
            is_tcp: true,
            port: 443,
            node_port,
        }],
    }
}

pub(crate) fn options() -> BalancerOptions {
    BalancerOptions {
        annotation: EXPOSE_ANNOTATION.to_owned(),
        sni_port: 0,
        sni_quic_port: 0,
        tunneling_port: 0,
        stats_port: 8002,
        namespace: None,
    }
}

fn port(name: &str, port: u16, node_port: u16) -> BalancerPort {
    let (name, target_port) = (name.to_owned(), port);
    BalancerPort {
        name,
        is_udp: false,
        port,
        target_port,
        node_port,
    }
}

#[test]
fn only_services_exposed_by_node_port_get_a_port() {
    let mut without_ip = service("a", "true", 30443);
    without_ip.has_cluster_ip = false;
    let mut without_annotation = service("b", "true", 30443);
    without_annotation.annotations.clear();
    let without_node_port = service("c", "true", 0);
    let others = ["", "SNI", "NodePort,SNI", " NodePort", "True"];
    let mut services = others.map(|value| service("d", value, 30443)).to_vec();
    services.extend([without_ip, without_annotation, without_node_port]);
    let ports = balancer_ports(services.iter(), &options(), false, &[]);
    assert_eq!(ports, [port("healthz", 8002, 0)]);
}

#[test]
fn existing_name_of_either_scheme_is_kept_with_its_node_port() {
    let services = [service("apiserver", "NodePort", 30443)];
    for (current, expected) in [
        (
            "cluster-apiserver-443-30443",
            port("cluster-apiserver-443-30443", 30443, 31443),
        ),
        (
            "cluster-apiserver-30443",
            port("cluster-apiserver-30443", 30443, 31443),
        ),
        (
            "cluster-apiserver",
            port("cluster-apiserver-30443", 30443, 0),
        ),
    ] {
        let current = [port(current, 30443, 31443), port("healthz", 8002, 32002)];
        let ports = balancer_ports(services.iter(), &options(), false, &current);
        assert_eq!(ports, [expected, port("healthz", 8002, 32002)]);
        assert_eq!(
            balancer_ports(services.iter(), &options(), false, &ports),
            ports
        );
    }
}

#[test]
fn listeners_for_names_and_connect_requests_get_ports() {
    let services = [service("apiserver", "true", 30443)];
    let options = BalancerOptions {
        sni_port: 6443,
        tunneling_port: 8088,
        ..options()
    };
    let expected = [
        port("cluster-apiserver-30443", 30443, 0),
        port("healthz", 8002, 0),
        port("sni-listener", 6443, 0),
        port("tunneling-listener", 8088, 0),
    ];
    assert_eq!(
        balancer_ports(services.iter(), &options, false, &[]),
        expected
    );
}

#[test]
fn udp_port_for_quic_is_included_on_request() {
    let options = BalancerOptions {
        sni_port: 6443,
        sni_quic_port: 6443,
        ..options()
    };
    let (tcp, mut udp) = (
        port("sni-listener", 6443, 30001),
        port("sni-quic-listener", 6443, 30002),
    );
    udp.is_udp = true;
    let current = [tcp.clone(), udp.clone()];
    let ports = |has_quic| balancer_ports([].iter(), &options, has_quic, &current);
    assert_eq!(ports(true), [port("healthz", 8002, 0), tcp.clone(), udp]);
    assert_eq!(ports(false), [port("healthz", 8002, 0), tcp]);
    let without = BalancerOptions {
        sni_quic_port: 0,
        ..options.clone()
    };
    assert_eq!(
        balancer_ports([].iter(), &without, true, &current),
        ports(false)
    );
}

#[test]
fn only_the_chosen_namespace_counts() {
    let services = [service("apiserver", "true", 30443)];
    for (namespace, count) in [("cluster", 2), ("other", 1)] {
        let namespace = Some(namespace.to_owned());
        let options = BalancerOptions {
            namespace,
            ..options()
        };
        assert_eq!(
            balancer_ports(services.iter(), &options, false, &[]).len(),
            count
        );
    }
}

#[test]
fn port_numbers_are_unique_and_the_order_of_services_does_not_matter() {
    let mut udp = service("dns", "true", 30053);
    udp.ports[0].is_tcp = false;
    let mut services = [udp, service("a", "true", 30053), service("b", "true", 8002)];
    let expected = [port("cluster-a-30053", 30053, 0), port("healthz", 8002, 0)];
    assert_eq!(
        balancer_ports(services.iter(), &options(), false, &[]),
        expected
    );
    services.reverse();
    assert_eq!(
        balancer_ports(services.iter(), &options(), false, &[]),
        expected
    );
    let alone = balancer_ports(services[2..].iter(), &options(), false, &[]);
    assert_eq!(alone[0].name, "cluster-dns-30053", "UDP has its port too");
}

#[test]
fn a_long_name_keeps_its_node_port() {
    let ports = balancer_ports(
        [service(&"x".repeat(63), "true", 30443)].iter(),
        &options(),
        false,
        &[],
    );
    assert_eq!(ports[0].name.len(), MAX_NAME);
    assert!(ports[0].name.ends_with("xx-30443"), "{ports:?}");
}
