//! The interface whose addresses the tunnel listens on: made, and kept as it has to be.
//!
//! A node has no address for the seed's API server by itself. A dummy interface gives it one that
//! never leaves the node, as KKP's network-interface-manager does. It is made before the listeners
//! bind, kept while the program runs, and left behind at its end: the next start finds it, and a
//! restart takes no address from a node. An interface of another kind is never touched.
//!
//! | module | what it holds |
//! |---|---|
//! | [`plan`] | what to do about an interface as it is found; no I/O |
//! | [`message`] | the few rtnetlink messages that takes; no I/O |
//! | [`netlink`] | the sockets |

pub mod message;
pub mod netlink;
pub mod plan;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

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

/// The kind of the interface, by the kernel's name for it: the kind that KKP makes.
pub const KIND: &str = "dummy";

/// How often the interface is looked at although the kernel has told of no change: as often as
/// network-interface-manager looks. It is the safety net for a notification that got lost.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The pause behind a look that found nothing to do: changes come in bursts.
const CALM_PAUSE: Duration = Duration::from_millis(100);

/// The first pause behind a repair or a failure. It doubles up to [`CHECK_INTERVAL`] as long as
/// each look finds something wrong: against a program that wants it otherwise this one does not win,
/// and must not load the node either.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// How often one repair looks again. Three times are what it takes to make an interface; more are
/// for changes that others make meanwhile.
const MAX_LOOKS: usize = 8;

/// What to make and keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name: 1 to 15 bytes.
    pub name: String,
    /// Its kind. The command line can only say [`KIND`]; tests on kernels without it say another.
    pub kind: &'static str,
    /// Its addresses, each alone in its network (`/32`, `/128`).
    pub addresses: Vec<IpAddr>,
}

/// Why the interface is not as it has to be.
#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    /// The process may not change interfaces.
    #[error(
        "interface {name}: cannot {step}: not permitted; grant CAP_NET_ADMIN, or leave out --if and --addr and have it made by others"
    )]
    Permission {
        /// The interface.
        name: String,
        /// What failed.
        step: Step,
    },
    /// Somebody else's interface has the name.
    #[error(
        "interface {name} is there already and {found}: it is left alone; choose another name with --if, or remove it"
    )]
    Foreign {
        /// The interface.
        name: String,
        /// What it is.
        found: Foreign,
    },
    /// The kernel can not make such an interface.
    #[error(
        "interface {name}: this kernel knows no interfaces of kind {kind}; load the module that brings them, such as with `modprobe {kind}` on the node"
    )]
    NoSuchKind {
        /// The interface.
        name: String,
        /// Its kind.
        kind: &'static str,
    },
    /// IPv6 is switched off.
    #[error(
        "interface {name}: cannot {step}: IPv6 is switched off, by net.ipv6.conf.default.disable_ipv6, that of {name}, or for the whole kernel; switch it on, or leave the address out of --addr"
    )]
    NoIpv6 {
        /// The interface.
        name: String,
        /// What failed.
        step: Step,
    },
    /// Others change it as fast as it is repaired.
    #[error(
        "interface {name} changes while it is repaired; find the other program that manages it, and stop one of the two"
    )]
    Contended {
        /// The interface.
        name: String,
    },
    /// The kernel said no to something else.
    #[error("interface {name}: cannot {step}: {reason}; `ip -d addr show` tells what is there")]
    Refused {
        /// The interface.
        name: String,
        /// What failed.
        step: Step,
        /// The kernel's error.
        reason: Errno,
    },
    /// Nothing can be learned from the kernel.
    #[error("interface {name}: cannot be looked at: {reason}; allow sockets of AF_NETLINK")]
    Unseen {
        /// The interface.
        name: String,
        /// The system's error.
        reason: io::Error,
    },
}

/// What one look has led to.
#[derive(Debug)]
struct Kept {
    index: u32,
    done: Vec<Step>,
}

/// Keeps one interface.
pub struct Keeper {
    wanted: Interface,
    monitor: Monitor,
    index: u32,
    health: Health,
    metrics: Arc<TunnelMetrics>,
}

/// Whether the interface was in place at the last look.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<Mutex<Option<String>>>);

// === impl Interface ===

impl Interface {
    /// Looks, and repairs until there is nothing left to do.
    fn repair(&self) -> Result<Kept, InterfaceError> {
        let unseen = |errno: Errno| self.unseen(errno.into());
        let mut netlink = Netlink::open().map_err(unseen)?;
        let mut done = Vec::new();
        for _ in 0..MAX_LOOKS {
            let link = match netlink.find(&self.name) {
                Ok(link) => link,
                Err(errno) if has_changed(errno) => continue,
                Err(errno) => return Err(unseen(errno)),
            };
            let todo = steps(self, link.as_ref()).map_err(|found| InterfaceError::Foreign {
                name: self.name.clone(),
                found,
            })?;
            let index = link.map_or(0, |link| link.index);
            if todo.is_empty() {
                return Ok(Kept { index, done });
            }
            // An address that can not be had, as without IPv6, keeps no other one away.
            let mut refused = None;
            for step in todo {
                match netlink.carry_out(self, index, &step) {
                    Ok(()) => done.push(step),
                    Err(errno) if has_changed(errno) => break,
                    Err(errno) => refused = refused.or(Some(self.refused(step, errno))),
                }
            }
            if let Some(error) = refused {
                return Err(error);
            }
        }
        let name = self.name.clone();
        Err(InterfaceError::Contended { name })
    }

    /// The first repair. It finds out, too, whether there may be another one: what is in place by
    /// chance must not hide until the next restart of the node that a capability is missing.
    fn make(&self) -> Result<Kept, InterfaceError> {
        let kept = self.repair()?;
        if kept.done.is_empty() {
            let step = Step::SetUp;
            let outcome = Netlink::open().and_then(|mut netlink| {
                // It is up: this changes nothing, and takes the same permission as a change.
                netlink.carry_out(self, kept.index, &step)
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
        match (reason, &step) {
            (Errno::PERM, _) => InterfaceError::Permission { name, step },
            (Errno::OPNOTSUPP, Step::Create) => {
                let kind = self.kind;
                InterfaceError::NoSuchKind { name, kind }
            }
            // By a setting; without the protocol.
            (Errno::ACCESS | Errno::OPNOTSUPP | Errno::AFNOSUPPORT, Step::Add(address))
                if address.ip.is_ipv6() =>
            {
                InterfaceError::NoIpv6 { name, step }
            }
            _ => InterfaceError::Refused { name, step, reason },
        }
    }

    fn unseen(&self, reason: io::Error) -> InterfaceError {
        let name = self.name.clone();
        InterfaceError::Unseen { name, reason }
    }

    /// Does `work` on a thread that may wait: the kernel makes all who ask for interfaces wait
    /// while others change theirs, and clients' bytes must not.
    async fn aside(
        &self,
        work: fn(&Self) -> Result<Kept, InterfaceError>,
    ) -> Result<Kept, InterfaceError> {
        let interface = self.clone();
        let outcome = spawn_blocking(move || work(&interface)).await;
        outcome.unwrap_or_else(|error| Err(self.unseen(error.into())))
    }
}

/// Whether an error only says that others changed the interface meanwhile.
fn has_changed(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::EXIST | Errno::NODEV | Errno::ADDRNOTAVAIL | Errno::INTR
    )
}

// === impl Keeper ===

impl Keeper {
    /// Makes the interface, or finds it as it has to be.
    ///
    /// # Errors
    /// [`InterfaceError`]; whatever was done before the error stays.
    pub async fn start(
        wanted: Interface,
        metrics: Arc<TunnelMetrics>,
    ) -> Result<Self, InterfaceError> {
        // Before the first look, so that no change can fall between the two.
        let monitor = Monitor::open().map_err(|error| wanted.unseen(error))?;
        let Kept { index, done } = wanted.aside(Interface::make).await?;
        let steps = Step::list(&done);
        info!(interface = wanted.name, steps, "the interface is in place");
        Ok(Self {
            wanted,
            monitor,
            index,
            health: Health::default(),
            metrics,
        })
    }

    /// For the readiness page.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Repairs the interface whenever it changes, until the token fires; leaves it as it is then.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut pause = CALM_PAUSE;
        loop {
            let due = Instant::now() + CHECK_INTERVAL;
            if stop.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.monitor.heard(|incoming| self.concerns(incoming)) => {}
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

    /// Looks and repairs. From the pause before it to the one behind it.
    async fn look(&mut self, pause: Duration) -> Duration {
        let interface = &self.wanted.name;
        match self.wanted.aside(Interface::repair).await {
            Ok(Kept { index, done }) => {
                self.index = index;
                if self.health.0.lock().take().is_some() {
                    info!(interface, "the interface is in place again");
                }
                if done.is_empty() {
                    return CALM_PAUSE;
                }
                self.metrics.interface_repairs.increment(1);
                let (steps, pause) = (Step::list(&done), longer(pause));
                let text = "the interface was changed and is repaired; the next repair waits";
                warn!(interface, steps, ?pause, "{text}");
                pause
            }
            Err(error) => {
                self.metrics.interface_failures.increment(1);
                let text = error.to_string();
                let before = self.health.0.lock().replace(text.clone());
                // Once, not at every look.
                if before.is_none_or(|before| before != text) {
                    error!("{text}");
                }
                longer(pause)
            }
        }
    }
}

/// The pause behind something wrong, from the one before.
fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST_PAUSE, CHECK_INTERVAL)
}

// === impl Health ===

impl Health {
    /// `Ok`, or what is wrong.
    ///
    /// # Errors
    /// The text of the last [`InterfaceError`].
    pub fn check(&self) -> Result<(), String> {
        self.0.lock().clone().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::plan::Address;
    use super::*;

    #[test]
    fn pauses_grow_while_something_is_wrong_and_never_beyond_a_check() {
        let mut pause = CALM_PAUSE;
        let mut pauses = Vec::new();
        for _ in 0..6 {
            pause = longer(pause);
            pauses.push(pause.as_secs());
        }
        assert_eq!(pauses, [1, 2, 4, 8, 10, 10]);
    }

    #[test]
    fn errors_say_what_to_do() {
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
