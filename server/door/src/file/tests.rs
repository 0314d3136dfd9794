#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::SystemTime;

use culvert_host::file_follower::SLOW_READ;
use culvert_host::net::proxy_protocol::Version;
use futures_util::future::poll_immediate;
use rustix::fs::{CWD, Mode, OFlags, mkfifoat};
use tokio::time::{Instant, advance, resume, timeout};

use super::*;

const GOOD: &str = "\
# The door of a laptop.
upstreams:
  - name: demo/apiserver
    endpoints: [127.0.0.1:8443, '[::1]:8443', 127.0.0.1:8443]
    serverNames: [API.example.com., '*.apps.example.com']
    authorities: ['apiserver.demo.svc.cluster.local:443']
    nodePorts: [30443]
  - name: demo/plain
    endpoints: [127.0.0.1:80]
";

#[test]
fn file_contents_become_routes() {
    let routes = parse(GOOD, "door.yaml").unwrap();
    let key = UpstreamKey::from("demo/apiserver".to_owned());
    let endpoints: Vec<String> = routes
        .upstreams
        .get(&key)
        .unwrap()
        .endpoints
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(endpoints, ["127.0.0.1:8443", "[::1]:8443"]);
    let names: Vec<_> = routes.server_names.keys().map(String::as_str).collect();
    assert_eq!(names, ["*.apps.example.com", "api.example.com"]);
    assert_eq!(routes.node_ports, BTreeMap::from([(30_443, key.clone())]));
    let authority = "apiserver.demo.svc.cluster.local:443";
    assert_eq!(routes.authorities.get(authority), Some(&key));
    assert_eq!(routes.upstreams.len(), 2);
    for empty in [
        "",
        "# nothing yet\n",
        "upstreams: []\n",
        "upstreams:\n",
        "{}",
    ] {
        assert_eq!(
            parse(empty, "door.yaml"),
            Ok(Routes::default()),
            "{empty:?}"
        );
    }
}

#[test]
fn quic_port_is_a_number_or_same() {
    let upstream = |port: &str| {
        let text = format!(
            "upstreams: [{{name: a, endpoints: ['10.0.0.1:1'], serverNames: [a.example], quicPort: {port}}}]"
        );
        let routes = parse(&text, "door.yaml").map_err(|error| error.0.concat())?;
        Ok(routes.upstreams.into_values().next().unwrap().quic_port)
    };
    assert_eq!(upstream("same"), Ok(Some(QuicPort::Same)));
    let number = QuicPort::Number(8133.try_into().unwrap());
    assert_eq!(upstream("8133"), Ok(Some(number)));
    let wrong: Result<_, String> = upstream("0");
    assert!(wrong.unwrap_err().contains("expected a number from 1"));
    let nameless = "upstreams:\n  - name: a\n    endpoints: ['10.0.0.1:1']\n    quicPort: same\n";
    let problems = parse(nameless, "door.yaml").unwrap_err().0;
    assert!(problems[0].starts_with("door.yaml:4: quicPort needs serverNames"));
}

#[test]
fn every_mistake_is_reported_with_its_line() {
    let text = "\
upstreams:
  - name: a
    endpoints: [localhost:80, 10.0.0.1:0]
    nodePorts: [0, 70000, 30000]
  - name: a
    serverNames: [no_ü, x.example.com]
    authorities: [x, 'x:99999']
  - name: b
    endpoints: [10.0.0.1:1]
    nodePorts: [30000]
    serverNames: [X.example.com]
";
    let problems = parse(text, "door.yaml").unwrap_err().0;
    let begins = [
        "door.yaml:3: endpoint \"localhost:80\"",
        "door.yaml:3: endpoint \"10.0.0.1:0\"",
        "door.yaml:4: node port 0 ",
        "door.yaml:4: node port 70000 ",
        "door.yaml:5: a second upstream has the name \"a\"",
        "door.yaml:5: upstream \"a\" needs at least one",
        "door.yaml:6: server name \"no_ü\"",
        "door.yaml:7: authority \"x\"",
        "door.yaml:7: authority \"x:99999\"",
        "door.yaml:10: node port 30000 belongs to upstream a already",
        "door.yaml:11: server name x.example.com belongs to upstream a already",
    ];
    assert_eq!(problems.len(), begins.len(), "{problems:#?}");
    for (problem, begin) in problems.iter().zip(begins) {
        assert!(problem.starts_with(begin), "{problem}\n{begin}");
    }
}

#[test]
fn first_mistake_in_syntax_fields_or_types_is_reported_with_line_column_and_form() {
    const A: &str = "upstreams:\n  - name: a\n    endpoints: [10.0.0.1:1]\n";
    for (text, begin) in [
        (
            format!("{A}    endpoint: [x]\n"),
            "4: unknown field `endpoint`, expected one of name, endpoints,",
        ),
        (
            format!("{A}    nodePorts: [abc, x]\n"),
            "4: invalid i64 at line 4, column 17, in \"nodePorts: [abc, x]\"",
        ),
        (format!("{A}    nodePorts: ['']\n"), "4: invalid i64"),
        (format!("{A}    nodePorts:\n"), "4: expected sequence start"),
        (
            format!("{A}    allowedNetworks:\n"),
            "4: expected sequence start",
        ),
        (
            format!("{A}    proxyProtocol:\n"),
            "4: cannot deserialize null into string",
        ),
        (
            format!("{A}    serverNames: {{x: y}}\n"),
            "4: expected sequence start at line 4, column 18, in \"serverNames: {x: y}\"",
        ),
        (
            format!("{A}    authorities: [[x]]\n"),
            "4: expected string scalar",
        ),
        (
            format!("{A}    authorities: [null]\n"),
            "4: cannot deserialize null into string",
        ),
        (
            format!("{A}    name: b\n"),
            "4: duplicate mapping key: name at line 4, column 5, in \"name: b\"; delete one of the two keys; ",
        ),
        (format!("{A}  - c\n"), "4: expected mapping start"),
        (format!("{A}  - endpoints: []\n"), "4: missing field `name`"),
        (format!("{A}upstream: []\n"), "4: unknown field `upstream`"),
        (format!("{A}  - [\n"), "4: unclosed bracket"),
        ("upstreams: 5\n".to_owned(), "1: expected sequence start"),
    ] {
        let problems = parse(&text, "door.yaml").unwrap_err().0;
        let [problem] = problems.as_slice() else {
            panic!("{problems:?}")
        };
        let begin = format!("door.yaml:{begin}");
        assert!(problem.starts_with(&begin), "{text}{problem}");
        assert!(problem.contains(", column ") && problem.ends_with(FORM));
        assert!(!problem.contains('\n'));
    }
}

#[test]
fn invalid_or_missing_file_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door.yaml");
    let open = |path: &Path| {
        let table = Arc::new(Table::new(10));
        let follower = Follower::open(path, table.clone(), ProxyMetrics::new().unwrap());
        follower.map(|follower| (follower, table))
    };
    let missing = open(&path).err().unwrap().to_string();
    assert!(missing.contains("door.yaml"), "{missing}");
    std::fs::write(&path, GOOD).unwrap();
    let (mut follower, table) = open(&path).unwrap();
    assert!(table.by_server_name("api.example.com").is_some());
    assert_eq!(follower.look(), Look::Unchanged);
    std::fs::write(&path, "upstreams: [").unwrap();
    assert_eq!(
        [follower.look(), follower.look()],
        [Look::Unchanged, Look::Unchanged]
    );
    std::fs::remove_file(&path).unwrap();
    let looked = follower.look();
    let Look::Unreadable(why) = looked else {
        panic!("{looked:?}");
    };
    assert!(why.contains("door.yaml"), "{why}");
    assert_eq!(follower.look(), Look::Unchanged, "reported twice");
    assert!(table.by_server_name("api.example.com").is_some());
    std::fs::write(&path, "").unwrap();
    let empty = follower.look();
    assert!(matches!(&empty, Look::Unreadable(why) if why.contains("is empty")));
    assert_eq!(follower.look(), Look::Unchanged);
    assert!(table.by_server_name("api.example.com").is_some());
    std::fs::write(&path, GOOD.replace("API.", "other.")).unwrap();
    assert_eq!(
        follower.look(),
        Look::Unchanged,
        "the file may be half written"
    );
    assert_eq!(follower.look(), Look::Changed);
    assert!(table.by_server_name("api.example.com").is_none());
    assert!(table.by_server_name("other.example.com").is_some());
    // A file restored with an old time stamp still counts as a change.
    let old = SystemTime::now() - Duration::from_secs(3600);
    let put = |text: &str, at: SystemTime| {
        std::fs::write(&path, text).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(at).unwrap();
    };
    put(GOOD, old);
    assert_eq!(
        [follower.look(), follower.look()],
        [Look::Unchanged, Look::Changed]
    );
    assert_eq!(follower.look(), Look::Unchanged);
    put("upstreams: []", old);
    assert_eq!(
        [follower.look(), follower.look()],
        [Look::Unchanged, Look::Changed]
    );
    assert!(table.by_server_name("api.example.com").is_none());
}

#[test]
fn source_state_shows_a_bad_file_until_a_good_one_applies() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door.yaml");
    let metrics = ProxyMetrics::new().unwrap();
    let write = |text: &str| std::fs::write(&path, text).unwrap();
    write(GOOD);
    let mut follower = Follower::open(&path, Arc::new(Table::new(10)), metrics.clone()).unwrap();
    let mut state = || {
        follower.look();
        follower.look();
        let page = metrics.render(&Table::new(10));
        let up = page.contains("\nculvert_nodeport_proxy_source_up 1\n");
        let source = *metrics.source.lock();
        assert_eq!(up, source == SourceState::Good);
        source
    };
    assert_eq!(state(), SourceState::Good);
    write("upstreams: [");
    assert_eq!(state(), SourceState::Rejected);
    assert_eq!(state(), SourceState::Rejected);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(state(), SourceState::Unreadable);
    write("upstreams: [");
    assert_eq!(
        state(),
        SourceState::Rejected,
        "the same wrong text is back"
    );
    // The last good text also differs from the wrong one.
    write(GOOD);
    assert_eq!(state(), SourceState::Good);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(state(), SourceState::Unreadable);
    write(GOOD);
    assert_eq!(state(), SourceState::Good);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn file_that_cannot_be_read_at_once_stops_no_other_task() {
    let dir = tempfile::tempdir().unwrap();
    let [path, pipe] = ["door.yaml", "pipe"].map(|name| dir.path().join(name));
    std::fs::write(&path, GOOD).unwrap();
    let (table, metrics) = (Arc::new(Table::new(10)), ProxyMetrics::new().unwrap());
    let follower = Follower::open(&path, table, metrics).unwrap();
    mkfifoat(CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
    std::fs::rename(&pipe, &path).unwrap();
    let stop = CancellationToken::new();
    let run = tokio::spawn(follower.run(watch::Sender::new(0), stop.clone()));
    // Opens once the follower has begun to read, and makes it wait for an end of the file.
    let writer = loop {
        match rustix::fs::open(&path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
            Ok(writer) => break writer,
            Err(_) => std::thread::yield_now(),
        }
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    tokio::spawn(async move { sender.send(()) });
    let others = receiver.recv_timeout(Duration::from_secs(10));
    stop.cancel();
    drop(writer);
    run.await.unwrap();
    assert_eq!(others, Ok(()));
}

#[tokio::test(start_paused = true)]
async fn file_that_cannot_be_read_in_time_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let [path, new] = ["door.yaml", "new"].map(|name| dir.path().join(name));
    std::fs::write(&path, GOOD).unwrap();
    let (table, metrics) = (Arc::new(Table::new(10)), ProxyMetrics::new().unwrap());
    let follower = Follower::open(&path, table, metrics.clone()).unwrap();
    mkfifoat(CWD, &new, Mode::from_raw_mode(0o600)).unwrap();
    std::fs::rename(&new, &path).unwrap();
    let stop = CancellationToken::new();
    let run = tokio::spawn(follower.run(watch::Sender::new(0), stop.clone()));
    // Opens once the follower has begun to read, and makes it wait for an end of the file.
    let writer = loop {
        match rustix::fs::open(&path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
            Ok(writer) => break writer,
            Err(_) => advance(POLL).await,
        }
    };
    // While a thread reads, only the test advances the clock.
    let deadline = Instant::now() + SLOW_READ * 2;
    while *metrics.source.lock() != SourceState::Unreadable {
        assert!(Instant::now() < deadline, "not reported");
        advance(POLL).await;
    }
    // The read ends without a change.
    std::fs::write(&new, GOOD).unwrap();
    std::fs::rename(&new, &path).unwrap();
    rustix::io::write(&writer, GOOD.as_bytes()).unwrap();
    drop(writer);
    // The threads of the next reads need real time.
    resume();
    let is_good = async {
        while *metrics.source.lock() != SourceState::Good {
            sleep(POLL).await;
        }
    };
    timeout(SLOW_READ, is_good).await.unwrap();
    stop.cancel();
    run.await.unwrap();
}

#[tokio::test]
async fn first_read_of_the_file_does_not_block_the_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("door.yaml");
    mkfifoat(CWD, &path, Mode::from_raw_mode(0o600)).unwrap();
    let (going_on, is_going_on) = std::sync::mpsc::channel();
    let pipe = path.clone();
    let writer = std::thread::spawn(move || {
        // Waits for the reader, which then waits for an end of the file.
        let pipe = rustix::fs::open(&pipe, OFlags::WRONLY, Mode::empty()).unwrap();
        rustix::io::write(&pipe, GOOD.as_bytes()).unwrap();
        is_going_on.recv_timeout(Duration::from_secs(10))
    });
    let (table, metrics) = (Arc::new(Table::new(10)), ProxyMetrics::new().unwrap());
    let mut load = pin!(Follower::load(&path, table, metrics));
    assert!(poll_immediate(load.as_mut()).await.is_none());
    going_on.send(()).unwrap();
    assert!(load.await.is_ok());
    writer.join().unwrap().unwrap();
}

#[test]
fn deeply_nested_yaml_is_rejected_with_its_line() {
    for (depth, why) in [(60, "expected mapping start"), (60_000, "")] {
        let text = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let problems = parse(&text, "door.yaml").unwrap_err().0;
        let [problem] = problems.as_slice() else {
            panic!("{problems:?}")
        };
        assert!(problem.starts_with("door.yaml:1: "), "{problem}");
        assert!(problem.contains(why), "{problem}");
    }
}

#[test]
fn conditions_of_an_upstream_are_read_and_checked() {
    let text = |networks: &str, version: &str| {
        format!(
            "upstreams:\n  - name: a\n    endpoints: [127.0.0.1:80]\n    allowedNetworks: [{networks}]\n    proxyProtocol: {version}\n"
        )
    };
    let routes = parse(&text("192.0.2.0/24", "v2"), "door.yaml").unwrap();
    let backend = routes.upstreams.values().next().unwrap();
    assert_eq!(backend.header, Some(Version::V2));
    let allowed = backend.allowed.as_ref().unwrap();
    assert_eq!(allowed.to_string(), "192.0.2.0/24");
    // An empty list permits no client.
    let routes = parse(&text("", "v1"), "door.yaml").unwrap();
    let backend = routes.upstreams.values().next().unwrap();
    assert_eq!(backend.allowed, Some(Networks::default()));
    let problems = parse(&text("192.0.2.0/24, nowhere", "v3"), "door.yaml").unwrap_err();
    assert_eq!(problems.0.len(), 2, "{problems}");
    assert!(problems.0[0].starts_with("door.yaml:4: \"nowhere\" is not a network"));
    assert!(problems.0[1].starts_with("door.yaml:5: the versions of the PROXY"));
}
