//! What every subcommand can be told, and what it does with its report.

use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::Args;

use crate::report::{Comparison, Machine, Report};
use crate::svg::{self, Picture};

/// How to measure, and where to write it.
#[derive(Debug, Args)]
pub struct Common {
    /// How often every row is measured; the table shows medians
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,

    /// How many seconds of load every measurement is
    #[arg(long, value_name = "S", default_value_t = 1.2, value_parser = seconds)]
    pub seconds: f64,

    /// One round of half a second: shows that everything runs, proves nothing else
    #[arg(long)]
    quick: bool,

    /// Write all samples to a file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,

    /// Draw the comparison as an SVG file
    #[arg(long, value_name = "PATH")]
    svg: Option<PathBuf>,

    /// Only rows with this text in their names
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
    /// Puts in what `--quick` stands for.
    pub fn settle(&mut self) {
        if self.quick {
            (self.rounds, self.seconds) = (1, 0.5);
        }
    }

    /// A report to fill. Says on stderr how long that takes, in seconds.
    pub fn begin(&self, comparison: &'static Comparison, estimate: f64) -> Report {
        match estimate {
            seconds @ ..120.0 => eprintln!("this takes about {seconds:.0} seconds"),
            seconds => eprintln!("this takes about {:.0} minutes", seconds / 60.0),
        }
        Report::new(comparison, Machine::this(), self.rounds, self.seconds)
    }

    /// Prints the report and writes the files that are wanted. Whether every measurement went well.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn end(&self, report: &Report, picture: &Picture) -> anyhow::Result<bool> {
        print!("{report}");
        if let Some(path) = &self.json {
            let text = format!("{:#}\n", report.json());
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
        if let Some(path) = &self.svg {
            let text = svg::draw(report, picture);
            std::fs::write(path, text).with_context(|| path.display().to_string())?;
        }
        Ok(report.is_clean())
    }
}

/// Whom to measure, of all that a comparison knows: `wanted`, or everyone if that is empty.
///
/// # Errors
/// When one that is wanted is not known.
pub fn chosen(wanted: &[String], comparison: &Comparison) -> anyhow::Result<impl Fn(&str) -> bool> {
    for name in wanted {
        let known = comparison.contenders.contains(&name.as_str());
        ensure!(known, "no contender is called {name:?}");
    }
    Ok(move |name: &str| wanted.is_empty() || wanted.iter().any(|one| one == name))
}
