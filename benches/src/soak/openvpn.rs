//! Events of the OpenVPN tunnel: a server and a client of ours. The client uses TCP and UDP in turns.

use std::net::SocketAddr;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use culvert_tests::openvpn::Pki;
use culvert_tests::ports::Ports;
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout_at};

use crate::entry::Entry;
use crate::names::{AGENT, SERVER};
use crate::openvpn::{Files, Ground, Proto, server_words};
use crate::programs::Programs;
use crate::soak::Run;
use crate::soak::flow::{Endpoint, recovers};
use crate::soak::ledger::{Path, Scope};
use crate::soak::random::Random;
use crate::soak::unit::Unit;

const PATHS: [Path; 1] = [Path::OpenVpn];

/// Names of the programs.
const SERVER_NAME: &str = "VPN server";
const CLIENT_NAME: &str = "VPN client";

/// Time limit for the tunnel to work again after a restart of a program.
const LIMIT: Duration = Duration::from_secs(40);

/// Log line of the server after it has loaded changed certificates, and the time limit.
const RELOADED: &str = "files reloaded; new connections use them\" files=\"openvpn\"";
const RELOAD_LIMIT: Duration = Duration::from_secs(30);

/// An event in the life of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    KillServer,
    StopServer,
    FreezeServer,
    KillClient,
    StopClient,
    FreezeClient,
    Rotate,
}

impl Event {
    fn ends_a_program(self) -> bool {
        !matches!(self, Self::FreezeServer | Self::FreezeClient)
    }
}

/// The running tunnel.
pub(super) struct OpenVpn {
    server: Unit,
    client: Unit,
    entry: Entry,
    listeners: [SocketAddr; 2],
    proto: Proto,
    endpoint: Endpoint,
    run: Run,
    random: Random,
    /// Number of events so far.
    events: u64,
    _ports: Ports,
    // The last fields, so that the programs end before their files are removed.
    files: Files,
    _dir: TempDir,
}

impl OpenVpn {
    /// Starts the programs, and waits until the tunnel works.
    pub(super) async fn start(
        programs: &Programs,
        ground: &Ground,
        run: Run,
        random: Random,
    ) -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("culvert-").tempdir()?;
        let mut ports = Ports::default();
        let files = Files::write(dir.path(), ground.address)?;
        let listeners = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], ports.next_port())));
        let [tcp, udp] = listeners;
        let own = SocketAddr::from((ground.address, 0));
        let endpoint = Endpoint::on(own, Arc::clone(&run.ledger))?;
        let [front, admin] =
            ["front", "admin"].map(|name| dir.path().join(format!("{name}.socket")));
        let mut words = server_words(&files.pki, [&front, &admin], &mut ports);
        words.extend(files.server(Proto::Tcp, tcp));
        words.push(format!("--openvpn-listen=udp:{udp}"));
        // The first rotation must show in the log.
        words.push("--v=2".to_owned());
        let server = Unit::start(SERVER_NAME, programs.path(SERVER), words, &run.lives)?;
        let mut words = files.client(Proto::Tcp, tcp, &mut ports);
        // OpenVPN cannot announce a drain, so new connections would prolong the drain without end.
        words.push("--drain-timeout=5s".to_owned());
        let client = Unit::start(CLIENT_NAME, programs.path(AGENT), words, &run.lives)?;
        let this = Self {
            server,
            client,
            entry: Entry::Connect(front),
            listeners,
            proto: Proto::Tcp,
            endpoint,
            run,
            random,
            events: 0,
            _ports: ports,
            files,
            _dir: dir,
        };
        this.works().await?;
        Ok(this)
    }

    /// Returns the entry of the path.
    pub(super) fn entry(&self) -> (Path, Entry) {
        (Path::OpenVpn, self.entry.clone())
    }

    /// Returns the endpoint behind the client.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns the TCP listener and the UDP listener for clients.
    pub(super) fn listeners(&self) -> [SocketAddr; 2] {
        self.listeners
    }

    /// Lets one event follow another until the end of the run.
    pub(super) async fn live(mut self, end: Instant) -> anyhow::Result<Self> {
        while self.run.pause(&mut self.random, end).await {
            let event = self.choose();
            if event.ends_a_program() && !self.run.may_end(end) {
                continue;
            }
            self.happens(event, end)
                .await
                .with_context(|| format!("{event:?}"))?;
        }
        Ok(self)
    }

    fn choose(&mut self) -> Event {
        self.events += 1;
        let number = self.random.below(8);
        // The first event is a rotation, so that every run has one.
        if self.events == 1 {
            return Event::Rotate;
        }
        match number {
            0 => Event::KillServer,
            1 => Event::StopServer,
            2 => Event::FreezeServer,
            3 => Event::KillClient,
            4 => Event::StopClient,
            5 | 6 => Event::FreezeClient,
            _ => Event::Rotate,
        }
    }

    async fn happens(&mut self, event: Event, end: Instant) -> anyhow::Result<()> {
        let ledger = Arc::clone(&self.run.ledger);
        let outage = |scope| ledger.outage(&PATHS, scope);
        match event {
            Event::KillServer => {
                let _outage = outage(Scope::Everything);
                ledger.event(format_args!("{SERVER_NAME}: SIGKILL"));
                self.server.kill()?;
                self.server_returns().await
            }
            Event::StopServer => {
                let _outage = outage(Scope::Everything);
                ledger.event(format_args!("{SERVER_NAME}: SIGTERM"));
                self.server.terminate().await?;
                self.server_returns().await
            }
            Event::KillClient => {
                let _outage = outage(Scope::Everything);
                ledger.event(format_args!("{CLIENT_NAME}: SIGKILL"));
                self.client.kill()?;
                self.client_returns().await
            }
            Event::StopClient => {
                let _outage = outage(Scope::Everything);
                ledger.event(format_args!("{CLIENT_NAME}: SIGTERM"));
                self.client.terminate().await?;
                self.client_returns().await
            }
            Event::FreezeServer => {
                let time = self.random.millis(1000, 4000);
                ledger.event(format_args!("{SERVER_NAME}: frozen for {time:.1?}"));
                self.server.freeze(time).await?;
                self.works().await
            }
            Event::FreezeClient => {
                // No second client can take the dials. Open connections must survive.
                let _outage = outage(Scope::Dials);
                let time = self.random.millis(1000, 4000);
                ledger.event(format_args!("{CLIENT_NAME}: frozen for {time:.1?}"));
                self.client.freeze(time).await?;
                self.works().await
            }
            Event::Rotate => self.rotate(end).await,
        }
    }

    /// Replaces the authority and all certificates. Both sides trust the old authority and the new one, as during a
    /// rotation in production. Afterwards the client has to connect with its new certificate.
    async fn rotate(&mut self, end: Instant) -> anyhow::Result<()> {
        let next = Pki::create();
        let now = &self.files.pki;
        let seen = self.server.program().log().matches(RELOADED).count();
        let authorities = last_certificate(&now.ca)? + &std::fs::read_to_string(&next.ca)?;
        replace(&now.ca, &authorities)?;
        for (now, next) in [
            (&now.server, &next.server),
            (&now.user_cluster, &next.user_cluster),
        ] {
            replace(&now.key, &std::fs::read_to_string(&next.key)?)?;
            replace(&now.cert, &std::fs::read_to_string(&next.cert)?)?;
        }
        self.run.ledger.event("OpenVPN certificates replaced");
        let program = self.server.program();
        let reloaded = async {
            while program.log().matches(RELOADED).count() <= seen {
                sleep(Duration::from_millis(100)).await;
            }
        };
        let limit = Instant::now() + RELOAD_LIMIT;
        if timeout_at(limit.min(end), reloaded).await.is_err() {
            ensure!(end < limit, "the server does not load new certificates");
            return Ok(());
        }
        self.run.ledger.event("OpenVPN certificates loaded");
        let _outage = self.run.ledger.outage(&PATHS, Scope::Everything);
        self.client.kill()?;
        self.client_returns().await
    }

    async fn server_returns(&mut self) -> anyhow::Result<()> {
        sleep(self.random.millis(0, 1500)).await;
        self.server.restart()?;
        self.works().await
    }

    async fn client_returns(&mut self) -> anyhow::Result<()> {
        sleep(self.random.millis(0, 1500)).await;
        let [tcp, udp] = self.listeners;
        let (proto, old, new) = match self.proto {
            Proto::Tcp => (Proto::Udp, format!("{tcp},tcp"), format!("{udp},udp")),
            Proto::Udp => (Proto::Tcp, format!("{udp},udp"), format!("{tcp},tcp")),
        };
        for word in self.client.args() {
            *word = word.replace(&old, &new);
        }
        self.proto = proto;
        self.client.restart()?;
        self.works().await
    }

    /// Waits until the tunnel carries data.
    async fn works(&self) -> anyhow::Result<()> {
        recovers(&self.entry, self.endpoint.address, &self.run.ledger, LIMIT).await
    }
}

/// Returns the last certificate of a file: the current authority.
fn last_certificate(path: &FilePath) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path)?;
    let begin = text.rfind("-----BEGIN CERTIFICATE-----");
    let last = begin.and_then(|begin| text.get(begin..));
    Ok(format!("{}\n", last.context("no certificate")?.trim_end()))
}

/// Replaces a file at once, as a mounted Secret.
fn replace(path: &FilePath, text: &str) -> anyhow::Result<()> {
    let next = path.with_extension("next");
    std::fs::write(&next, text)?;
    std::fs::rename(next, path).with_context(|| path.display().to_string())
}
