//! A session and its flows on a socket, in either role: the work of our programs in its simplest form.
//!
//! A single task owns all state and polls everything after each event. This is slow with thousands of flows,
//! but easy to trust.

mod core;
mod driver;
mod link;
mod pipe;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;

use culvert_kit::client::BoxedStream;
use culvert_openvpn::session::{ClientConfig, Established, ServerConfig, Stats};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::network::Namespace;
use super::scenario::Dial;
use crate::topology::PATIENCE;
use crate::wait::eventually;

use self::driver::{Command, Driver};
pub use self::link::Link;

/// Observations of an endpoint about its session.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Negotiated parameters; `None` before the session is established.
    pub established: Option<Established>,
    /// Number of established sessions. Clients of a UDP server may connect again.
    pub sessions: u32,
    /// Key ids of successful renegotiations.
    pub rekeyed: Vec<u8>,
    /// Texts for the log.
    pub notices: Vec<String>,
    /// Reason for the end of the session; `None` while the session runs.
    pub ended: Option<String>,
    /// Dropped packets by cause, and the session's other counters.
    pub stats: Stats,
    /// Number of received packets, by opcode.
    pub received: BTreeMap<u8, u64>,
    /// Number of echo replies to `ping`.
    pub pongs: u16,
}

/// A running endpoint. Dropping the value closes the socket without notice to the peer.
#[derive(Debug)]
pub struct Endpoint {
    commands: mpsc::UnboundedSender<Command>,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Endpoint {
    /// Starts a server for the client at the other end of `link`. The server accepts the client and pushes
    /// these options. Over UDP, a later client may replace the first client.
    pub fn server(link: Link, config: ServerConfig, push: &[&str]) -> Self {
        let push = push.iter().map(|option| (*option).to_owned()).collect();
        Self::start(|commands, seen| Driver::server(link, config, push, commands, seen))
    }

    /// Starts a client. Flows from the tunnel are connected from the namespace `cluster` to any requested
    /// destination; without `cluster`, flows are refused.
    pub fn client(link: Link, config: ClientConfig, cluster: Option<Namespace>) -> Self {
        Self::start(|commands, seen| Driver::client(link, config, cluster, commands, seen))
    }

    fn start(
        driver: impl FnOnce(mpsc::UnboundedReceiver<Command>, Arc<Mutex<Seen>>) -> Driver,
    ) -> Self {
        let (commands, received) = mpsc::unbounded_channel();
        let seen = Arc::default();
        let driver = driver(received, Arc::clone(&seen));
        let task = tokio::spawn(driver.run());
        Self {
            commands,
            seen,
            task,
        }
    }

    /// Returns the observations so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// Waits until the session can carry data.
    ///
    /// # Panics
    /// If the session ends first, or is not established within [`PATIENCE`].
    pub async fn established(&self) -> Established {
        eventually("the session is established", PATIENCE, async || {
            let seen = self.seen();
            if let Some(why) = seen.ended {
                panic!("the session ended: {why}; {:?}", seen.stats);
            }
            seen.established.ok_or(format!("{:?}", seen.stats))
        })
        .await
    }

    /// Waits until the session ends, and returns the reason.
    ///
    /// # Panics
    /// If the session does not end within [`PATIENCE`].
    pub async fn ended(&self) -> String {
        eventually("the session ends", PATIENCE, async || {
            let seen = self.seen();
            seen.ended.clone().ok_or(format!("{seen:?}"))
        })
        .await
    }

    /// Waits until at least `times` renegotiations have completed.
    ///
    /// # Panics
    /// If the renegotiations do not complete within [`PATIENCE`].
    pub async fn rekeyed(&self, times: usize) {
        let what = format!("{times} renegotiations");
        eventually(&what, PATIENCE, async || {
            let seen = self.seen();
            (seen.rekeyed.len() >= times)
                .then_some(())
                .ok_or(format!("{seen:?}"))
        })
        .await;
    }

    /// Sends `count` pings through the tunnel, one per `interval`. Returns the number of missing replies.
    pub async fn lost_pings(&self, to: std::net::Ipv4Addr, count: u16, interval: Duration) -> u16 {
        let before = self.seen().pongs;
        for sequence in 0..count {
            self.tell(Command::Ping(to, sequence));
            tokio::time::sleep(interval).await;
        }
        // Waits up to 2 s for the last replies.
        for _ in 0..100 {
            if self.seen().pongs - before == count {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        count - (self.seen().pongs - before)
    }

    /// Closes the session with the protocol's goodbye, and waits until everything is sent.
    pub async fn close(mut self) {
        self.tell(Command::Close);
        (&mut self.task).await.expect("an endpoint");
    }

    fn tell(&self, command: Command) {
        // An error means that the task has ended.
        self.commands.send(command).ok();
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Dial for Endpoint {
    async fn dial(&self, to: SocketAddrV4) -> io::Result<BoxedStream> {
        let (answer, answered) = oneshot::channel();
        self.tell(Command::Dial(to, answer));
        let gone = || Err(io::Error::other("the session has ended"));
        answered.await.unwrap_or_else(|_| gone())
    }
}
