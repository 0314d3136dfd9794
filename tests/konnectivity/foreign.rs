//! The native transport against independent implementations: an agent and a server built on Go's HTTP/2 and
//! HTTP/1.1 libraries. Without Go the tests are skipped, see [`culvert_tests::interop`].

use culvert_kit::check;
use culvert_kit::pki::Pair;
use culvert_kit::services::Services;
use culvert_tests::interop::Interop;
use culvert_tests::{Mode, Program, Signal, Topology, Transport};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::searching::Lone;
use crate::support::*;

fn args(command: &str, addr: &str, ca: &std::path::Path, pair: &Pair) -> Vec<String> {
    vec![
        command.into(),
        format!("--addr={addr}"),
        format!("--ca={}", ca.display()),
        format!("--cert={}", pair.cert.display()),
        format!("--key={}", pair.key.display()),
    ]
}

/// Waits for the driver's log line with an event, and returns the parsed line.
async fn event(driver: &Program, name: &str) -> Value {
    let name = format!("\"event\":\"{name}\"");
    let line = driver.wait_for_log(&name, LIMIT).await;
    serde_json::from_str(&line).unwrap()
}

/// Starts our server and connects a foreign agent to it.
async fn with_foreign_agent(interop: &Interop, mode: Mode) -> (Topology, Program) {
    let builder = Topology::builder(mode, Transport::Uds);
    let topology = builder.servers(1).start().await;
    let pki = topology.pki();
    let addr = topology
        .agent_address(0)
        .to_string()
        .replace("127.0.0.1", "localhost");
    let agent = interop.start(&args("native-agent", &addr, &pki.ca, &pki.agent));
    let connected = event(&agent, "connected").await;
    assert_eq!(connected["serverid"], "server-0");
    assert_eq!(connected["servercount"], "1");
    server_shows(&topology, "ready_backends", &[], 1.0).await;
    (topology, agent)
}

#[tokio::test]
async fn a_foreign_agent_works_with_our_server() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let raw = services.raw.to_string();
    for mode in MODES {
        let (topology, mut agent) = with_foreign_agent(interop, mode).await;
        let size = 20 << 20;
        let download = check::download(open(&topology, &raw).await, size);
        timely("a download", download).await.unwrap();
        let upload = check::upload(open(&topology, &raw).await, size);
        timely("an upload", upload).await.unwrap();
        let error = refusal(&topology, "127.0.0.1:1").await;
        let text = "dial tcp 127.0.0.1:1: connect: connection refused";
        assert_refused(&error, 502, text, text);
        let mut echoes = JoinSet::new();
        for _ in 0..20 {
            echoes.spawn(check::echo(open(&topology, &raw).await, 50, 5000));
        }
        for echoed in timely("all echoes", echoes.join_all()).await {
            echoed.unwrap();
        }
        if mode == Mode::HttpConnect {
            let mut stream = open(&topology, &services.half.to_string()).await;
            let ask = async {
                use tokio::io::AsyncWriteExt as _;
                stream.write_all(&vec![7; 100_000]).await?;
                stream.shutdown().await
            };
            timely("a half close", ask).await.unwrap();
            assert_eq!(read_rest(&mut stream).await, b"100000\n");
        }
        let mut kept = Innocent::open(&topology, services.raw).await;
        agent.send_line("drain");
        let drains = [("segment", "from_agent"), ("packet_type", "DRAIN")];
        server_shows(&topology, "stream_packets_total", &drains, 1.0).await;
        kept.still_echoes("the drain").await;
        drop(kept);
        server_is_idle(&topology).await;
        drop(agent);
        server_shows(&topology, "ready_backends", &[], 0.0).await;
    }
}

#[tokio::test]
async fn our_agent_works_with_a_foreign_server() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let mut lone = Lone::new();
    let pki = &lone.pki;
    let mut command = args("native-server", "127.0.0.1:0", &pki.ca, &pki.cluster);
    command.push(format!("--raw={}", services.raw));
    command.push(format!("--half={}", services.half));
    let mut server = interop.start(&command);
    let listening = event(&server, "listening").await;
    let (_, port) = listening["addr"]
        .as_str()
        .unwrap()
        .rsplit_once(':')
        .unwrap();
    let flags = [
        &format!("--proxy-server-port={port}"),
        "--drain-linger=200ms",
    ];
    lone.start(&flags, &[]);
    assert_eq!(event(&server, "agent").await["agentid"], "agent-0");
    lone.shows("open_server_connections", 1.0).await;
    event(&server, "checked").await;
    lone.shows("open_endpoint_connections", 0.0).await;
    lone.program().signal(Signal::TERM);
    let status = server.wait_exit(LIMIT).await;
    assert!(status.success(), "{}", server.log());
    assert_eq!(lone.program().wait_exit(LIMIT).await.code(), Some(0));
}
