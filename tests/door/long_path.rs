//! Clients at the other end of a long path.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use culvert_tests::hello::client_hello;
use culvert_tests::link::{self, FAR, Link, most_unsent_bytes, slow_path};
use culvert_tests::namespace::alone;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Door, Upstream, timely};

const HOST: &str = "bulk.example.com";

/// Sends zeros to each client, as fast as the client accepts them, and counts the bytes.
async fn endless(listener: TcpListener, sent: Arc<AtomicU64>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let sent = sent.clone();
        // The bytes wait in the front door, and not here.
        SockRef::from(&stream)
            .set_send_buffer_size(64 * 1024)
            .unwrap();
        tokio::spawn(async move {
            let zeros = vec![0; 64 * 1024];
            while let Ok(written) = stream.write(&zeros).await {
                sent.fetch_add(written as u64, Ordering::Relaxed);
            }
        });
    }
}

#[test]
fn bulk_beyond_a_long_path_waits_at_the_endpoint() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let _link = Link::start(slow_path(), 1).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = Upstream::new("demo/bulk", listener.local_addr().unwrap());
        let (sent, received) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        tokio::spawn(endless(listener, sent.clone()));
        let flags = ["--bind-address=0.0.0.0"];
        let door = Door::start_with(&[upstream.server_name(HOST)], &flags).await;
        let client = TcpStream::connect((FAR, door.sni.port()));
        let mut client = timely("a connection", client).await.unwrap();
        client.write_all(&client_hello(HOST)).await.unwrap();
        let counted = received.clone();
        let reading = tokio::spawn(async move {
            let mut buffer = vec![0; 64 * 1024];
            while let Ok(read @ 1..) = client.read(&mut buffer).await {
                counted.fetch_add(read as u64, Ordering::Relaxed);
            }
        });
        let most = most_unsent_bytes().await;
        assert!(most > 0 && most < 384 * 1024, "{most} unsent bytes");
        let waiting = sent.load(Ordering::Relaxed) - received.load(Ordering::Relaxed);
        println!("{waiting} bytes wait");
        // The path and its queue hold 2.2 MB.
        assert!(waiting < 3_200_000, "{waiting} bytes wait");
        assert!(!reading.is_finished(), "the connection ended");
        reading.abort();
    });
}
