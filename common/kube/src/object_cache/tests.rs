#![allow(clippy::unwrap_used)]

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt as _;
use kube::core::Status;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;

fn node(name: &str, label: &str) -> Node {
    let mut node = Node::default();
    node.metadata.name = Some(name.to_owned());
    let labels = [("label".to_owned(), label.to_owned())];
    node.metadata.labels = Some(labels.into());
    node
}

/// Returns the label of a node; `None` without one.
fn label_of(node: Node) -> Option<String> {
    let label = node.labels().get("label").cloned();
    label.filter(|label| !label.is_empty())
}

/// Returns the error of a list that the API refuses for this reason.
fn refused(why: &str) -> watcher::Error {
    let status = Status::failure(why, "").with_code(500);
    watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()))
}

/// Returns the error of a watch that the API refuses.
fn refused_watch(code: u16) -> watcher::Error {
    let status = Status::failure("no", "r").with_code(code);
    watcher::Error::WatchStartFailed(kube::Error::Api(status.boxed()))
}

fn known(cache: &ObjectCache<String>) -> Vec<&str> {
    let mut known: Vec<&str> = cache.values().map(String::as_str).collect();
    known.sort_unstable();
    known
}

#[test]
fn a_list_counts_once_it_is_complete_and_changes_follow() {
    let mut cache = ObjectCache::new("Nodes");
    let mut take = |event| (cache.take(Ok(event), label_of), cache.is_synced());
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
    assert_eq!(known(&cache), ["3"]);
}

#[test]
fn alternating_reasons_are_logged_once_and_again_after_a_success() {
    let mut cache = ObjectCache::<String>::new("Nodes");
    for why in ["reset", "closed", "reset", "closed"] {
        cache.fail(&refused(why));
    }
    assert_eq!(cache.failing.current(), Some("closed (500)"));
    assert_eq!(cache.failing.failed("reset (500)"), None);
    for reason in 0..100 {
        cache.fail(&refused(&reason.to_string()));
    }
    assert_eq!(cache.failing.current(), Some("99 (500)"));
    cache.take(Ok(Event::InitDone), label_of);
    assert!(cache.is_up());
}

#[test]
fn reason_of_a_refused_request_contains_the_remedy() {
    let mut cache = ObjectCache::<String>::new("Nodes");
    for (code, remedy) in [
        (
            401,
            "no; the API does not accept the caller's own credentials: renew",
        ),
        (403, "no; allow the account to list and watch Nodes"),
        (500, "no (500)"),
    ] {
        let status = || kube::Error::Api(Status::failure("no", "").with_code(code).boxed());
        for failed in [
            watcher::Error::InitialListFailed(status()),
            watcher::Error::WatchStartFailed(status()),
        ] {
            cache.take(Err(failed), label_of);
            let why = cache.failing.current().unwrap();
            assert!(why.starts_with(remedy), "{why}");
        }
    }
}

#[test]
fn list_is_no_success_while_watches_are_refused() {
    let mut cache = ObjectCache::new("Nodes");
    for _ in 0..3 {
        cache.take(Ok(Event::Init), label_of);
        cache.take(Ok(Event::<Node>::InitDone), label_of);
        cache.take(Err(refused_watch(403)), label_of);
        assert!(!cache.is_up());
    }
    cache.take(Ok(Event::Init), label_of);
    cache.take(Ok(Event::InitApply(node("a", "1"))), label_of);
    assert!(cache.take(Ok(Event::<Node>::InitDone), label_of) && !cache.is_up());
    // The watch has stayed up.
    assert!(!cache.take(Ok(Event::<Node>::InitDone), label_of) && cache.is_up());
    assert_eq!(known(&cache), ["1"]);
}

#[test]
fn version_that_the_api_no_longer_has_is_a_failure_only_if_the_next_watch_fails() {
    let mut cache = ObjectCache::<String>::new("Nodes");
    let list = |cache: &mut ObjectCache<String>| {
        cache.take(Ok(Event::Init), label_of);
        cache.take(Ok(Event::<Node>::InitDone), label_of);
    };
    for _ in 0..2 {
        cache.take(Err(refused_watch(410)), label_of);
        list(&mut cache);
        assert!(cache.is_up());
        // The watch has stayed up.
        cache.take(Ok(Event::<Node>::InitDone), label_of);
    }
    let status = Status::failure("too old", "Expired").with_code(410);
    cache.take(Err(refused_watch(410)), label_of);
    list(&mut cache);
    cache.take(Err(watcher::Error::WatchError(status.boxed())), label_of);
    assert!(!cache.is_up());
}

#[test]
fn known_objects_stay_while_lists_fail() {
    let mut cache = ObjectCache::new("Nodes");
    cache.take(Ok(Event::Init), label_of);
    cache.take(Ok(Event::InitApply(node("a", "1"))), label_of);
    cache.take(Ok(Event::InitDone), label_of);
    for _ in 0..3 {
        assert!(!cache.take(Err(refused("no")), label_of));
        // A retry has begun, but it is not a success yet.
        assert!(!cache.take(Ok(Event::<Node>::Init), label_of));
        assert!(!cache.is_up());
        cache.take(Ok(Event::InitApply(node("b", "2"))), label_of);
        assert!(!cache.is_up());
        assert_eq!(known(&cache), ["1"]);
    }
    cache.take(Ok(Event::Init), label_of);
    cache.take(Ok(Event::InitApply(node("c", "3"))), label_of);
    assert!(cache.take(Ok(Event::<Node>::InitDone), label_of) && !cache.is_up());
    assert!(!cache.take(Ok(Event::<Node>::InitDone), label_of) && cache.is_up());
    assert_eq!(known(&cache), ["3"]);
}

#[test]
fn objects_beyond_the_limit_are_left_out() {
    let mut cache = ObjectCache::new("Nodes").at_most(2);
    cache.take(Ok(Event::Init), label_of);
    for name in ["a", "b", "c"] {
        cache.take(Ok(Event::InitApply(node(name, name))), label_of);
    }
    assert!(cache.take(Ok(Event::<Node>::InitDone), label_of));
    assert_eq!(known(&cache), ["a", "b"]);
    assert!(!cache.take(Ok(Event::Apply(node("d", "d"))), label_of));
    assert!(cache.take(Ok(Event::Apply(node("a", "x"))), label_of));
    assert!(cache.take(Ok(Event::Delete(node("b", "b"))), label_of));
    assert!(cache.take(Ok(Event::Apply(node("d", "d"))), label_of));
    assert_eq!(known(&cache), ["d", "x"]);
}

#[test]
fn objects_that_do_not_matter_are_kept_but_report_no_change() {
    let mut cache = ObjectCache::new("Nodes");
    let mut take = |event| {
        let matters = |label: &String| label.starts_with('+');
        cache.take_where(Ok(event), label_of, matters)
    };
    assert!(!take(Event::Init) && !take(Event::InitApply(node("a", "1"))));
    assert!(take(Event::InitDone), "the first list counts");
    assert!(!take(Event::Apply(node("a", "2"))));
    assert!(take(Event::Apply(node("a", "+3"))));
    assert!(take(Event::Apply(node("a", "4"))), "it did matter");
    assert!(!take(Event::Apply(node("b", "5"))));
    assert!(!take(Event::Delete(node("a", "4"))));
    for (b, c, counts) in [
        ("6", "", false),
        ("6", "+7", true),
        ("8", "+7", false),
        ("8", "9", true),
        ("+1", "9", true),
        ("+1", "9", false),
        ("", "9", true),
    ] {
        take(Event::Init);
        take(Event::InitApply(node("b", b)));
        take(Event::InitApply(node("c", c)));
        assert_eq!(take(Event::InitDone), counts, "{b:?} {c:?}");
    }
    assert_eq!(known(&cache), ["9"]);
    assert!(cache.has("", "c") && !cache.has("", "b") && !cache.has("x", "c"));
}

#[tokio::test(start_paused = true)]
async fn pauses_grow_until_a_watch_stays_up() {
    let mut pause = Pause::default();
    let mut after = |event: Result<Event<Node>, watcher::Error>| {
        pause.note(&event);
        pause.due.take()
    };
    let [shortest, longest] = PAUSES;
    let mut expected = shortest;
    for _ in 0..10 {
        let time = after(Err(refused("no"))).unwrap();
        assert!(time <= expected && time >= expected / 2, "{time:?}");
        assert_eq!(after(Ok(Event::Init)), None);
        assert_eq!(after(Ok(Event::InitDone)), None);
        expected = (2 * expected).min(longest);
    }
    // A watch that breaks as soon as it has begun.
    let broken = watcher::Error::WatchFailed(kube::Error::TlsRequired);
    assert!(after(Err(broken)).unwrap() >= longest / 2);
    // A watch that stayed up for a while resets the pauses: it may have failed because the API went away.
    assert_eq!(after(Ok(Event::InitDone)), None);
    tokio::time::advance(2 * WATCHED).await;
    assert!(after(Err(refused("no"))).unwrap() <= shortest);
}

/// Longer than any step of these tests.
const MINUTE: Duration = Duration::from_secs(60);

/// An API of Nodes that the test answers, with one connection for each request.
struct ByHand {
    listener: TcpListener,
    /// Short names of the events that [`objects`] yields.
    events: mpsc::UnboundedReceiver<&'static str>,
}

impl ByHand {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let kubeconfig = dir.path().join("kubeconfig");
        let text = format!(
            "{{current-context: c, contexts: [{{name: c, context: {{cluster: c, user: u}}}}], \
             clusters: [{{name: c, cluster: {{server: '{url}'}}}}], users: [{{name: u, user: {{}}}}]}}"
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let client = crate::client::tests::client_of(&kubeconfig).await;
        let (sender, events) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let mut nodes = std::pin::pin!(objects::<Node>(Api::all(client)));
            while let Some(event) = nodes.next().await {
                let told = match event {
                    Ok(Event::Init) => "list",
                    Ok(Event::InitDone) => "listed",
                    Ok(_) => "node",
                    Err(error) if root(&error) == "timed out" => "silence",
                    Err(watcher::Error::WatchStartFailed(_)) => "refused",
                    Err(error) => panic!("{error:?}"),
                };
                sender.send(told).unwrap();
            }
        });
        Self { listener, events }
    }

    /// Waits for the next request. Returns its first line and the stream for the answer.
    async fn asked(&mut self) -> (String, TcpStream) {
        let asked = async {
            let (mut stream, _) = self.listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            (head.lines().next().unwrap().to_owned(), stream)
        };
        timeout(MINUTE, asked).await.unwrap()
    }

    async fn event(&mut self) -> &'static str {
        timeout(MINUTE, self.events.recv()).await.unwrap().unwrap()
    }

    /// Answers the next request, a list.
    async fn list(&mut self) {
        let (line, mut stream) = self.asked().await;
        assert!(line.starts_with("GET /api/v1/nodes?") && !line.contains("watch="));
        let list = r#"{"kind":"NodeList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":[]}"#;
        let length = list.len();
        let head = format!("{HEAD}content-length: {length}\r\n\r\n{list}");
        stream.write_all(head.as_bytes()).await.unwrap();
        assert_eq!([self.event().await, self.event().await], ["list", "listed"]);
    }

    /// Refuses the next request, a watch.
    async fn refuse_watch(&mut self, code: u16) {
        let (line, mut stream) = self.asked().await;
        assert!(line.contains("watch=true"), "{line}");
        let status = format!(r#"{{"kind":"Status","status":"Failure","code":{code}}}"#);
        let head = HEAD.replacen("200 OK", &format!("{code} Refused"), 1);
        let answer = format!("{head}content-length: {}\r\n\r\n{status}", status.len());
        stream.write_all(answer.as_bytes()).await.unwrap();
    }

    /// Begins to answer the next request, a watch with these parameters.
    async fn watch(&mut self, parameters: &[&str]) -> TcpStream {
        let (line, mut stream) = self.asked().await;
        for parameter in [&["watch=true"][..], parameters].concat() {
            assert!(line.contains(parameter), "{line}");
        }
        let head = format!("{HEAD}transfer-encoding: chunked\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    /// Sends an event on a watch.
    async fn send(stream: &mut TcpStream, kind: &str, version: &str) {
        let metadata = format!(r#"{{"name":"n","resourceVersion":"{version}"}}"#);
        let node = format!(r#"{{"kind":"Node","apiVersion":"v1","metadata":{metadata}}}"#);
        let line = format!("{{\"type\":\"{kind}\",\"object\":{node}}}\n");
        let chunk = format!("{:x}\r\n{line}\r\n", line.len());
        stream.write_all(chunk.as_bytes()).await.unwrap();
    }

    /// Sends nothing until the event arrives.
    async fn silent_until(&mut self, event: &str) {
        tokio::time::pause();
        assert_eq!(self.event().await, event);
        tokio::time::resume();
    }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n";

#[tokio::test]
async fn silence_is_a_failure_and_leads_to_a_new_list() {
    let mut api = ByHand::start().await;
    // A list without an answer.
    let (line, _silent) = api.asked().await;
    assert!(!line.contains("watch="), "{line}");
    assert_eq!(api.event().await, "list");
    api.silent_until("silence").await;
    api.list().await;
    // A watch without an answer.
    let (line, _silent) = api.asked().await;
    assert!(line.contains("watch=true"), "{line}");
    api.silent_until("silence").await;
    api.list().await;
    // A watch that falls silent, as if a device on the path had forgotten its connection.
    let mut silent = api.watch(&["resourceVersion=5"]).await;
    ByHand::send(&mut silent, "ADDED", "6").await;
    assert_eq!(api.event().await, "node");
    api.silent_until("silence").await;
    api.list().await;
}

#[tokio::test]
async fn watch_that_stays_up_after_a_failure_is_reported() {
    let mut api = ByHand::start().await;
    api.list().await;
    api.refuse_watch(403).await;
    assert_eq!(api.event().await, "refused");
    api.list().await;
    // This watch is repeated without a list.
    api.refuse_watch(503).await;
    let _silent = api.watch(&[]).await;
    api.silent_until("listed").await;
}

#[tokio::test]
async fn watch_refused_by_an_overloaded_api_is_repeated_without_a_new_list() {
    let mut api = ByHand::start().await;
    api.list().await;
    for (code, text) in [(429, "Too Many Requests"), (503, "Service Unavailable")] {
        let (line, mut stream) = api.asked().await;
        assert!(line.contains("watch=true") && line.contains("resourceVersion=5"));
        let status = format!(
            r#"{{"kind":"Status","apiVersion":"v1","metadata":{{}},"status":"Failure","message":"m","reason":"r","code":{code}}}"#
        );
        let length = status.len();
        let answer = format!(
            "HTTP/1.1 {code} {text}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{status}"
        );
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
    let mut watch = api.watch(&["resourceVersion=5"]).await;
    ByHand::send(&mut watch, "ADDED", "6").await;
    assert_eq!(api.event().await, "node");
}

#[test]
fn refused_watches_are_repeated_twice_since_the_last_event() {
    let refused = |code| -> Result<Event<Node>, watcher::Error> { Err(refused_watch(code)) };
    let mut pause = Pause {
        repeats: REFUSALS,
        ..Pause::default()
    };
    assert_eq!(pause.before_repeat(&refused(403)), None);
    for _ in 0..2 {
        for _ in 0..REFUSALS {
            assert!(pause.before_repeat(&refused(503)).is_some());
        }
        assert_eq!(pause.before_repeat(&refused(429)), None);
        pause.note::<Node>(&Ok(Event::InitDone));
    }
}

#[tokio::test]
async fn watch_without_changes_continues_without_a_new_list() {
    let mut api = ByHand::start().await;
    api.list().await;
    let mut watch = api.watch(&["resourceVersion=5"]).await;
    for version in ["8", "9", "9"] {
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(WATCH.into())).await;
        tokio::time::resume();
        ByHand::send(&mut watch, "BOOKMARK", version).await;
        watch.write_all(b"0\r\n\r\n").await.unwrap();
        drop(watch);
        let version = format!("resourceVersion={version}");
        watch = api.watch(&["timeoutSeconds=30", &version]).await;
    }
    assert!(api.events.try_recv().is_err(), "nothing has happened");
}
