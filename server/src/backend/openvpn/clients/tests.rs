#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use culvert_host::telemetry::metrics::Registry;
use culvert_openvpn::control::push::Topology;
use culvert_openvpn::flows::Config;
use culvert_openvpn::peer_info::PeerInfo;
use culvert_openvpn::tls::PeerIdentity;
use culvert_openvpn_io::config_file::Server;
use culvert_openvpn_io::streams::Streams;
use tempfile::TempDir;

use super::super::silence::tests::answer;
use super::*;

/// Settings of a server without pushed options.
pub(in super::super) fn settings() -> Settings {
    Settings {
        proxies: Default::default(),
        listen: Vec::new(),
        server: Server {
            routes: vec!["172.25.0.0/16".parse().unwrap()],
            duplicate_cn: true,
            ..Server::default()
        },
        network: "10.20.0.0/24".parse().unwrap(),
        topology: Topology::Net30,
        node_access: "10.254.0.0/16".parse().unwrap(),
        watch_nodes: None,
        max_clients: 10,
        ping: Some(Duration::from_secs(5)),
        ping_restart: None,
    }
}

/// Returns a client with a valid certificate. `lines` are its peer-info.
pub(in super::super) fn authenticated(name: &str, lines: &str) -> Authenticated {
    Authenticated {
        identity: PeerIdentity {
            common_name: name.to_owned(),
            subject: format!("CN={name}"),
            fingerprint: [0; 32],
        },
        peer_info: PeerInfo::parse(lines),
        username: String::new(),
        password: String::new(),
    }
}

pub(in super::super) struct World {
    directory: TempDir,
    pub(in super::super) clients: Arc<Clients>,
}

/// A connected client.
struct Connected {
    admission: Admission,
    streams: Streams,
    kick: CancellationToken,
}

impl World {
    pub(in super::super) fn new(change: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut settings = settings();
        settings.server.client_config_dir = Some(directory.path().to_owned());
        change(&mut settings);
        let registry = Registry::new(&[]).unwrap();
        let metrics = Arc::new(OpenvpnMetrics::new(&registry));
        Self {
            directory,
            clients: Clients::new(settings, metrics),
        }
    }

    pub(in super::super) fn file(&self, name: &str, text: &str) {
        std::fs::write(self.directory.path().join(name), text).unwrap();
    }

    pub(in super::super) fn admit(
        &self,
        name: &str,
    ) -> Result<(Admission, CancellationToken), Refused> {
        self.admit_as(name, "IV_VER=2.6.14\n")
    }

    fn admit_as(&self, name: &str, lines: &str) -> Result<(Admission, CancellationToken), Refused> {
        let client = authenticated(name, lines);
        let directory = self.clients.settings.server.client_config_dir.as_ref();
        let file = directory.map(|directory| ClientConfig::find(directory, name));
        let file = file.unwrap_or(Ok(None)).map_err(|error| error.to_string());
        let kick = CancellationToken::new();
        let remote = "192.0.2.1:1000".parse().unwrap();
        self.clients
            .admit(&client, file, remote, Transport::Tcp, kick.clone())
            .map(|admission| (admission, kick))
    }

    fn connect(&self, name: &str) -> Connected {
        let (admission, kick) = self.admit(name).unwrap();
        let streams = Streams::new(Config::default(), now());
        admission.connected(streams.peer());
        Connected {
            admission,
            streams,
            kick,
        }
    }

    /// Returns the number of packets that were dropped because of their source.
    pub(in super::super) fn bad_sources(&self) -> u64 {
        self.clients.state.lock().forward.stats().bad_source
    }

    fn way(&self, address: &str) -> Option<PeerId> {
        let way = self.clients.way(address.parse().unwrap(), &[])?;
        Some(way.id)
    }
}

#[tokio::test(start_paused = true)]
async fn newest_client_is_dialed_and_older_clients_replace_it() {
    let world = World::new(|_| {});
    world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
    assert_eq!(world.clients.health(), Health::Absent);
    let old = world.connect("user");
    let mut new = world.connect("user");
    let seed = world.connect("seed");
    assert_eq!(world.clients.health(), Health::Healthy);
    assert_eq!(world.clients.peers().len(), 3);
    assert_eq!(world.way("172.25.3.4"), Some(new.admission.id));
    assert_eq!(world.way("10.1.1.1"), None);
    let own = seed.admission.address.to_string();
    assert_eq!(world.way(&own), Some(seed.admission.id));
    // Clients in `tried` are skipped.
    let other = world
        .clients
        .way("172.25.3.4".parse().unwrap(), &[new.admission.id]);
    assert_eq!(other.unwrap().id, old.admission.id);
    // A client with recent packets is preferred to a newer, silent client.
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(world.clients.health(), Health::Doubtful);
    let mut old = old;
    old.streams.heard(now());
    assert_eq!(world.way("172.25.3.4"), Some(old.admission.id));
    new.streams.heard(now());
    assert_eq!(world.way("172.25.3.4"), Some(new.admission.id));
    // A longer prefix outweighs silence and age.
    world.file("one", "iroute 172.25.3.0 255.255.255.0\n");
    let one = world.connect("one");
    tokio::time::advance(Duration::from_secs(20)).await;
    old.streams.heard(now());
    assert_eq!(world.way("172.25.3.4"), Some(one.admission.id));
    assert_eq!(world.way("172.25.4.4"), Some(old.admission.id));
    drop((new, one, seed));
    assert_eq!(world.way("172.25.3.4"), Some(old.admission.id));
    // A client whose task has ended cannot be dialed.
    drop(old.streams);
    assert_eq!(world.way("172.25.3.4"), None);
    assert_eq!(world.clients.health(), Health::Absent);
    drop(old.admission);
    assert_eq!(world.clients.peers().len(), 0);
}

#[tokio::test]
async fn clients_with_one_name_replace_each_other_unless_duplicates_are_allowed() {
    let world = World::new(|rules| {
        rules.server.duplicate_cn = false;
        rules.max_clients = 1;
    });
    let mut first = world.connect("user");
    assert!(!first.kick.is_cancelled());
    let second = world.connect("user");
    assert!(first.kick.is_cancelled());
    first.streams.work(now(), &mut drop);
    assert!(first.streams.take_close());
    assert_eq!(first.admission.address, second.admission.address);
    drop(first);
    let refused = world.admit("other").map(|_| ()).unwrap_err();
    assert!(refused.reason.contains("1 clients"), "{refused:?}");
    drop(second);
    assert!(world.admit("other").is_ok());
    let world = World::new(|_| {});
    let first = world.connect("user");
    let _second = world.connect("user");
    assert!(!first.kick.is_cancelled());
}

#[tokio::test]
async fn refused_client_does_not_end_the_client_with_its_name() {
    let world = World::new(|settings| {
        settings.server.duplicate_cn = false;
        settings.network = "10.20.0.0/28".parse().unwrap();
    });
    // An address of its own, which the next connection of the client does not request.
    world.file("user", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    let mut user = world.connect("user");
    let is_ended = |user: &mut Connected| {
        user.streams.work(now(), &mut drop);
        user.streams.take_close() || user.kick.is_cancelled()
    };
    world.file("user", "push \"route 10.1.0.0 255.255.0.0,oops\"\n");
    let refused = world.admit("user").map(|_| ()).unwrap_err();
    assert!(refused.reason.contains("cannot be pushed"), "{refused:?}");
    assert!(!is_ended(&mut user));
    world.file("user", "");
    let others = [world.connect("a"), world.connect("b")];
    let refused = world.admit("user").map(|_| ()).unwrap_err();
    assert_eq!(refused.told, "no address is free");
    assert!(!is_ended(&mut user));
    assert_eq!(world.way("10.20.0.42"), Some(user.admission.id));
    drop(others);
    assert!(world.admit("user").is_ok());
    assert!(is_ended(&mut user));
}

#[tokio::test]
async fn client_files_decide_admission_and_address() {
    let world = World::new(|rules| rules.server.ccd_exclusive = true);
    assert!(world.admit("nobody").is_err());
    world.file("banned", "disable\n");
    assert!(world.admit("banned").is_err());
    world.file("fixed", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    let fixed = world.connect("fixed");
    assert_eq!(fixed.admission.address.to_string(), "10.20.0.42");
    assert!(
        fixed
            .admission
            .push
            .contains(&"ifconfig 10.20.0.42 10.20.0.41".to_owned())
    );
    // Another client with this address gets an address of the pool.
    world.file("greedy", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    let greedy = world.connect("greedy");
    assert_eq!(greedy.admission.address.to_string(), "10.20.0.6");
}

#[tokio::test]
async fn connections_of_one_name_share_the_address_of_their_file() {
    let world = World::new(|settings| {
        assert!(settings.server.duplicate_cn);
        settings.network = "10.20.0.0/28".parse().unwrap();
    });
    world.file("fixed", "ifconfig-push 10.20.0.6 10.20.0.5\n");
    let old = world.connect("fixed");
    let new = world.connect("fixed");
    for client in [&old, &new] {
        assert_eq!(client.admission.address.to_string(), "10.20.0.6");
        assert!(!client.kick.is_cancelled());
    }
    assert_eq!(world.way("10.20.0.6"), Some(new.admission.id));
    // The older connection keeps the address until it ends.
    drop(new);
    assert_eq!(world.way("10.20.0.6"), Some(old.admission.id));
    let other = world.connect("other");
    assert_eq!(other.admission.address.to_string(), "10.20.0.10");
    drop(old);
    assert!(world.admit("late").is_ok());
}

#[tokio::test]
async fn returning_client_keeps_its_address() {
    let world = World::new(|rules| rules.server.duplicate_cn = false);
    world.file("fixed", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    world.file("greedy", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    let address = |client: &Connected| client.admission.address.to_string();
    let gone = world.connect("fixed");
    let back = world.connect("fixed");
    assert_eq!(address(&back), "10.20.0.42");
    assert_eq!(world.way("10.20.0.42"), Some(back.admission.id));
    // The dropped lease does not free the address of its successor.
    drop(gone);
    assert_eq!(address(&world.connect("greedy")), "10.20.0.6");
    assert_eq!(world.way("10.20.0.42"), Some(back.admission.id));
    drop(back);
    assert_eq!(address(&world.connect("greedy")), "10.20.0.42");
}

#[tokio::test]
async fn address_of_another_client_is_not_taken_over() {
    let world = World::new(|settings| settings.server.duplicate_cn = false);
    // The first client of the name stays for a moment, after its successor has gone.
    let first = world.connect("a");
    let second = world.connect("a");
    drop(second);
    let other = world.connect("b");
    assert_ne!(other.admission.address, first.admission.address);
    let third = world.connect("a");
    assert_eq!(third.admission.address, first.admission.address);
}

#[tokio::test]
async fn returning_client_takes_over_its_address_in_a_full_pool() {
    let world = World::new(|settings| {
        settings.server.duplicate_cn = false;
        settings.network = "10.20.0.0/28".parse().unwrap();
    });
    let other = world.connect("other");
    let gone = world.connect("user");
    assert!(world.admit("late").is_err(), "the pool is full");
    let back = world.connect("user");
    let address = back.admission.address;
    assert_eq!(address, gone.admission.address);
    assert_ne!(address, other.admission.address);
    // The dropped lease does not free the address of its successor.
    drop(gone);
    assert!(world.admit("late").is_err(), "the pool is full");
    assert_eq!(world.way(&address.to_string()), Some(back.admission.id));
    // A client with an address of its own leaves the old address to the pool.
    world.file("user", "ifconfig-push 10.20.0.42 10.20.0.41\n");
    let moved = world.connect("user");
    assert_eq!(moved.admission.address.to_string(), "10.20.0.42");
    drop(back);
    // An address from a removed file is not taken over.
    world.file("user", "");
    assert_eq!(world.connect("user").admission.address, address);
}

#[tokio::test]
async fn temporary_refusal_is_marked_for_clients_that_support_it() {
    let world = World::new(|rules| rules.max_clients = 1);
    let _only = world.connect("user");
    for (lines, told) in [
        ("IV_PROTO=990\n", "TEMP:too many clients"),
        ("IV_PROTO=6\n", "too many clients"),
    ] {
        let refused = world.admit_as("other", lines).map(|_| ()).unwrap_err();
        assert_eq!(refused.told, told);
    }
    world.file("banned", "disable\n");
    let refused = world.admit_as("banned", "IV_PROTO=990\n");
    assert_eq!(refused.map(|_| ()).unwrap_err().told, "");
}

#[tokio::test(start_paused = true)]
async fn silence_depends_on_the_ping_interval_of_the_client() {
    let world = World::new(|_| {});
    world.file("slow", "iroute 172.25.0.0 255.255.0.0\npush \"ping 60\"\n");
    world.file("mute", "iroute 172.26.0.0 255.255.0.0\npush \"ping 0\"\n");
    let healths = || world.clients.peers().into_iter().map(|peer| peer.health);
    let (_slow, _mute) = (world.connect("slow"), world.connect("mute"));
    tokio::time::advance(Duration::from_secs(170)).await;
    assert!(healths().eq([Health::Healthy, Health::Healthy]));
    tokio::time::advance(Duration::from_secs(20)).await;
    assert!(healths().eq([Health::Doubtful, Health::Healthy]));
}

#[tokio::test]
async fn packet_with_foreign_source_is_not_forwarded() {
    let world = World::new(|_| {});
    world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
    let user = world.connect("user");
    let seed = world.connect("seed");
    let admission = &seed.admission;
    assert!(admission.permits(admission.address));
    assert!(!admission.permits("172.25.0.1".parse().unwrap()));
    assert!(user.admission.permits("172.25.0.1".parse().unwrap()));
    let mut packet = vec![
        0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 1, 0, 0, 172, 25, 0, 1, 172, 25, 0, 2, 8, 0, 0xf7, 0xff,
        0, 0, 0, 0,
    ];
    let sum = culvert_openvpn::ip::Sum::of(&packet[..20]).checksum();
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    assert!(!world.clients.forward(admission.id, &packet, now()));
    assert_eq!(world.bad_sources(), 1);
}

impl Connected {
    /// Returns the probes that were sent to the client since the last call.
    fn probes(&mut self) -> Vec<Vec<u8>> {
        let mut probes = Vec::new();
        self.streams.work(now(), &mut drop);
        self.streams.poll_output(now(), &mut |packet| {
            probes.push(packet.to_vec());
            true
        });
        probes
    }

    /// Answers the probe that followed the handshake.
    fn answer(&mut self) {
        let probe = self.probes().pop().unwrap();
        assert!(self.admission.silence.input(&answer(&probe)));
        self.streams.heard(now());
    }
}

#[tokio::test(start_paused = true)]
async fn client_that_answers_no_probe_gets_no_dials_until_it_answers_one() {
    let world = World::new(|_| {});
    world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
    let old = world.connect("user");
    let mut new = world.connect("user");
    new.answer();
    let target = "172.25.3.4".parse().unwrap();
    let way = world.clients.way(target, &[]).unwrap();
    assert_eq!((way.id, way.is_healthy), (new.admission.id, true));
    let started = tokio::time::Instant::now();
    way.suspect().await;
    assert_eq!(started.elapsed(), Duration::from_millis(1500));
    assert_eq!(new.probes().len(), 1);
    assert_eq!(world.way("172.25.3.4"), Some(old.admission.id));
    // Another client can still be dialed, so the tunnel is healthy. Without it the suspect client is dialed.
    assert_eq!(world.clients.health(), Health::Healthy);
    drop(old);
    assert_eq!(world.clients.health(), Health::Doubtful);
    assert_eq!(world.way("172.25.3.4"), Some(new.admission.id));
    assert_eq!(new.probes().len(), 0);
    // A client that receives nothing may still send.
    tokio::time::advance(Duration::from_secs(1)).await;
    new.streams.heard(now());
    assert_eq!(world.clients.health(), Health::Doubtful);
    assert_eq!(world.clients.health(), Health::Doubtful);
    let probes = new.probes();
    assert_eq!(probes.len(), 1);
    assert!(new.admission.silence.input(&answer(&probes[0])));
    assert_eq!(world.clients.health(), Health::Healthy);
}

#[tokio::test(start_paused = true)]
async fn probe_that_finds_a_full_link_is_sent_again() {
    let world = World::new(|_| {});
    world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
    let mut user = world.connect("user");
    user.answer();
    let fill = |user: &Connected| while user.streams.peer().forward(&[0; 28]) {};
    fill(&user);
    let way = world
        .clients
        .way("172.25.3.4".parse().unwrap(), &[])
        .unwrap();
    let waiting = tokio::time::timeout(Duration::from_secs(60), way.suspect());
    assert!(waiting.await.is_err());
    assert!(!user.admission.silence.is_suspect(&way.peer));
    // Once the link has room, the next attempt succeeds.
    user.probes();
    way.suspect().await;
    assert_eq!(user.probes().len(), 1);
    // The same applies to a client that is already suspect.
    fill(&user);
    tokio::time::advance(Duration::from_secs(1)).await;
    user.streams.heard(now());
    assert!(user.admission.silence.is_suspect(&way.peer));
    user.probes();
    assert!(user.admission.silence.is_suspect(&way.peer));
    assert_eq!(user.probes().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn client_that_never_answered_a_probe_is_not_suspect() {
    let world = World::new(|_| {});
    world.file("mute", "iroute 172.26.0.0 255.255.0.0\npush \"ping 0\"\n");
    world.file("user", "iroute 172.25.0.0 255.255.0.0\n");
    let (mut user, mut mute) = (world.connect("user"), world.connect("mute"));
    // Without pings, nothing would end the suspicion.
    mute.answer();
    assert_eq!(user.probes().len(), 1);
    for target in ["172.25.3.4", "172.26.3.4"] {
        let way = world.clients.way(target.parse().unwrap(), &[]).unwrap();
        let waiting = tokio::time::timeout(Duration::from_secs(60), way.suspect());
        assert!(waiting.await.is_err());
    }
    // A dial asks again.
    assert_eq!(user.probes().len(), 1);
}
