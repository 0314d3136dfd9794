//! Certificates and accounts that rotate while tunnels run.

use std::sync::Arc;

use culvert_kit::pki::Pki;
use culvert_kit::services::Services;
use culvert_tests::eventually;
use culvert_tests::kube_api::{KubeApi, service, slice};
use culvert_tests::rotation::{Reloads, install, install_pair, read, uses};
use http::StatusCode;
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{Door, Http2, LIMIT, Upstream, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";

/// Opens a TLS connection to the CONNECT port.
async fn tls(door: &Door, config: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(door.tunneling).await?;
    let name = ServerName::try_from("localhost").unwrap();
    TlsConnector::from(config).connect(name, stream).await
}

/// An HTTP/1.1 tunnel over TLS to the echo service.
struct Tunnel(TlsStream<TcpStream>);

impl Tunnel {
    /// Opens a tunnel with the client certificate of `pki`; `None` if the front door refuses the client.
    async fn open(door: &Door, pki: &Pki) -> Option<Self> {
        let config = pki.client_tls(&pki.client, &["http/1.1"]).unwrap();
        let mut stream = tls(door, config).await.ok()?;
        let request = format!("CONNECT {RAW} HTTP/1.1\r\n\r\necho\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            // With TLS 1.3, a refusal arrives after the client has finished its handshake.
            head.push(timely("the answer", stream.read_u8()).await.ok()?);
        }
        Some(Self(stream))
    }

    async fn echoes(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
        self.0.flush().await.unwrap();
        let mut back = vec![0; text.len()];
        timely("an echo", self.0.read_exact(&mut back))
            .await
            .unwrap();
        assert_eq!(back, text.as_bytes());
    }
}

#[tokio::test]
async fn tunnels_continue_while_the_certificates_of_the_connect_port_rotate() {
    let dir = tempfile::tempdir().unwrap();
    let [own, old, later] = ["own", "old", "later"].map(|name| {
        let path = dir.path().join(name);
        std::fs::create_dir(&path).unwrap();
        path
    });
    // The front door uses `own`, whose files change; `old` has the first state.
    let pki = Pki::create(&own).unwrap();
    let new = Pki::create_valid_for(&later, 60).unwrap();
    for file in std::fs::read_dir(&own).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), old.join(file.file_name())).unwrap();
    }
    let old = Pki {
        ca: old.join("ca.crt"),
        client: culvert_kit::pki::Pair {
            cert: old.join("client.crt"),
            key: old.join("client.key"),
        },
        ..pki.clone()
    };
    let flags = [
        format!("--tunneling-cert={}", pki.server.cert.display()),
        format!("--tunneling-key={}", pki.server.key.display()),
        format!("--tunneling-client-ca={}", pki.ca.display()),
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let services = Services::start().await.unwrap();
    let routes = [Upstream::new("demo/raw", services.raw).authority(RAW)];
    let mut door = Door::start_with(&routes, &flags).await;
    let mut tunnel = Tunnel::open(&door, &old).await.unwrap();
    let config = old.client_tls(&old.client, &["h2"]).unwrap();
    let framed = Http2::over(tls(&door, config).await.unwrap()).await;
    tunnel.echoes("before").await;

    let reloads = Reloads::before(&[(door.stats, "tunneling")]).await;
    install(&[read(&pki.ca), read(&new.ca)].concat(), &pki.ca);
    reloads.happen().await;
    assert!(Tunnel::open(&door, &old).await.is_some());
    install_pair(&new.server, &pki.server);
    uses(door.stats, "tunneling", Some(&new.server.cert), None).await;
    let mut of_new = Tunnel::open(&door, &new).await.unwrap();
    install(&read(&new.ca), &pki.ca);
    uses(door.stats, "tunneling", None, Some(&new.ca)).await;

    // The old client, even if it trusts the new certificate.
    let trusting = Pki {
        ca: new.ca.clone(),
        ..old
    };
    assert!(Tunnel::open(&door, &trusting).await.is_none());
    assert!(Tunnel::open(&door, &new).await.is_some());
    for tunnel in [&mut tunnel, &mut of_new] {
        tunnel.echoes("after").await;
    }
    let mut late = framed.open(RAW, b"download 7\n").await.unwrap();
    assert_eq!(late.hear(9).await.len(), 7);
    assert_eq!(door.program.exited(), None);
    let panics = door.metrics().await.value("culvert_panics_total", &[]);
    assert_eq!(panics, Some(0.0));
}

#[tokio::test]
async fn routes_come_from_the_api_of_the_latest_kubeconfig() {
    let services = Services::start().await.unwrap();
    let (first, second) = (KubeApi::start().await, KubeApi::start().await);
    let port = services.raw.port();
    for (api, name) in [(&first, "one"), (&second, "two")] {
        let exposed = service("demo", name)
            .port("secure", 443)
            .annotation("nodeport-proxy.k8s.io/expose", "Tunneling");
        api.put("services", exposed);
        let endpoint = slice("demo", name).port("secure", port).ready("127.0.0.1");
        api.put("endpointslices", endpoint);
    }
    let door = Door::watching(&first, &[]).await;
    door.is_ready().await;
    let client = Http2::connect(door.tunneling).await;
    let status = async |name: &str| {
        let authority = format!("{name}.demo.svc.cluster.local:443");
        client.open(&authority, b"").await.err()
    };
    assert_eq!(status("one").await, None);
    assert_eq!(status("two").await, Some(StatusCode::NOT_FOUND));
    let reloads = Reloads::before(&[(door.stats, "kubeconfig")]).await;
    second.kubeconfig(door.dir.path());
    reloads.happen().await;
    // Open watches continue with the old account until they end.
    assert_eq!(status("one").await, None);
    first.cut();
    eventually(
        "the routes of the second API are in force",
        LIMIT,
        async || {
            status("two")
                .await
                .map_or(Ok(()), |status| Err(status.to_string()))
        },
    )
    .await;
    assert_eq!(status("one").await, Some(StatusCode::NOT_FOUND));
}
