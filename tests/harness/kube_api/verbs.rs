//! The verbs: get, list, watch, create, update, patch, delete.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};

use super::address::{Address, Filter, Kind, Query};
use super::status::Failure;
use super::store::{self, Key, Store};
use super::watch::{Start, WatchBody, WatchRequest};
use super::{State, text, tokens};

/// JSON pointer to the version of an object.
const VERSION: &str = "/metadata/resourceVersion";

const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
/// Treated as a plain merge: lists are replaced, not merged by their keys.
const STRATEGIC: &str = "application/strategic-merge-patch+json";
/// Server-side apply, treated as a merge that may create the object. The body may be YAML, but clients send
/// JSON.
const APPLY: &str = "application/apply-patch+yaml";

/// Lifetime of a watch without `timeoutSeconds`: the API server's minimum (`--min-request-timeout`).
const WATCH_LIFETIME: Duration = Duration::from_secs(1800);

/// A request whose body has been read.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) query: Query,
    /// Path and query as sent.
    pub(super) sent: String,
    /// Media type of the body, without parameters; empty without a Content-Type header.
    pub(super) media_type: String,
    pub(super) body: Bytes,
    /// True if a watch opened by this request must send nothing.
    pub(super) silent: bool,
}

/// An answer.
#[derive(Debug)]
pub(super) enum Reply {
    /// A JSON object.
    Object(StatusCode, Value),
    /// The events of a watch.
    Watch(WatchBody),
}

/// Performs a request.
pub(super) fn perform(state: &mut State, call: &Call) -> Result<Reply, Failure> {
    if call.path == tokens::PATH && call.method == "POST" {
        let review = tokens::review(state, call.json(&[JSON])?)?;
        return Ok(Reply::Object(StatusCode::CREATED, review));
    }
    let Some(address) = Address::parse(&call.path) else {
        let message = format!("nothing is served at {}", call.path);
        return Err(Failure::new(StatusCode::NOT_FOUND, message));
    };
    let request = Request {
        kind: address.kind,
        store: &mut state.store,
        address: &address,
        call,
    };
    match (call.method.as_str(), address.name.as_deref()) {
        ("GET", None) if call.query.is_true("watch") => request.watch(),
        ("GET", None) => request.list(),
        ("GET", Some(name)) => request.get(name),
        // A namespaced object is created in its namespace, never through the path for all namespaces.
        ("POST", None) if address.kind.namespaced == address.namespace.is_some() => {
            request.create()
        }
        ("PUT", Some(name)) => request.update(name),
        ("PATCH", Some(name)) => request.patch(name),
        ("DELETE", Some(name)) => request.delete(name),
        (method, _) => {
            let message = format!("{method} is not served at {}", call.path);
            Err(Failure::new(StatusCode::METHOD_NOT_ALLOWED, message))
        }
    }
}

/// A request for objects of a single kind.
struct Request<'a> {
    kind: &'static Kind,
    store: &'a mut Store,
    address: &'a Address,
    call: &'a Call,
}

// === impl Call ===

impl Call {
    /// Parses the body, which must have one of these media types and be a JSON object. Its `metadata`, if
    /// present, must be an object too.
    fn json(&self, media_types: &[&str]) -> Result<Value, Failure> {
        let given = self.media_type.as_str();
        if !given.is_empty() && !media_types.contains(&given) {
            let message = format!("the body is {given:?}, expected one of {media_types:?}");
            return Err(Failure::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let body: Value = serde_json::from_slice(&self.body)
            .map_err(|error| Failure::bad_request(format!("the body is not JSON: {error}")))?;
        let metadata = body.get("metadata").unwrap_or(&Value::Null);
        if body.is_object() && (metadata.is_object() || metadata.is_null()) {
            return Ok(body);
        }
        Err(Failure::bad_request("the body is not a Kubernetes object"))
    }
}

// === impl Request ===

impl Request<'_> {
    fn get(self, name: &str) -> Result<Reply, Failure> {
        let object = self.found(name)?.clone();
        Ok(Reply::Object(StatusCode::OK, object))
    }

    fn list(self) -> Result<Reply, Failure> {
        let filter = self.filter()?;
        let items = self.store.list(&filter).cloned().map(|mut item| {
            // The API server omits these fields in a list of a single kind.
            item.as_object_mut()
                .unwrap()
                .retain(|field, _| field != "kind" && field != "apiVersion");
            item
        });
        let list = json!({
            "kind": format!("{}List", self.kind.name),
            "apiVersion": self.kind.api_version,
            "metadata": {"resourceVersion": self.store.version().to_string()},
            "items": items.collect::<Vec<Value>>(),
        });
        Ok(Reply::Object(StatusCode::OK, list))
    }

    fn watch(self) -> Result<Reply, Failure> {
        let query = &self.call.query;
        let streaming = query.get("sendInitialEvents");
        if streaming.is_some() != (query.get("resourceVersionMatch") == Some("NotOlderThan")) {
            let why = "sendInitialEvents and resourceVersionMatch=NotOlderThan go together";
            return Err(Failure::invalid("the query of the watch", why));
        }
        let start = match (streaming, self.number("resourceVersion")?) {
            (Some("true" | "1"), _) => Start::PresentAndMark,
            (Some(_), 0) => Start::After(self.store.version()),
            (None, 0) => Start::Present,
            (_, version) => Start::After(version),
        };
        let lifetime = match self.number("timeoutSeconds")? {
            0 => WATCH_LIFETIME,
            seconds => Duration::from_secs(seconds),
        };
        let request = WatchRequest {
            filter: self.filter()?,
            path: self.call.sent.clone(),
            start,
            bookmarks: query.is_true("allowWatchBookmarks"),
            lifetime,
            silent: self.call.silent,
        };
        self.store.watch(request).map(Reply::Watch)
    }

    fn create(self) -> Result<Reply, Failure> {
        let object = self.sent_object()?;
        let key = store::key(self.kind, &object);
        if self.store.get(&key).is_some() {
            return Err(Failure::already_exists(self.kind, &key.2));
        }
        self.stored(StatusCode::CREATED, object)
    }

    fn update(self, name: &str) -> Result<Reply, Failure> {
        let object = self.sent_object()?;
        let Some(before) = self.store.get(&self.key(name)) else {
            return if self.kind.put_creates {
                self.stored(StatusCode::CREATED, object)
            } else {
                Err(Failure::not_found(self.kind, name))
            };
        };
        if !self.kind.put_without_version && text(&object, VERSION).is_empty() {
            let what = format!("{} {name:?}", self.kind.resource());
            let why = "an update needs metadata.resourceVersion";
            return Err(Failure::invalid(&what, why));
        }
        self.same_version(before, &object)?;
        self.stored(StatusCode::OK, object)
    }

    fn patch(self, name: &str) -> Result<Reply, Failure> {
        let patch = self.call.json(&[MERGE, STRATEGIC, APPLY])?;
        let before = self.store.get(&self.key(name)).cloned();
        let (status, mut object) = match &before {
            Some(before) => (StatusCode::OK, before.clone()),
            None if self.call.media_type == APPLY => (StatusCode::CREATED, json!({})),
            None => return Err(Failure::not_found(self.kind, name)),
        };
        merge(&mut object, &patch);
        let object = self.placed(object)?;
        if let Some(before) = &before {
            self.same_version(before, &object)?;
        }
        self.stored(status, object)
    }

    fn delete(self, name: &str) -> Result<Reply, Failure> {
        let before = self.found(name)?;
        if !self.call.body.is_empty() {
            let options = self.call.json(&[JSON])?;
            for field in ["uid", "resourceVersion"] {
                let wanted = text(&options, &format!("/preconditions/{field}"));
                let actual = text(before, &format!("/metadata/{field}"));
                if !wanted.is_empty() && wanted != actual {
                    let why = format!("its {field} is {actual}, not {wanted}");
                    return Err(Failure::conflict(self.kind, name, &why));
                }
            }
        }
        let status = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Success",
            "details": {
                "name": name,
                "group": self.kind.group(),
                "kind": self.kind.plural,
                "uid": text(before, "/metadata/uid"),
            },
        });
        let key = self.key(name);
        self.store.remove(self.kind, &key);
        Ok(Reply::Object(StatusCode::OK, status))
    }

    fn key(&self, name: &str) -> Key {
        let namespace = self.address.namespace.clone();
        let namespace = namespace.unwrap_or_default();
        (self.kind.plural, namespace, name.to_owned())
    }

    fn found(&self, name: &str) -> Result<&Value, Failure> {
        let found = self.store.get(&self.key(name));
        found.ok_or_else(|| Failure::not_found(self.kind, name))
    }

    fn filter(&self) -> Result<Filter, Failure> {
        Filter::new(self.address, &self.call.query).map_err(Failure::bad_request)
    }

    /// Returns a number from the query; 0 if the parameter is missing.
    fn number(&self, name: &str) -> Result<u64, Failure> {
        let number = self.call.query.get(name).unwrap_or("0");
        number
            .parse()
            .map_err(|_| Failure::bad_request(format!("{name} is not a number: {number:?}")))
    }

    fn stored(self, status: StatusCode, object: Value) -> Result<Reply, Failure> {
        Ok(Reply::Object(status, self.store.set(self.kind, object)))
    }

    /// Returns the object in the body, with namespace and name from the URL.
    fn sent_object(&self) -> Result<Value, Failure> {
        self.placed(self.call.json(&[JSON])?)
    }

    /// Returns the object with namespace and name from the URL. Fails if the object contradicts the URL, or
    /// has no name in either place.
    fn placed(&self, mut object: Value) -> Result<Value, Failure> {
        let kind = text(&object, "/kind");
        if !kind.is_empty() && kind != self.kind.name {
            let message = format!(
                "the body is a {kind}, but the URL is for a {}",
                self.kind.name
            );
            return Err(Failure::bad_request(message));
        }
        let places = [
            ("namespace", &self.address.namespace),
            ("name", &self.address.name),
        ];
        for (field, place) in places {
            let Some(place) = place else { continue };
            let given = text(&object, &format!("/metadata/{field}"));
            if !given.is_empty() && given != place {
                let message = format!("the object's {field} is {given}, but the URL has {place}");
                return Err(Failure::bad_request(message));
            }
            object["metadata"][field] = json!(place);
        }
        if text(&object, "/metadata/name").is_empty() {
            let why = "metadata.name is required";
            return Err(Failure::invalid(self.kind.name, why));
        }
        Ok(object)
    }

    /// Fails if `object` has a version that differs from the version of `before`.
    fn same_version(&self, before: &Value, object: &Value) -> Result<(), Failure> {
        let (actual, wanted) = (text(before, VERSION), text(object, VERSION));
        if wanted.is_empty() || wanted == actual {
            return Ok(());
        }
        let why = format!(
            "the stored version is {actual}, not {wanted}; read the object again and repeat the change"
        );
        let name = text(before, "/metadata/name");
        Err(Failure::conflict(self.kind, name, &why))
    }
}

/// Applies a JSON merge patch (RFC 7396): null removes a field, an object is merged, and any other value
/// replaces the field.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (name, value) in fields {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(name);
        } else {
            merge(&mut target[name], value);
        }
    }
}
