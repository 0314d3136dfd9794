//! Everything that `kubectl` does with pods and nodes.

use std::path::Path;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use culvert_tests::eventually;
use culvert_tests::process::outcome;
use futures_util::future::join_all;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::time::{sleep, timeout};

use crate::lab::cluster::{Cluster, NODE, silence};
use crate::lab::{Egress, PATIENCE};

/// Container with a shell, in the pod `far-side`.
const SHELL: [&str; 3] = ["far-side", "-c", "shell"];

/// Number of bytes in each direction of a copy.
const COPY: usize = 60_000_000;

/// The first line of a container's log arrives.
pub(super) async fn logs(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let args = [&["logs"][..], &SHELL].concat();
    let log = cluster.lab.kubectl.must(&args).await;
    assert!(log.starts_with("started\n"), "{log}");
}

/// A command in a container receives its input, and the caller its output, error output and status.
pub(super) async fn exec(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let kubectl = &cluster.lab.kubectl;
    let input = vec![b'x'; 1_000_000];
    let args = [&["exec", "-i"][..], &SHELL, &["--", "cat"]].concat();
    let echoed = kubectl.bytes(&args, &input).await.unwrap();
    assert_eq!(echoed.len(), input.len());
    assert!(echoed == input);
    let script = "echo to the error output >&2; exit 3";
    let args = [&["exec"][..], &SHELL, &["--", "sh", "-c", script]].concat();
    let error = kubectl.run(&args).await.unwrap_err();
    assert!(error.contains("to the error output"), "{error}");
    assert!(error.contains("exit code 3"), "{error}");
}

/// A file is the same after a copy into a container and back.
pub(super) async fn cp_both_ways(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let kubectl = &cluster.lab.kubectl;
    let folder = tempfile::tempdir_in("/run").unwrap();
    let (sent, received) = (folder.path().join("sent"), folder.path().join("received"));
    let bytes: Vec<u8> = (0..COPY)
        .map(|i| (i % 251) as u8 ^ (i >> 16) as u8)
        .collect();
    std::fs::write(&sent, &bytes).unwrap();
    let path = |path: &Path| path.display().to_string();
    let (sent, received) = (path(&sent), path(&received));
    let there = ["cp", "-c", "shell", &sent, "default/far-side:/tmp/copy"];
    kubectl.must(&there).await;
    let args = [&["exec"][..], &SHELL, &["--", "sha256sum", "/tmp/copy"]].concat();
    let digest = kubectl.must(&args).await;
    let expected = outcome(Command::new("sha256sum").arg(&sent)).unwrap();
    let word = |text: &str| text.split(' ').next().unwrap_or_default().to_owned();
    assert_eq!(word(&digest), word(&expected));
    let back = [
        "cp",
        "-c",
        "shell",
        "--retries=0",
        "default/far-side:/tmp/copy",
        &received,
    ];
    kubectl.must(&back).await;
    let digest = outcome(Command::new("sha256sum").arg(&received)).unwrap();
    assert_eq!(word(&digest), word(&expected));
}

/// Ten connections at once through one forwarded port receive all their bytes.
pub(super) async fn port_forward(cluster: &mut Cluster, egress: Egress) {
    const COUNT: usize = 1_000_000;
    cluster.tunnel(egress).await;
    let mut forward = spawn(cluster, &["port-forward", "far-side", ":8080"]);
    let line = line_with(&mut forward, "Forwarding from 127.0.0.1:").await;
    let port = line
        .split([':', ' '])
        .find_map(|word| word.parse::<u16>().ok());
    let port = port.unwrap_or_else(|| panic!("no port: {line}"));
    let downloads = (0..10).map(|_| async move {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let request = format!("GET /bytes/{COUNT} HTTP/1.0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let head = answer.windows(4).position(|it| it == b"\r\n\r\n").unwrap() + 4;
        is_pattern(&answer[head..], COUNT);
    });
    timeout(PATIENCE, join_all(downloads)).await.unwrap();
}

/// A line reaches the input of a running container, and the answer comes back.
pub(super) async fn attach(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let mut attached = spawn(cluster, &[&["attach", "-i"][..], &SHELL].concat());
    let mut stdin = attached.stdin.take().unwrap();
    stdin.write_all(b"attached\n").await.unwrap();
    line_with(&mut attached, "line attached").await;
}

/// kube-apiserver's proxies reach a pod, a service and the kubelet.
pub(super) async fn proxies(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let kubectl = &cluster.lab.kubectl;
    for object in ["pods/far-side:8080", "services/far-side:http"] {
        let path = format!("--raw=/api/v1/namespaces/default/{object}/proxy/bytes/1000");
        is_pattern(&kubectl.bytes(&["get", &path], &[]).await.unwrap(), 1000);
    }
    let path = format!("--raw=/api/v1/nodes/{NODE}/proxy/healthz");
    assert_eq!(kubectl.must(&["get", &path]).await, "ok");
}

/// A followed log goes on after a time without a line that is longer than several keepalives.
pub(super) async fn followed_logs_survive_silence(cluster: &mut Cluster, egress: Egress) {
    cluster.tunnel(egress).await;
    let mut followed = spawn(cluster, &[&["logs", "-f", "--tail=0"][..], &SHELL].concat());
    let mut lines = BufReader::new(followed.stdout.take().unwrap()).lines();
    let write = async |text: &str| {
        let script = format!("echo {text} >/proc/1/fd/1");
        let args = [&["exec"][..], &SHELL, &["--", "sh", "-c", &script]].concat();
        cluster.lab.kubectl.must(&args).await;
    };
    // The follower shows the lines after its start.
    let mut is_following = false;
    eventually("the log is followed", PATIENCE, async || {
        write("before").await;
        let line = timeout(Duration::from_secs(1), lines.next_line()).await;
        is_following |= line.is_ok();
        is_following
    })
    .await;
    sleep(silence()).await;
    write("after").await;
    let line = async {
        loop {
            let line = lines
                .next_line()
                .await
                .unwrap()
                .expect("the end of the log");
            if line == "after" {
                return;
            }
            assert_eq!(line, "before");
        }
    };
    timeout(PATIENCE, line).await.unwrap();
}

/// Starts a call of `kubectl` that does not end on its own.
fn spawn(cluster: &Cluster, args: &[&str]) -> Child {
    let mut command = cluster.lab.kubectl.command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::null());
    command.spawn().unwrap()
}

/// Waits until the program prints a line with this text.
async fn line_with(child: &mut Child, text: &str) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let wait = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.contains(text) {
                return line;
            }
        }
        panic!("the program ended without {text:?}");
    };
    let line = timeout(PATIENCE, wait).await.unwrap();
    // The program must be able to print further lines.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    line
}

/// Checks bytes of the test pod.
fn is_pattern(bytes: &[u8], count: usize) {
    assert_eq!(bytes.len(), count);
    let wrong = bytes
        .iter()
        .enumerate()
        .find(|(i, byte)| (i % 251) as u8 != **byte);
    assert!(wrong.is_none(), "{wrong:?}");
}
