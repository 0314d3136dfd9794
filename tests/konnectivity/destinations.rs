//! The policies of agents and servers for destinations.

use std::net::{Ipv4Addr, SocketAddr};

use culvert_kit::services::Services;
use culvert_konnectivity::message::Message;
use culvert_tests::{Executable, Topology, Transport};

use crate::scripts::{self, Server, opened};
use crate::searching::Lone;
use crate::streams_of_servers::dialed;
use crate::support::*;

const LISTED: &str = "the destination is in --deny-destinations";
const NOT_LISTED: &str = "the destination is not in --allow-destinations";

/// Returns the start of an agent's refusal. Dialing link-local addresses would leave this machine, so the tests
/// only dial denied ones.
fn by_agent(address: impl std::fmt::Display) -> String {
    format!("dial tcp {address}: denied by the agent: ")
}

/// Returns a flag that denies the port of `address` on every address.
fn denies(address: SocketAddr) -> String {
    format!("--deny-destinations=*:{}", address.port())
}

#[tokio::test]
async fn agent_denies_addresses_and_names_on_the_native_transport() {
    let services = Services::start().await.unwrap();
    let (raw, port) = (services.raw, services.raw.port());
    for mode in MODES {
        let builder = Topology::builder(mode, Transport::Uds).servers(1);
        let builder = builder.agent(Executable::Ours, &[&denies(raw)]);
        let mut topology = builder.start().await;
        for target in [raw.to_string(), format!("[::ffff:127.0.0.1]:{port}")] {
            let error = refusal(&topology, &target).await;
            let text = by_agent(raw) + LISTED;
            assert_refused(&error, 502, &text, &text);
        }
        let error = refusal(&topology, &format!("localhost:{port}")).await;
        assert_refused(&error, 502, LISTED, LISTED);
        let error = refusal(&topology, "169.254.169.254:80").await;
        let text = by_agent("169.254.169.254:80") + "the destination is link-local";
        assert_refused(&error, 502, &text, &text);
        let denied = [("reason", "denied")];
        agent_shows(&topology, "endpoint_dial_failure_total", &denied, 4.0).await;
        assert_eq!(dial_failures(&topology, "error_response").await, 4.0);
        topology.agent(0).wait_for_log("dial denied", LIMIT).await;
        open(&topology, &services.http.to_string()).await;
        server_is_idle(&topology).await;
    }
}

#[tokio::test]
async fn agent_denies_addresses_and_names_on_the_packet_transport() {
    let services = Services::start().await.unwrap();
    let (raw, port) = (services.raw, services.raw.port());
    let mut lone = Lone::new();
    let mut server = Server::start(&lone.pki.cluster, &["a"], "1").await;
    let server_port = format!("--proxy-server-port={}", server.addr.port());
    let loopback = format!("[::1],127.0.0.0/8:{}", services.http.port());
    let allow = format!("--allow-destinations={loopback}");
    lone.start(&[&server_port, &allow], &[]);
    let mut call = server.call().await;
    let (_, error) = dialed(&mut call, 1, "tcp", &raw.to_string()).await;
    assert_eq!(error, by_agent(raw) + NOT_LISTED);
    let unspecified = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let (_, error) = dialed(&mut call, 2, "tcp", &unspecified.to_string()).await;
    assert_eq!(error, by_agent(unspecified) + NOT_LISTED);
    let (_, error) = dialed(&mut call, 3, "tcp4", &format!("localhost:{port}")).await;
    assert!(error.ends_with(NOT_LISTED), "{error}");
    let (connection, error) = dialed(&mut call, 4, "tcp", &services.http.to_string()).await;
    assert_eq!((connection > 0, error.as_str()), (true, ""));
}

#[tokio::test]
async fn server_denies_addresses_before_an_agent_gets_the_dial() {
    for (mode, transport) in FRONTS {
        let builder = Topology::builder(mode, transport).servers(1);
        let builder = builder.server_args(&[
            "--allow-destinations=10.0.0.0/8,[fd00::/8]:443",
            "--deny-destinations=10.0.0.1,10.0.0.0/8:22",
        ]);
        let mut topology = builder.start().await;
        let mut agent = scripts::agent(&topology, "a").await;
        server_shows(&topology, "ready_backends", &[], 1.0).await;
        let refused = [
            ("10.0.0.1:443", LISTED),
            ("10.9.9.9:22", LISTED),
            ("[::ffff:10.0.0.1]:443", LISTED),
            ("167772161:443", LISTED),
            ("127.0.0.1:443", NOT_LISTED),
            ("[fd00::1]:80", NOT_LISTED),
        ];
        for (address, rule) in refused {
            let error = refusal(&topology, address).await;
            let text = format!("dial tcp {address}: denied by the server: {rule}");
            assert_refused(&error, 403, &text, &text);
        }
        let count = refused.len() as f64;
        assert_eq!(dial_failures(&topology, "denied").await, count);
        topology.server(0).wait_for_log("dial denied", LIMIT).await;
        // The agent's first dials are those that the server permits. Names are left to the agent.
        for (id, target) in [
            (1, "10.9.9.9:443"),
            (2, "[fd00::1]:443"),
            (3, "localhost:22"),
        ] {
            let answers = async {
                let Message::DialRequest { address, dial, .. } = agent.hear().await else {
                    panic!("not a dial");
                };
                assert_eq!(address, target);
                agent.say(opened(dial, id)).await;
            };
            let (connected, ()) = tokio::join!(topology.connect(target), answers);
            drop(connected.unwrap());
            // The server closes the connection at the agent.
            agent.hear().await;
        }
    }
}

#[tokio::test]
async fn unusable_destinations_stop_the_start() {
    let flags = [
        "--allow-destinations=10.0.0.0/33",
        "--deny-destinations=*:0",
    ];
    for program in ["culvert-server", "culvert-agent"] {
        let mut program = culvert_tests::Program::spawn(program, flags, &[]);
        let status = program.wait_exit(LIMIT).await;
        assert_eq!(status.code(), Some(1));
        for text in [
            "--allow-destinations: \"10.0.0.0/33\" is not a destination",
            "--deny-destinations: \"*:0\" is not a destination",
        ] {
            let log = program.log();
            assert!(log.contains(text), "{log}");
        }
    }
}
