//! The plan of one connection. Its number and the seed of the run determine everything.

use std::time::Duration;

use crate::soak::random::{Random, mix};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Numbers from this one on belong to probes, which wait for a path to work again.
pub(super) const PROBES: u64 = 1 << 63;

/// Bytes of a probe in each direction.
const PROBE_BYTES: u64 = 64;

/// The end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The client closes after everything has arrived.
    ClientCloses,
    /// The endpoint closes after everything has arrived.
    EndpointCloses,
    /// The client closes in the middle.
    ClientAborts,
    /// The endpoint resets its connection in the middle.
    EndpointAborts,
}

/// The plan of a connection.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    /// Number of the connection.
    pub number: u64,
    /// Seed of the connection. A header carries it, so that the endpoint can check the number.
    pub seed: u64,
    /// Bytes from the client.
    pub up: u64,
    /// Bytes from the endpoint.
    pub down: u64,
    /// Bytes of each write, in both directions.
    pub piece: u64,
    /// Pause after each write.
    pub pause: Duration,
    /// Pause of the client's reads after half of the bytes.
    pub stall: Duration,
    /// End of the connection.
    pub ending: Ending,
}

impl Plan {
    /// Returns the plan of connection `number` in the run with the seed `run`.
    pub(super) fn new(run: u64, number: u64) -> Self {
        let seed = mix(run, number);
        let mut plan = Self {
            number,
            seed,
            up: PROBE_BYTES,
            down: PROBE_BYTES,
            piece: 64 * KIB,
            pause: Duration::ZERO,
            stall: Duration::ZERO,
            ending: Ending::ClientCloses,
        };
        if number < PROBES {
            plan.vary(&mut Random::new(seed));
        }
        plan
    }

    fn vary(&mut self, random: &mut Random) {
        let most = match random.below(100) {
            0..55 => 16 * KIB,
            55..80 => MIB,
            80..92 => {
                self.pause = random.millis(20, 300);
                self.piece = 8 * KIB;
                128 * KIB
            }
            92..97 => 8 * MIB,
            _ => {
                self.stall = random.millis(1000, 3000);
                4 * MIB
            }
        };
        self.up = random.below(most);
        self.down = random.below(most);
        if self.pause.is_zero() {
            self.piece = 1 + random.below(64 * KIB);
        }
        self.ending = match random.below(100) {
            0..45 => Ending::ClientCloses,
            45..80 => Ending::EndpointCloses,
            80..90 => Ending::ClientAborts,
            _ => Ending::EndpointAborts,
        };
    }

    /// Returns the first line of the connection.
    pub(super) fn header(&self) -> String {
        format!("soak {} {:x}\n", self.number, self.seed)
    }

    /// Returns the plan that a first line without its line end names. `None` if no client of this run sends the line.
    pub(super) fn parse(run: u64, line: &str) -> Option<Self> {
        let (number, _) = line.strip_prefix("soak ")?.split_once(' ')?;
        let plan = Self::new(run, number.parse().ok()?);
        (plan.header().trim_end() == line).then_some(plan)
    }

    /// Returns the number of bytes, in both directions, that are always compared with the plan.
    pub(super) fn verified(&self) -> u64 {
        match self.ending {
            Ending::ClientCloses | Ending::EndpointCloses => self.up + self.down,
            Ending::ClientAborts => self.down / 2,
            Ending::EndpointAborts => 0,
        }
    }

    /// Returns the seed of the client's bytes.
    pub(super) fn up_seed(&self) -> u64 {
        mix(self.seed, 1)
    }

    /// Returns the seed of the endpoint's bytes.
    pub(super) fn down_seed(&self) -> u64 {
        mix(self.seed, 2)
    }

    /// Returns the endpoint's last eight bytes, which confirm the client's bytes.
    pub(super) fn receipt(&self) -> u64 {
        mix(self.seed, 3)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn header_names_its_plan_and_any_other_line_names_none() {
        let plan = Plan::new(9, 1234);
        let line = plan.header();
        let line = line.trim_end();
        assert_eq!(Plan::parse(9, line).unwrap().number, 1234);
        assert!(Plan::parse(8, line).is_none());
        assert!(Plan::parse(9, &line.replace("1234", "1235")).is_none());
        for other in ["", "soak", "soak x y", "soak 1", "echo"] {
            assert!(Plan::parse(9, other).is_none(), "{other}");
        }
    }

    #[test]
    fn plans_have_every_ending_and_every_kind_of_pause() {
        let plans: Vec<Plan> = (0..500).map(|number| Plan::new(1, number)).collect();
        for ending in [
            Ending::ClientCloses,
            Ending::EndpointCloses,
            Ending::ClientAborts,
            Ending::EndpointAborts,
        ] {
            assert!(plans.iter().any(|plan| plan.ending == ending), "{ending:?}");
        }
        assert!(plans.iter().any(|plan| !plan.stall.is_zero()));
        assert!(plans.iter().any(|plan| !plan.pause.is_zero()));
        assert!(plans.iter().any(|plan| plan.down > 4 * MIB));
        let probe = Plan::new(1, PROBES + 1);
        assert_eq!(
            (probe.up, probe.ending),
            (PROBE_BYTES, Ending::ClientCloses)
        );
    }
}
