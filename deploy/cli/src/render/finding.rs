//! Problems of a cluster file: errors with field path, value and reason, and warnings.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

/// Kind of an error, with the words of the Kubernetes API.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// The value breaks a rule.
    Invalid,
    /// The value is missing.
    Required,
    /// The field must not have a value, or must not change.
    Forbidden,
    /// The value is not in a list of values.
    Unsupported,
    /// A list has more items than the field allows.
    TooMany,
}

/// An error about one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    path: String,
    /// Path that KKP prints for the same error, if that path differs.
    kkp_path: Option<String>,
    kind: Kind,
    /// `None` for a missing value.
    value: Option<Value>,
    reason: String,
}

/// A warning about one field. The cluster is rendered nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Warning {
    path: String,
    value: Value,
    reason: String,
}

/// All errors and warnings about a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    pub(crate) problems: Vec<Problem>,
    pub(crate) warnings: Vec<Warning>,
}

// === impl Problem ===

impl Problem {
    fn new(kind: Kind, path: &str, value: Option<Value>, reason: String) -> Self {
        Self {
            path: path.to_owned(),
            kkp_path: kkp_path(path),
            kind,
            value,
            reason,
        }
    }

    pub(crate) fn invalid(path: &str, value: impl Serialize, reason: impl Into<String>) -> Self {
        Self::new(Kind::Invalid, path, Some(json(value)), reason.into())
    }

    pub(crate) fn required(path: &str, reason: impl Into<String>) -> Self {
        Self::new(Kind::Required, path, None, reason.into())
    }

    pub(crate) fn forbidden(path: &str, value: impl Serialize, reason: impl Into<String>) -> Self {
        Self::new(Kind::Forbidden, path, Some(json(value)), reason.into())
    }

    pub(crate) fn unsupported(path: &str, value: impl Serialize, supported: &[&str]) -> Self {
        let supported: Vec<String> = supported.iter().map(|one| format!("{one:?}")).collect();
        let reason = format!("supported values: {}", supported.join(", "));
        Self::new(Kind::Unsupported, path, Some(json(value)), reason)
    }

    pub(crate) fn too_many(path: &str, count: usize, most: usize) -> Self {
        let reason = format!("must have at most {most} items");
        Self::new(Kind::TooMany, path, Some(json(count)), reason)
    }

    /// Error for a changed value of a field that must not change.
    pub(crate) fn immutable(path: &str, value: impl Serialize) -> Self {
        let mut problem = Self::invalid(path, value, "field is immutable");
        // KKP's checks of updates use the names of the fields.
        problem.kkp_path = None;
        problem
    }

    /// Replaces the path that KKP prints.
    pub(crate) fn named_by_kkp(mut self, path: &str) -> Self {
        self.kkp_path = (path != self.path).then(|| path.to_owned());
        self
    }
}

/// Returns the path that KKP's checks of a new object print, if it differs from the path of the field.
fn kkp_path(path: &str) -> Option<String> {
    if let Some(rest) = path.strip_prefix("spec.clusterNetwork") {
        return Some(format!("spec.networkConfig{rest}"));
    }
    let rest = path.strip_prefix("spec.componentsOverride.apiserver.nodePortRange")?;
    Some(format!("componentsOverride.apiserver.nodePortRange{rest}"))
}

fn json(value: impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_default()
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Invalid => "Invalid value",
            Kind::Required => "Required value",
            Kind::Forbidden => "Forbidden",
            Kind::Unsupported => "Unsupported value",
            Kind::TooMany => "Too many",
        };
        write!(f, "{}: {kind}", self.path)?;
        if let Some(value) = &self.value {
            write!(f, ": {value}")?;
        }
        write!(f, ": {}", self.reason)?;
        match &self.kkp_path {
            Some(path) => write!(f, " (KKP: {path})"),
            None => Ok(()),
        }
    }
}

// === impl Warning ===

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.path, self.value, self.reason)
    }
}

// === impl Findings ===

impl Findings {
    pub(crate) fn error(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    pub(crate) fn warn(&mut self, path: &str, value: impl Serialize, reason: impl Into<String>) {
        self.warnings.push(Warning {
            path: path.to_owned(),
            value: json(value),
            reason: reason.into(),
        });
    }
}
