//! The node tunnel's own interface, on the kernel of the test machine. Every test runs in a separate network
//! namespace.
//!
//! The programs create dummy interfaces. If the kernel does not support dummy interfaces, most tests run the
//! same code with the most similar kind of interface, and the tests of the real program are skipped.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use culvert_kit::check;
use culvert_kit::services::Services;
use culvert_node_tunnel::app::{Bound, InterfaceOnly};
use culvert_node_tunnel::config::{Config, PROGRAM};
use culvert_node_tunnel::interface::KIND;
use culvert_tests::metrics::{http_get, scrape};
use culvert_tests::namespace::{alone, ip};
use culvert_tests::process::ours;
use culvert_tests::skip::skip_for_kernel;
use culvert_tests::{Program, Signal, eventually};
use http::StatusCode;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::{Door, LIMIT, Upstream, timely};

const RAW: &str = "raw.demo.svc.cluster.local:443";
const NAME: &str = "envoyagent";
const V4: &str = "100.64.30.10";
const V6: &str = "fd00::10";
const BOTH: [&str; 2] = [V4, V6];

/// Address without a listener, for tests without traffic.
const NOWHERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 1);
const STATS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8002);

/// Starts services and a front door with a route to them.
async fn seed() -> (Services, Door) {
    let services = Services::start().await.unwrap();
    let door = Door::start(&[Upstream::new("demo/raw", services.raw).authority(RAW)]).await;
    (services, door)
}

/// Returns the command line of a node tunnel that listens on port 6443 of these addresses.
fn args(proxy: SocketAddr, addresses: &[&str]) -> Vec<String> {
    let mut args = vec![
        format!("--proxy={proxy}"),
        "--stats-address=127.0.0.1".to_owned(),
        format!("--if={NAME}"),
        format!("--addr={}", addresses.join(",")),
    ];
    for address in addresses {
        let listen = SocketAddr::new(address.parse().unwrap(), 6443);
        args.push(format!("--listen={listen}={RAW}"));
    }
    args
}

fn has_kind(kind: &str) -> bool {
    let made = ip(&format!("link add probe type {kind}"));
    made.is_ok_and(|_| ip("link del probe").is_ok())
}

/// Returns the interface kind of the programs if the kernel supports it, and the most similar kind otherwise.
fn kind() -> &'static str {
    let kind = [KIND, "ifb"].into_iter().find(|kind| has_kind(kind));
    kind.expect("a kernel with dummy or ifb interfaces")
}

/// Returns true if the kernel supports the interface kind of the programs. Otherwise prints a line to stderr.
fn has_programs_kind() -> bool {
    let found = has_kind(KIND);
    if !found {
        skip_for_kernel(KIND);
    }
    found
}

/// Creates the interface like another program.
fn make(kind: &str, address: &str) {
    ip(&format!("link add {NAME} up type {kind}")).unwrap();
    ip(&format!("addr add {address} dev {NAME}")).unwrap();
}

/// A node tunnel in this process, with an interface kind that the kernel supports.
struct Node {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Node {
    async fn start(proxy: SocketAddr, addresses: &[&str]) -> Self {
        Self::start_of(kind(), proxy, addresses).await.unwrap()
    }

    async fn start_of(
        kind: &'static str,
        proxy: SocketAddr,
        addresses: &[&str],
    ) -> anyhow::Result<Self> {
        let args = args(proxy, addresses);
        let line = std::iter::once(PROGRAM.to_owned()).chain(args);
        let mut config = Config::from_args(line).unwrap();
        config.interface.as_mut().unwrap().kind = kind;
        let bound = Bound::bind(config).await?;
        let stop = CancellationToken::new();
        let task = tokio::spawn(bound.run(stop.clone()));
        Ok(Self { stop, task })
    }

    async fn end(self) {
        self.stop.cancel();
        timely("the end", self.task).await.unwrap();
    }
}

async fn counted(what: &str) -> f64 {
    let name = format!("culvert_node_tunnel_interface_{what}_total");
    scrape(STATS).await.unwrap().value(&name, &[]).unwrap()
}

/// Returns the line about the interface from the readiness page.
async fn readiness() -> String {
    let (_, _, body) = http_get(STATS, "/readyz?verbose").await.unwrap();
    let body = String::from_utf8(body.to_vec()).unwrap();
    let line = body.lines().find(|line| line.contains("]interface"));
    line.expect("a line about the interface").to_owned()
}

/// Returns the interface as reported by `ip`.
fn link() -> Result<Value, String> {
    let text = ip(&format!("-json -details addr show dev {NAME}"))?;
    let links: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    Ok(links[0].clone())
}

/// Returns the interface's addresses with prefix length, scope and flags, without link-local addresses.
fn addresses() -> Result<Vec<String>, String> {
    let link = link()?;
    let flags = link["flags"].as_array().unwrap();
    if !flags.contains(&"UP".into()) {
        return Err(format!("not up: {flags:?}"));
    }
    let all = link["addr_info"].as_array().unwrap().iter();
    let own = all.filter(|one| one["scope"] != "link");
    let told = own.map(|one| {
        let marks: Vec<&str> = ["nodad", "tentative"]
            .into_iter()
            .filter(|mark| one[mark] == true)
            .collect();
        let text = |key: &str| one[key].to_string().replace('"', "");
        let (local, prefix, scope) = (text("local"), text("prefixlen"), text("scope"));
        format!("{local}/{prefix} {scope} {}", marks.join(" "))
    });
    Ok(told.map(|text| text.trim_end().to_owned()).collect())
}

const PLACED: [&str; 2] = ["100.64.30.10/32 host", "fd00::10/128 global nodad"];

/// Waits until the interface has exactly these addresses.
async fn has(expected: &[&str]) {
    eventually("the interface is in place", LIMIT, async || {
        let now = addresses()?;
        (now == expected).then_some(()).ok_or(format!("{now:?}"))
    })
    .await;
}

async fn connect(address: &str) -> TcpStream {
    let address = SocketAddr::new(address.parse().unwrap(), 6443);
    let connected = timely("a connection", TcpStream::connect(address)).await;
    connected.unwrap_or_else(|error| panic!("{address}: {error}"))
}

async fn carries() {
    for address in BOTH {
        check::echo(connect(address).await, 2, 1000).await.unwrap();
    }
}

/// Returns the number of netlink route sockets of all programs in this network namespace.
fn route_sockets() -> usize {
    let sockets = std::fs::read_to_string("/proc/net/netlink").unwrap();
    let sockets = sockets
        .lines()
        .map(|line| line.split_whitespace().collect());
    sockets
        // Protocol 0 is NETLINK_ROUTE. Port id 0 belongs to the kernel's own sockets.
        .filter(|fields: &Vec<&str>| fields[1] == "0" && fields[2] != "0")
        .count()
}

/// Runs the `ip` command `harm`, and waits until the interface is repaired and the old listeners serve again.
async fn survives(harm: &str) {
    let before = counted("repairs").await;
    ip(harm).unwrap();
    eventually(harm, LIMIT, async || counted("repairs").await > before).await;
    has(&PLACED).await;
    carries().await;
}

#[test]
fn removed_addresses_are_restored_and_listeners_keep_working() {
    alone(async || {
        let (_services, door) = seed().await;
        let node = Node::start(door.tunneling, &BOTH).await;
        assert_eq!(addresses().unwrap(), PLACED);
        assert_eq!(readiness().await, "[+]interface ok");
        assert!(route_sockets() >= 1);
        carries().await;

        let mut held = connect(V4).await;
        held.write_all(b"echo\nx").await.unwrap();
        assert_eq!(timely("an echo", held.read_u8()).await.unwrap(), b'x');
        survives("addr del 100.64.30.10/32 dev envoyagent").await;
        survives("addr del fd00::10/128 dev envoyagent").await;
        // The open connection survived the removal of its address.
        held.write_all(b"y").await.unwrap();
        assert_eq!(timely("an echo", held.read_u8()).await.unwrap(), b'y');
        drop(held);
        assert_eq!(counted("failures").await, 0.0);

        node.end().await;
        assert_eq!(addresses().unwrap(), PLACED);
        assert_eq!(route_sockets(), 0);
    });
}

#[test]
fn a_removed_interface_is_restored_and_listeners_keep_working() {
    alone(async || {
        let (_services, door) = seed().await;
        let node = Node::start(door.tunneling, &BOTH).await;
        survives("link set envoyagent down").await;
        survives("link del envoyagent").await;
        node.end().await;
    });
}

#[test]
fn an_existing_interface_is_reused_and_its_old_address_replaced() {
    alone(async || {
        make(kind(), "192.168.30.10/32");
        ip("addr add fd00::1/64 dev envoyagent").unwrap();
        let index = link().unwrap()["ifindex"].clone();
        let node = Node::start(NOWHERE, &[V4]).await;
        has(&["100.64.30.10/32 host", "fd00::1/64 global"]).await;
        assert_eq!(link().unwrap()["ifindex"], index);
        // An address that another program adds stays.
        ip("addr add 10.0.0.1/32 dev envoyagent").unwrap();
        ip("link set envoyagent down").unwrap();
        eventually("a repair", LIMIT, async || counted("repairs").await == 1.0).await;
        has(&["100.64.30.10/32 host", "10.0.0.1/32 global"]).await;
        node.end().await;
    });
}

#[test]
fn an_interface_of_another_kind_is_left_alone() {
    alone(async || {
        make("bridge", "10.0.0.1/32");
        let before = (link().unwrap()["ifindex"].clone(), addresses().unwrap());
        let mut program = Program::spawn(PROGRAM, args(NOWHERE, &BOTH), &[]);
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1));
        let log = program.log();
        let text = "interface envoyagent already exists and is of kind bridge; \
                    choose another name with --if, or remove the existing interface";
        assert!(log.contains(text), "{log}");
        let after = (link().unwrap()["ifindex"].clone(), addresses().unwrap());
        assert_eq!(after, before);

        // The same is true while the program runs.
        ip("link del envoyagent").unwrap();
        let node = Node::start(NOWHERE, &BOTH).await;
        ip("link set envoyagent down").unwrap();
        eventually("a repair", LIMIT, async || counted("repairs").await == 1.0).await;
        ip("link del envoyagent").unwrap();
        let taken = make_soon("bridge").await;
        eventually(
            "the readiness page reports the wrong kind",
            LIMIT,
            async || {
                let told = readiness().await;
                told.contains("is of kind bridge").then_some(()).ok_or(told)
            },
        )
        .await;
        assert!(counted("failures").await >= 1.0);
        assert_eq!(link().unwrap()["ifindex"], taken);
        assert_eq!(addresses().unwrap(), ["10.0.0.1/32 global"]);
        ip("link del envoyagent").unwrap();
        has(&PLACED).await;
        assert_eq!(readiness().await, "[+]interface ok");
        node.end().await;
    });
}

/// Creates an interface with the name of the program's interface, although the program may create its interface
/// again at any moment. Returns the index of the new interface.
async fn make_soon(kind: &str) -> Value {
    eventually("the name is free", LIMIT, async || {
        ip(&format!("link add {NAME} up type {kind}"))
            .or_else(|error| ip(&format!("link del {NAME}")).and(Err(error)))
    })
    .await;
    ip(&format!("addr add 10.0.0.1/32 dev {NAME}")).unwrap();
    link().unwrap()["ifindex"].clone()
}

#[test]
fn missing_kernel_support_is_reported() {
    alone(async || {
        let error = Node::start_of("nonsense", NOWHERE, &BOTH).await.err();
        let error = error.unwrap().to_string();
        assert!(error.contains("modprobe nonsense"), "{error}");
        // Like a node with IPv6 switched off.
        std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        let error = Node::start_of(kind(), NOWHERE, &BOTH).await.err();
        let error = error.unwrap().to_string();
        assert!(error.contains("IPv6 is switched off, by"), "{error}");
        let node = Node::start(NOWHERE, &[V4]).await;
        has(&PLACED[..1]).await;
        node.end().await;
    });
}

/// Starts the program as root without CAP_NET_ADMIN.
fn spawn_without_permission(args: &[String]) -> Program {
    let program = ours(PROGRAM).to_str().unwrap().to_owned();
    let without = ["--inh-caps=-net_admin", "--bounding-set=-net_admin"].map(str::to_owned);
    let line = without.into_iter().chain([program]);
    Program::spawn("/usr/bin/setpriv", line.chain(args.to_vec()), &[])
}

#[test]
fn a_missing_capability_is_named() {
    alone(async || {
        let mut program = spawn_without_permission(&args(NOWHERE, &BOTH));
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1));
        let log = program.log();
        let text =
            "interface envoyagent: cannot create the interface: not permitted; grant CAP_NET_ADMIN";
        assert!(log.contains(text), "{log}");
    });
}

#[test]
fn without_the_flag_no_interface_is_created() {
    alone(async || {
        let args = [
            format!("--proxy={NOWHERE}"),
            format!("--listen=127.0.0.1:6443={RAW}"),
        ];
        let program = spawn_without_permission(&args);
        eventually("it serves", LIMIT, async || scrape(STATS).await).await;
        assert_eq!(route_sockets(), 0);
        let (_, _, body) = http_get(STATS, "/readyz").await.unwrap();
        let body = String::from_utf8(body.to_vec()).unwrap();
        assert!(!body.contains("interface"), "{body}");
        assert!(link().is_err());
        drop(program);
    });
}

/// Returns the configuration for arguments of network-interface-manager, with a kind that the kernel supports.
fn manager(mode: &str) -> Config {
    let line = [PROGRAM, "-mode", mode, "-if", NAME, "-addr", V4];
    let mut config = Config::from_args(line).unwrap();
    config.interface.as_mut().unwrap().kind = kind();
    config
}

#[test]
fn mode_init_creates_the_interface_and_ends() {
    alone(async || {
        let made = InterfaceOnly::bind(manager("init")).await.unwrap();
        timely("the end", made.run(CancellationToken::new())).await;
        has(&PLACED[..1]).await;
        // A restarted pod finds the interface.
        let made = InterfaceOnly::bind(manager("init")).await.unwrap();
        timely("the end", made.run(CancellationToken::new())).await;
        has(&PLACED[..1]).await;
    });
}

#[test]
fn mode_probe_repairs_the_interface_and_opens_no_port() {
    alone(async || {
        let made = InterfaceOnly::bind(manager("probe")).await.unwrap();
        let stop = CancellationToken::new();
        let task = tokio::spawn(made.run(stop.clone()));
        for harm in [
            "addr del 100.64.30.10/32 dev envoyagent",
            "link del envoyagent",
        ] {
            has(&PLACED[..1]).await;
            ip(harm).unwrap();
        }
        has(&PLACED[..1]).await;
        // The pod's other container has this port.
        assert!(TcpStream::connect(STATS).await.is_err());
        stop.cancel();
        timely("the end", task).await.unwrap();
        has(&PLACED[..1]).await;
    });
}

#[test]
fn the_program_creates_and_repairs_a_dummy_interface() {
    alone(async || {
        if !has_programs_kind() {
            return;
        }
        let (_services, door) = seed().await;
        let args = args(door.tunneling, &BOTH);
        let mut program = Program::spawn(PROGRAM, &args, &[]);
        eventually("the node tunnel is ready", LIMIT, async || {
            let (status, _, body) = http_get(STATS, "/readyz").await?;
            anyhow::ensure!(status == StatusCode::OK, "{status} {body:?}");
            anyhow::Ok(())
        })
        .await;
        has(&PLACED).await;
        assert_eq!(link().unwrap()["linkinfo"]["info_kind"], KIND);
        carries().await;
        ip("link del envoyagent").unwrap();
        has(&PLACED).await;
        let line = program.wait_for_log("is repaired", LIMIT).await;
        assert!(
            line.contains("create the interface, add the address 100.64.30.10/32"),
            "{line}"
        );
        carries().await;
        program.signal(Signal::TERM);
        assert!(program.wait_exit(LIMIT).await.success());
        assert_eq!(addresses().unwrap(), PLACED);

        // The capability is required even if the interface is in place already.
        let mut program = spawn_without_permission(&args);
        assert_eq!(program.wait_exit(LIMIT).await.code(), Some(1));
        let log = program.log();
        assert!(
            log.contains("cannot set the interface up: not permitted"),
            "{log}"
        );
    });
}
