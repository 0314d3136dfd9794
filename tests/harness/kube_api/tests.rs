//! The API over HTTP, from the view of a client.

mod faults;
mod watches;

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use super::address::{Address, Query};
use super::*;
use crate::wait::eventually;

const LIMIT: Duration = Duration::from_secs(10);

/// Time without an event after which a watch counts as silent.
const SILENCE: Duration = Duration::from_millis(200);

const JSON: &str = "application/json";
const SERVICES: &str = "/api/v1/namespaces/a/services";
const WEB: &str = "/api/v1/namespaces/a/services/web";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/a/leases";

type Sender = SendRequest<Full<Bytes>>;

/// Sends a request on its own connection, which stays open as long as the sender.
async fn ask(
    api: &KubeApi,
    method: &str,
    path: &str,
    media_type: &str,
    body: &str,
) -> hyper::Result<(Sender, Response<Incoming>)> {
    let stream = TcpStream::connect(api.addr()).await.unwrap();
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, "api")
        .header(AUTHORIZATION, "Bearer secret")
        .header(CONTENT_TYPE, media_type)
        .body(Full::from(body.to_owned()))
        .unwrap();
    let response = sender.send_request(request).await?;
    Ok((sender, response))
}

async fn send(
    api: &KubeApi,
    method: &str,
    path: &str,
    media_type: &str,
    body: &str,
) -> (StatusCode, Value) {
    let (_sender, response) = ask(api, method, path, media_type, body).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, serde_json::from_slice(&body).unwrap())
}

async fn get(api: &KubeApi, path: &str) -> (StatusCode, Value) {
    send(api, "GET", path, JSON, "").await
}

async fn call(
    api: &KubeApi,
    method: &str,
    path: &str,
    object: impl Into<Value>,
) -> (StatusCode, Value) {
    send(api, method, path, JSON, &object.into().to_string()).await
}

/// Checks the form of a failure, and returns its code and its reason.
fn failure(answer: &(StatusCode, Value)) -> (u16, &str) {
    let (status, object) = answer;
    assert_eq!(object["kind"], "Status", "{object}");
    assert_eq!(object["status"], "Failure", "{object}");
    assert_eq!(object["code"], status.as_u16(), "{object}");
    (status.as_u16(), object["reason"].as_str().unwrap())
}

fn names(list: &Value) -> Vec<&str> {
    let items = list["items"].as_array().unwrap();
    items
        .iter()
        .map(|item| text(item, "/metadata/name"))
        .collect()
}

/// An open watch.
struct Watch {
    body: Incoming,
    unread: Vec<u8>,
    _sender: Sender,
}

impl Watch {
    async fn open(api: &KubeApi, path: &str) -> Self {
        let (sender, response) = ask(api, "GET", path, JSON, "").await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        Self {
            body: response.into_body(),
            unread: Vec::new(),
            _sender: sender,
        }
    }

    /// Returns the next event; `None` at the end of the watch.
    async fn next(&mut self) -> Option<Value> {
        timeout(LIMIT, self.read())
            .await
            .expect("an event or the end")
    }

    async fn read(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = self.body.frame().await?.expect("a whole watch");
            self.unread.extend_from_slice(frame.data_ref().unwrap());
        }
    }

    /// Returns the type of the next event and the name of its object.
    async fn seen(&mut self) -> String {
        let event = self.next().await.expect("an event");
        let name = text(&event, "/object/metadata/name");
        format!("{} {name}", text(&event, "/type"))
    }

    async fn is_silent(&mut self) -> bool {
        timeout(SILENCE, self.read()).await.is_err()
    }
}

#[tokio::test]
async fn an_object_is_created_read_changed_and_deleted() {
    let api = KubeApi::start().await;
    assert_eq!(failure(&get(&api, WEB).await), (404, "NotFound"));
    let web = service("a", "web").port("http", 80);
    let (status, made) = call(&api, "POST", SERVICES, web.clone()).await;
    assert_eq!(status, StatusCode::CREATED);
    assert_eq!(get(&api, WEB).await, (StatusCode::OK, made.clone()));
    assert_eq!(api.get("services", "a", "web"), Some(made.clone()));
    assert!(!text(&made, "/metadata/uid").is_empty(), "{made}");
    let created = text(&made, "/metadata/creationTimestamp");
    assert!(
        created.starts_with("20") && created.len() == 20,
        "{created}"
    );

    let again = call(&api, "POST", SERVICES, web).await;
    assert_eq!(failure(&again), (409, "AlreadyExists"));

    let mut changed = made.clone();
    changed["spec"]["type"] = json!("NodePort");
    let (status, stored) = call(&api, "PUT", WEB, changed.clone()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(stored["metadata"]["uid"], made["metadata"]["uid"]);
    assert_ne!(
        text(&stored, "/metadata/resourceVersion"),
        text(&made, "/metadata/resourceVersion")
    );
    let late = call(&api, "PUT", WEB, changed).await;
    assert_eq!(failure(&late), (409, "Conflict"));
    let same = call(&api, "PUT", WEB, stored.clone()).await;
    assert_eq!(
        same.1, stored,
        "a write that changes nothing makes no version"
    );

    let options = json!({"preconditions": {"uid": "another"}});
    let other = call(&api, "DELETE", WEB, options).await;
    assert_eq!(failure(&other), (409, "Conflict"));
    let (status, deleted) = send(&api, "DELETE", WEB, JSON, "").await;
    assert_eq!(
        (status, &deleted["status"]),
        (StatusCode::OK, &json!("Success"))
    );
    assert_eq!(failure(&get(&api, WEB).await), (404, "NotFound"));
}

#[tokio::test]
async fn a_put_obeys_the_rules_of_its_kind() {
    let api = KubeApi::start().await;
    let path = format!("{LEASES}/me");
    let lease =
        |holder: &str| json!({"metadata": {"name": "me"}, "spec": {"holderIdentity": holder}});
    let (status, made) = call(&api, "PUT", &path, lease("x")).await;
    assert_eq!(
        (status, &made["kind"]),
        (StatusCode::CREATED, &json!("Lease"))
    );
    assert_eq!(made["metadata"]["namespace"], "a");
    let blind = call(&api, "PUT", &path, lease("y")).await;
    assert_eq!(failure(&blind), (422, "Invalid"));
    let node = call(
        &api,
        "PUT",
        "/api/v1/nodes/n",
        json!({"metadata": {"name": "n"}}),
    )
    .await;
    assert_eq!(failure(&node), (404, "NotFound"));
    api.put("nodes", json!({"metadata": {"name": "n"}}));
    assert_eq!(get(&api, "/api/v1/nodes/n").await.1["kind"], "Node");
}

#[tokio::test]
async fn patches_merge_and_apply_creates() {
    let api = KubeApi::start().await;
    let patch = r#"{"metadata": {"annotations": {"x": "1", "y": null}}, "spec": {"ports": []}}"#;
    let merge = "application/merge-patch+json";
    let missing = send(&api, "PATCH", WEB, merge, patch).await;
    assert_eq!(failure(&missing), (404, "NotFound"));
    let applied = send(&api, "PATCH", WEB, "application/apply-patch+yaml", patch).await;
    assert_eq!(applied.0, StatusCode::CREATED);
    assert_eq!(applied.1["metadata"]["annotations"], json!({"x": "1"}));

    api.put(
        "services",
        service("a", "web").port("http", 80).annotation("y", "2"),
    );
    let (status, merged) = send(&api, "PATCH", WEB, merge, patch).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(merged["metadata"]["annotations"], json!({"x": "1"}));
    assert_eq!(merged["spec"]["ports"], json!([]));
    assert_eq!(merged["spec"]["type"], "ClusterIP");
    let late = r#"{"metadata": {"resourceVersion": "1"}}"#;
    let late = send(&api, "PATCH", WEB, merge, late).await;
    assert_eq!(failure(&late), (409, "Conflict"));
    let list = send(&api, "PATCH", WEB, "application/json-patch+json", "[]").await;
    assert_eq!(failure(&list), (415, "UnsupportedMediaType"));
}

#[tokio::test]
async fn bad_requests_are_answered_with_a_status_object() {
    let api = KubeApi::start().await;
    let protobuf = "application/vnd.kubernetes.protobuf";
    let cases = [
        ("POST", SERVICES, JSON, "{", 400),
        ("POST", SERVICES, JSON, "[]", 400),
        ("POST", SERVICES, JSON, r#"{"metadata": "web"}"#, 400),
        (
            "POST",
            SERVICES,
            JSON,
            r#"{"kind": "Node", "metadata": {"name": "web"}}"#,
            400,
        ),
        (
            "POST",
            SERVICES,
            JSON,
            r#"{"metadata": {"name": "web", "namespace": "b"}}"#,
            400,
        ),
        ("POST", SERVICES, JSON, "{}", 422),
        ("POST", SERVICES, protobuf, "k8s", 415),
        ("POST", "/api/v1/services", JSON, "{}", 405),
        ("PUT", SERVICES, JSON, "{}", 405),
        ("PUT", WEB, JSON, r#"{"metadata": {"name": "other"}}"#, 400),
        ("GET", "/api/v1/pods", JSON, "", 404),
        ("GET", "/api/v1/namespaces/a/nodes", JSON, "", 404),
        (
            "GET",
            "/api/v1/services?labelSelector=a%20of%20(b,c)",
            JSON,
            "",
            400,
        ),
        (
            "GET",
            "/api/v1/services?watch=1&resourceVersion=x",
            JSON,
            "",
            400,
        ),
        (
            "GET",
            "/api/v1/services?watch=1&sendInitialEvents=true",
            JSON,
            "",
            422,
        ),
    ];
    for (method, path, media_type, body, code) in cases {
        let answer = send(&api, method, path, media_type, body).await;
        assert_eq!(failure(&answer).0, code, "{method} {path} {body}");
    }
    let long = "x".repeat(4 << 20);
    // The API may close the connection before it has read the whole body.
    if let Ok((_sender, response)) = ask(&api, "POST", SERVICES, JSON, &long).await {
        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    }
}

#[tokio::test]
async fn a_list_has_a_version_and_obeys_namespace_and_selectors() {
    let api = KubeApi::start().await;
    api.put("services", service("a", "web").label("tier", "front"));
    api.put("services", service("a", "db").label("tier", "back"));
    let last = api.put("services", service("b", "web").label("tier", "front"));
    let (_, all) = get(&api, "/api/v1/services?limit=1").await;
    assert_eq!(
        (&all["kind"], &all["apiVersion"]),
        (&json!("ServiceList"), &json!("v1"))
    );
    assert_eq!(
        all["metadata"]["resourceVersion"],
        last["metadata"]["resourceVersion"]
    );
    assert_eq!(names(&all), ["db", "web", "web"]);
    assert_eq!(all["items"][0]["kind"], Value::Null);
    let cases: [(&str, &[&str]); 10] = [
        ("", &["db", "web"]),
        ("labelSelector=tier%3Dfront", &["web"]),
        ("labelSelector=tier!%3Dfront", &["db"]),
        ("labelSelector=tier,tier%3D%3Dback", &["db"]),
        ("labelSelector=!tier", &[]),
        ("labelSelector=tier+in+(front,side)", &["web"]),
        ("labelSelector=tier+notin+(front,+side),tier", &["db"]),
        ("labelSelector=tier+notin+(front,back)", &[]),
        ("fieldSelector=metadata.name%3Dweb", &["web"]),
        ("fieldSelector=spec.type%3DNodePort", &[]),
    ];
    for (query, expected) in cases {
        let (_, list) = get(&api, &format!("{SERVICES}?{query}")).await;
        assert_eq!(names(&list), expected, "{query}");
    }
}

#[test]
fn queries_are_decoded() {
    let query = Query::parse("&a=1%2b2+3&b&c=%zz%4&d=0&e=%E2%82%AC");
    assert_eq!(query.get("a"), Some("1+2 3"));
    assert_eq!(query.get("b"), None);
    assert_eq!(query.get("c"), Some("%zz%4"));
    assert_eq!(query.get("e"), Some("€"));
    assert!(query.is_true("a") && !query.is_true("d") && !query.is_true("z"));
}

#[test]
fn paths_name_one_object_or_many() {
    let slice = Address::parse("/apis/discovery.k8s.io/v1/namespaces/n/endpointslices/s").unwrap();
    assert_eq!(slice.kind.name, "EndpointSlice");
    assert_eq!(
        (slice.namespace.as_deref(), slice.name.as_deref()),
        (Some("n"), Some("s"))
    );
    let nodes = Address::parse("/api/v1/nodes").unwrap();
    assert_eq!((nodes.namespace, nodes.name), (None, None));
    for path in [
        "/",
        "/api/v1",
        "/api/v1/services/web",
        "/api/v1/leases",
        "/api/v1x/nodes",
    ] {
        assert!(Address::parse(path).is_none(), "{path}");
    }
}

#[test]
fn builders_make_objects_like_those_of_a_cluster() {
    let service: Value = service("a", "web")
        .node_port("http", 80, 30080)
        .node_port("dns", 53, 30053)
        .protocol("UDP")
        .cluster_ip("None")
        .into();
    let spec = &service["spec"];
    assert_eq!(
        (&spec["type"], &spec["clusterIPs"]),
        (&json!("NodePort"), &json!(["None"]))
    );
    let http =
        json!({"name": "http", "protocol": "TCP", "port": 80, "targetPort": 80, "nodePort": 30080});
    assert_eq!(spec["ports"][0], http);
    assert_eq!(spec["ports"][1]["protocol"], "UDP");
    let slice: Value = slice("a", "web")
        .port("", 80)
        .ready("fd00::1")
        .not_ready("fd00::2")
        .into();
    assert_eq!(
        slice["metadata"]["labels"]["kubernetes.io/service-name"],
        "web"
    );
    assert_eq!(slice["addressType"], "IPv6");
    assert_eq!(
        slice["ports"],
        json!([{"name": "", "protocol": "TCP", "port": 80}])
    );
    assert_eq!(slice["endpoints"][1]["addresses"], json!(["fd00::2"]));
    assert_eq!(slice["endpoints"][1]["conditions"]["ready"], false);
}

#[tokio::test]
async fn token_reviews_are_answered_from_the_table_and_recorded() {
    let api = KubeApi::start().await;
    api.token("good", TokenStatus::user("system:serviceaccount:a:agent"));
    api.token("narrow", TokenStatus::user("x").audiences(&["other"]));
    let review = async |token: &str| {
        let spec = json!({"token": token, "audiences": ["konnectivity"]});
        let path = "/apis/authentication.k8s.io/v1/tokenreviews";
        call(&api, "POST", path, json!({"spec": spec})).await
    };
    let (status, good) = review("good").await;
    assert_eq!(status, StatusCode::CREATED);
    assert_eq!(good["kind"], "TokenReview");
    assert_eq!(good["status"]["authenticated"], true);
    assert_eq!(
        good["status"]["user"]["username"],
        "system:serviceaccount:a:agent"
    );
    assert_eq!(good["status"]["audiences"], json!(["konnectivity"]));
    let narrow = review("narrow").await.1;
    assert_eq!(narrow["status"]["audiences"], json!(["other"]));
    let unknown = review("unknown").await.1;
    assert_eq!(
        unknown["status"],
        json!({"user": {}, "error": "invalid bearer token"})
    );
    assert_eq!(failure(&review("").await), (400, "BadRequest"));
    let reviews = api.reviews();
    assert_eq!(reviews.len(), 3);
    assert_eq!(reviews[2].token, "unknown");
    assert_eq!(reviews[0].audiences, ["konnectivity"]);
}

#[tokio::test]
async fn requests_are_recorded_and_the_kubeconfig_points_to_this_api() {
    let api = KubeApi::start().await;
    get(&api, "/api/v1/nodes?labelSelector=a%3Db").await;
    let expected = Recorded {
        method: "GET".to_owned(),
        path: "/api/v1/nodes?labelSelector=a%3Db".to_owned(),
        authorization: Some("Bearer secret".to_owned()),
    };
    assert_eq!(api.requests(), [expected]);
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(api.kubeconfig(dir.path())).unwrap();
    assert!(
        config.contains(&format!("server: {}\n", api.url())),
        "{config}"
    );
    assert!(config.contains(&format!("token: {TOKEN}\n")), "{config}");
}
