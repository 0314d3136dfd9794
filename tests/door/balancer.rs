//! The ports of the load balancer's Service: one replica of several keeps them current, even if the API fails.

use std::io::ErrorKind;
use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::kube_api::{Fault, KubeApi, Recorded, ServiceBuilder, service};
use culvert_tests::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::support::{Door, LIMIT};

const EXPOSE: &str = "nodeport-proxy.k8s.io/expose";
const NAMESPACE: &str = "kubermatic";
const NAME: &str = "nodeport-proxy";
const LEASE: &str = "nodeport-proxy-updater";
const HEALTHZ: &str = "healthz";
const LEADER: &str = "culvert_nodeport_proxy_leader";
const UPDATES: &str = "culvert_nodeport_proxy_balancer_updates_total";
const FAILURES: &str = "culvert_nodeport_proxy_balancer_failures_total";

/// Flags with lease times longer than a test. Another replica leads only after the leader has released the
/// lease.
const LONG: [&str; 2] = [
    "--leader-elect-lease-duration=2h",
    "--leader-elect-renew-deadline=1h",
];

/// Returns the load balancer's Service as an operator creates it.
fn balancer() -> ServiceBuilder {
    service(NAMESPACE, NAME)
        .of_type("LoadBalancer")
        .node_port(HEALTHZ, 8002, 32002)
}

/// Returns a Service with a node port that the load balancer must offer.
fn exposed(namespace: &str, name: &str, node_port: u16) -> ServiceBuilder {
    service(namespace, name)
        .node_port("secure", 443, node_port)
        .annotation(EXPOSE, "true")
}

/// Starts a proxy that keeps the load balancer's ports current. `flags` override the flags set here.
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
    eventually("the replica leads", LIMIT, async || leads(door).await).await;
}

async fn failures(door: &Door, step: &str) -> f64 {
    door.value(FAILURES, &[("step", step)]).await
}

fn ports(api: &KubeApi) -> Vec<Value> {
    let balancer = api.get("services", NAMESPACE, NAME).unwrap();
    balancer["spec"]["ports"].as_array().unwrap().clone()
}

/// Waits until the load balancer has exactly the ports with these names, and returns the ports.
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

/// Returns the recorded requests for Services, except GET requests.
fn writes(api: &KubeApi) -> Vec<Recorded> {
    let mut requests = api.requests();
    requests.retain(|request| request.method != "GET" && request.path.contains("/services"));
    requests
}

/// Returns the number of times that the load balancer's Service was read.
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

/// Waits for `looks` more requests for the lease. There are at least 100 ms between two requests.
async fn time_passes(api: &KubeApi, looks: usize) {
    let end = lease_requests(api) + looks;
    eventually("more requests for the lease arrive", LIMIT, async || {
        lease_requests(api) >= end
    })
    .await;
}

fn holder(api: &KubeApi) -> String {
    let lease = api.get("leases", NAMESPACE, LEASE).unwrap();
    lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn ports_follow_services_and_other_fields_stay_unchanged() {
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

    // Changes that do not affect the ports cause no write.
    api.put("services", service("cluster-b", "new").port("secure", 443));
    let mut edited = api.get("services", NAMESPACE, NAME).unwrap();
    edited["metadata"]["labels"]["team"] = json!("edge");
    let read = reads(&api);
    api.put("services", edited);
    eventually("another read", LIMIT, async || reads(&api) > read).await;
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
    eventually("the updates are counted", LIMIT, async || {
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
async fn arguments_of_lb_updater_keep_the_ports_current_without_a_lease() {
    let api = KubeApi::start().await;
    // The account of the stock program has no access to leases, and before KKP 2.30 none to EndpointSlices.
    api.fault(Fault::status(403).on("/leases"));
    api.fault(Fault::status(403).on("/endpointslices"));
    api.put("services", balancer());
    api.put("services", exposed("cluster-a", "old", 30001));
    let flags = ["-lb-namespace=kubermatic", "-lb-name=nodeport-proxy"];
    let door = Door::watching(&api, &flags).await;
    let fixed = [HEALTHZ, "sni-listener", "tunneling-listener"];
    comes_to_have(&api, [&fixed[..], &["cluster-a-old-30001"]].concat()).await;
    assert!(leads(&door).await);
    api.delete("services", "cluster-a", "old");
    comes_to_have(&api, fixed.to_vec()).await;
    assert_eq!(lease_requests(&api), 0);
    door.is_ready().await;
    let requests = api.requests();
    let slices = requests.iter().find(|it| it.path.contains("slices"));
    assert_eq!(slices, None);
    for listener in [door.sni, door.tunneling] {
        let error = TcpStream::connect(listener).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    }
}

#[tokio::test]
async fn arguments_of_lb_updater_for_one_cluster_need_access_to_one_namespace_only() {
    let api = KubeApi::start().await;
    for resource in ["services", "endpointslices"] {
        api.fault(Fault::status(403).on(&format!("/v1/{resource}")));
    }
    let key = "nodeport-proxy.k8s.io/expose-namespaced";
    let front = service("cluster-a", "front").of_type("LoadBalancer");
    api.put("services", front.port("secure", 443));
    let node_port = service("cluster-a", "api").node_port("secure", 443, 30001);
    api.put("services", node_port.annotation(key, "true"));
    let annotation = format!("-expose-annotation-key={key}");
    let flags = [
        "-lb-namespace=cluster-a",
        "-lb-name=front",
        &annotation,
        "-namespaced=true",
        "-envoy-sni-port=0",
        "-envoy-tunneling-port=0",
    ];
    let _door = Door::watching(&api, &flags).await;
    let what = "the balancer of the namespace has the port";
    eventually(what, LIMIT, async || {
        let front = api.get("services", "cluster-a", "front").unwrap();
        let ports = front["spec"]["ports"].to_string();
        let has_port = ports.contains("cluster-a-api-30001");
        has_port.then_some(()).ok_or(ports)
    })
    .await;
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
async fn foreign_changes_to_the_balancer_are_undone() {
    let api = KubeApi::start().await;
    let door = replica(&api, &[]).await;
    // The Service does not exist yet.
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
            // A port with the right name and a wrong number.
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

/// Starts two replicas and returns the leader first.
async fn leader_and_follower(api: &KubeApi, flags: &[&str]) -> (Door, Door) {
    let one = replica(api, flags).await;
    let two = replica(api, flags).await;
    let first = eventually("one of the two replicas leads", LIMIT, async || {
        match [leads(&one).await, leads(&two).await] {
            [true, false] => Ok(true),
            [false, true] => Ok(false),
            both => Err(format!("{both:?}")),
        }
    })
    .await;
    if first { (one, two) } else { (two, one) }
}

/// Waits until the replica `door` has written the Service: the Service then has the replica's port for health.
async fn comes_to_write(api: &KubeApi, door: &Door) {
    eventually("the replica has written", LIMIT, async || {
        let ports = ports(api);
        let health = ports.iter().find(|port| port["name"] == HEALTHZ);
        health.is_some_and(|port| port["port"] == door.stats.port())
    })
    .await;
}

#[tokio::test]
async fn only_the_leader_writes_and_a_stopped_leader_hands_over() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let (mut leader, follower) = leader_and_follower(&api, &LONG).await;
    comes_to_write(&api, &leader).await;
    for number in 30001..30004 {
        let before = writes(&api).len();
        let name = format!("api-{number}");
        api.put("services", exposed("cluster-a", &name, number));
        eventually("another write", LIMIT, async || writes(&api).len() > before).await;
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
    // The last replica releases the lease, too.
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
async fn a_leader_that_cannot_renew_its_lease_stops_writing() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let short = [
        "--leader-elect-lease-duration=3s",
        "--leader-elect-renew-deadline=1s",
    ];
    let door = replica(&api, &short).await;
    comes_to_write(&api, &door).await;
    api.fault(Fault::status(500).on("/leases"));
    eventually("no longer leads", LIMIT, async || !leads(&door).await).await;
    let before = writes(&api).len();
    api.put("services", exposed("cluster-a", "api", 30001));
    time_passes(&api, 10).await;
    assert_eq!(writes(&api).len(), before);
    assert!(failures(&door, "lease").await >= 10.0);
    // Routes do not depend on the lease.
    door.is_ready().await;
    api.clear_faults();
    comes_to_have(&api, vec!["cluster-a-api-30001", HEALTHZ]).await;
    comes_to_lead(&door).await;
}

#[tokio::test]
async fn failed_reads_and_writes_are_counted_and_retried() {
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
    // The API becomes unreachable.
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
async fn a_concurrent_edit_is_not_overwritten() {
    let api = KubeApi::start().await;
    api.put("services", balancer());
    let door = replica(&api, &LONG).await;
    comes_to_write(&api, &door).await;
    let before = writes(&api).len();
    let slow = Fault::delay(Duration::from_secs(3)).method("PUT");
    api.fault(slow.on(&format!("/services/{NAME}")).times(1));
    api.put("services", exposed("cluster-a", "api", 30001));
    eventually("the write has begun", LIMIT, async || {
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
async fn a_missing_permission_is_logged_once_and_retried_with_backoff() {
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
    // Four seconds have passed, with retries after 0.2, 0.6, 1.4 and 3 s. On a slow machine there are more.
    let asked = writes(&api).len();
    assert!((2..=10).contains(&asked), "{asked}");
    let told = door.program.log().matches(&advice).count();
    assert_eq!(told, 1, "each failure is logged once");
    door.is_ready().await;
    api.clear_faults();
    comes_to_write(&api, &door).await;
}

#[tokio::test]
async fn without_update_loadbalancer_nothing_is_written() {
    let api = KubeApi::start().await;
    let before = api.put("services", balancer());
    let flags = [
        "-update-loadbalancer=false",
        "-lb-namespace=kubermatic",
        "-lb-name=nodeport-proxy",
    ];
    let mut door = Door::watching(&api, &flags).await;
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

#[tokio::test]
async fn udp_port_for_quic_exists_while_the_balancer_requests_it() {
    let api = KubeApi::start().await;
    let requesting = balancer().annotation("nodeport-proxy.k8s.io/quic-listener", "true");
    api.put("services", requesting);
    let quic = ["-envoy-sni-port={sni}", "-sni-quic-port={sni}"];
    let door = replica(&api, &quic).await;
    let fixed = [HEALTHZ, "sni-listener"];
    let ports = comes_to_have(&api, [&fixed[..], &["sni-quic-listener"]].concat()).await;
    let sni = door.sni.port();
    let udp =
        json!({"name": "sni-quic-listener", "protocol": "UDP", "port": sni, "targetPort": sni});
    assert!(ports.contains(&udp), "{ports:?}");
    let mut without = api.get("services", NAMESPACE, NAME).unwrap();
    without["metadata"]["annotations"] = json!({});
    api.put("services", without);
    comes_to_have(&api, fixed.to_vec()).await;
}
