//! Watches: their start, their events and their end.

use super::*;

#[tokio::test]
async fn a_watch_replays_the_log_and_continues_with_new_changes() {
    let api = KubeApi::start().await;
    api.put("services", service("a", "old"));
    let version = get(&api, SERVICES).await.1["metadata"]["resourceVersion"].clone();
    let path = format!(
        "{SERVICES}?watch=true&resourceVersion={}",
        version.as_str().unwrap()
    );
    api.put("services", service("a", "web"));
    api.put("services", service("b", "elsewhere"));
    let mut watch = Watch::open(&api, &path).await;
    assert_eq!(watch.seen().await, "ADDED web");
    api.put("services", service("a", "web").port("http", 80));
    assert_eq!(watch.seen().await, "MODIFIED web");
    api.put("services", service("a", "web").port("http", 80));
    let before = api.delete("services", "a", "web");
    let deleted = watch.next().await.unwrap();
    assert_eq!(
        deleted["type"], "DELETED",
        "a write that changes nothing creates no event"
    );
    assert_eq!(deleted["object"]["spec"], before["spec"]);
    let version = |object: &Value| {
        text(object, "/metadata/resourceVersion")
            .parse::<u64>()
            .unwrap()
    };
    assert!(version(&deleted["object"]) > version(&before));
    assert_eq!(api.watches(), 1);
    drop(watch);
    eventually("the watch is closed", LIMIT, async || api.watches() == 0).await;
}

#[tokio::test]
async fn a_selective_watch_sees_objects_enter_and_leave() {
    let api = KubeApi::start().await;
    let path = format!("{SERVICES}?watch=1&labelSelector=on%3Dyes");
    let mut watch = Watch::open(&api, &path).await;
    api.put("services", service("a", "web"));
    api.put("services", service("a", "web").label("on", "yes"));
    assert_eq!(watch.seen().await, "ADDED web");
    api.put("services", service("a", "web").label("on", "no"));
    assert_eq!(watch.seen().await, "DELETED web");
}

#[tokio::test]
async fn a_watch_without_a_version_starts_with_all_existing_objects() {
    let api = KubeApi::start().await;
    api.put("services", service("a", "web"));
    for version in ["", "&resourceVersion=0"] {
        let mut watch = Watch::open(&api, &format!("{SERVICES}?watch=true{version}")).await;
        assert_eq!(watch.seen().await, "ADDED web");
        assert!(watch.is_silent().await);
    }
}

#[tokio::test]
async fn a_streaming_list_ends_with_its_bookmark() {
    let api = KubeApi::start().await;
    api.put("services", service("a", "web"));
    let path = format!(
        "{SERVICES}?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    let mut watch = Watch::open(&api, &path).await;
    assert_eq!(watch.seen().await, "ADDED web");
    let mark = watch.next().await.unwrap();
    assert_eq!(
        (&mark["type"], &mark["object"]["kind"]),
        (&json!("BOOKMARK"), &json!("Service"))
    );
    let metadata = &mark["object"]["metadata"];
    assert_eq!(metadata["annotations"]["k8s.io/initial-events-end"], "true");
    let list = get(&api, SERVICES).await.1;
    assert_eq!(
        metadata["resourceVersion"],
        list["metadata"]["resourceVersion"]
    );
    api.delete("services", "a", "web");
    assert_eq!(watch.seen().await, "DELETED web");
}

#[tokio::test]
async fn bookmarks_reach_only_watches_that_allow_them() {
    let api = KubeApi::start().await;
    let mut plain = Watch::open(&api, &format!("{SERVICES}?watch=true")).await;
    let path = format!("{SERVICES}?watch=true&allowWatchBookmarks=true");
    let mut marked = Watch::open(&api, &path).await;
    let node = api.put("nodes", json!({"metadata": {"name": "n"}}));
    api.bookmark();
    let mark = marked.next().await.unwrap();
    assert_eq!(mark["type"], "BOOKMARK");
    let version = &node["metadata"]["resourceVersion"];
    assert_eq!(&mark["object"]["metadata"]["resourceVersion"], version);
    assert!(plain.is_silent().await);
}

#[tokio::test]
async fn a_watch_ends_after_its_timeout() {
    let api = KubeApi::start().await;
    let start = Instant::now();
    let mut watch = Watch::open(&api, &format!("{SERVICES}?watch=true&timeoutSeconds=1")).await;
    assert_eq!(watch.next().await, None);
    assert!(start.elapsed() >= Duration::from_secs(1));
}

#[tokio::test]
async fn an_unread_watch_ends_after_a_bounded_number_of_events() {
    let api = KubeApi::start().await;
    let mut watch = Watch::open(&api, &format!("{SERVICES}?watch=true")).await;
    // Without an await between the writes, nothing reads the watch meanwhile.
    for port in 1..=2000 {
        api.put("services", service("a", "web").port("", port));
    }
    let mut events = 0;
    while watch.next().await.is_some() {
        events += 1;
    }
    assert_eq!(events, 1000);
}

#[tokio::test]
async fn an_expired_version_is_reported_as_an_event_or_as_a_status() {
    let api = KubeApi::start().await;
    api.put("services", service("a", "web"));
    let resume = async || {
        let list = get(&api, SERVICES).await.1;
        let version = text(&list, "/metadata/resourceVersion");
        format!("{SERVICES}?watch=true&resourceVersion={version}")
    };
    let path = resume().await;
    let mut open = Watch::open(&api, &path).await;
    api.expire(Gone::Event);
    let mut watch = Watch::open(&api, &path).await;
    let error = watch.next().await.unwrap();
    assert_eq!(
        (&error["type"], &error["object"]["code"]),
        (&json!("ERROR"), &json!(410))
    );
    assert_eq!(error["object"]["reason"], "Expired");
    assert_eq!(watch.next().await, None);

    let path = resume().await;
    let mut watch = Watch::open(&api, &path).await;
    api.expire(Gone::Http);
    assert_eq!(failure(&get(&api, &path).await), (410, "Expired"));
    api.delete("services", "a", "web");
    assert_eq!(watch.seen().await, "DELETED web");
    assert_eq!(open.seen().await, "DELETED web");
}
