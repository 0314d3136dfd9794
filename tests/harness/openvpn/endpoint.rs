//! A session and its flows on a socket, in either role: what our programs do, in its simplest form.
//!
//! One task owns everything and looks at all of it whenever anything has happened. That is slow with
//! thousands of flows and easy to trust.

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

/// What an endpoint has seen of its session.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// What was agreed on, once it was.
    pub established: Option<Established>,
    /// How many sessions were established: a UDP server's clients may come back.
    pub sessions: u32,
    /// Key ids of renegotiations that ended well.
    pub rekeyed: Vec<u8>,
    /// Texts for the log.
    pub notices: Vec<String>,
    /// Why the session ended.
    pub ended: Option<String>,
    /// Packets dropped, by cause, with the session's other counters.
    pub stats: Stats,
    /// Packets received, by opcode.
    pub received: BTreeMap<u8, u64>,
    /// Echo replies to `ping`.
    pub pongs: u16,
}

/// A running endpoint. Dropping it closes its socket, without a word to the peer.
#[derive(Debug)]
pub struct Endpoint {
    commands: mpsc::UnboundedSender<Command>,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Endpoint {
    /// A server for the one client at the other end of `link`, who is let in and told these options. Over UDP
    /// another one may take its place.
    pub fn server(link: Link, config: ServerConfig, push: &[&str]) -> Self {
        let push = push.iter().map(|option| (*option).to_owned()).collect();
        Self::start(|commands, seen| Driver::server(link, config, push, commands, seen))
    }

    /// A client. What comes out of the tunnel is connected from `cluster`, whatever it asks for, or
    /// refused without.
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

    /// What it has seen so far.
    pub fn seen(&self) -> Seen {
        self.seen.lock().clone()
    }

    /// Waits until data can flow.
    ///
    /// # Panics
    /// When the session ends before, or nothing happens in [`PATIENCE`].
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

    /// Waits until the session ends, and gives the reason.
    ///
    /// # Panics
    /// When it does not within [`PATIENCE`].
    pub async fn ended(&self) -> String {
        eventually("the session ends", PATIENCE, async || {
            let seen = self.seen();
            seen.ended.clone().ok_or(format!("{seen:?}"))
        })
        .await
    }

    /// Waits for the end of so many renegotiations.
    ///
    /// # Panics
    /// When they do not come within [`PATIENCE`].
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

    /// Pings through the tunnel, so many times at this interval. Gives how many answers are missing.
    pub async fn lost_pings(&self, to: std::net::Ipv4Addr, count: u16, interval: Duration) -> u16 {
        let before = self.seen().pongs;
        for sequence in 0..count {
            self.tell(Command::Ping(to, sequence));
            tokio::time::sleep(interval).await;
        }
        // The last answers need a moment.
        for _ in 0..100 {
            if self.seen().pongs - before == count {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        count - (self.seen().pongs - before)
    }

    /// Leaves as the protocol has it, and waits until everything is said.
    pub async fn close(mut self) {
        self.tell(Command::Close);
        (&mut self.task).await.expect("an endpoint");
    }

    fn tell(&self, command: Command) {
        // After its end nobody listens any more.
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
