//! The mistakes in the shape of a file, reported all at once: unknown fields, values of the wrong kind, ports
//! that are not numbers. Used only if deserialization fails, because deserialization stops at the first
//! mistake. The valid parts get the usual checks.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::{Entry, RouteReader};

/// The fields of an upstream.
const FIELDS: [&str; 5] = [
    "name",
    "endpoints",
    "nodePorts",
    "serverNames",
    "authorities",
];

/// Any YAML value.
pub(super) enum Node {
    Nothing,
    Scalar(String),
    List(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
}

// === impl RouteReader ===

impl RouteReader {
    /// Reads the valid parts of a document and reports all mistakes.
    pub(super) fn tolerate(&mut self, document: &Spanned<Node>) {
        for (_, upstreams) in self.fields(document, "the file", &["upstreams"]) {
            for upstream in self.list(upstreams, "upstreams") {
                self.upstream(upstream);
            }
        }
    }

    fn upstream(&mut self, node: &Spanned<Node>) {
        let mut name = None;
        let [mut endpoints, mut server_names, mut authorities] = [const { Vec::new() }; 3];
        let mut node_ports = Vec::new();
        for (field, value) in self.fields(node, "an upstream", &FIELDS) {
            let field = field.value.as_str();
            match field {
                "name" => name = self.text(value, field),
                "endpoints" => endpoints = self.texts(value, field),
                "serverNames" => server_names = self.texts(value, field),
                "nodePorts" => node_ports = self.numbers(value, field),
                _ => authorities = self.texts(value, field),
            }
        }
        match name {
            Some(name) => self.entry(&Entry {
                name,
                endpoints,
                node_ports,
                server_names,
                authorities,
            }),
            // A node that is not a mapping, or has an invalid name, is already reported.
            None => {
                if let Node::Map(fields) = &node.value
                    && fields.iter().all(|(field, _)| field.value != "name")
                {
                    self.problem(node, "an upstream needs a name");
                }
            }
        }
    }

    /// Returns the known fields of a mapping and reports the unknown ones.
    fn fields<'n>(
        &mut self,
        node: &'n Spanned<Node>,
        what: &str,
        known: &[&str],
    ) -> Vec<&'n (Spanned<String>, Spanned<Node>)> {
        let known_are = known.join(", ");
        let Node::Map(fields) = &node.value else {
            let text = format!("{what} has to be a mapping; its fields are {known_are}");
            self.problem(node, &text);
            return Vec::new();
        };
        let is_known = |field: &&(Spanned<String>, _)| known.contains(&field.0.value.as_str());
        let (right, wrong): (Vec<_>, Vec<_>) = fields.iter().partition(is_known);
        for (field, _) in wrong {
            let text = format!("{what} has no field {:?}; use {known_are}", field.value);
            self.problem(field, &text);
        }
        right
    }

    fn list<'n>(&mut self, node: &'n Spanned<Node>, field: &str) -> &'n [Spanned<Node>] {
        match &node.value {
            Node::List(items) => items,
            Node::Nothing => &[],
            Node::Scalar(_) | Node::Map(_) => {
                self.problem(node, &format!("{field} has to be a list"));
                &[]
            }
        }
    }

    fn texts(&mut self, node: &Spanned<Node>, field: &str) -> Vec<Spanned<String>> {
        let items = self.list(node, field).iter();
        items.filter_map(|item| self.text(item, field)).collect()
    }

    fn numbers(&mut self, node: &Spanned<Node>, field: &str) -> Vec<Spanned<i64>> {
        let mut numbers = Vec::new();
        for text in self.texts(node, field) {
            match text.value.parse() {
                Ok(number) => numbers.push(Spanned::new(number, text.referenced, text.defined)),
                Err(_) => self.problem(
                    &text,
                    &format!("node port {:?} is not a number", text.value),
                ),
            }
        }
        numbers
    }

    fn text(&mut self, node: &Spanned<Node>, field: &str) -> Option<Spanned<String>> {
        if let Node::Scalar(text) = &node.value {
            let text = text.clone();
            return Some(Spanned::new(text, node.referenced, node.defined));
        }
        let text = format!("{field} has something that is not a single value");
        self.problem(node, &text);
        None
    }
}

// === impl Node ===

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyNode)
    }
}

struct AnyNode;

impl<'de> Visitor<'de> for AnyNode {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Nothing)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Scalar(value.to_string()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Scalar(value.to_string()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Scalar(value.to_string()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Scalar(value.to_string()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Scalar(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Node::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Node, A::Error> {
        let mut map = Vec::new();
        while let Some(field) = fields.next_entry()? {
            map.push(field);
        }
        Ok(Node::Map(map))
    }
}
