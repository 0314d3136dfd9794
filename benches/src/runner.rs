//! The runner of all subcommands.
//!
//! All contenders run all the time; some rows start another instance. Every round measures every row, and every
//! row measures one contender right after the other. Each row starts with another contender, so that other
//! activity of the machine affects all of them.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::timeout;

use crate::figures::{Figures, HUNG, MEMORY_AFTER, MEMORY_START, MIB, Metric};
use crate::names::{MEMORY, START};
use crate::options::Common;
use crate::report::{Comparison, Report, describe};
use crate::rows::{Kind, Row};
use crate::svg::Picture;

/// Time limit of one measurement beyond its estimate, so that a tunnel that hangs does not stop the whole run.
const MARGIN: f64 = 60.0;

/// A subcommand: its contenders, its rows, and their measurement.
pub(crate) trait Scenario {
    /// Entry point of the load.
    type Front: Copy;
    /// Measurement of a row.
    type Kind: Kind + Copy + 'static;
    /// A contender to measure.
    type Contender: Copy + 'static;
    /// A running contender. Dropping it kills its programs.
    type Running;

    const COMPARISON: &'static Comparison;
    const PICTURE: &'static Picture;
    const CONTENDERS: &'static [Self::Contender];
    /// Metrics of each value of [`Self::rss`], before any load and at the end.
    const MEMORY: &'static [[Metric; 2]] = &[[MEMORY_START, MEMORY_AFTER]];

    /// Returns the name of an entry point in the table.
    fn front_name(front: Self::Front) -> &'static str;

    /// Returns the rows of an entry point.
    fn rows(front: Self::Front) -> &'static [Row<Self::Kind>];

    /// Returns the name of a contender in the table.
    fn name(contender: Self::Contender) -> &'static str;

    /// Returns the reason if the contender cannot run on this machine.
    fn missing(&self, contender: Self::Contender) -> Option<&'static str>;

    /// Returns true for a contender that is measured only if an option names it.
    fn is_optional(_contender: Self::Contender) -> bool {
        false
    }

    /// Returns true if a row of this kind applies to the contender at this entry point.
    fn has(&self, front: Self::Front, kind: Self::Kind, contender: Self::Contender) -> bool;

    /// Starts a contender. Most rows use this long-lived instance.
    async fn start(
        &self,
        front: Self::Front,
        contender: Self::Contender,
    ) -> anyhow::Result<Self::Running>;

    /// Measures one row: on `running`, or on a contender that is started for this row.
    async fn measure(
        &self,
        front: Self::Front,
        kind: Self::Kind,
        contender: Self::Contender,
        running: &mut Self::Running,
    ) -> anyhow::Result<Figures>;

    /// Returns the resident memory of the programs in bytes, one value per element of [`Self::MEMORY`]. Empty
    /// if the contender has no program.
    fn rss(running: &mut Self::Running) -> anyhow::Result<Vec<u64>>;

    /// Returns the report as text.
    fn text(report: &Report) -> String {
        report.to_string()
    }

    /// Returns further figures of a long-running instance at the end.
    async fn counters(&self, _running: &Self::Running) -> anyhow::Result<Figures> {
        Ok(Vec::new())
    }
}

/// Measures the rows and contenders that the options select, and writes the report. Returns the result of
/// [`Common::end`].
pub(crate) async fn run<S: Scenario>(
    scenario: &S,
    fronts: &[S::Front],
    common: &Common,
    wanted: &[String],
) -> anyhow::Result<bool> {
    let plan = Plan {
        scenario,
        contenders: contenders(scenario, wanted)?,
        parts: parts::<S>(fronts, &common.row)?,
        has_memory: MEMORY.contains(&common.row),
        rounds: common.rounds(),
        seconds: common.seconds(),
    };
    let mut report = common.begin(S::COMPARISON, plan.estimate());
    for (front, rows) in &plan.parts {
        plan.measure_all(*front, rows, &mut report).await;
    }
    common.end(&report, &S::text(&report), S::PICTURE)
}

/// Returns the contenders that are in `wanted`, or all but the optional ones if `wanted` is empty. Leaves out missing ones.
fn contenders<S: Scenario>(scenario: &S, wanted: &[String]) -> anyhow::Result<Vec<S::Contender>> {
    for name in wanted {
        let known = S::COMPARISON.contenders.contains(&name.as_str());
        ensure!(known, "unknown contender {name:?}; --help lists all");
    }
    let mut contenders = S::CONTENDERS.to_vec();
    contenders.retain(|contender| {
        let name = S::name(*contender);
        let is_wanted = match wanted {
            [] => !S::is_optional(*contender),
            wanted => wanted.iter().any(|one| one == name),
        };
        if !is_wanted {
            return false;
        }
        let missing = scenario.missing(*contender);
        if let Some(why) = missing {
            eprintln!("{name} left out: {why}");
        }
        missing.is_none()
    });
    ensure!(!contenders.is_empty(), "no contender can be measured");
    Ok(contenders)
}

/// Entry points with their rows.
type Parts<S> = Vec<(
    <S as Scenario>::Front,
    Vec<&'static Row<<S as Scenario>::Kind>>,
)>;

/// Returns the rows of each entry point whose names contain `text`. All may be empty if only the memory row
/// matches.
fn parts<S: Scenario>(fronts: &[S::Front], text: &str) -> anyhow::Result<Parts<S>> {
    let rows = |front| {
        let rows = S::rows(front).iter();
        rows.filter(|row| row.name.contains(text)).collect()
    };
    let parts: Parts<S> = fronts.iter().map(|front| (*front, rows(*front))).collect();
    let found = parts.iter().any(|(_, rows)| !rows.is_empty());
    ensure!(
        found || MEMORY.contains(text),
        "no row name contains {text:?}"
    );
    Ok(parts)
}

/// The rows and contenders to measure.
struct Plan<'a, S: Scenario> {
    scenario: &'a S,
    contenders: Vec<S::Contender>,
    parts: Parts<S>,
    /// True if the row [`MEMORY`] is selected.
    has_memory: bool,
    rounds: u32,
    /// Seconds of load per measurement.
    seconds: f64,
}

/// A running contender.
struct Instance<S: Scenario> {
    contender: S::Contender,
    running: S::Running,
    /// Memory before any load, in bytes.
    at_start: Vec<u64>,
    /// True if the programs were started again, so that they have not carried the load of all rows.
    is_restarted: bool,
}

impl<S: Scenario> Plan<'_, S> {
    /// Returns the approximate duration of all measurements, in seconds.
    fn estimate(&self) -> f64 {
        let mut total = 0.0;
        for (front, rows) in &self.parts {
            // Starting a contender takes about a second.
            total += self.contenders.len() as f64;
            for row in rows {
                let contenders = self.contenders.iter();
                let count = contenders
                    .filter(|c| self.scenario.has(*front, row.kind, **c))
                    .count();
                let times = f64::from(row.kind.rounds(self.rounds)) * count as f64;
                total += times * row.kind.estimate(self.seconds);
            }
        }
        total
    }

    /// Measures all rows of one entry point.
    async fn measure_all(&self, front: S::Front, rows: &[&Row<S::Kind>], report: &mut Report) {
        let memory_only = self.parts.iter().all(|(_, rows)| rows.is_empty());
        let mut instances = Vec::new();
        for contender in &self.contenders {
            let mut rows = rows.iter();
            if !memory_only && !rows.any(|row| self.scenario.has(front, row.kind, *contender)) {
                continue;
            }
            match self.start(front, *contender).await {
                Ok(instance) => instances.push(instance),
                Err(error) => {
                    report.add(S::front_name(front), START, S::name(*contender), Err(error));
                }
            }
        }
        for round in 1..=self.rounds {
            let rows = rows.iter();
            for row in rows.filter(|row| round <= row.kind.rounds(self.rounds)) {
                for instance in &mut instances {
                    if self.scenario.has(front, row.kind, instance.contender) {
                        self.measure(front, row, round, instance, report).await;
                    }
                }
                if !instances.is_empty() {
                    instances.rotate_left(1);
                }
            }
        }
        for instance in instances.iter_mut().filter(|_| self.has_memory) {
            let figures = self.memory(instance).await;
            let name = S::name(instance.contender);
            report.add(S::front_name(front), MEMORY, name, figures);
        }
    }

    async fn start(&self, front: S::Front, contender: S::Contender) -> anyhow::Result<Instance<S>> {
        let mut running = self.scenario.start(front, contender).await?;
        Ok(Instance {
            contender,
            at_start: S::rss(&mut running)?,
            is_restarted: false,
            running,
        })
    }

    /// Measures one row of one contender, and restarts the contender if it hangs or fails.
    async fn measure(
        &self,
        front: S::Front,
        row: &Row<S::Kind>,
        round: u32,
        instance: &mut Instance<S>,
        report: &mut Report,
    ) {
        let (scenario, contender) = (self.scenario, instance.contender);
        let measuring = scenario.measure(front, row.kind, contender, &mut instance.running);
        let limit = Duration::from_secs_f64(MARGIN + row.kind.estimate(self.seconds));
        let measured = timeout(limit, measuring).await;
        let measured = measured.with_context(|| format!("not finished within {limit:?}"));
        let figures = measured.flatten();
        let (front_name, name) = (S::front_name(front), S::name(contender));
        let rounds = row.kind.rounds(self.rounds);
        let text = describe(&figures);
        eprintln!("{round}/{rounds} {front_name} {}, {name}: {text}", row.name);
        let usable = is_usable(&figures);
        report.add(front_name, row.name, name, figures);
        if !usable && !row.kind.is_fresh() {
            match scenario.start(front, contender).await {
                Ok(running) => {
                    instance.running = running;
                    instance.is_restarted = true;
                }
                // The old programs stay, so that the next row fails, too.
                Err(error) => report.add(front_name, "restart", name, Err(error)),
            }
        }
    }

    /// Returns the memory of a long-running instance before any load and now, and its counters. After a restart, only
    /// the memory before any load.
    async fn memory(&self, instance: &mut Instance<S>) -> anyhow::Result<Figures> {
        if instance.is_restarted {
            let starts = S::MEMORY.iter().zip(&instance.at_start);
            let figures = starts.map(|([metric, _], start)| (*metric, *start as f64 / MIB));
            return Ok(figures.collect());
        }
        let counters = self.scenario.counters(&instance.running).await?;
        let after = S::rss(&mut instance.running)?;
        let bytes = instance.at_start.iter().zip(after);
        let memory = S::MEMORY.iter().zip(bytes);
        let memory = memory.flat_map(|([start_metric, after_metric], (start, after))| {
            [
                (*start_metric, *start as f64 / MIB),
                (*after_metric, after as f64 / MIB),
            ]
        });
        Ok(memory.chain(counters).collect())
    }
}

/// Returns true if a contender is usable after a measurement: the measurement neither failed nor hung.
fn is_usable(figures: &anyhow::Result<Figures>) -> bool {
    let figures = figures.as_ref();
    figures.is_ok_and(|figures| figures.iter().all(|(_, value)| *value != HUNG))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use anyhow::bail;

    use super::*;
    use crate::report::{Machine, example};

    /// A scenario with one contender, and rows that fail if their kind is false.
    struct Fake;

    impl Kind for bool {
        fn rounds(&self, rounds: u32) -> u32 {
            rounds
        }

        fn is_fresh(&self) -> bool {
            false
        }

        fn estimate(&self, seconds: f64) -> f64 {
            4.0 * seconds
        }
    }

    static ROWS: [Row<bool>; 2] = [Row::new("good", true), Row::new("bad", false)];

    impl Scenario for Fake {
        type Front = ();
        type Kind = bool;
        type Contender = ();
        type Running = ();

        const COMPARISON: &'static Comparison = &example::COMPARISON;
        const PICTURE: &'static Picture = &Picture {
            title: "",
            panels: &[],
            bars: &[],
            by: "stock",
        };
        const CONTENDERS: &'static [()] = &[()];

        fn front_name((): ()) -> &'static str {
            "front"
        }

        fn rows((): ()) -> &'static [Row<bool>] {
            &ROWS
        }

        fn name((): ()) -> &'static str {
            "ours"
        }

        fn missing(&self, (): ()) -> Option<&'static str> {
            None
        }

        fn has(&self, (): (), _kind: bool, (): ()) -> bool {
            true
        }

        async fn start(&self, (): (), (): ()) -> anyhow::Result<()> {
            Ok(())
        }

        async fn measure(
            &self,
            (): (),
            kind: bool,
            (): (),
            (): &mut (),
        ) -> anyhow::Result<Figures> {
            match kind {
                true => Ok(Figures::new()),
                false => bail!("it broke"),
            }
        }

        fn rss((): &mut ()) -> anyhow::Result<Vec<u64>> {
            Ok(vec![1 << 20])
        }
    }

    /// Measures the rows with this text in their names. Returns the names of the metrics with figures.
    async fn metrics(text: &str) -> Vec<&'static str> {
        let plan = Plan {
            scenario: &Fake,
            contenders: vec![()],
            parts: parts::<Fake>(&[()], text).unwrap(),
            has_memory: MEMORY.contains(text),
            rounds: 1,
            seconds: 1.0,
        };
        let mut report = Report::new(Fake::COMPARISON, Machine::this(), 1, 1.0);
        plan.measure_all((), &plan.parts[0].1, &mut report).await;
        let lines = report.lines();
        lines.iter().map(|line| line.metric.name).collect()
    }

    #[tokio::test]
    async fn memory_is_measured_only_if_selected_and_after_all_rows() {
        let both = [MEMORY_START.name, MEMORY_AFTER.name];
        assert_eq!(metrics("memory").await, both);
        assert!(metrics("good").await.is_empty());
        // The row that fails restarts the contender.
        assert_eq!(metrics("").await, [MEMORY_START.name]);
    }
}
