//! The result of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::report::{Machine, number};
use crate::soak::konnectivity::STOCK;
use crate::soak::ledger::{Account, Path};
use crate::soak::lives::Trend;

/// Largest slopes that count as flat, per minute, and the minutes of samples that a judgement needs.
const FLAT_KIB: f64 = 512.0;
const FLAT_DESCRIPTORS: f64 = 1.0;
const ENOUGH: f64 = 3.0;

/// Verdict of a program that is not flat.
const GROWS: &str = "GROWS";

/// The result of a run. `Display` prints the tables.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Seed of the run.
    pub seed: u64,
    /// Time of the load.
    pub time: Duration,
    /// Paths with load.
    pub paths: Vec<Path>,
    /// Connections, failures and events.
    pub account: Account,
    /// Programs.
    pub trends: BTreeMap<String, Trend>,
    /// Number of the attackers' connections.
    pub attacks: u64,
}

impl Outcome {
    /// Returns true without wrong bytes, without failures, and if no program of ours grows.
    pub(super) fn is_clean(&self) -> bool {
        let mut trends = self.trends.iter();
        let grows = trends.any(|(program, trend)| program != STOCK && verdict(trend) == GROWS);
        self.account.wrong.is_empty() && self.failures().is_empty() && !grows
    }

    /// Returns the unexplained failures, and each part of the run that did nothing.
    fn failures(&self) -> Vec<String> {
        let done = |path: &Path| {
            let tally = self.account.tallies.get(path);
            tally.is_some_and(|tally| tally.done > 0)
        };
        let idle = self.paths.iter().filter(|path| !done(path));
        let idle = idle.map(|path| format!("no connection of {} succeeded", path.name()));
        let attacks = (self.attacks == 0).then(|| "no attacker connected".to_owned());
        let failures = self.account.failures.iter().cloned();
        failures.chain(idle).chain(attacks).collect()
    }

    /// Returns the result as JSON.
    pub(super) fn json(&self) -> Value {
        let account = &self.account;
        let paths = account.tallies.iter().map(|(path, tally)| {
            let value = json!({
                "done": tally.done,
                "explained_failures": tally.explained,
                "unexplained_failures": tally.unexplained,
                "verified_bytes": tally.bytes,
                "dials_over_1_s": tally.slow,
                "slowest_dial_s": tally.slowest.as_secs_f64(),
            });
            (path.name().to_owned(), value)
        });
        let programs = self.trends.iter().map(|(program, trend)| {
            let value = json!({
                "lives": trend.lives,
                "minutes": trend.minutes,
                "most_mib": trend.most_mib,
                "kib_per_minute": trend.kib_per_minute,
                "descriptors_per_minute": trend.descriptors_per_minute,
                "descriptors": trend.descriptors,
                "verdict": verdict(trend),
            });
            (program.clone(), value)
        });
        let events = account
            .events
            .iter()
            .map(|(at, what)| json!([at.as_secs_f64(), what]));
        json!({
            "machine": Machine::this().to_string(),
            "seed": self.seed,
            "minutes": self.time.as_secs_f64() / 60.0,
            "attacks": self.attacks,
            "paths": paths.collect::<serde_json::Map<_, _>>(),
            "programs": programs.collect::<serde_json::Map<_, _>>(),
            "wrong": account.wrong,
            "failures": self.failures(),
            "events": events.collect::<Vec<_>>(),
        })
    }
}

/// Judges the slopes of a program.
fn verdict(trend: &Trend) -> &'static str {
    let (Some(kib), Some(descriptors)) = (trend.kib_per_minute, trend.descriptors_per_minute)
    else {
        return "too short";
    };
    if trend.minutes < ENOUGH {
        "too short"
    } else if kib <= FLAT_KIB && descriptors <= FLAT_DESCRIPTORS {
        "flat"
    } else {
        GROWS
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let account = &self.account;
        let minutes = self.time.as_secs_f64() / 60.0;
        writeln!(
            f,
            "{}; {minutes:.1} minutes, seed {}, {} events, {} connections of attackers",
            Machine::this(),
            self.seed,
            account.events.len(),
            self.attacks
        )?;
        writeln!(
            f,
            "{:12} {:>11} {:>9} {:>9} {:>11} {:>8} {:>10}",
            "path", "connections", "MiB", "explained", "unexplained", "over 1 s", "slowest s"
        )?;
        for (path, tally) in &account.tallies {
            writeln!(
                f,
                "{:12} {:>11} {:>9.1} {:>9} {:>11} {:>8} {:>10.2}",
                path.name(),
                tally.done + tally.explained + tally.unexplained,
                tally.bytes as f64 / f64::from(1 << 20),
                tally.explained,
                tally.unexplained,
                tally.slow,
                tally.slowest.as_secs_f64()
            )?;
        }
        writeln!(
            f,
            "{:12} {:>5} {:>8} {:>9} {:>9} {:>15} {:>12}  verdict",
            "program", "lives", "minutes", "most MiB", "KiB/min", "descriptors/min", "descriptors"
        )?;
        for (program, trend) in &self.trends {
            let [first, last] = trend.descriptors;
            writeln!(
                f,
                "{program:12} {:>5} {:>8.1} {:>9.1} {:>9} {:>15} {:>12}  {}",
                trend.lives,
                trend.minutes,
                trend.most_mib,
                number(trend.kib_per_minute, 0),
                number(trend.descriptors_per_minute, 2),
                format!("{first} -> {last}"),
                verdict(trend)
            )?;
        }
        for wrong in &account.wrong {
            writeln!(f, "WRONG {wrong}")?;
        }
        let failures = self.failures();
        for failure in &failures {
            writeln!(f, "FAILED {failure}")?;
        }
        writeln!(
            f,
            "{} wrong, {} unexplained failures",
            account.wrong.len(),
            failures.len()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::soak::ledger::{Ledger, Tally};

    /// Returns the result of a run with one connection of one path.
    fn outcome(trend: Trend) -> Outcome {
        let ledger = Ledger::new(5);
        let plan = ledger.plan();
        ledger.begins(Path::Sni, &plan);
        ledger.succeeds(&plan, Duration::ZERO);
        Outcome {
            seed: 5,
            time: Duration::from_secs(60),
            paths: vec![Path::Sni],
            account: ledger.account(),
            trends: BTreeMap::from([("agent 0".to_owned(), trend)]),
            attacks: 1,
        }
    }

    fn trend(minutes: f64, kib: f64) -> Trend {
        Trend {
            lives: 1,
            minutes,
            most_mib: 10.0,
            kib_per_minute: Some(kib),
            descriptors_per_minute: Some(0.0),
            descriptors: [20.0, 21.0],
        }
    }

    #[test]
    fn growth_is_judged_after_enough_time() {
        assert_eq!(verdict(&trend(1.0, 9999.0)), "too short");
        assert_eq!(verdict(&trend(8.0, 100.0)), "flat");
        assert_eq!(verdict(&trend(8.0, 9999.0)), "GROWS");
    }

    #[test]
    fn failures_and_wrong_bytes_are_printed_and_make_the_run_fail() {
        let mut outcome = outcome(trend(8.0, 0.0));
        assert!(outcome.is_clean());
        assert!(outcome.to_string().contains("20 -> 21  flat"), "{outcome}");
        outcome
            .account
            .wrong
            .push("connection 1: byte 5".to_owned());
        assert!(!outcome.is_clean());
        outcome.account.wrong.clear();
        outcome.account.failures.push("it hung".to_owned());
        assert!(!outcome.is_clean());
        assert!(!self::outcome(trend(8.0, 9999.0)).is_clean());
        assert!(outcome.to_string().contains("FAILED it hung"));
        let json = outcome.json();
        assert_eq!(
            (&json["seed"], &json["failures"][0]),
            (&json!(5), &json!("it hung"))
        );
        assert_eq!(json["programs"]["agent 0"]["verdict"], "flat");
    }

    #[test]
    fn run_without_connections_of_a_path_or_without_attacks_fails() {
        let mut idle = outcome(trend(8.0, 0.0));
        idle.paths.push(Path::Node);
        assert!(!idle.is_clean());
        let text = idle.to_string();
        assert!(
            text.contains("FAILED no connection of node succeeded"),
            "{text}"
        );
        let mut failed = outcome(trend(8.0, 0.0));
        let tally = failed.account.tallies.get_mut(&Path::Sni);
        *tally.expect("a tally") = Tally {
            explained: 9,
            ..Tally::default()
        };
        assert!(!failed.is_clean());
        let mut calm = outcome(trend(8.0, 0.0));
        calm.attacks = 0;
        assert!(!calm.is_clean());
        assert_eq!(calm.json()["failures"][0], "no attacker connected");
    }
}
