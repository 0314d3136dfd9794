//! Options of all subcommands, and the output of their reports.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::report::{Comparison, Machine, Report};
use crate::svg::{self, Picture};

/// Options for the measurements and for the output.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Number of measurements per row; the table shows medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,

    /// Seconds of load per measurement
    #[arg(long, value_name = "S", default_value_t = 1.2, value_parser = seconds)]
    seconds: f64,

    /// Run one round of half a second: shows that everything works, but gives no usable figures
    #[arg(long)]
    quick: bool,

    /// Write all samples to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,

    /// Draw the comparison as an SVG file
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,

    /// Exit with code 1 if a target is missed
    #[arg(long)]
    strict: bool,

    /// Measure only rows with this text in their names
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub row: String,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=20.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be a number from 0.1 to 20".to_owned()),
    }
}

impl Common {
    /// Number of rounds.
    pub(crate) fn rounds(&self) -> u32 {
        if self.quick { 1 } else { self.rounds }
    }

    /// Seconds of load per measurement.
    pub(crate) fn seconds(&self) -> f64 {
        if self.quick { 0.5 } else { self.seconds }
    }

    /// Creates an empty report, and prints the estimated duration, given in seconds, to stderr.
    pub(crate) fn begin(&self, comparison: &'static Comparison, estimate: f64) -> Report {
        match estimate {
            seconds @ ..120.0 => eprintln!("this takes about {seconds:.0} seconds"),
            seconds => eprintln!("this takes about {:.0} minutes", seconds / 60.0),
        }
        Report::new(comparison, Machine::this(), self.rounds(), self.seconds())
    }

    /// Prints the report as `text` and writes the requested files. Returns true if no measurement failed, and,
    /// with `--strict`, no target is missed.
    pub(crate) fn end(
        &self,
        report: &Report,
        text: &str,
        picture: &Picture,
    ) -> anyhow::Result<bool> {
        print!("{text}");
        if let Some(path) = &self.json {
            let text = format!("{:#}\n", report.json());
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
        if let Some(path) = &self.svg {
            let text = svg::draw(report, picture);
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
        Ok(report.is_clean() && (!self.strict || report.meets_targets()))
    }
}
