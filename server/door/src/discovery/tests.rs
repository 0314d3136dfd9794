#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};

use super::super::annotations::EXPOSE_ANNOTATION;
use super::super::exposure::Options;
use super::*;
use crate::annotations::PORT_MAPPING_ANNOTATION;

/// Annotation of KKP for a proxy of one namespace.
const EXPOSE_NAMESPACED_ANNOTATION: &str = "nodeport-proxy.k8s.io/expose-namespaced";

const AUTHORITY: &str = "api.demo.svc.cluster.local:443";

/// Creates the discovery for a cluster that does not exist.
async fn discovery() -> Discovery {
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    let text = "{current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}], \
                clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}], \
                users: [{name: u, user: {}}]}";
    std::fs::write(&kubeconfig, text).unwrap();
    let cluster = Cluster {
        kubeconfig: Some(kubeconfig),
        namespace: None,
        options: Options {
            annotation: EXPOSE_ANNOTATION.to_owned(),
            server_names: true,
            authorities: true,
        },
        balancer: None,
    };
    let (table, metrics) = (Arc::new(Table::new(10)), ProxyMetrics::new().unwrap());
    let mut reloader = Reloader::new(metrics.registry());
    let discovery = Discovery::new(cluster, table, metrics, &mut reloader).await;
    let mut discovery = discovery.unwrap();
    for done in [Event::Init, Event::InitDone] {
        discovery.take_service(Ok(done));
    }
    for done in [Event::Init, Event::InitDone] {
        discovery.take_slice(Ok(done));
    }
    discovery
}

/// Creates an event for the Service `demo/api` with the given annotations.
fn service(annotations: Value) -> Event<core::Service> {
    let object = json!({
        "metadata": {"namespace": "demo", "name": "api", "annotations": annotations},
        "spec": {"clusterIP": "10.0.0.1", "ports": [{"name": "https", "port": 443}]},
    });
    Event::Apply(serde_json::from_value(object).unwrap())
}

/// Creates an event for the Service's slice with one endpoint.
fn slice(address: &str) -> Event<discovery::EndpointSlice> {
    let object = json!({
        "metadata": {"namespace": "demo", "name": "api-1", "labels": {SERVICE_LABEL: "api"}},
        "addressType": "IPv4",
        "ports": [{"name": "https", "port": 8443}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
    });
    Event::Apply(serde_json::from_value(object).unwrap())
}

#[tokio::test]
async fn services_that_are_not_exposed_are_not_stored_and_change_nothing() {
    let mut discovery = discovery().await;
    let foreign = json!({EXPOSE_NAMESPACED_ANNOTATION: "Tunneling", "x": "y"});
    assert!(!discovery.take_service(Ok(service(foreign.clone()))));
    assert!(!discovery.take_service(Ok(service(json!(null)))));
    assert_eq!(discovery.services.values().count(), 0);
    assert!(!discovery.take_slice(Ok(slice("10.0.0.2"))));
    assert!(!discovery.take_slice(Ok(slice("10.0.0.3"))));

    // A Service exposed later has the endpoints that were reported before.
    let exposed = |x: &str| service(json!({EXPOSE_ANNOTATION: "Tunneling", "x": x}));
    assert!(discovery.take_service(Ok(exposed("y"))));
    discovery.apply();
    assert!(discovery.table.by_authority(AUTHORITY).is_some());
    assert!(discovery.take_slice(Ok(slice("10.0.0.4"))));
    assert!(!discovery.take_slice(Ok(slice("10.0.0.4"))));

    // Changes of foreign annotations do not matter.
    assert!(!discovery.take_service(Ok(exposed("z"))));
    let mapped = json!({EXPOSE_ANNOTATION: "Tunneling", PORT_MAPPING_ANNOTATION: "{}", "x": "y"});
    assert!(discovery.take_service(Ok(service(mapped))));
    let kept = discovery.services.values().next().unwrap();
    let kept: Vec<&String> = kept.annotations.keys().collect();
    assert_eq!(kept, [EXPOSE_ANNOTATION, PORT_MAPPING_ANNOTATION]);

    assert!(discovery.take_service(Ok(service(foreign))));
    discovery.apply();
    assert!(discovery.table.by_authority(AUTHORITY).is_none());
    assert!(!discovery.take_slice(Ok(slice("10.0.0.5"))));
}

#[test]
fn computations_use_at_most_a_fifth_of_the_time() {
    let begun = Instant::now();
    let ms = Duration::from_millis;
    for (took, changed_after, due_after) in [
        (0, 0, 20),
        (5, 0, 20),
        (35, 0, 140),
        (35, 100, 140),
        (35, 120, 140),
        (35, 121, 141),
        (35, 5_000, 5_020),
        // The process was suspended.
        (3_600_000, 0, 2_000),
    ] {
        let ended = begun + ms(took);
        let due = next_computation(ended + ms(changed_after), [begun, ended]);
        assert_eq!(due - ended, ms(due_after), "{took}, {changed_after}");
    }
}

#[test]
fn slice_keeps_only_tcp_ports_and_addresses_of_ready_endpoints() {
    let object = json!({
        "metadata": {"namespace": "demo", "labels": {SERVICE_LABEL: "api"}},
        "addressType": "IPv4",
        "ports": [
            {"name": "https", "port": 8443},
            {"port": 80, "protocol": "TCP"},
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "none"},
        ],
        "endpoints": [
            {"addresses": ["10.0.0.1", "host"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false}},
            {"addresses": ["10.0.0.3"], "conditions": {}},
            {"addresses": ["10.0.0.4"]},
        ],
    });
    let slice = slice_of(serde_json::from_value(object).unwrap()).unwrap();
    assert_eq!(
        (slice.namespace.as_str(), slice.service.as_str()),
        ("demo", "api")
    );
    assert_eq!(
        slice.ports,
        [("https".to_owned(), 8443), (String::new(), 80)]
    );
    assert_eq!(
        slice.ready,
        ["10.0.0.1".parse::<std::net::IpAddr>().unwrap()]
    );
}

#[test]
fn first_kubeconfig_that_exists_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    for name in ["b", "c"] {
        std::fs::write(file(name), "").unwrap();
    }
    let first = |names: &[&str]| {
        let paths = names.iter().map(|name| match *name {
            "" => PathBuf::new(),
            name => file(name),
        });
        first_kubeconfig(&std::env::join_paths(paths).unwrap())
    };
    assert_eq!(first(&["", "a", "b", "c"]), Some(file("b")));
    // The error of a missing file names the file.
    assert_eq!(first(&["a"]), Some(file("a")));
    assert_eq!(first(&[""]), None);
}
