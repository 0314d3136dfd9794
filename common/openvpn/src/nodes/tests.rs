#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;

fn at(text: &str) -> SocketAddrV4 {
    text.parse().unwrap()
}

fn node(name: &str, internal: &str, external: &[&str], kubelet_port: u16) -> Node {
    Node {
        name: name.into(),
        internal: internal.parse().unwrap(),
        external: external.iter().map(|e| e.parse().unwrap()).collect(),
        kubelet_port,
    }
}

fn nodes(rewrite_others: bool) -> Nodes {
    Nodes::new(
        "10.254.0.0/16".parse().unwrap(),
        vec![
            "172.25.0.0/16".parse().unwrap(),
            "10.240.16.0/20".parse().unwrap(),
        ],
        rewrite_others,
    )
}

#[test]
fn kubelets_by_either_address_and_nothing_else() {
    let mut nodes = nodes(false);
    nodes.update(&[
        node("one", "10.1.1.11", &["192.0.2.101"], 0),
        node("two", "10.1.1.12", &[], 10255),
    ]);
    for dialed in ["10.1.1.11:10250", "192.0.2.101:10250"] {
        let through = nodes.translate(at(dialed));
        assert_eq!(through, at("10.254.1.11:10250"));
        assert_eq!(nodes.restore(through), Some(at("10.1.1.11:10250")));
    }
    assert_eq!(
        nodes.translate(at("10.1.1.12:10255")),
        at("10.254.1.12:10255")
    );
    for same in [
        "10.1.1.12:10250",
        "10.1.1.11:9100",
        "172.25.0.1:10250",
        "8.8.8.8:53",
    ] {
        assert_eq!(nodes.translate(at(same)), at(same));
    }
    assert_eq!(
        nodes.restore(at("10.254.1.11:9100")),
        Some(at("10.1.1.11:9100"))
    );
    assert_eq!(nodes.restore(at("10.254.9.9:10250")), None);
    assert_eq!(nodes.restore(at("10.1.1.11:10250")), None);
    nodes.update(&[]);
    assert_eq!(nodes.restore(at("10.254.1.11:9100")), None);
}

#[test]
fn without_a_list_what_is_no_pod_and_no_service_is_a_node() {
    let mut nodes = nodes(true);
    assert_eq!(
        nodes.translate(at("192.168.7.9:10250")),
        at("10.254.7.9:10250")
    );
    assert_eq!(
        nodes.translate(at("192.168.7.9:9100")),
        at("10.254.7.9:9100")
    );
    for same in ["172.25.3.4:443", "10.240.16.10:53", "10.254.7.9:10250"] {
        assert_eq!(nodes.translate(at(same)), at(same));
    }
    // An external address needs the list.
    nodes.update(&[node("one", "10.1.1.11", &["192.0.2.101"], 0)]);
    assert_eq!(
        nodes.translate(at("192.0.2.101:10250")),
        at("10.254.1.11:10250")
    );
}

#[test]
fn equal_last_octets_are_told() {
    let mut nodes = nodes(false);
    nodes.update(&[
        node("one", "10.1.1.11", &[], 0),
        node("other", "10.2.1.11", &[], 0),
        node("same", "10.1.1.11", &[], 10260),
    ]);
    assert_eq!(nodes.collisions(), [("one".to_owned(), "other".to_owned())]);
    assert_eq!(
        nodes.restore(at("10.254.1.11:10250")),
        Some(at("10.1.1.11:10250"))
    );
}
