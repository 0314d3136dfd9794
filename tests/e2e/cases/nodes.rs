//! Hundreds of nodes.

use serde_json::json;

use super::scale::create;
use crate::lab::Lab;
use crate::lab::nodes::{Nodes, external, name, node};

/// Number of nodes.
const COUNT: usize = 500;
/// Nodes with kubelets that the test dials: from the first list of the server, and from the watch.
const DIALED: [usize; 3] = [0, COUNT / 2, COUNT - 1];
/// Number of nodes that are deleted.
const DELETED: usize = 100;
/// Memory limit of the server in the rendered objects, in bytes.
const LIMIT: u64 = 200 << 20;

/// The server knows every node of a list and of a watch, within the memory of the rendered objects. kube-apiserver
/// reaches kubelets, and dials to ExternalIPs and names reach their nodes, also after changes.
pub(super) async fn server_follows_hundreds_of_nodes(lab: &mut Lab) {
    let objects = |from, to| (from..to).map(|at| node(at, external(at)));
    create(lab, &objects(0, COUNT / 2).collect::<Vec<_>>()).await;
    let nodes = Nodes::start(lab, &DIALED).await;
    nodes.are_known(lab, COUNT / 2).await;
    create(lab, &objects(COUNT / 2, COUNT).collect::<Vec<_>>()).await;
    nodes.are_known(lab, COUNT).await;
    for at in DIALED {
        let path = format!("--raw=/api/v1/nodes/{}/proxy/healthz", name(at));
        assert_eq!(lab.kubectl.must(&["get", &path]).await, "ok");
        for host in [external(at).to_string(), name(at)] {
            nodes.reaches(&host, at).await;
        }
    }
    let server = lab.server.as_ref().expect("a server");
    let memory = server.rss();
    println!("server: {} KiB with {COUNT} nodes", memory >> 10);
    assert!(memory < LIMIT, "{memory}");

    // The ExternalIP of a node moves to another node, after its owner was deleted.
    let doomed: Vec<String> = (1..=DELETED).map(name).collect();
    let mut delete = vec!["delete", "nodes", "--wait=false"];
    delete.extend(doomed.iter().map(String::as_str));
    lab.kubectl.must(&delete).await;
    nodes.are_known(lab, COUNT - DELETED).await;
    let [.., last] = DIALED;
    let moved = node(last, external(1));
    let patch = json!({"status": moved["status"]}).to_string();
    let name = name(last);
    let words = [
        "patch",
        "node",
        &name,
        "--subresource=status",
        "--type=merge",
    ];
    lab.kubectl
        .must(&[&words[..], &["-p", &patch]].concat())
        .await;
    nodes.reaches(&external(1).to_string(), last).await;
    nodes.are_known(lab, COUNT - DELETED).await;
    lab.stop_tunnel();
}
