//! The ports of the load balancer's Service: kept by one replica of several, whatever the API does.

use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::kube_api::{Fault, KubeApi, Recorded, ServiceBuilder, service};
use culvert_tests::process::Signal;
use serde_json::{Value, json};

use crate::support::{Door, LIMIT};

const EXPOSE: &str = "nodeport-proxy.k8s.io/expose";
const NAMESPACE: &str = "kubermatic";
const NAME: &str = "nodeport-proxy";
const LEASE: &str = "nodeport-proxy-updater";
const HEALTHZ: &str = "healthz";
const LEADER: &str = "culvert_nodeport_proxy_leader";
const UPDATES: &str = "culvert_nodeport_proxy_balancer_updates_total";
const FAILURES: &str = "culvert_nodeport_proxy_balancer_failures_total";

/// Nobody else leads before the end of the test, unless the lease is given back.
const LONG: [&str; 2] = [
    "--leader-elect-lease-duration=2h",
    "--leader-elect-renew-deadline=1h",
];

/// The balancer as an operator creates it.
fn balancer() -> ServiceBuilder {
    service(NAMESPACE, NAME)
        .of_type("LoadBalancer")
        .node_port(HEALTHZ, 8002, 32002)
}

/// A Service with a node port that the balancer has to offer.
fn exposed(namespace: &str, name: &str, node_port: u16) -> ServiceBuilder {
    service(namespace, name)
        .node_port("secure", 443, node_port)
        .annotation(EXPOSE, "true")
}

/// A proxy that keeps the ports. What is in `flags` counts.
async fn replica(api: &KubeApi, flags: &[&str]) -> Door {
    let namespace = format!("-lb-namespace={NAMESPACE}");
    let name = format!("-lb-name={NAME}");
    let all = [
        "-update-loadbalancer",
        &namespace,
        &name,
        "-envoy-sni-port=0",
        "-envoy-tunneling-port=0",
        "-leader-elect-retry-period=100ms",
    ];
    Door::watching(api, &[&all, flags].concat()).await
}

async fn leads(door: &Door) -> bool {
    door.value(LEADER, &[]).await == 1.0
}

async fn comes_to_lead(door: &Door) {
    eventually("it leads", LIMIT, async || leads(door).await).await;
}

async fn failures(door: &Door, step: &str) -> f64 {
    door.value(FAILURES, &[("step", step)]).await
}

fn ports(api: &KubeApi) -> Vec<Value> {
    let balancer = api.get("services", NAMESPACE, NAME).unwrap();
    balancer["spec"]["ports"].as_array().unwrap().clone()
}

/// Waits until the balancer has ports with these names and no others.
async fn comes_to_have(api: &KubeApi, mut names: Vec<&str>) -> Vec<Value> {
    names.sort_unstable();
    let what = format!("the balancer has {names:?}");
    eventually(&what, LIMIT, async || {
        let ports = ports(api);
        let present: Vec<&str> = ports.iter().filter_map(|it| it["name"].as_str()).collect();
        let text = format!("{present:?}");
        (present == names).then_some(ports).ok_or(text)
    })
    .await
}

/// What was asked about Services by anything but GET.
fn writes(api: &KubeApi) -> Vec<Recorded> {
    let mut requests = api.requests();
    requests.retain(|request| request.method != "GET" && request.path.contains("/services"));
    requests
}

/// How often the balancer was read.
fn reads(api: &KubeApi) -> usize {
    let requests = api.requests();
    let path = format!("/services/{NAME}");
    let reads = requests
        .iter()
        .filter(|it| it.method == "GET" && it.path.contains(&path));
    reads.count()
}

fn lease_requests(api: &KubeApi) -> usize {
    let requests = api.requests();
    let leases = requests.iter().filter(|it| it.path.contains("/leases"));
    leases.count()
}

/// Waits until the lease was asked for so many times more, which takes 100 ms each at least.
async fn time_passes(api: &KubeApi, looks: usize) {
    let end = lease_requests(api) + looks;
    eventually("the lease is looked at", LIMIT, async || {
        lease_requests(api) >= end
    })
    .await;
}

fn holder(api: &KubeApi) -> String {
    let lease = api.get("leases", NAMESPACE, LEASE).unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn ports_come_and_go_and_nothing_else_is_touched() {
    let api = KubeApi::start().await;
    let mut before: Value = balancer()
        .node_port("cluster-a-old-443-30001", 30001, 31001)
        .node_port("secure", 443, 31443)
        .annotation("service.beta.kubernetes.io/aws-load-balancer-type", "nlb")
        .label("app", "nodeport-proxy")
        .into();
    before["metadata"]["finalizers"] = json!(["service.kubernetes.io/load-balancer-cleanup"]);
    before["spec"]["loadBalancerSourceRanges"] = json!(["10.0.0.0/8"]);
    before["spec"]["ofALaterVersion"] = json!({"a": [1, null, "b"]});
    before["spec"]["ports"][0]["appProtocol"] = json!("http");
    before["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
    let mut before = api.put("services", before);
    api.put("services", exposed("cluster-a", "old", 30001));
    for (name, annotation) in [("sni", "SNI"), ("both", "NodePort,SNI"), ("none", "")] {
        let service = service("cluster-a", name).node_port("secure", 443, 30010);
        api.put("services", service.annotation(EXPOSE, annotation));
    }

    let door = Door::watching(
        &api,
        &[
            "-update-loadbalancer",
            "-lb-namespace=kubermatic",
            "-lb-name=nodeport-proxy",
        ],
    )
    .await;
    let fixed = [HEALTHZ, "sni-listener", "tunneling-listener"];
    let with = |others: &[&'static str]| [&fixed, others].concat();
    let old = "cluster-a-old-443-30001";
    let now = comes_to_have(&api, with(&[old])).await;
    let (stats, sni) = (door.stats.port(), door.sni.port());
    let tunneling = door.tunneling.port();
    let expected = json!([
        {"name": old, "protocol": "TCP", "port": 30001, "targetPort": 30001, "nodePort": 31001},
        {"name": HEALTHZ, "protocol": "TCP", "port": stats, "targetPort": stats, "nodePort": 32002, "appProtocol": "http"},
        {"name": "sni-listener", "protocol": "TCP", "port": sni, "targetPort": sni},
        {"name": "tunneling-listener", "protocol": "TCP", "port": tunneling, "targetPort": tunneling},
    ]);
    assert_eq!(json!(now), expected);

    // What changes nothing of the ports is not written.
    api.put("services", service("cluster-b", "new").port("secure", 443));
    let mut edited = api.get("services", NAMESPACE, NAME).unwrap();
    edited["metadata"]["labels"]["team"] = json!("edge");
    let read = reads(&api);
    api.put("services", edited);
    eventually("it is looked at", LIMIT, async || reads(&api) > read).await;
    before["metadata"]["labels"]["team"] = json!("edge");
    api.put("services", exposed("cluster-b", "new", 30002));
    let new = "cluster-b-new-30002";
    let now = comes_to_have(&api, with(&[old, new])).await;
    let created = json!({"name": new, "protocol": "TCP", "port": 30002, "targetPort": 30002});
    assert!(now.contains(&created), "{now:?}");
    let unannotated = service("cluster-b", "new").node_port("secure", 443, 30002);
    api.put("services", unannotated);
    comes_to_have(&api, with(&[old])).await;
    api.delete("services", "cluster-a", "old");
    comes_to_have(&api, with(&[])).await;

    let writes = writes(&api);
    assert_eq!(writes.len(), 4, "{writes:#?}");
    let path = "/api/v1/namespaces/kubermatic/services/nodeport-proxy?";
    for write in &writes {
        assert_eq!(write.method, "PUT");
        assert!(write.path.starts_with(path), "{write:?}");
    }
    eventually("they are counted", LIMIT, async || {
        door.value(UPDATES, &[]).await == 4.0
    })
    .await;
    let mut after = api.get("services", NAMESPACE, NAME).unwrap();
    for object in [&mut before, &mut after] {
        object["spec"]["ports"] = json!(null);
        object["metadata"]["resourceVersion"] = json!(null);
    }
    assert_eq!(after, before);
}

#[tokio::test]
async fn one_namespace_can_have_its_own_balancer() {
    let api = KubeApi::start().await;
    let key = "nodeport-proxy.k8s.io/expose-namespaced";
    api.put(
        "services",
        service("cluster-a", "front").port("secure", 443),
    );
    for (namespace, annotation, node_port) in [
        ("cluster-a", key, 30001),
        ("cluster-b", key, 30002),
        ("cluster-a", EXPOSE, 30003),
    ] {
        let name = if annotation == key { "api" } else { "other" };
        let service = service(namespace, name).node_port("secure", 443, node_port);
        api.put("services", service.annotation(annotation, "true"));
    }
    let key = format!("-expose-annotation-key={key}");
    let own = [
        "-lb-namespace=cluster-a",
        "-lb-name=front",
        "-namespaced=true",
        &key,
    ];
    let _door = replica(&api, &own).await;
    eventually("its own Service has its port", LIMIT, async || {
        let front = api.get("services", "cluster-a", "front").unwrap();
        let ports = front["spec"]["ports"].as_array().unwrap();
        let names: Vec<&str> = ports.iter().filter_map(|it| it["name"].as_str()).collect();
        let text = format!("{names:?}");
        (names == ["cluster-a-api-30001", HEALTHZ])
            .then_some(())
            .ok_or(text)
    })
    .await;
    assert!(api.get("leases", "cluster-a", "front-updater").is_some());
}

#[tokio::test]
async fn what_somebody_else_does_to_the_balancer_is_undone() {
    let api = KubeApi::start().await;
    let door = replica(&api, &[]).await;
    // There is none yet.
    let line = door
        .program
        .wait_for_log("there is no Service", LIMIT)
        .await;
    assert!(line.contains("kubermatic/nodeport-proxy"), "{line}");
    api.put("services", exposed("cluster-a", "api", 30001));
    let names = || vec!["cluster-a-api-30001", HEALTHZ];
    for round in 0..3 {
        match round {
            1 => {
                api.delete("services", NAMESPACE, NAME);
            }
            // With the name of a port that is to be there, but not its number.
            2 => {
                let wrong = balancer().node_port("cluster-a-api-30001", 30009, 31001);
                api.put("services", wrong);
            }
            _ => {}
        }
        if round < 2 {
            api.put("services", balancer());
        }
        eventually("the ports are right", LIMIT, async || {
            let ports = ports(&api);
            let is_right = ports.iter().all(|it| it["port"] == it["targetPort"])
                && ports.iter().any(|it| it["port"] == 30001);
            (is_right && ports.len() == 2)
                .then_some(())
                .ok_or(format!("{ports:?}"))
        })
        .await;
        comes_to_have(&api, names()).await;
    }
    assert_eq!(ports(&api)[0]["nodePort"], 31001);
}

/// Of two replicas, the one that leads first.
async fn leader_and_follower(api: &KubeApi, flags: &[&str]) -> (Door, Door) {
    let one = replica(api, flags).await;
    let two = replica(api, flags).await;
    let first = eventually("one of the two leads", LIMIT, async || {
        match [leads(&one).await, leads(&two).await] {
            [true, false] => Ok(true),
            [false, true] => Ok(false),
            both => Err(format!("{both:?}")),
        }
    })
    .await;
    if first { (one, two) } else { (two, one) }
}

/// Waits until a replica has written the balancer: its port for health is its own.
async fn comes_to_write(api: &KubeApi, door: &Door) {
    eventually("the replica has written", LIMIT, async || {
        let ports = ports(api);
        let health = ports.iter().find(|port| port["name"] == HEALTHZ);
        health.is_some_and(|port| port["port"] == door.stats.port())
    })
    .await;
}

#[tokio::test]
async fn one_of_two_replicas_writes_and_hands_over_when_it_is_stopped() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let (mut leader, follower) = leader_and_follower(&api, &LONG).await;
    comes_to_write(&api, &leader).await;
    for number in 30001..30004 {
        let before = writes(&api).len();
        let name = format!("api-{number}");
        api.put("services", exposed("cluster-a", &name, number));
        eventually("it is written", LIMIT, async || writes(&api).len() > before).await;
    }
    time_passes(&api, 10).await;
    assert_eq!(writes(&api).len(), 4, "{:#?}", writes(&api));
    assert_eq!(follower.value(UPDATES, &[]).await, 0.0);
    assert!(!leads(&follower).await);
    let first = holder(&api);

    leader.program.signal(Signal::TERM);
    comes_to_write(&api, &follower).await;
    assert!(leads(&follower).await);
    assert_ne!(holder(&api), first);
    let lease = api.get("leases", NAMESPACE, LEASE).unwrap();
    assert_eq!(lease["spec"]["leaseTransitions"], 1);
    assert!(leader.program.wait_exit(LIMIT).await.success());
    // The last one gives it back, too.
    let mut follower = follower;
    follower.program.signal(Signal::TERM);
    assert!(follower.program.wait_exit(LIMIT).await.success());
    assert_eq!(holder(&api), "");
}

#[tokio::test]
async fn a_leader_that_is_killed_is_replaced_when_its_lease_ends() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let short = [
        "--leader-elect-lease-duration=6s",
        "--leader-elect-renew-deadline=4s",
    ];
    let (leader, follower) = leader_and_follower(&api, &short).await;
    comes_to_write(&api, &leader).await;
    let first = holder(&api);
    leader.program.kill();
    comes_to_lead(&follower).await;
    comes_to_write(&api, &follower).await;
    let second = holder(&api);
    assert_ne!(first, second);
    api.put("services", exposed("cluster-a", "api", 30001));
    comes_to_have(&api, vec!["cluster-a-api-30001", HEALTHZ]).await;
}

#[tokio::test]
async fn a_leader_that_can_not_renew_stops_writing() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let short = [
        "--leader-elect-lease-duration=3s",
        "--leader-elect-renew-deadline=1s",
    ];
    let door = replica(&api, &short).await;
    comes_to_write(&api, &door).await;
    api.fault(Fault::status(500).on("/leases"));
    eventually("it leads no more", LIMIT, async || !leads(&door).await).await;
    let before = writes(&api).len();
    api.put("services", exposed("cluster-a", "api", 30001));
    time_passes(&api, 10).await;
    assert_eq!(writes(&api).len(), before);
    assert!(failures(&door, "lease").await >= 10.0);
    // Routes do not depend on it.
    door.is_ready().await;
    api.clear_faults();
    comes_to_have(&api, vec!["cluster-a-api-30001", HEALTHZ]).await;
    comes_to_lead(&door).await;
}

#[tokio::test]
async fn errors_are_counted_and_the_ports_come_in_the_end() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let door = replica(&api, &LONG).await;
    comes_to_write(&api, &door).await;
    let name = format!("/services/{NAME}");
    let mut names = vec![HEALTHZ.to_owned()];
    let faults = [
        ("read", Fault::status(503).method("GET").on(&name)),
        ("write", Fault::status(409).method("PUT").on(&name)),
        ("write", Fault::status(429).method("PUT").on(&name)),
        ("write", Fault::status(500).method("PUT").on(&name)),
    ];
    for (number, (step, fault)) in (30001..).zip(faults) {
        let before = failures(&door, step).await;
        api.fault(fault.times(3));
        api.put("services", exposed("cluster-a", "api", number));
        names.resize(1, String::new());
        names.push(format!("cluster-a-api-{number}"));
        comes_to_have(&api, names.iter().map(String::as_str).collect()).await;
        assert_eq!(failures(&door, step).await, before + 3.0, "{step}");
    }
    // The API goes away in the middle of it all.
    api.fault(Fault::refuse());
    api.cut();
    api.put("services", exposed("cluster-b", "api", 30010));
    eventually("the source is down", LIMIT, async || {
        door.value("culvert_nodeport_proxy_source_up", &[]).await == 0.0
    })
    .await;
    api.clear_faults();
    names.push("cluster-b-api-30010".to_owned());
    comes_to_have(&api, names.iter().map(String::as_str).collect()).await;
}

#[tokio::test]
async fn a_write_never_replaces_what_it_has_not_read() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let door = replica(&api, &LONG).await;
    comes_to_write(&api, &door).await;
    let before = writes(&api).len();
    let slow = Fault::delay(Duration::from_secs(3)).method("PUT");
    api.fault(slow.on(&format!("/services/{NAME}")).times(1));
    api.put("services", exposed("cluster-a", "api", 30001));
    eventually("the write is on its way", LIMIT, async || {
        writes(&api).len() > before
    })
    .await;
    let mut edited = api.get("services", NAMESPACE, NAME).unwrap();
    edited["spec"]["loadBalancerSourceRanges"] = json!(["192.0.2.0/24"]);
    api.put("services", edited);
    comes_to_have(&api, vec!["cluster-a-api-30001", HEALTHZ]).await;
    let after = api.get("services", NAMESPACE, NAME).unwrap();
    let ranges = &after["spec"]["loadBalancerSourceRanges"];
    assert_eq!(*ranges, json!(["192.0.2.0/24"]));
    assert_eq!(failures(&door, "write").await, 1.0);
}

#[tokio::test]
async fn a_missing_permission_is_named_and_not_asked_for_all_the_time() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let forbidden = |method: &str, path: &str| Fault::status(403).method(method).on(path);
    api.fault(forbidden("GET", "/leases"));
    let door = replica(&api, &LONG).await;
    for (verb, next) in [
        (
            "get leases.coordination.k8s.io",
            forbidden("POST", "/leases"),
        ),
        (
            "create leases.coordination.k8s.io",
            forbidden("PUT", "/services/"),
        ),
    ] {
        let advice = format!("allow the account to {verb} in namespace {NAMESPACE}");
        door.program.wait_for_log(&advice, LIMIT).await;
        api.clear_faults();
        api.fault(next);
    }
    let advice = format!("allow the account to update services in namespace {NAMESPACE}");
    door.program.wait_for_log(&advice, LIMIT).await;
    time_passes(&api, 40).await;
    // Four seconds: after 0.2, 0.6, 1.4 and 3 s, and more only if the machine is slow.
    let asked = writes(&api).len();
    assert!((2..=10).contains(&asked), "{asked}");
    let told = door.program.log().matches(&advice).count();
    assert_eq!(told, 1, "each failure is told once");
    door.is_ready().await;
    api.clear_faults();
    comes_to_write(&api, &door).await;
}

#[tokio::test]
async fn without_the_flag_nothing_is_ever_written() {
    let api = KubeApi::start().await;
    let before = api.put("services", balancer());
    let names = ["-lb-namespace=kubermatic", "-lb-name=nodeport-proxy"];
    let mut door = Door::watching(&api, &names).await;
    door.program
        .wait_for_log("have no effect without --update-loadbalancer", LIMIT)
        .await;
    door.is_ready().await;
    api.put("services", exposed("cluster-a", "api", 30001));
    assert!(!leads(&door).await);
    door.program.signal(Signal::TERM);
    assert!(door.program.wait_exit(LIMIT).await.success());
    let requests = api.requests();
    assert!(requests.len() >= 2, "{requests:?}");
    assert!(
        requests.iter().all(|it| it.method == "GET"),
        "{requests:#?}"
    );
    let lease = requests.iter().find(|it| it.path.contains("lease"));
    assert_eq!(lease, None);
    assert_eq!(api.get("services", NAMESPACE, NAME), Some(before));
}
