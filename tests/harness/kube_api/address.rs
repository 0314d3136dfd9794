//! The kinds that are served, and what a URL says: which objects it names, and which it selects.

use std::collections::BTreeMap;

use serde_json::Value;

use super::text;

/// One kind of object.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// Group and version, such as `discovery.k8s.io/v1`; `v1` alone for the core group.
    pub(super) api_version: &'static str,
    /// What URLs call it.
    pub(super) plural: &'static str,
    /// What objects call it.
    pub(super) name: &'static str,
    pub(super) namespaced: bool,
    /// Whether a PUT of an object that is not there creates it.
    pub(super) put_creates: bool,
    /// Whether a PUT may leave out the version that it replaces.
    pub(super) put_without_version: bool,
}

/// All kinds. What a PUT may do is what the API server's update strategy of each kind allows.
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

/// What a path names: one object, or all of a kind, in one namespace or in all.
#[derive(Debug)]
pub(super) struct Address {
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
}

/// The parameters of a query, decoded. Of a name that comes twice, the last counts.
#[derive(Debug)]
pub(super) struct Query(BTreeMap<String, String>);

/// Which objects a list or a watch is about.
#[derive(Debug)]
pub(super) struct Filter {
    pub(super) kind: &'static Kind,
    namespace: Option<String>,
    labels: Vec<Rule>,
    fields: Vec<Rule>,
}

/// One requirement of a selector.
#[derive(Debug, PartialEq, Eq)]
struct Rule {
    key: String,
    /// The value to have; any will do if there is none.
    value: Option<String>,
    negated: bool,
}

// === impl Kind ===

impl Kind {
    /// The kind whose plural is `resource`; panics if it is not served.
    pub(super) fn of(resource: &str) -> &'static Self {
        let kind = KINDS.iter().find(|kind| kind.plural == resource);
        kind.unwrap_or_else(|| panic!("{resource:?} is not served; add it to KINDS"))
    }

    /// The API group; empty for the core group.
    pub(super) fn group(&self) -> &'static str {
        self.api_version
            .split_once('/')
            .map_or("", |(group, _)| group)
    }

    /// What error messages call it, such as `leases.coordination.k8s.io`.
    pub(super) fn resource(&self) -> String {
        match self.group() {
            "" => self.plural.to_owned(),
            group => format!("{}.{group}", self.plural),
        }
    }
}

// === impl Address ===

impl Address {
    /// Reads a path; nothing if it names nothing that is served.
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

    /// The value of a parameter. An empty one counts as none, as the API has it.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// Whether a parameter is there and is neither `false` nor `0`.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|value| !matches!(value, "false" | "0"))
    }
}

/// Undoes the percent-encoding of a query. What is not well encoded is left as it is.
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
    /// What a list or a watch of `address` selects; a text for the client if the query's selectors
    /// can not be understood.
    pub(super) fn new(address: &Address, query: &Query) -> Result<Self, String> {
        let rules = |name: &str| parse_rules(query.get(name).unwrap_or_default());
        Ok(Self {
            kind: address.kind,
            namespace: address.namespace.clone(),
            labels: rules("labelSelector")?,
            fields: rules("fieldSelector")?,
        })
    }

    /// Whether an object of this kind is selected.
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
        let holds = match &self.value {
            Some(value) => actual == Some(value.as_str()),
            None => actual.is_some(),
        };
        holds != self.negated
    }
}

/// Reads `a=b`, `a==b`, `a!=b`, `a` and `!a`, separated by commas.
fn parse_rules(selector: &str) -> Result<Vec<Rule>, String> {
    let parts = selector.split(',').map(str::trim);
    let rules = parts.filter(|part| !part.is_empty()).map(|part| {
        if part.contains(['(', ')']) {
            return Err(format!(
                "the selector {selector:?} has a set in it; this API knows only equality"
            ));
        }
        let (key, value, negated) = if let Some((key, value)) = part.split_once("!=") {
            (key, Some(value), true)
        } else if let Some((key, value)) = part.split_once('=') {
            (key, Some(value.trim_start_matches('=')), false)
        } else if let Some(key) = part.strip_prefix('!') {
            (key, None, true)
        } else {
            (part, None, false)
        };
        Ok(Rule {
            key: key.trim().to_owned(),
            value: value.map(|value| value.trim().to_owned()),
            negated,
        })
    });
    rules.collect()
}
