#![allow(clippy::unwrap_used)]

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::core::Status;

use super::*;

fn node(name: &str, label: &str) -> Node {
    let mut node = Node::default();
    node.metadata.name = Some(name.to_owned());
    let labels = [("label".to_owned(), label.to_owned())];
    node.metadata.labels = Some(labels.into());
    node
}

/// Nodes without a label are nothing.
fn label_of(node: Node) -> Option<String> {
    let label = node.labels().get("label").cloned();
    label.filter(|label| !label.is_empty())
}

fn refused() -> watcher::Error {
    let status = Status::failure("no", "Forbidden").with_code(403);
    watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()))
}

fn known(mirror: &Mirror<String>) -> Vec<&str> {
    let mut known: Vec<&str> = mirror.values().map(String::as_str).collect();
    known.sort_unstable();
    known
}

#[test]
fn a_list_counts_once_it_is_complete_and_changes_follow() {
    let mut mirror = Mirror::new("Nodes");
    let mut take = |event| (mirror.take(Ok(event), label_of), mirror.is_synced());
    assert_eq!(take(Event::Init), (false, false));
    assert_eq!(take(Event::InitApply(node("a", "1"))), (false, false));
    assert_eq!(take(Event::InitApply(node("b", ""))), (false, false));
    assert_eq!(take(Event::InitDone), (true, true));
    assert_eq!(take(Event::Apply(node("a", "1"))), (false, true));
    assert_eq!(take(Event::Apply(node("b", "2"))), (true, true));
    assert_eq!(take(Event::Apply(node("c", "3"))), (true, true));
    assert_eq!(take(Event::Apply(node("b", ""))), (true, true));
    assert_eq!(take(Event::Delete(node("a", "1"))), (true, true));
    assert_eq!(take(Event::Delete(node("a", "1"))), (false, true));
    assert_eq!(known(&mirror), ["3"]);
}

#[test]
fn what_was_seen_last_stays_while_lists_fail() {
    let mut mirror = Mirror::new("Nodes");
    mirror.take(Ok(Event::Init), label_of);
    mirror.take(Ok(Event::InitApply(node("a", "1"))), label_of);
    mirror.take(Ok(Event::InitDone), label_of);
    for _ in 0..3 {
        assert!(!mirror.take(Err(refused()), label_of));
        // It is tried again, which is no success yet.
        assert!(!mirror.take(Ok(Event::<Node>::Init), label_of));
        assert!(!mirror.is_up());
        mirror.take(Ok(Event::InitApply(node("b", "2"))), label_of);
        assert!(!mirror.is_up());
        assert_eq!(known(&mirror), ["1"]);
    }
    mirror.take(Ok(Event::Init), label_of);
    mirror.take(Ok(Event::InitApply(node("c", "3"))), label_of);
    assert!(mirror.take(Ok(Event::<Node>::InitDone), label_of) && mirror.is_up());
    assert_eq!(known(&mirror), ["3"]);
}

#[test]
fn no_more_is_kept_than_there_is_room_for() {
    let mut mirror = Mirror::new("Nodes").at_most(2);
    mirror.take(Ok(Event::Init), label_of);
    for name in ["a", "b", "c"] {
        mirror.take(Ok(Event::InitApply(node(name, name))), label_of);
    }
    assert!(mirror.take(Ok(Event::<Node>::InitDone), label_of));
    assert_eq!(known(&mirror), ["a", "b"]);
    assert!(!mirror.take(Ok(Event::Apply(node("d", "d"))), label_of));
    assert!(mirror.take(Ok(Event::Apply(node("a", "x"))), label_of));
    assert!(mirror.take(Ok(Event::Delete(node("b", "b"))), label_of));
    assert!(mirror.take(Ok(Event::Apply(node("d", "d"))), label_of));
    assert_eq!(known(&mirror), ["d", "x"]);
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_until_a_watch_has_lived() {
    let mut pause = Pause::default();
    let mut after = |event: Result<Event<Node>, watcher::Error>| {
        pause.note(&event);
        pause.due.take()
    };
    let [shortest, longest] = PAUSES;
    let mut expected = shortest;
    for _ in 0..10 {
        let time = after(Err(refused())).unwrap();
        assert!(time <= expected && time >= expected / 2, "{time:?}");
        assert_eq!(after(Ok(Event::Init)), None);
        assert_eq!(after(Ok(Event::InitDone)), None);
        expected = (2 * expected).min(longest);
    }
    // One that breaks as soon as it has begun.
    let broken = watcher::Error::WatchFailed(kube::Error::TlsRequired);
    assert!(after(Err(broken)).unwrap() >= longest / 2);
    // What has watched for a while need not have failed by itself: the API may have gone.
    assert_eq!(after(Ok(Event::InitDone)), None);
    tokio::time::advance(2 * WATCHED).await;
    assert!(after(Err(refused())).unwrap() <= shortest);
}
