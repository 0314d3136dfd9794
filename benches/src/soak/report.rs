//! The result of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::report::{Machine, number};
use crate::soak::konnectivity::STOCK;
use crate::soak::ledger::Account;
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
    /// Connections, failures and events.
    pub account: Account,
    /// Programs.
    pub trends: BTreeMap<String, Trend>,
    /// Number of the attackers' connections.
    pub attacks: u64,
}

impl Outcome {
    /// Returns true without wrong bytes, without unexplained failures, and if no program of ours grows.
    pub(super) fn is_clean(&self) -> bool {
        let mut trends = self.trends.iter();
        let grows = trends.any(|(program, trend)| program != STOCK && verdict(trend) == GROWS);
        self.account.wrong.is_empty() && self.account.failures.is_empty() && !grows
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
            "failures": account.failures,
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
        for failure in &account.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        writeln!(
            f,
            "{} wrong, {} unexplained failures",
            account.wrong.len(),
            account.failures.len()
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing)]
    use super::*;
    use crate::soak::ledger::Ledger;

    fn outcome(trend: Trend) -> Outcome {
        Outcome {
            seed: 5,
            time: Duration::from_secs(60),
            account: Ledger::new(5).account(),
            trends: BTreeMap::from([("agent 0".to_owned(), trend)]),
            attacks: 0,
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
}
