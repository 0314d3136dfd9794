//! Faults: the requests to which a fault applies, and the recovery afterwards.

use super::*;

#[tokio::test]
async fn a_status_fault_applies_to_its_path_a_limited_number_of_times() {
    let api = KubeApi::start().await;
    api.fault(Fault::status(429).retry_after(7).on("/leases").times(2));
    for _ in 0..2 {
        let (_sender, response) = ask(&api, "GET", LEASES, JSON, "").await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(get(&api, SERVICES).await.0, StatusCode::OK);
    }
    assert_eq!(get(&api, LEASES).await.0, StatusCode::OK);
    assert_eq!(api.requests().len(), 5, "a failed request is recorded too");
}

#[tokio::test]
async fn a_fault_can_apply_to_one_method() {
    let api = KubeApi::start().await;
    api.fault(Fault::status(500).method("PUT").on("/services").times(1));
    assert_eq!(get(&api, SERVICES).await.0, StatusCode::OK);
    let web = || service("a", "web");
    assert_eq!(
        call(&api, "POST", SERVICES, web()).await.0,
        StatusCode::CREATED
    );
    assert_eq!(failure(&call(&api, "PUT", WEB, web()).await).0, 500);
    assert_eq!(call(&api, "PUT", WEB, web()).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_status_fault_lasts_until_it_is_cleared() {
    let api = KubeApi::start().await;
    for (code, reason) in [
        (403, "Forbidden"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
    ] {
        api.fault(Fault::status(code));
        for _ in 0..3 {
            assert_eq!(failure(&get(&api, SERVICES).await), (code, reason));
        }
        api.clear_faults();
        assert_eq!(get(&api, SERVICES).await.0, StatusCode::OK);
    }
}

#[tokio::test]
async fn delays_add_up() {
    let api = KubeApi::start().await;
    let delay = Duration::from_millis(60);
    api.fault(Fault::delay(delay).times(1));
    api.fault(Fault::delay(delay).times(1));
    let start = Instant::now();
    assert_eq!(get(&api, SERVICES).await.0, StatusCode::OK);
    assert!(start.elapsed() >= 2 * delay, "{:?}", start.elapsed());
}

#[tokio::test]
async fn hung_watches_stay_silent_after_the_fault_is_cleared() {
    let api = KubeApi::start().await;
    let services = format!("{SERVICES}?watch=true");
    let mut open = Watch::open(&api, &services).await;
    let mut other = Watch::open(&api, "/api/v1/nodes?watch=true").await;
    api.fault(Fault::hang_watches().on("/services"));
    let mut late = Watch::open(&api, &services).await;
    api.put("services", service("a", "web"));
    api.put("nodes", json!({"metadata": {"name": "n"}}));
    assert_eq!(other.seen().await, "ADDED n");
    assert_eq!(get(&api, WEB).await.0, StatusCode::OK);
    api.clear_faults();
    api.delete("services", "a", "web");
    assert!(open.is_silent().await);
    assert!(late.is_silent().await);
    assert_eq!(api.watches(), 1);
    let mut anew = Watch::open(&api, &services).await;
    api.put("services", service("a", "web"));
    assert_eq!(anew.seen().await, "ADDED web");
}

#[tokio::test]
async fn cut_breaks_open_watches() {
    let api = KubeApi::start().await;
    let path = format!("{SERVICES}?watch=true");
    let mut watch = Watch::open(&api, &path).await;
    api.cut();
    api.put("services", service("a", "web"));
    let end = timeout(LIMIT, watch.body.frame()).await.unwrap();
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    let mut watch = Watch::open(&api, &path).await;
    assert_eq!(watch.seen().await, "ADDED web");
}

#[tokio::test]
async fn connections_are_refused_until_the_fault_is_cleared() {
    let api = KubeApi::start().await;
    let mut watch = Watch::open(&api, &format!("{SERVICES}?watch=true")).await;
    api.fault(Fault::refuse());
    for _ in 0..2 {
        assert!(ask(&api, "GET", SERVICES, JSON, "").await.is_err());
    }
    api.put("services", service("a", "web"));
    assert_eq!(watch.seen().await, "ADDED web");
    api.clear_faults();
    assert_eq!(get(&api, SERVICES).await.0, StatusCode::OK);
}

#[tokio::test]
async fn a_dropped_api_closes_its_port_and_its_connections() {
    let api = KubeApi::start().await;
    let addr = api.addr();
    let mut watch = Watch::open(&api, &format!("{SERVICES}?watch=true")).await;
    drop(api);
    let end = timeout(LIMIT, watch.body.frame()).await.unwrap();
    assert!(matches!(end, Some(Err(_))), "{end:?}");
    let closed = async || TcpStream::connect(addr).await.is_err();
    eventually("the port is closed", LIMIT, closed).await;
}
