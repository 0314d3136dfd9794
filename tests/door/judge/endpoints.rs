//! Endpoints that run a script and report the result.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::task::JoinHandle;

use crate::support::timely;

/// A listener that runs the same script for every connection.
pub(super) struct Endpoint {
    pub address: SocketAddr,
    seen: UnboundedReceiver<String>,
    task: JoinHandle<()>,
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Endpoint {
    pub(super) async fn start<S, F>(script: S) -> Self
    where
        S: Fn(TcpStream) -> F + Send + 'static,
        F: Future<Output = io::Result<&'static str>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sees, seen) = unbounded_channel();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (sees, script) = (sees.clone(), script(stream));
                tokio::spawn(async move {
                    let saw = match script.await {
                        Ok(saw) => saw.to_owned(),
                        Err(error) => error.kind().to_string(),
                    };
                    // The test may have ended already.
                    sees.send(saw).ok();
                });
            }
        });
        Self {
            address,
            seen,
            task,
        }
    }

    /// Returns the result of the next connection.
    pub(super) async fn saw(&mut self) -> String {
        timely("the endpoint's result", self.seen.recv())
            .await
            .unwrap()
    }
}

/// Reads an optional ClientHello, and then `go`.
pub(super) async fn begin(stream: &mut TcpStream) -> io::Result<()> {
    let mut first = stream.read_u8().await?;
    if first == 22 {
        let mut head = [0; 4];
        stream.read_exact(&mut head).await?;
        let len = u16::from_be_bytes([head[2], head[3]]);
        stream.read_exact(&mut vec![0; len.into()]).await?;
        first = stream.read_u8().await?;
    }
    assert_eq!((first, stream.read_u8().await?), (b'g', b'o'));
    Ok(())
}

/// Sends `ok`, reads until the client's end, and sends the number of bytes.
pub(super) async fn counts(mut stream: TcpStream) -> io::Result<&'static str> {
    begin(&mut stream).await?;
    stream.write_all(b"ok").await?;
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await?;
    let answer = format!("{} ", heard.len());
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    Ok("end")
}

/// Reads until the client's end, and sends the number of bytes 16 s later, after Envoy's route timeout of 15 s.
pub(super) async fn counts_late(mut stream: TcpStream) -> io::Result<&'static str> {
    begin(&mut stream).await?;
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await?;
    tokio::time::sleep(Duration::from_secs(16)).await;
    let answer = format!("{} ", heard.len());
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await?;
    Ok("end")
}

/// Sends `bye`, closes the sending side, and continues to read.
pub(super) async fn ends_first(mut stream: TcpStream) -> io::Result<&'static str> {
    begin(&mut stream).await?;
    stream.write_all(b"bye ").await?;
    stream.shutdown().await?;
    let mut heard = Vec::new();
    stream.read_to_end(&mut heard).await?;
    Ok(match heard.as_slice() {
        b"late" => "late",
        b"" => "nothing",
        _ => "something else",
    })
}

/// Sends `ok`, and reads until the end.
pub(super) async fn listens(mut stream: TcpStream) -> io::Result<&'static str> {
    begin(&mut stream).await?;
    stream.write_all(b"ok").await?;
    stream.read_to_end(&mut Vec::new()).await?;
    Ok("end")
}

/// Sends `ok`, waits for one more byte, and resets the connection.
pub(super) async fn resets(mut stream: TcpStream) -> io::Result<&'static str> {
    begin(&mut stream).await?;
    stream.write_all(b"ok").await?;
    stream.read_u8().await?;
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok("reset")
}
