//! The supported kinds, and the meaning of a URL: the objects that its path names and its query selects.

use std::collections::BTreeMap;

use serde_json::Value;

use super::text;

/// A kind of object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Group and version, for example `discovery.k8s.io/v1`; only `v1` for the core group.
    pub(super) api_version: &'static str,
    /// Name in URLs, a plural.
    pub(super) plural: &'static str,
    /// Name in the `kind` field of objects.
    pub(super) name: &'static str,
    pub(super) namespaced: bool,
    /// True if a PUT creates an object that does not exist.
    pub(super) put_creates: bool,
    /// True if a PUT may omit the version of the object that it replaces.
    pub(super) put_without_version: bool,
}

/// All supported kinds. The rules for PUT are from the API server's update strategy of each kind.
static KINDS: [Kind; 4] = [
    Kind {
        api_version: "v1",
        plural: "services",
        name: "Service",
        namespaced: true,
        put_creates: true,
        put_without_version: true,
    },
    Kind {
        api_version: "discovery.k8s.io/v1",
        plural: "endpointslices",
        name: "EndpointSlice",
        namespaced: true,
        put_creates: false,
        put_without_version: true,
    },
    Kind {
        api_version: "coordination.k8s.io/v1",
        plural: "leases",
        name: "Lease",
        namespaced: true,
        put_creates: true,
        put_without_version: false,
    },
    Kind {
        api_version: "v1",
        plural: "nodes",
        name: "Node",
        namespaced: false,
        put_creates: false,
        put_without_version: true,
    },
];

/// The meaning of a path: a single object, or all objects of a kind, in one namespace or in all namespaces.
#[derive(Debug)]
pub(super) struct Address {
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
}

/// The decoded parameters of a query. If a parameter is repeated, the last value counts.
#[derive(Debug)]
pub(super) struct Query(BTreeMap<String, String>);

/// Condition for the objects of a list or a watch.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) kind: &'static Kind,
    namespace: Option<String>,
    labels: Vec<Rule>,
    fields: Vec<Rule>,
}

/// A single requirement of a selector.
#[derive(Debug, PartialEq, Eq)]
struct Rule {
    key: String,
    /// The permitted values; `None` accepts every value.
    values: Option<Vec<String>>,
    negated: bool,
}

// === impl Kind ===

impl Kind {
    /// Returns the kind with the plural `resource`. Panics if the kind is not supported.
    pub(super) fn of(resource: &str) -> &'static Self {
        let kind = KINDS.iter().find(|kind| kind.plural == resource);
        kind.unwrap_or_else(|| panic!("{resource:?} is not served; add it to KINDS"))
    }

    /// Returns the API group; empty for the core group.
    pub(super) fn group(&self) -> &'static str {
        self.api_version
            .split_once('/')
            .map_or("", |(group, _)| group)
    }

    /// Returns the name for error messages, for example `leases.coordination.k8s.io`.
    pub(super) fn resource(&self) -> String {
        match self.group() {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }
}

// === impl Address ===

impl Address {
    /// Parses a path; `None` if nothing is served there.
    pub(super) fn parse(path: &str) -> Option<Self> {
        KINDS.iter().find_map(|kind| Self::of_kind(kind, path))
    }

    fn of_kind(kind: &'static Kind, path: &str) -> Option<Self> {
        let root = if kind.group().is_empty() {
            "/api/"
        } else {
            "/apis/"
        };
        let rest = path.strip_prefix(root)?.strip_prefix(kind.api_version)?;
        let parts: Vec<&str> = rest.strip_prefix('/')?.split('/').collect();
        let (namespace, plural, name) = match *parts.as_slice() {
            [plural] => (None, plural, None),
            [plural, name] if !kind.namespaced => (None, plural, Some(name)),
            ["namespaces", namespace, plural] if kind.namespaced => (Some(namespace), plural, None),
            ["namespaces", namespace, plural, name] if kind.namespaced => {
                (Some(namespace), plural, Some(name))
            }
            _ => return None,
        };
        (plural == kind.plural).then(|| Self {
            kind,
            namespace: namespace.map(str::to_owned),
            name: name.map(str::to_owned),
        })
    }
}

// === impl Query ===

impl Query {
    pub(super) fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        let decoded = pairs.map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(name), decode(value))
        });
        Self(decoded.collect())
    }

    /// Returns the value of a parameter. As in the API server, an empty value counts as a missing parameter.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// Returns true if a parameter is present and is neither `false` nor `0`.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|value| !matches!(value, "false" | "0"))
    }
}

/// Decodes the percent-encoding of a query. Invalid sequences stay unchanged.
fn decode(text: &str) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        let hex = after.get(..2).and_then(|hex| str::from_utf8(hex).ok());
        let escaped = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (byte, escaped) {
            (b'%', Some(escaped)) => {
                decoded.push(escaped);
                rest = &after[2..];
            }
            (b'+', _) => decoded.push(b' '),
            _ => decoded.push(byte),
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

// === impl Filter ===

impl Filter {
    /// Creates the filter for a list or a watch of `address`. The error is a text for the client, if a
    /// selector in the query is invalid.
    pub(super) fn new(address: &Address, query: &Query) -> Result<Self, String> {
        let rules = |name: &str| parse_rules(query.get(name).unwrap_or_default());
        Ok(Self {
            kind: address.kind,
            namespace: address.namespace.clone(),
            labels: rules("labelSelector")?,
            fields: rules("fieldSelector")?,
        })
    }

    /// Returns true if an object of this filter's kind is selected.
    pub(super) fn matches(&self, object: &Value) -> bool {
        let namespace = text(object, "/metadata/namespace");
        let here = self.namespace.as_deref().is_none_or(|it| it == namespace);
        let labels = &object["metadata"]["labels"];
        let mut labels = self.labels.iter().map(|rule| (rule, labels.get(&rule.key)));
        let mut fields = self.fields.iter().map(|rule| {
            let pointer = format!("/{}", rule.key.replace('.', "/"));
            (rule, object.pointer(&pointer))
        });
        here && labels.all(|(rule, value)| rule.matches(value))
            && fields.all(|(rule, value)| rule.matches(value))
    }
}

impl Rule {
    fn matches(&self, actual: Option<&Value>) -> bool {
        let actual = actual.and_then(Value::as_str);
        let holds = actual.is_some_and(|actual| {
            let values = self.values.as_ref();
            values.is_none_or(|values| values.iter().any(|value| value == actual))
        });
        holds != self.negated
    }
}

/// Parses `a=b`, `a==b`, `a!=b`, `a`, `!a`, `a in (b,c)` and `a notin (b,c)`, separated by commas.
fn parse_rules(selector: &str) -> Result<Vec<Rule>, String> {
    let mut depth = 0_i32;
    let parts = selector.split(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    });
    let parts = parts.map(str::trim).filter(|part| !part.is_empty());
    let rules = parts.map(|part| {
        let one = |value: &str| Some(vec![value.trim().to_owned()]);
        let (key, values, negated) = if let Some((head, set)) = part.split_once('(') {
            let set = set.strip_suffix(')');
            let set = set.ok_or_else(|| format!("the set in {part:?} has no end"))?;
            let values = set.split(',').map(|value| value.trim().to_owned());
            match head.trim().rsplit_once(' ') {
                Some((key, "in")) => (key, Some(values.collect()), false),
                Some((key, "notin")) => (key, Some(values.collect()), true),
                _ => return Err(format!("unable to parse requirement: {part:?}")),
            }
        } else if let Some((key, value)) = part.split_once("!=") {
            (key, one(value), true)
        } else if let Some((key, value)) = part.split_once('=') {
            (key, one(value.trim_start_matches('=')), false)
        } else if let Some(key) = part.strip_prefix('!') {
            (key, None, true)
        } else {
            (part, None, false)
        };
        Ok(Rule {
            key: key.trim().to_owned(),
            values,
            negated,
        })
    });
    rules.collect()
}
