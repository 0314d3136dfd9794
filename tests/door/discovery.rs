//! Routes from the Kubernetes API, also while the API fails.

use std::time::Duration;

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_tests::eventually;
use culvert_tests::kube_api::{Fault, Gone, KubeApi, ServiceBuilder, SliceBuilder, service, slice};
use http::StatusCode;
use tokio::net::TcpStream;

use crate::support::{Door, Http2, LIMIT, TlsEndpoint};

const EXPOSE: &str = "nodeport-proxy.k8s.io/expose";
const MAPPING: &str = "nodeport-proxy.k8s.io/port-mapping";
const RAW: &str = "raw.cluster-a.svc.cluster.local:443";

/// Returns a Service that is exposed through CONNECT.
fn tunneled(namespace: &str, name: &str) -> ServiceBuilder {
    service(namespace, name)
        .port("secure", 443)
        .annotation(EXPOSE, "Tunneling")
}

/// Returns an EndpointSlice with the only endpoint of a Service.
fn behind(namespace: &str, name: &str, port: u16) -> SliceBuilder {
    slice(namespace, name)
        .port("secure", port)
        .ready("127.0.0.1")
}

async fn works(client: &Http2, authority: &str) -> Result<(), String> {
    match client.open(authority, b"download 5\n").await {
        Ok(mut tunnel) => match tunnel.hear(9).await.len() {
            5 => Ok(()),
            len => Err(format!("{len} bytes")),
        },
        Err(status) => Err(status.to_string()),
    }
}

async fn comes_to_work(client: &Http2, authority: &str) {
    let what = format!("{authority} is reachable");
    eventually(&what, LIMIT, async || works(client, authority).await).await;
}

async fn comes_to_be_gone(client: &Http2, authority: &str) {
    let what = format!("{authority} is no longer exposed");
    eventually(&what, LIMIT, async || {
        let status = client.open(authority, b"").await.err();
        (status == Some(StatusCode::NOT_FOUND))
            .then_some(())
            .ok_or(format!("{status:?}"))
    })
    .await;
}

#[tokio::test]
async fn each_of_many_services_with_a_mistake_is_named_in_the_log() {
    let api = KubeApi::start().await;
    for index in 0..30 {
        let wrong = service("cluster-a", &format!("wrong-{index}-")).port("secure", 443);
        api.put("services", wrong.annotation(EXPOSE, "tunneling"));
    }
    let door = Door::watching(&api, &[]).await;
    for index in 0..30 {
        let name = format!("cluster-a/wrong-{index}-");
        door.program.wait_for_log(&name, LIMIT).await;
    }
}

#[tokio::test]
async fn only_annotated_services_with_ready_endpoints_are_exposed() {
    let services = Services::start().await.unwrap();
    let endpoint = TlsEndpoint::start("api.example.com").await;
    let api = KubeApi::start().await;
    let raw = services.raw.port();
    let mut ports = culvert_tests::ports::Ports::default();
    let [exposed, hidden] = [(); 2].map(|()| ports.next_port());
    api.put("services", tunneled("cluster-a", "raw"));
    api.put("endpointslices", behind("cluster-a", "raw", raw));
    api.put(
        "services",
        service("cluster-a", "api")
            .port("secure", 443)
            .annotation(EXPOSE, "SNI,Tunneling")
            .annotation(MAPPING, r#"{"secure": "Api.example.com"}"#),
    );
    api.put(
        "endpointslices",
        behind("cluster-a", "api", endpoint.address.port()),
    );
    for (name, port, annotated) in [("open", exposed, true), ("closed", hidden, false)] {
        let mut service = service("cluster-a", name).node_port("secure", 443, port);
        if annotated {
            service = service.annotation(EXPOSE, "true");
        }
        api.put("services", service);
        api.put("endpointslices", behind("cluster-a", name, raw));
    }
    api.put("services", tunneled("cluster-a", "unready"));
    let unready = slice("cluster-a", "unready")
        .port("secure", raw)
        .not_ready("127.0.0.1");
    api.put("endpointslices", unready);
    let wrong = service("cluster-a", "wrong").port("secure", 443);
    api.put("services", wrong.annotation(EXPOSE, "tunneling"));
    api.put("endpointslices", behind("cluster-a", "wrong", raw));

    let door = Door::watching(&api, &[]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    works(&client, RAW).await.unwrap();
    endpoint.answers(door.sni, "api.example.com").await;
    let connect = async |port| TcpStream::connect(("127.0.0.1", port)).await;
    eventually("the node port is open", LIMIT, async || {
        connect(exposed).await.map(|_| ())
    })
    .await;
    check::echo(connect(exposed).await.unwrap(), 2, 100)
        .await
        .unwrap();
    assert!(connect(hidden).await.is_err());
    for name in ["unready", "wrong", "open", "closed"] {
        let authority = format!("{name}.cluster-a.svc.cluster.local:443");
        let status = client.open(&authority, b"").await.err();
        assert_eq!(status, Some(StatusCode::NOT_FOUND), "{name}");
    }
    // The log contains the mistake and the correct value.
    let line = door.program.wait_for_log("cluster-a/wrong", LIMIT).await;
    assert!(line.contains("Tunneling"), "{line}");
    assert_eq!(
        door.value("culvert_nodeport_proxy_problems", &[]).await,
        1.0
    );

    // Routes follow readiness, annotations and Services.
    api.put(
        "endpointslices",
        behind("cluster-a", "unready", raw).name("unready"),
    );
    comes_to_work(&client, "unready.cluster-a.svc.cluster.local:443").await;
    api.put("services", service("cluster-a", "raw").port("secure", 443));
    comes_to_be_gone(&client, RAW).await;
    api.delete("services", "cluster-a", "open");
    eventually("the node port is closed", LIMIT, async || {
        connect(exposed).await.is_err()
    })
    .await;
    endpoint.answers(door.sni, "api.example.com").await;
}

#[tokio::test]
async fn namespace_and_annotation_key_are_configurable() {
    let services = Services::start().await.unwrap();
    let api = KubeApi::start().await;
    let namespaced = "nodeport-proxy.k8s.io/expose-namespaced";
    let raw = services.raw.port();
    for (namespace, annotation) in [
        ("cluster-a", namespaced),
        ("cluster-b", namespaced),
        ("cluster-a", EXPOSE),
    ] {
        let name = if annotation == EXPOSE { "other" } else { "raw" };
        let service = service(namespace, name).port("secure", 443);
        api.put("services", service.annotation(annotation, "Tunneling"));
        api.put("endpointslices", behind(namespace, name, raw));
    }
    let key = format!("-expose-annotation-key={namespaced}");
    let door = Door::watching(&api, &["-namespace=cluster-a", &key]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    works(&client, RAW).await.unwrap();
    for authority in [
        "raw.cluster-b.svc.cluster.local:443",
        "other.cluster-a.svc.cluster.local:443",
    ] {
        let status = client.open(authority, b"").await.err();
        assert_eq!(status, Some(StatusCode::NOT_FOUND), "{authority}");
    }
    let requests = api.requests();
    assert!(!requests.is_empty());
    let outside = requests
        .iter()
        .find(|request| !request.path.contains("/namespaces/cluster-a/"));
    assert_eq!(outside.map(|request| &request.path), None);
}

#[tokio::test]
async fn proxy_is_not_ready_before_services_and_endpoints_are_listed() {
    let services = Services::start().await.unwrap();
    let api = KubeApi::start().await;
    api.put("services", tunneled("cluster-a", "raw"));
    api.put(
        "endpointslices",
        behind("cluster-a", "raw", services.raw.port()),
    );
    api.fault(Fault::status(503).on("endpointslices"));
    let door = Door::watching(&api, &[]).await;
    door.program
        .wait_for_log("cannot watch EndpointSlices", LIMIT)
        .await;
    let (status, text) = door.readiness().await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(text.contains("Kubernetes API"), "{text}");
    let synced = async || {
        door.metrics()
            .await
            .value("culvert_nodeport_proxy_synced", &[])
    };
    assert_eq!(synced().await, Some(0.0));
    let (alive, _, _) = culvert_tests::metrics::http_get(door.stats, "/healthz")
        .await
        .unwrap();
    assert_eq!(alive, StatusCode::OK);
    api.clear_faults();
    door.is_ready().await;
    assert_eq!(synced().await, Some(1.0));
    works(&Http2::connect(door.tunneling).await, RAW)
        .await
        .unwrap();
}

#[tokio::test]
async fn an_api_that_does_not_answer_is_reported_as_down() {
    let api = KubeApi::start().await;
    api.fault(Fault::delay(2 * LIMIT).on("endpointslices"));
    let door = Door::watching(&api, &[]).await;
    let asked = || {
        let requests = api.requests();
        let asked = |path: &str| requests.iter().any(|request| request.path.contains(path));
        asked("/services?") && asked("/endpointslices?")
    };
    eventually(
        "Services and EndpointSlices are requested",
        LIMIT,
        async || asked(),
    )
    .await;
    let up = async || door.value("culvert_nodeport_proxy_source_up", &[]).await;
    assert_eq!(up().await, 0.0);
    assert_eq!(door.readiness().await.0, StatusCode::SERVICE_UNAVAILABLE);
    api.clear_faults();
    api.cut();
    door.is_ready().await;
    // The watches must stay up for some time.
    eventually("the source is up", LIMIT, async || up().await == 1.0).await;
}

#[tokio::test]
async fn the_last_routes_stay_in_force_while_the_api_is_gone() {
    let services = Services::start().await.unwrap();
    let api = KubeApi::start().await;
    let raw = services.raw.port();
    api.put("services", tunneled("cluster-a", "raw"));
    api.put("endpointslices", behind("cluster-a", "raw", raw));
    let door = Door::watching(&api, &[]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    works(&client, RAW).await.unwrap();

    api.fault(Fault::refuse());
    api.cut();
    eventually("the source is down", LIMIT, async || {
        door.value("culvert_nodeport_proxy_source_up", &[]).await == 0.0
    })
    .await;
    works(&client, RAW).await.unwrap();
    let (status, text) = door.readiness().await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("last known routes"), "{text}");
    // Meanwhile routes change, and the resource version of the proxy's watch expires.
    api.put("services", tunneled("cluster-b", "raw"));
    api.put("endpointslices", behind("cluster-b", "raw", raw));
    api.delete("services", "cluster-a", "raw");
    api.expire(Gone::Event);
    api.clear_faults();
    comes_to_work(&client, "raw.cluster-b.svc.cluster.local:443").await;
    comes_to_be_gone(&client, RAW).await;
    eventually("the front door reports no outage", LIMIT, async || {
        door.readiness().await == (StatusCode::OK, "ok".to_owned())
    })
    .await;
}

#[tokio::test]
async fn routes_stay_current_through_expired_watches_throttling_errors_and_cuts() {
    let services = Services::start().await.unwrap();
    let api = KubeApi::start().await;
    let raw = services.raw.port();
    api.put("services", tunneled("cluster-a", "raw"));
    api.put("endpointslices", behind("cluster-a", "raw", raw));
    let door = Door::watching(&api, &[]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    works(&client, RAW).await.unwrap();
    let faults: [fn(&KubeApi); 6] = [
        |api| api.bookmark(),
        |api| {
            api.expire(Gone::Event);
            api.cut();
        },
        |api| {
            api.expire(Gone::Http);
            api.cut();
        },
        |api| {
            api.fault(Fault::status(429).retry_after(1).times(3));
            api.cut();
        },
        |api| {
            api.fault(Fault::status(500).times(3));
            api.cut();
        },
        |api| api.cut(),
    ];
    for (round, fault) in faults.iter().enumerate() {
        fault(&api);
        let name = format!("round-{round}");
        api.put("services", tunneled("cluster-a", &name));
        api.put("endpointslices", behind("cluster-a", &name, raw));
        comes_to_work(&client, &format!("{name}.cluster-a.svc.cluster.local:443")).await;
        works(&client, RAW).await.unwrap();
    }
    assert_eq!(
        door.value(
            "culvert_connections_closed_total",
            &[("reason", "shutdown")]
        )
        .await,
        0.0
    );
}

#[tokio::test]
async fn the_older_of_two_services_gets_a_shared_server_name() {
    let one = TlsEndpoint::start("api.example.com").await;
    let two = TlsEndpoint::start("api.example.com").await;
    let api = KubeApi::start().await;
    for (name, endpoint) in [("older", &one), ("newer", &two)] {
        let service = service("cluster-a", name)
            .port("secure", 443)
            .annotation(EXPOSE, "SNI")
            .annotation(MAPPING, r#"{"secure": "api.example.com"}"#);
        api.put("services", service);
        api.put(
            "endpointslices",
            behind("cluster-a", name, endpoint.address.port()),
        );
        // Creation times have a resolution of one second.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    let door = Door::watching(&api, &[]).await;
    door.is_ready().await;
    // The client checks the certificate, which differs between the two endpoints.
    one.answers(door.sni, "api.example.com").await;
    let line = door.program.wait_for_log("cluster-a/newer", LIMIT).await;
    assert!(
        line.contains("api.example.com") && line.contains("cluster-a/older"),
        "{line}"
    );
    api.delete("services", "cluster-a", "older");
    eventually("the newer Service has the server name", LIMIT, async || {
        let stream = two
            .connect(door.sni, "api.example.com", rustls::ALL_VERSIONS)
            .await;
        stream.map(|_| ())
    })
    .await;
}
