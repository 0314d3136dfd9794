//! Clients at the other end of a long path.

use culvert_tests::hello::client_hello;
use culvert_tests::link::{self, FAR, Link, most_unsent_bytes, slow_path};
use culvert_tests::namespace::alone;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::support::{Door, Upstream, timely};

const HOST: &str = "bulk.example.com";

/// Sends zeros to each client, as fast as the client accepts them.
async fn endless(listener: TcpListener) {
    while let Ok((mut stream, _)) = listener.accept().await {
        tokio::spawn(async move {
            let zeros = vec![0; 256 * 1024];
            while stream.write_all(&zeros).await.is_ok() {}
        });
    }
}

#[test]
fn bulk_beyond_a_long_path_does_not_wait_in_the_kernel() {
    if !link::is_possible() {
        return;
    }
    alone(async || {
        let _link = Link::start(slow_path(), 1).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = Upstream::new("demo/bulk", listener.local_addr().unwrap());
        tokio::spawn(endless(listener));
        let flags = ["--bind-address=0.0.0.0"];
        let door = Door::start_with(&[upstream.server_name(HOST)], &flags).await;
        let client = TcpStream::connect((FAR, door.sni.port()));
        let mut client = timely("a connection", client).await.unwrap();
        client.write_all(&client_hello(HOST)).await.unwrap();
        let reading = tokio::spawn(async move {
            let mut buffer = vec![0; 64 * 1024];
            while client.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
        });
        let most = most_unsent_bytes().await;
        assert!(most > 0 && most < 384 * 1024, "{most} unsent bytes");
        assert!(!reading.is_finished(), "the connection ended");
        reading.abort();
    });
}
