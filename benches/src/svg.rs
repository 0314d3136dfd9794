//! The report as a picture for a web page: panels with bars for the medians, and ratios to one contender. The
//! picture of `tunnel` is defined here.
//!
//! The output is plain SVG without scripts, without a background, in the reader's own font, and in colours
//! for light and dark pages.

use std::fmt::Write as _;

use crate::figures::{HUNG, Metric};
use crate::report::{Line, Report, number};

/// Rows that share an axis.
#[derive(Debug)]
pub(crate) struct Panel {
    title: &'static str,
    /// Figure of the bars.
    pub metric: Metric,
    /// Names of the rows.
    pub rows: &'static [&'static str],
}

/// A contender that has bars.
#[derive(Debug)]
pub(crate) struct Bar {
    pub contender: &'static str,
    /// Text in the legend.
    label: &'static str,
    /// Class of the style sheet that sets the colour: `o`, `s` or `r`.
    class: &'static str,
}

/// Content of a picture.
#[derive(Debug)]
pub(crate) struct Picture {
    /// Alternative text for readers who do not see the picture.
    pub title: &'static str,
    /// Panels from top to bottom.
    pub panels: &'static [Panel],
    /// At most three.
    pub bars: &'static [Bar],
    /// Contender that the ratios refer to.
    pub by: &'static str,
}

/// A panel for the lines of `rows` that show `metric`.
pub(crate) const fn panel(
    title: &'static str,
    metric: Metric,
    rows: &'static [&'static str],
) -> Panel {
    Panel {
        title,
        metric,
        rows,
    }
}

pub(crate) const fn bar(contender: &'static str, label: &'static str, class: &'static str) -> Bar {
    Bar {
        contender,
        label,
        class,
    }
}

/// All lengths are in units of the picture.
const WIDTH: f64 = 860.0;
const BARS_FROM: f64 = 270.0;
const LONGEST: f64 = 430.0;
const BAR: f64 = 11.0;
const GAP: f64 = 7.0;
const TITLE: f64 = 30.0;
const LEGEND: f64 = 34.0;
const FOOT: f64 = 26.0;

const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#57606a}\
    .t{font-weight:600;fill:#24292f}.o{fill:#1a7f64}.s{fill:#8c959f}.r{fill:#bf8700}\
    @media(prefers-color-scheme:dark){text{fill:#9da7b3}.t{fill:#e6edf3}\
    .o{fill:#2ea886}.s{fill:#768390}.r{fill:#c69026}}";

/// Draws all panels that have figures.
pub(crate) fn draw(report: &Report, picture: &Picture) -> String {
    let lines = report.lines();
    let mut body = String::new();
    let mut top = legend(&lines, picture, &mut body);
    for panel in picture.panels {
        let shown: Vec<&Line> = lines
            .iter()
            .filter(|line| line.metric == panel.metric && panel.rows.contains(&line.row))
            .collect();
        if !shown.is_empty() {
            top = draw_panel(picture, panel, &shown, top, &mut body);
        }
    }
    let height = top + FOOT;
    let foot = format!("{}; medians of {} rounds", report.machine, report.rounds);
    text(0.0, top + FOOT - 8.0, "", &foot, &mut body);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         role=\"img\" aria-label=\"{}\">\n\
         <style>{STYLE}</style>\n{body}</svg>\n",
        picture.title
    )
}

/// Draws the legend, with all contenders that have a bar. Returns the position of the first panel.
fn legend(lines: &[Line], picture: &Picture, body: &mut String) -> f64 {
    let mut x = 0.0;
    for bar in picture.bars {
        let drawn = |line: &Line| line.median(bar.contender).is_some();
        if lines.iter().any(drawn) {
            rect(x, 8.0, BAR, bar.class, body);
            text(x + 17.0, 18.0, "", bar.label, body);
            x += 190.0;
        }
    }
    LEGEND
}

/// Draws a panel below `top`. Returns the position of its end.
fn draw_panel(
    picture: &Picture,
    panel: &Panel,
    lines: &[&Line],
    top: f64,
    body: &mut String,
) -> f64 {
    let better = if panel.metric.higher_is_better {
        "more is better"
    } else {
        "less is better"
    };
    let title = format!("{} \u{2013} {better}", panel.title);
    text(0.0, top + 18.0, "t", &title, body);
    let bars = picture.bars.iter();
    let longest = bars
        .flat_map(|bar| lines.iter().filter_map(|line| line.median(bar.contender)))
        .filter(|value| value.is_finite())
        .fold(0.0, f64::max);
    let mut y = top + TITLE;
    for line in lines {
        let label = if lines.iter().any(|other| other.row != line.row) {
            format!("{}, {}", line.front, line.row)
        } else {
            line.front.to_owned()
        };
        text(0.0, y + BAR - 1.0, "", &label, body);
        for bar in picture.bars {
            let Some(value) = line.median(bar.contender) else {
                continue;
            };
            // A contender that hung gets the longest bar.
            let share = if value.is_finite() && longest > 0.0 {
                value / longest
            } else {
                1.0
            };
            rect(BARS_FROM, y, (share * LONGEST).max(1.0), bar.class, body);
            let x = BARS_FROM + share * LONGEST + 6.0;
            let caption = caption(picture, line, bar, value);
            text(x, y + BAR - 1.0, "", &caption, body);
            y += BAR + 2.0;
        }
        y += GAP;
    }
    y
}

/// Returns the figure of a bar and its ratio to the reference.
fn caption(picture: &Picture, line: &Line, bar: &Bar, value: f64) -> String {
    let digits = match value {
        ..10.0 => 2,
        10.0..100.0 => 1,
        _ => 0,
    };
    let figure = number(Some(value), digits);
    let by = picture.by;
    match line.ratio(bar.contender, by) {
        Some(ratio) if bar.contender != by && ratio > 0.0 && ratio != HUNG => {
            format!("{figure} ({}\u{d7} {by})", number(Some(ratio), 2))
        }
        _ => figure,
    }
}

fn rect(x: f64, y: f64, width: f64, class: &str, body: &mut String) {
    // Writing to a string does not fail.
    let _ = writeln!(
        body,
        "<rect x=\"{x:.0}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{BAR}\" class=\"{class}\"/>"
    );
}

fn text(x: f64, y: f64, class: &str, content: &str, body: &mut String) {
    let class = if class.is_empty() {
        String::new()
    } else {
        format!(" class=\"{class}\"")
    };
    let content = content
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    // Writing to a string does not fail.
    let _ = writeln!(
        body,
        "<text x=\"{x:.0}\" y=\"{y:.0}\"{class}>{content}</text>"
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
    use super::*;
    use crate::figures::RATE;
    use crate::names::BULK;
    use crate::report::example;

    static PICTURE: Picture = Picture {
        title: "example",
        panels: &[panel("Throughput, MiB/s", RATE, BULK)],
        bars: &[
            bar("ours", "Culvert", "o"),
            bar("stock", "Konnectivity (stock)", "s"),
            bar("relay", "TLS relay pair", "r"),
        ],
        by: "stock",
    };

    fn drawn(figures: &[(&'static str, f64)]) -> String {
        let report = example::report(&example::COMPARISON, "CONNECT", BULK[0], RATE, figures);
        draw(&report, &PICTURE)
    }

    #[test]
    fn bar_length_is_proportional_to_figure() {
        let drawn = drawn(&[("ours", 400.0), ("stock", 100.0)]);
        assert!(
            drawn.contains(&format!("width=\"{LONGEST:.1}\"")),
            "{drawn}"
        );
        assert!(drawn.contains(&format!("width=\"{:.1}\"", LONGEST / 4.0)));
        assert!(!drawn.contains("relay"));
    }

    #[test]
    fn hung_contender_has_a_bar_and_no_ratios() {
        let drawn = drawn(&[("ours", 5.0), ("stock", HUNG), ("relay", 5.0)]);
        assert!(drawn.contains(">hung<"));
        assert!(!drawn.contains("\u{d7} stock"), "{drawn}");
    }
}
