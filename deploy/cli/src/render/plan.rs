//! Migration plans: the ordered steps from one tunnel or expose strategy to another.

mod strategy;
mod tunnel;

use std::fmt;

use clap::ValueEnum;

use super::input::Input;
use super::target::Target;

/// A tunnel or an expose strategy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Side {
    /// The Konnectivity tunnel.
    Konnectivity,
    /// The OpenVPN tunnel.
    Openvpn,
    /// The expose strategy NodePort.
    #[value(name = "NodePort")]
    NodePort,
    /// The expose strategy LoadBalancer.
    #[value(name = "LoadBalancer")]
    LoadBalancer,
    /// The expose strategy Tunneling.
    #[value(name = "Tunneling")]
    Tunneling,
}

/// Comment at the end of a command that only a cluster of KKP needs.
const KKP_ONLY: &str = "  # KKP only";

/// A step of a plan.
struct Step {
    title: String,
    /// Commands, and comments about work by hand. Commands without a line of work by hand between them are joined, so that
    /// none runs after a failed one.
    commands: Vec<String>,
    /// Programs that restart; empty if nothing restarts.
    restarts: &'static str,
    /// Commands or words that undo the step.
    back: String,
}

/// A migration plan.
pub(super) struct Plan {
    title: String,
    steps: Vec<Step>,
}

impl Side {
    pub(super) fn is_tunnel(self) -> bool {
        matches!(self, Self::Konnectivity | Self::Openvpn)
    }

    /// Returns the name as in the cluster file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Konnectivity => "konnectivity",
            Self::Openvpn => "openvpn",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::Tunneling => "Tunneling",
        }
    }
}

/// Sets the tunnel of a cluster, or what follows from its expose strategy.
pub(super) fn apply(side: Side, input: &mut Input) {
    if side.is_tunnel() {
        input.facts.tunnel = Some(side.name().to_owned());
    }
    // The platform demands an empty address in the same write that leaves Tunneling.
    if matches!(side, Side::NodePort | Side::LoadBalancer)
        && let Some(network) = &mut input.spec.cluster_network
    {
        network.tunneling_agent_ip.clear();
    }
}

impl Plan {
    /// Creates the plan. `file` has the cluster file and the flags with its values, for the commands.
    ///
    /// # Errors
    /// Fails if the sides are equal, or if only one of them is a tunnel.
    pub(super) fn new(
        from: Side,
        to: Side,
        target: &Target<'_>,
        file: &str,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!(from != to, "--diff-from and --to are equal: {}", to.name());
        anyhow::ensure!(
            from.is_tunnel() == to.is_tunnel(),
            "--diff-from {} and --to {} are a tunnel and an expose strategy; change one after the other",
            from.name(),
            to.name()
        );
        let steps = match to {
            Side::Konnectivity => tunnel::to_konnectivity(target, file),
            Side::Openvpn => tunnel::to_openvpn(target, file),
            _ => strategy::change(from, to, target, file),
        };
        Ok(Self {
            title: format!(
                "From {} to {}, cluster {}",
                from.name(),
                to.name(),
                target.namespace
            ),
            steps,
        })
    }
}

impl Step {
    fn new(
        title: &str,
        commands: &[String],
        restarts: &'static str,
        back: impl Into<String>,
    ) -> Self {
        Self {
            title: title.to_owned(),
            commands: commands.to_vec(),
            restarts,
            back: back.into(),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.title)?;
        writeln!(
            f,
            "SEED and USER stand for the kubeconfigs of the seed and of the user cluster."
        )?;
        for (at, step) in self.steps.iter().enumerate() {
            writeln!(f, "\n{}. {}", at + 1, step.title)?;
            for (at, command) in step.commands.iter().enumerate() {
                let next = step.commands.get(at + 1);
                let (command, note) = match command.strip_suffix(KKP_ONLY) {
                    Some(command) => (command, KKP_ONLY),
                    None => (command.as_str(), ""),
                };
                let is_joined =
                    !command.starts_with('#') && next.is_some_and(|it| !it.starts_with('#'));
                let join = if is_joined { " &&" } else { "" };
                writeln!(f, "     {command}{join}{note}")?;
            }
            let restarts = if step.restarts.is_empty() {
                "nothing"
            } else {
                step.restarts
            };
            writeln!(f, "   restarts: {restarts}")?;
            writeln!(f, "   back:     {}", step.back)?;
        }
        Ok(())
    }
}
