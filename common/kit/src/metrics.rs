//! A parser of the Prometheus text format.

use std::collections::BTreeMap;

/// A sample: a single line of a scrape.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The name with its suffix, as in `x_bucket`.
    pub name: String,
    /// The labels by name.
    pub labels: BTreeMap<String, String>,
    /// The value.
    pub value: f64,
}

/// The parsed result of a scrape.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
    text: String,
}

/// A line that is not in the Prometheus text format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why} in {line:?}")]
pub struct Malformed {
    why: &'static str,
    line: String,
}

impl Metrics {
    /// Parses the Prometheus text format.
    ///
    /// # Errors
    /// Names the first line that is not valid.
    pub fn parse(text: &str) -> Result<Self, Malformed> {
        let lines = text.lines().map(str::trim);
        let samples = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                parse_sample(line).map_err(|why| Malformed {
                    why,
                    line: line.to_owned(),
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            samples,
            text: text.to_owned(),
        })
    }

    /// Returns the sum of all samples of `name` that have all of the `labels`, and possibly more labels;
    /// `None` if no sample matches.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.samples(name)
            .filter(|sample| {
                labels
                    .iter()
                    .all(|(key, value)| sample.label(key) == Some(value))
            })
            .map(|sample| sample.value)
            .reduce(|a, b| a + b)
    }

    /// Returns all samples of `name`.
    pub fn samples<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }

    /// Returns the text of the scrape as received, including HELP and TYPE lines.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl Sample {
    /// Returns the value of a label.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels.get(key).map(String::as_str)
    }
}

fn parse_sample(line: &str) -> Result<Sample, &'static str> {
    let name_end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = parse_labels(inner, &mut labels)?;
    }
    // A timestamp may follow.
    let value = rest.split_whitespace().next().ok_or("no value")?;
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().map_err(|_| "no number")?,
    })
}

/// Parses `key="value",...}` into `labels` and returns the text behind the brace.
fn parse_labels<'a>(
    mut rest: &'a str,
    labels: &mut BTreeMap<String, String>,
) -> Result<&'a str, &'static str> {
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Ok(after);
        }
        let (key, quoted) = rest.split_once("=\"").ok_or("no label value")?;
        let mut value = String::new();
        let mut chars = quoted.chars();
        loop {
            match chars.next().ok_or("unterminated label value")? {
                '"' => break,
                '\\' => match chars.next().ok_or("unterminated label value")? {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                other => value.push(other),
            }
        }
        labels.insert(key.to_owned(), value);
        rest = chars.as_str();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TEXT: &str = r#"
# HELP dials Dials.
# TYPE dials counter
dials{reason="no_agent"} 2
dials{reason="error_response",code="a\"b,}\\\n"} 3 1395066363000
up 1
took_bucket{le="+Inf"} 4
took_sum 1.5e-05
ratio NaN
"#;

    #[test]
    fn values_are_found_by_name_and_labels() {
        let metrics = Metrics::parse(TEXT).unwrap();
        assert_eq!(metrics.value("up", &[]), Some(1.0));
        assert_eq!(metrics.value("dials", &[]), Some(5.0));
        assert_eq!(metrics.value("dials", &[("reason", "no_agent")]), Some(2.0));
        assert_eq!(metrics.value("dials", &[("code", "a\"b,}\\\n")]), Some(3.0));
        assert_eq!(metrics.value("dials", &[("reason", "x")]), None);
        assert_eq!(metrics.value("took", &[]), None);
        assert_eq!(metrics.value("took_bucket", &[("le", "+Inf")]), Some(4.0));
        assert_eq!(metrics.value("took_sum", &[]), Some(1.5e-05));
        assert!(metrics.value("ratio", &[]).unwrap().is_nan());
        assert_eq!(metrics.text(), TEXT);
    }

    #[test]
    fn invalid_text_is_an_error() {
        for text in ["up", "up x", "up{a=\"b\" 1", "up{a} 1", "up{a=\"b\\"] {
            assert!(Metrics::parse(text).is_err(), "{text:?}");
        }
    }
}
