//! NetworkPolicies as rules of iptables on the node. No plugin of the pod network enforces the objects.
//!
//! Supported: `podSelector` and `namespaceSelector` with `matchLabels`, `ipBlock` without exceptions, and ports with
//! numbers. Other fields end the test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::openvpn::Namespace;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::super::PATIENCE;
use super::super::kubectl::Kubectl;

/// Chain of all rules.
const CHAIN: &str = "POLICIES";

/// The rules, which follow all changes of policies and pods. Call [`Policies::stop`] to remove them.
pub(crate) struct Policies {
    kubectl: Kubectl,
    node: Namespace,
    /// Rules of the node.
    rules: Arc<Mutex<String>>,
    is_stopped: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Policies {
    /// Enforces all policies of a cluster with one node. The rules exist when the call returns.
    pub(crate) async fn enforce(kubectl: &Kubectl, node: &Namespace) -> Self {
        let first = rules(&objects(kubectl).await);
        node.restore(&first);
        for hook in ["FORWARD", "INPUT -i pods"] {
            node.iptables(&format!("-w -I {hook} -j {CHAIN}"));
        }
        let is_stopped = Arc::<AtomicBool>::default();
        let current = Arc::new(Mutex::new(first));
        let (client, network) = (kubectl.clone(), node.clone());
        let (stopped, shared) = (Arc::clone(&is_stopped), Arc::clone(&current));
        let task = tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(200)).await;
                let now = rules(&objects(&client).await);
                if now != *shared.lock() {
                    network.restore(&now);
                    *shared.lock() = now;
                }
            }
        });
        Self {
            kubectl: kubectl.clone(),
            node: node.clone(),
            rules: current,
            is_stopped,
            task,
        }
    }

    /// Waits until the rules are those of the current policies and pods. Connections that were opened before stay.
    pub(crate) async fn are_in_force(&self) {
        eventually("the rules follow the policies", PATIENCE, async || {
            let wanted = rules(&objects(&self.kubectl).await);
            *self.rules.lock() == wanted
        })
        .await;
    }

    /// Returns the number of packets from an address that its policies dropped.
    pub(crate) async fn dropped_from(&self, address: &str) -> u64 {
        let chain = chain("E", address);
        let listed = self
            .node
            .run("iptables", &format!("-w -nvxL {chain}"))
            .await;
        let listed = listed.unwrap_or_default();
        let drop = listed.lines().find(|line| line.contains("DROP"));
        let count = drop.and_then(|line| line.split_whitespace().next()?.parse().ok());
        count.unwrap_or(0)
    }

    /// Removes all rules.
    pub(crate) async fn stop(self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.task.await.expect("the task of the policies");
        for hook in ["FORWARD", "INPUT -i pods"] {
            self.node.iptables(&format!("-w -D {hook} -j {CHAIN}"));
        }
        self.node.iptables(&format!("-w -F {CHAIN}"));
    }
}

/// Returns the pods, namespaces and policies.
async fn objects(kubectl: &Kubectl) -> Vec<Value> {
    let list = kubectl
        .get(&["pods,namespaces,networkpolicies", "-A"])
        .await;
    let list = list.unwrap_or_default();
    list["items"].as_array().cloned().unwrap_or_default()
}

/// A pod with an address.
struct Pod<'a> {
    namespace: &'a str,
    labels: &'a Value,
    address: &'a str,
}

fn of<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |it| it["kind"] == kind)
}

/// Returns the input of `iptables-restore`.
fn rules(objects: &[Value]) -> String {
    let pods: Vec<Pod<'_>> = of(objects, "Pod")
        .filter(|pod| pod["spec"]["hostNetwork"] != true)
        .filter_map(|pod| {
            Some(Pod {
                namespace: pod["metadata"]["namespace"].as_str()?,
                labels: &pod["metadata"]["labels"],
                address: pod["status"]["podIP"].as_str()?,
            })
        })
        .collect();
    let (mut heads, mut lines) = (vec![format!(":{CHAIN} - [0:0]")], Vec::new());
    lines.push(format!(
        "-A {CHAIN} -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"
    ));
    for pod in &pods {
        let selecting = of(objects, "NetworkPolicy").filter(|policy| {
            policy["metadata"]["namespace"] == pod.namespace
                && selects(&policy["spec"]["podSelector"], pod.labels)
        });
        let selecting: Vec<&Value> = selecting.map(|policy| &policy["spec"]).collect();
        for (kind, rule, letter, own) in [
            ("Egress", "egress", "E", "-s"),
            ("Ingress", "ingress", "I", "-d"),
        ] {
            let applying = selecting.iter().filter(|spec| {
                let kinds = spec["policyTypes"].as_array().expect("policyTypes");
                kinds.iter().any(|it| it == kind)
            });
            let applying: Vec<_> = applying.collect();
            if applying.is_empty() {
                continue;
            }
            let chain = chain(letter, pod.address);
            heads.push(format!(":{chain} - [0:0]"));
            lines.push(format!("-A {CHAIN} {own} {} -j {chain}", pod.address));
            for spec in applying {
                for rule in spec[rule].as_array().into_iter().flatten() {
                    let matches = allowed(rule, letter, pod.namespace, objects, &pods);
                    lines.extend(matches.iter().map(|it| format!("-A {chain}{it} -j RETURN")));
                }
            }
            lines.push(format!("-A {chain} -j DROP"));
        }
    }
    format!(
        "*filter\n{}\n{}\nCOMMIT\n",
        heads.join("\n"),
        lines.join("\n")
    )
}

fn chain(letter: &str, address: &str) -> String {
    format!("{letter}-{address}")
}

/// Returns the matches of all packets that a rule allows.
fn allowed(
    rule: &Value,
    letter: &str,
    namespace: &str,
    objects: &[Value],
    pods: &[Pod<'_>],
) -> Vec<String> {
    let (peers, side) = match letter {
        "E" => (&rule["to"], "-d"),
        _ => (&rule["from"], "-s"),
    };
    let mut found = Vec::new();
    for peer in peers.as_array().into_iter().flatten() {
        if let Some(block) = peer["ipBlock"]["cidr"].as_str() {
            assert!(peer["ipBlock"]["except"].is_null(), "{peer}");
            found.push(format!(" {side} {block}"));
            continue;
        }
        let is_near = |pod: &&Pod<'_>| match &peer["namespaceSelector"] {
            Value::Null => pod.namespace == namespace,
            selector => of(objects, "Namespace").any(|it| {
                it["metadata"]["name"] == pod.namespace
                    && selects(selector, &it["metadata"]["labels"])
            }),
        };
        let chosen = pods.iter().filter(is_near);
        let chosen = chosen.filter(|pod| selects(&peer["podSelector"], pod.labels));
        found.extend(chosen.map(|pod| format!(" {side} {}", pod.address)));
    }
    if peers.is_null() {
        found.push(String::new());
    }
    let Some(ports) = rule["ports"].as_array() else {
        return found;
    };
    let with_port = |peer: &String, port: &Value| {
        assert!(port["endPort"].is_null(), "{port}");
        let number = port["port"].as_u64().expect("a port with a number");
        let protocol = port["protocol"].as_str().unwrap_or("TCP").to_lowercase();
        format!("{peer} -p {protocol} --dport {number}")
    };
    let each = found
        .iter()
        .flat_map(|peer| ports.iter().map(move |port| with_port(peer, port)));
    each.collect()
}

/// Returns true if a selector selects an object with these labels. A missing selector selects everything.
fn selects(selector: &Value, labels: &Value) -> bool {
    assert!(selector["matchExpressions"].is_null(), "{selector}");
    let wanted = selector["matchLabels"].as_object();
    wanted
        .into_iter()
        .flatten()
        .all(|(key, value)| labels[key] == *value)
}
