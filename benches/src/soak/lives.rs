//! Memory and descriptors of every program during each of its lives.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::{Instant, interval};

/// Interval of the samples.
const EVERY: Duration = Duration::from_secs(1);

/// Time after the start of a program that its slopes leave out: buffers and caches fill up.
const WARM_UP: Duration = Duration::from_secs(15);

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
    /// Minutes of all samples after the warm-up of each life.
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
    let warm = WARM_UP.as_secs_f64() / 60.0;
    let steady = lives.iter().map(|life| {
        let samples = life.samples.iter().filter(|sample| sample.at >= warm);
        samples.copied().collect::<Vec<_>>()
    });
    let steady: Vec<Vec<Sample>> = steady.collect();
    let all = lives.iter().flat_map(|life| &life.samples);
    let last = lives.last().map(|life| life.samples.as_slice());
    let last = last.unwrap_or_default();
    let descriptors = [last.first(), last.last()];
    Trend {
        lives: lives.len(),
        minutes: steady.iter().map(Vec::len).sum::<usize>() as f64 * EVERY.as_secs_f64() / 60.0,
        most_mib: all.map(|sample| sample.kib / 1024.0).fold(0.0, f64::max),
        kib_per_minute: slope(&steady, |sample| sample.kib),
        descriptors_per_minute: slope(&steady, |sample| sample.descriptors),
        descriptors: descriptors.map(|sample| sample.map_or(0.0, |sample| sample.descriptors)),
    }
}

/// Returns the common slope of all lives by least squares. Each life has an intercept of its own.
fn slope(lives: &[Vec<Sample>], figure: impl Fn(&Sample) -> f64) -> Option<f64> {
    let (mut products, mut squares) = (0.0, 0.0);
    for life in lives.iter().filter(|life| life.len() > 2) {
        let count = life.len() as f64;
        let mean_at = life.iter().map(|sample| sample.at).sum::<f64>() / count;
        let mean = life.iter().map(&figure).sum::<f64>() / count;
        for sample in life {
            products += (sample.at - mean_at) * (figure(sample) - mean);
            squares += (sample.at - mean_at).powi(2);
        }
    }
    (squares > 0.0).then(|| products / squares)
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
    fn slope_is_that_of_every_life_whatever_their_levels_are() {
        let lives = [
            life(100, 5000.0, 60.0),
            life(40, 90_000.0, 60.0),
            life(3, 1.0, 9.0),
        ];
        let trend = trend(&lives.each_ref());
        assert!(
            (trend.kib_per_minute.unwrap() - 60.0).abs() < 1e-6,
            "{trend:?}"
        );
        assert!(trend.descriptors_per_minute.unwrap().abs() < 1e-9);
        assert_eq!((trend.lives, trend.descriptors), (3, [7.0, 7.0]));
        assert!((trend.minutes - (85.0 + 25.0) / 60.0).abs() < 1e-6);
    }

    #[test]
    fn short_lives_have_no_slope() {
        let trend = trend(&[&life(15, 1.0, 1.0)]);
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
