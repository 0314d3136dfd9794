//! Tests of the harness and of the lab's clients, against the stock programs.

use culvert_kit::check;
use culvert_kit::services::Services;

use super::*;
use crate::interop::Interop;

fn stock(interop: &Interop, mode: Mode, transport: Transport, servers: usize) -> Builder {
    let mut builder = Topology::builder(mode, transport);
    for _ in 0..servers {
        builder = builder.server(Executable::At(interop.proxy_server.clone()), &[]);
    }
    builder.agent(Executable::At(interop.proxy_agent.clone()), &[])
}

/// Checks traffic through stock programs at both ends, with a given mode and transport.
async fn carries(mode: Mode, transport: Transport) {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let topology = stock(interop, mode, transport, 1).start().await;
    let connect = async |addr: SocketAddr| topology.connect(&addr.to_string()).await.unwrap();
    check::http_get(connect(services.http).await, "/")
        .await
        .unwrap();
    check::echo(connect(services.raw).await, 10, 1000)
        .await
        .unwrap();
    check::download(connect(services.raw).await, 3_000_000)
        .await
        .unwrap();
    check::upload(connect(services.raw).await, 3_000_000)
        .await
        .unwrap();
    // Port 1 has no listener.
    let refused = topology.connect("127.0.0.1:1").await.err().unwrap();
    let text = refused.refusal().unwrap_or_default();
    assert!(text.contains("connection refused"), "{refused}");
}

#[tokio::test]
async fn stock_programs_carry_grpc_over_uds() {
    carries(Mode::Grpc, Transport::Uds).await;
}

#[tokio::test]
async fn stock_programs_carry_grpc_over_tcp() {
    carries(Mode::Grpc, Transport::Tcp).await;
}

#[tokio::test]
async fn stock_programs_carry_connect_over_uds() {
    carries(Mode::HttpConnect, Transport::Uds).await;
}

#[tokio::test]
async fn stock_programs_carry_connect_over_tcp() {
    carries(Mode::HttpConnect, Transport::Tcp).await;
}

#[tokio::test]
async fn topology_survives_restarts_and_kills_of_stock_programs() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let target = services.http.to_string();
    let agent = Executable::At(interop.proxy_agent.clone());
    let mut topology = stock(interop, Mode::Grpc, Transport::Uds, 2)
        .agent(agent, &["--agent-id=second"])
        .agent_args(&["--sync-forever=true"])
        .start()
        .await;
    topology.restart_server(1).await;
    topology.wait_for_agents().await;
    topology.kill_server(1);
    topology.kill_agent(1);
    // Wait: a stock server that has not noticed the dead agent yet may dial through that agent, without an
    // answer.
    eventually("the killed agent is gone", PATIENCE, async || {
        ready_backends(&topology.server_metrics(0).await) == 1.0
    })
    .await;
    let stream = topology.connect(&target).await.unwrap();
    check::http_get(stream, "/").await.unwrap();
    topology.start_agent(1).await;
    topology.wait_for_agents().await;
    eventually(
        "the new agent counts its connection",
        PATIENCE,
        async || {
            let metrics = topology.agent_metrics(1).await;
            metrics.value(
                "konnectivity_network_proxy_agent_open_server_connections",
                &[],
            ) == Some(1.0)
        },
    )
    .await;
    assert!(topology.server(0).fd_count() > 0);
    let services_closed = async || services.open_connections() == 0;
    eventually(
        "the endpoint's connection is closed",
        PATIENCE,
        services_closed,
    )
    .await;
}

#[tokio::test]
async fn the_driver_reports_success_and_failure() {
    let Some(interop) = Interop::get() else {
        return;
    };
    let services = Services::start().await.unwrap();
    let topology = stock(interop, Mode::Grpc, Transport::Uds, 1).start().await;
    let FrontEnd::GrpcUds(socket) = topology.front_end() else {
        panic!("the front end must be gRPC over a Unix socket");
    };
    let dial = async |target: &str| {
        let uds = socket.to_str().unwrap();
        let args = [
            "dial", "--front", "grpc-uds", "--uds", uds, "--target", target,
        ];
        interop.run(&args).await
    };
    let result = dial(&services.raw.to_string()).await;
    assert_eq!(result["ok"], true, "{result}");
    let result = dial("127.0.0.1:1").await;
    assert_eq!(result["ok"], false, "{result}");
    assert!(
        result.to_string().contains("connection refused"),
        "{result}"
    );
}
