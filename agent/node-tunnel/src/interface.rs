//! Creation and maintenance of the network interface with the listen addresses.
//!
//! Pods reach the seed's API server at an address that the node's own devices do not have. A dummy interface
//! adds this address to the node, and packets to the address never leave the node. KKP's
//! network-interface-manager does the same. The program creates the interface before the listeners bind,
//! maintains the interface while running, and leaves the interface in place at exit. The next start finds the
//! interface, so the node keeps the address during a restart. The program never touches an interface of
//! another kind.
//!
//! | module | contents |
//! |---|---|
//! | `plan` | the changes that an interface needs; no I/O |
//! | `message` | the necessary rtnetlink messages; no I/O |
//! | `netlink` | the sockets |

mod message;
mod netlink;
mod plan;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use culvert_host::admin::Check;
use culvert_host::telemetry::log_once::LogOnce;
use parking_lot::Mutex;
use rustix::io::Errno;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use self::message::Incoming;
use self::netlink::{Monitor, Netlink};
use self::plan::{Foreign, Step, steps};
use super::metrics::TunnelMetrics;

/// Kind of the interface, as the kernel names it: the kind that KKP creates.
pub const KIND: &str = "dummy";

/// Longest time between two checks of the interface, as in network-interface-manager. Usually a kernel
/// notification triggers a check; the interval covers lost notifications.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Pause after a check without a problem, because changes come in bursts.
const CALM_PAUSE: Duration = Duration::from_millis(100);

/// First pause after a repair or a failure. The pause doubles up to [`CHECK_INTERVAL`] while each check finds
/// a problem. If another program keeps undoing the repairs, the pause limits the load on the node.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// Maximum number of checks in one repair. Creating an interface needs three checks; more checks allow for
/// changes by other programs meanwhile.
const MAX_LOOKS: usize = 8;

/// The interface to create and maintain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Name of the interface: 1 to 15 bytes.
    pub name: String,
    /// Kind of the interface. The command line always sets [`KIND`]. Tests use another kind on kernels
    /// without dummy interfaces.
    pub kind: &'static str,
    /// Addresses of the interface, each with a network of its own (`/32`, `/128`).
    pub addresses: Vec<IpAddr>,
}

/// Error of a failed creation or repair of an interface.
#[derive(Debug, thiserror::Error)]
#[error("interface {name}{cause}")]
pub(crate) struct InterfaceError {
    name: String,
    cause: Cause,
}

/// Reason why the interface could not be created or repaired.
#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error(
        ": cannot {0}: not permitted; grant CAP_NET_ADMIN, or omit --if and --addr and create the interface by other means"
    )]
    Permission(Step),
    #[error(
        " already exists and {0}; choose another name with --if, or remove the existing interface"
    )]
    Foreign(Foreign),
    #[error(
        ": this kernel does not support interfaces of kind {0}; load the kernel module, for example with `modprobe {0}` on the node"
    )]
    NoSuchKind(&'static str),
    #[error(
        ": cannot {step}: IPv6 is switched off, by net.ipv6.conf.default.disable_ipv6, by net.ipv6.conf.{name}.disable_ipv6, or for the whole kernel; switch IPv6 on, or leave the address out of --addr"
    )]
    NoIpv6 { name: String, step: Step },
    #[error(
        " keeps changing during the repair; find the other program that manages the interface, and stop one of the two"
    )]
    Contended,
    /// The kernel rejected a step for another reason.
    #[error(": cannot {0}: {1}; `ip -d addr show` lists the current state")]
    Refused(Step, Errno),
    #[error(": cannot read the current state: {0}; allow AF_NETLINK sockets")]
    Unseen(io::Error),
}

/// Result of one successful repair. `done` is empty if the interface was already in place.
#[derive(Debug)]
struct Kept {
    index: u32,
    done: Vec<Step>,
}

/// Creates and maintains one interface.
pub(crate) struct Keeper {
    wanted: Interface,
    monitor: Monitor,
    index: u32,
    /// Errors of the checks since the interface was last in place.
    failures: Arc<Mutex<LogOnce>>,
    metrics: Arc<TunnelMetrics>,
}

// === impl Interface ===

impl Interface {
    /// Checks and repairs the interface until there is nothing left to repair.
    fn repair(&self) -> Result<Kept, InterfaceError> {
        let unseen = |errno: Errno| self.error(Cause::Unseen(errno.into()));
        let mut netlink = Netlink::open().map_err(unseen)?;
        let mut done = Vec::new();
        for _ in 0..MAX_LOOKS {
            let link = match netlink.find(&self.name) {
                Ok(link) => link,
                Err(errno) if has_changed(errno) => continue,
                Err(errno) => return Err(unseen(errno)),
            };
            let todo = steps(self, link.as_ref());
            let todo = todo.map_err(|found| self.error(Cause::Foreign(found)))?;
            let index = link.map_or(0, |link| link.index);
            if todo.is_empty() {
                return Ok(Kept { index, done });
            }
            // If one step fails, for example an IPv6 address on a node with IPv6 disabled, the next steps
            // must still run.
            let mut refused = None;
            for step in todo {
                match netlink.apply(self, index, &step) {
                    Ok(()) => done.push(step),
                    Err(errno) if has_changed(errno) => break,
                    Err(errno) => refused = refused.or(Some(self.refused(step, errno))),
                }
            }
            if let Some(error) = refused {
                return Err(error);
            }
        }
        Err(self.error(Cause::Contended))
    }

    /// Does the first repair, and checks the permission for later repairs. Without the check, an interface
    /// that is already in place would hide a missing capability until the node restarts.
    fn make(&self) -> Result<Kept, InterfaceError> {
        let kept = self.repair()?;
        if kept.done.is_empty() {
            let step = Step::SetUp;
            let outcome = Netlink::open().and_then(|mut netlink| {
                // The interface is already up, so this step changes nothing, but the kernel still checks the
                // permission.
                netlink.apply(self, kept.index, &step)
            });
            match outcome {
                Err(errno) if !has_changed(errno) => return Err(self.refused(step, errno)),
                _ => {}
            }
        }
        Ok(kept)
    }

    fn refused(&self, step: Step, reason: Errno) -> InterfaceError {
        let name = self.name.clone();
        self.error(match (reason, &step) {
            (Errno::PERM, _) => Cause::Permission(step),
            (Errno::OPNOTSUPP, Step::Create) => Cause::NoSuchKind(self.kind),
            // EACCES: a sysctl disables IPv6. EOPNOTSUPP and EAFNOSUPPORT: the kernel does not support IPv6.
            (Errno::ACCESS | Errno::OPNOTSUPP | Errno::AFNOSUPPORT, Step::Add(address))
                if address.ip.is_ipv6() =>
            {
                Cause::NoIpv6 { name, step }
            }
            _ => Cause::Refused(step, reason),
        })
    }

    fn error(&self, cause: Cause) -> InterfaceError {
        let name = self.name.clone();
        InterfaceError { name, cause }
    }

    /// Runs `work` on a thread for blocking work. The kernel delays rtnetlink requests during changes by
    /// other programs, and client traffic must not wait.
    async fn aside(
        &self,
        work: fn(&Self) -> Result<Kept, InterfaceError>,
    ) -> Result<Kept, InterfaceError> {
        let interface = self.clone();
        let outcome = spawn_blocking(move || work(&interface)).await;
        outcome.unwrap_or_else(|error| Err(self.error(Cause::Unseen(error.into()))))
    }
}

/// True if the error only means that another program changed the interface meanwhile.
fn has_changed(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EXIST | Errno::NODEV | Errno::ADDRNOTAVAIL | Errno::INTR
    )
}

// === impl Keeper ===

impl Keeper {
    /// Creates the interface, or verifies that the interface is already in place.
    ///
    /// # Errors
    /// Returns [`InterfaceError`]. Steps done before the error are not undone.
    pub(crate) async fn start(
        wanted: Interface,
        metrics: Arc<TunnelMetrics>,
    ) -> Result<Self, InterfaceError> {
        // The monitor is opened before the first check, so that no change after the check is missed.
        let monitor = Monitor::open().map_err(|error| wanted.error(Cause::Unseen(error)))?;
        let Kept { index, done } = wanted.aside(Interface::make).await?;
        let steps = Step::list(&done);
        info!(interface = wanted.name, steps, "the interface is in place");
        Ok(Self {
            wanted,
            monitor,
            index,
            failures: Arc::default(),
            metrics,
        })
    }

    /// Returns the readiness check, which fails with the text of the last [`InterfaceError`].
    pub(crate) fn check(&self) -> Check {
        let failures = self.failures.clone();
        let last = move || failures.lock().current().map(str::to_owned);
        Check {
            name: "interface",
            run: Box::new(move || last().map_or(Ok(()), Err)),
        }
    }

    /// Repairs the interface after every change, until the token fires. Leaves the interface in place at the
    /// end.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut pause = CALM_PAUSE;
        loop {
            let due = Instant::now() + CHECK_INTERVAL;
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.monitor.changed(|incoming| self.concerns(incoming)) => {}
                () = sleep_until(due) => {}
            }
            pause = self.look(pause).await;
        }
    }

    fn concerns(&self, incoming: &Incoming<'_>) -> bool {
        match incoming {
            Incoming::Link(link) => link.index == self.index || link.name == self.wanted.name,
            Incoming::Address { index, .. } => *index == self.index,
            Incoming::Outcome(_) | Incoming::Other => false,
        }
    }

    /// Checks and repairs the interface. `pause` is the pause before this check. Returns the pause before the
    /// next check.
    async fn look(&mut self, pause: Duration) -> Duration {
        let interface = &self.wanted.name;
        match self.wanted.aside(Interface::repair).await {
            Ok(Kept { index, done }) => {
                self.index = index;
                if self.failures.lock().has_recovered() {
                    info!(interface, "the interface is in place again");
                }
                if done.is_empty() {
                    return CALM_PAUSE;
                }
                self.metrics.interface_repairs.increment(1);
                let (steps, pause) = (Step::list(&done), longer(pause));
                let text =
                    "the interface was changed and is repaired; pausing before the next repair";
                warn!(interface, steps, ?pause, "{text}");
                pause
            }
            Err(error) => {
                self.metrics.interface_failures.increment(1);
                let text = error.to_string();
                let due = self.failures.lock().failed(&text);
                if let Some(due) = due {
                    let (attempts, failing_seconds) = (due.attempts, due.failing_seconds);
                    error!(attempts, failing_seconds, "{text}");
                }
                longer(pause)
            }
        }
    }
}

/// Returns the next, longer pause after a problem.
fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST_PAUSE, CHECK_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::plan::Address;
    use super::*;

    #[test]
    fn pauses_double_up_to_the_check_interval() {
        let mut pause = CALM_PAUSE;
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pause = longer(pause);
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
    }

    #[test]
    fn errors_name_the_remedy() {
        let interface = Interface {
            name: "envoyagent".to_owned(),
            kind: KIND,
            addresses: Vec::new(),
        };
        let v6 = Step::Add(Address::host(IpAddr::from([0; 16])));
        let v4 = Step::Add(Address::host(IpAddr::from([10, 0, 0, 1])));
        for (step, errno, part) in [
            (Step::Create, Errno::PERM, "grant CAP_NET_ADMIN"),
            (Step::Create, Errno::OPNOTSUPP, "modprobe dummy"),
            (v6, Errno::ACCESS, "net.ipv6.conf.default.disable_ipv6"),
            (v6, Errno::OPNOTSUPP, "leave the address out of --addr"),
            (v4, Errno::ACCESS, "cannot add the address 10.0.0.1/32"),
        ] {
            let error = interface.refused(step, errno).to_string();
            assert!(error.contains(part), "{error}\n{part}");
        }
    }
}
