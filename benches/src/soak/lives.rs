//! Memory and descriptors of every program during each of its lives.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, interval};

/// Interval of the samples.
const EVERY: Duration = Duration::from_secs(1);

/// Time after the start of a program that its slopes leave out: buffers and caches fill up.
const WARM_UP: Duration = Duration::from_mins(1);

/// Size of a page in KiB, for `/proc/PID/statm`.
fn page() -> f64 {
    rustix::param::page_size() as f64 / 1024.0
}

/// One sample.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// Time since the start of the program, in minutes.
    at: f64,
    /// Resident memory, in KiB.
    kib: f64,
    descriptors: f64,
}

/// One life of a program.
#[derive(Debug)]
struct Life {
    program: String,
    pid: u32,
    began: Instant,
    is_over: bool,
    samples: Vec<Sample>,
}

/// All lives of a run.
#[derive(Debug, Default)]
pub(super) struct Lives(Mutex<Vec<Life>>);

/// Result for a program.
#[derive(Debug, PartialEq)]
pub(super) struct Trend {
    /// Number of lives.
    pub lives: usize,
    /// Minutes of the longest life after its warm-up. The slopes are of this time.
    pub minutes: f64,
    /// Largest memory, in MiB.
    pub most_mib: f64,
    /// Growth of the memory, in KiB per minute. `None` without enough samples.
    pub kib_per_minute: Option<f64>,
    /// Growth of the number of descriptors per minute.
    pub descriptors_per_minute: Option<f64>,
    /// Descriptors at the first and at the last sample of the last life.
    pub descriptors: [f64; 2],
}

impl Lives {
    /// Records the start of a program.
    pub(super) fn begins(&self, program: &str, pid: u32) {
        let life = Life {
            program: program.to_owned(),
            pid,
            began: Instant::now(),
            is_over: false,
            samples: Vec::new(),
        };
        self.0.lock().push(life);
    }

    /// Records the end of a program.
    pub(super) fn ends(&self, program: &str) {
        let mut lives = self.0.lock();
        let lives = lives.iter_mut().rev();
        for life in lives.filter(|life| life.program == program) {
            life.is_over = true;
        }
    }

    /// Takes samples of all running programs until the future is dropped.
    pub(super) async fn sample(self: Arc<Self>) {
        let mut ticks = interval(EVERY);
        loop {
            ticks.tick().await;
            self.sample_once();
        }
    }

    /// Takes a sample of each running program.
    pub(super) fn sample_once(&self) {
        let mut lives = self.0.lock();
        for life in lives.iter_mut().filter(|life| !life.is_over) {
            let at = life.began.elapsed().as_secs_f64() / 60.0;
            // A program that has just ended has no figures.
            if let Some((kib, descriptors)) = read(life.pid) {
                life.samples.push(Sample {
                    at,
                    kib,
                    descriptors,
                });
            }
        }
    }

    /// Returns the result for each program.
    pub(super) fn trends(&self) -> BTreeMap<String, Trend> {
        let lives = self.0.lock();
        let mut programs: BTreeMap<String, Vec<&Life>> = BTreeMap::new();
        for life in lives.iter() {
            programs.entry(life.program.clone()).or_default().push(life);
        }
        let trends = programs.into_iter();
        trends
            .map(|(program, lives)| (program, trend(&lives)))
            .collect()
    }
}

/// Reads memory in KiB and the number of descriptors of a process.
fn read(pid: u32) -> Option<(f64, f64)> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: f64 = statm.split(' ').nth(1)?.parse().ok()?;
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count();
    Some((pages * page(), descriptors as f64))
}

fn trend(lives: &[&Life]) -> Trend {
    let samples = |life: &&Life| life.samples.clone();
    let longest = lives.iter().max_by_key(|life| life.samples.len());
    let mut steady = longest.map(samples).unwrap_or_default();
    steady.retain(|sample| sample.at >= WARM_UP.as_secs_f64() / 60.0);
    let all = lives.iter().flat_map(|life| &life.samples);
    let last = lives.last().map(samples).unwrap_or_default();
    let descriptors = [last.first(), last.last()];
    Trend {
        lives: lives.len(),
        minutes: steady.len() as f64 * EVERY.as_secs_f64() / 60.0,
        most_mib: all.map(|sample| sample.kib / 1024.0).fold(0.0, f64::max),
        kib_per_minute: slope(&steady, |sample| sample.kib),
        descriptors_per_minute: slope(&steady, |sample| sample.descriptors),
        descriptors: descriptors.map(|sample| sample.map_or(0.0, |sample| sample.descriptors)),
    }
}

/// Returns the slope between the lowest tenths of the first third and of the last third. A leak raises also the lowest
/// figures, and load does not: attackers hold up to 900 descriptors for much of the time.
fn slope(samples: &[Sample], figure: impl Fn(&Sample) -> f64) -> Option<f64> {
    let third = samples.len() / 3;
    let (first, last) = (samples.get(..third)?, samples.get(samples.len() - third..)?);
    let low = |samples: &[Sample]| {
        let mut figures: Vec<f64> = samples.iter().map(&figure).collect();
        figures.sort_by(f64::total_cmp);
        figures.get(figures.len() / 10).copied()
    };
    let middle = |samples: &[Sample]| Some(samples.get(samples.len() / 2)?.at);
    Some((low(last)? - low(first)?) / (middle(last)? - middle(first)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    /// Returns a life with a sample each second, and memory of `from` KiB with a growth in KiB per minute.
    fn life(seconds: u32, from: f64, growth: f64) -> Life {
        let sample = |second| {
            let at = f64::from(second) / 60.0;
            Sample {
                at,
                kib: from + growth * at,
                descriptors: 7.0,
            }
        };
        Life {
            program: "it".to_owned(),
            pid: 0,
            began: Instant::now(),
            is_over: true,
            samples: (0..seconds).map(sample).collect(),
        }
    }

    #[test]
    fn slope_is_of_the_longest_life_without_its_warm_up_and_bursts() {
        let mut long = life(240, 5000.0, 60.0);
        // The warm-up, and a burst.
        for second in (0..59).chain([100, 101, 220, 221, 222]) {
            long.samples[second].kib += 90_000.0;
        }
        let lives = [life(100, 90_000.0, -500.0), long, life(3, 1.0, 9.0)];
        let trend = trend(&lives.each_ref());
        let kib = trend.kib_per_minute.unwrap();
        assert!((kib - 60.0).abs() < 5.0, "{trend:?}");
        assert!(trend.descriptors_per_minute.unwrap().abs() < 1e-9);
        assert_eq!((trend.lives, trend.descriptors), (3, [7.0, 7.0]));
        assert!((trend.minutes - 3.0).abs() < 1e-6);
    }

    #[test]
    fn short_lives_have_no_slope() {
        let trend = trend(&[&life(59, 1.0, 1.0)]);
        assert_eq!((trend.kib_per_minute, trend.minutes), (None, 0.0));
    }

    #[tokio::test]
    async fn samples_are_taken_until_the_end() {
        let lives = Lives::default();
        lives.begins("this", std::process::id());
        lives.sample_once();
        lives.ends("this");
        lives.sample_once();
        let trend = &lives.trends()["this"];
        assert!(
            trend.most_mib > 1.0 && trend.descriptors[0] > 2.0,
            "{trend:?}"
        );
        assert_eq!(lives.0.lock()[0].samples.len(), 1);
    }
}
