//! Network namespaces inside the test's own namespaces, links between them, and sockets in them.
//!
//! Their names are mounts below `/run`, on a private file system of the test, so that the machine's `/run`
//! never contains them. The test's files are there too.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Once;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

use crate::namespace::ip;
use crate::process::Program;

/// Connections that may wait until a busy test accepts them. More connections than this may be reset by the kernel.
const BACKLOG: u32 = 1024;

/// Directory where `ip` keeps named network namespaces.
const DIR: &str = "/run/netns";

/// A network namespace with a loopback interface. The namespace ends with the test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Creates a namespace. A name has at most 8 letters, because interfaces have the same names.
    ///
    /// # Panics
    /// If the caller is not inside [`alone`](crate::namespace::alone), or the namespace cannot be created.
    pub fn add(name: &str) -> Self {
        assert!(name.len() <= 8, "{name} is too long");
        assert!(is_alone(), "call namespace::alone first");
        private_run();
        ip(&format!("netns add {name}")).expect("a network namespace");
        let namespace = Self {
            name: name.to_owned(),
        };
        namespace.ip("link set lo up");
        namespace
    }

    /// Links this namespace with another namespace. `near` and `far` are addresses with prefix lengths, for
    /// example `192.168.77.1/24`.
    ///
    /// # Panics
    /// If the namespaces are already linked.
    pub fn link(&self, near: &str, other: &Self, far: &str) {
        let (here, there) = (&self.name, &other.name);
        let pair = format!("link add {there} type veth peer name {here} netns {there}");
        self.ip(&pair);
        for (namespace, interface, address) in [(self, there, near), (other, here, far)] {
            namespace.ip(&format!("address add {address} dev {interface}"));
            namespace.ip(&format!("link set {interface} up"));
        }
    }

    /// Adds an address to the loopback interface. Other namespaces need a route to reach the address.
    ///
    /// # Panics
    /// If the namespace already has the address.
    pub fn address(&self, address: Ipv4Addr) {
        self.ip(&format!("address add {address}/32 dev lo"));
    }

    /// Runs `ip` in the namespace and returns its output.
    ///
    /// # Panics
    /// If `ip` fails; the panic has the error output.
    pub fn ip(&self, words: &str) -> String {
        let name = &self.name;
        ip(&format!("-netns {name} {words}")).unwrap_or_else(|why| panic!("{name}: {words}: {why}"))
    }

    /// Runs `iptables` in the namespace.
    ///
    /// # Panics
    /// If `iptables` fails; the panic has the error output.
    pub fn iptables(&self, words: &str) {
        let output = Command::new("nsenter")
            .arg(self.entrance())
            .arg("iptables")
            .args(words.split(' '))
            .output()
            .expect("nsenter");
        told(output).unwrap_or_else(|why| panic!("{}: iptables {words}: {why}", self.name));
    }

    /// Runs `iptables-restore` in the namespace, and keeps all other chains.
    ///
    /// # Panics
    /// If `iptables-restore` fails; the panic has the error output.
    pub fn restore(&self, rules: &str) {
        let mut command = Command::new("nsenter");
        command.arg(self.entrance());
        command.args(["iptables-restore", "-w", "--noflush"]);
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("nsenter");
        let mut input = child.stdin.take().expect("a pipe");
        let written = input.write_all(rules.as_bytes());
        drop(input);
        let output = child.wait_with_output().expect("nsenter");
        let told = told(output);
        told.unwrap_or_else(|why| panic!("{}: {why} {written:?}\n{rules}", self.name));
    }

    /// Enables routing between the links of the namespace.
    ///
    /// # Panics
    /// If the kernel setting cannot be written.
    pub fn forward(&self) {
        self.within(|| std::fs::write("/proc/sys/net/ipv4/ip_forward", "1"))
            .expect("ip_forward");
    }

    /// Starts a program in the namespace.
    ///
    /// # Panics
    /// If the program cannot be started.
    pub fn spawn<A: AsRef<OsStr>>(&self, program: &Path, args: &[A]) -> Program {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let entrance = self.entrance();
        let words = [OsStr::new(&entrance), program.as_os_str()];
        let words = words.into_iter().chain(args.iter().map(AsRef::as_ref));
        Program::spawn("/usr/bin/nsenter", words, &[]).named(&format!("{name} in {}", self.name))
    }

    /// Runs a program in the namespace to its end and returns its output.
    ///
    /// # Errors
    /// Returns the exit status and the output if the program fails.
    pub async fn run(&self, program: &str, words: &str) -> Result<String, String> {
        let output = tokio::process::Command::new("nsenter")
            .arg(self.entrance())
            .arg(program)
            .args(words.split(' '))
            .kill_on_drop(true)
            .output()
            .await;
        told(output.expect("nsenter"))
    }

    /// Runs `work` on a new thread in the namespace. Sockets that `work` creates stay in the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let path = Path::new(DIR).join(&self.name);
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let file = File::open(path).expect("a namespace");
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("entering a namespace");
                work()
            });
            inside.join().expect("work in a namespace")
        })
    }

    /// Opens a listener in the namespace.
    ///
    /// # Panics
    /// If the namespace does not have the address, or the address is in use.
    pub fn listen(&self, at: SocketAddrV4) -> TcpListener {
        let listener = || {
            let socket = self.within(TcpSocket::new_v4)?;
            socket.set_reuseaddr(true)?;
            socket.bind(SocketAddr::V4(at))?;
            socket.listen(BACKLOG)
        };
        listener().unwrap_or_else(|error: io::Error| panic!("{}: {at}: {error}", self.name))
    }

    /// Connects from the namespace.
    ///
    /// # Errors
    /// Returns the error of the kernel.
    pub async fn connect(&self, to: SocketAddrV4) -> io::Result<TcpStream> {
        let socket = self.within(TcpSocket::new_v4)?;
        socket.connect(SocketAddr::V4(to)).await
    }

    /// Opens a UDP socket in the namespace.
    ///
    /// # Panics
    /// If the namespace does not have the address, or the address is in use.
    pub fn udp(&self, at: SocketAddrV4) -> UdpSocket {
        let socket = self.within(|| {
            let socket = std::net::UdpSocket::bind(at)?;
            socket.set_nonblocking(true)?;
            io::Result::Ok(socket)
        });
        let socket = socket.unwrap_or_else(|error| panic!("{}: {at}: {error}", self.name));
        UdpSocket::from_std(socket).expect("a runtime")
    }

    fn entrance(&self) -> String {
        format!("--net={DIR}/{}", self.name)
    }
}

/// Creates a directory that ends with the test, even if the test is killed.
pub(super) fn directory() -> TempDir {
    let mut builder = tempfile::Builder::new();
    builder.prefix("culvert-");
    let dir = if is_alone() {
        private_run();
        builder.tempdir_in("/run")
    } else {
        builder.tempdir()
    };
    dir.expect("a temporary directory")
}

/// Returns true if this process is the first process of its PID namespace.
fn is_alone() -> bool {
    std::process::id() == 1
}

/// Mounts, at the first call, a `/run` in memory that only this process and its children see.
fn private_run() {
    static MOUNTED: Once = Once::new();
    MOUNTED.call_once(|| {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "tmpfs", "/run"]);
        told(mount.output().expect("mount")).expect("a /run of the test's own");
    });
}

fn told(output: Output) -> Result<String, String> {
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    if output.status.success() {
        Ok(text)
    } else {
        Err(format!("{}: {}", output.status, text.trim()))
    }
}
