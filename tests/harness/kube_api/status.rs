//! Errors as the `Status` objects that clients understand.

use http::StatusCode;
use serde_json::{Value, json};

use super::address::Kind;

/// The cause of a failed request.
#[derive(Debug, Clone)]
pub(super) struct Failure {
    code: StatusCode,
    /// The word that clients evaluate, because a status code can have several reasons.
    reason: &'static str,
    message: String,
    details: Value,
    retry_after: Option<u64>,
}

// === impl Failure ===

impl Failure {
    /// Creates a failure with the usual reason for its code.
    pub(super) fn new(code: StatusCode, message: impl Into<String>) -> Self {
        let reason = match code.as_u16() {
            400 => "BadRequest",
            401 => "Unauthorized",
            403 => "Forbidden",
            404 => "NotFound",
            405 => "MethodNotAllowed",
            409 => "Conflict",
            410 => "Expired",
            413 => "RequestEntityTooLarge",
            415 => "UnsupportedMediaType",
            422 => "Invalid",
            429 => "TooManyRequests",
            500 => "InternalError",
            503 => "ServiceUnavailable",
            504 => "Timeout",
            _ => "",
        };
        Self {
            code,
            reason,
            message: message.into(),
            details: json!({}),
            retry_after: None,
        }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} not found", kind.resource());
        Self::new(StatusCode::NOT_FOUND, message).about(kind, name)
    }

    pub(super) fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.resource());
        let conflict = Self::new(StatusCode::CONFLICT, message).about(kind, name);
        Self {
            reason: "AlreadyExists",
            ..conflict
        }
    }

    pub(super) fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let resource = kind.resource();
        let message = format!("{resource} {name:?} cannot be written: {why}");
        Self::new(StatusCode::CONFLICT, message).about(kind, name)
    }

    pub(super) fn invalid(what: &str, why: &str) -> Self {
        let message = format!("{what} is invalid: {why}");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, message)
    }

    /// Creates the failure of a watch that resumes from a version before the start of the log.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        let message = format!("too old resource version: {asked} ({oldest})");
        Self::new(StatusCode::GONE, message)
    }

    fn about(mut self, kind: &Kind, name: &str) -> Self {
        self.details = json!({"name": name, "group": kind.group(), "kind": kind.plural});
        self
    }

    /// Sets the number of seconds after which the client may retry; `None` leaves the number out.
    pub(super) fn retry_after(mut self, seconds: Option<u64>) -> Self {
        self.retry_after = seconds;
        if let Some(seconds) = seconds {
            self.details["retryAfterSeconds"] = json!(seconds);
        }
        self
    }

    /// Returns the HTTP status and the value of the `Retry-After` header.
    pub(super) fn head(&self) -> (StatusCode, Option<u64>) {
        (self.code, self.retry_after)
    }

    /// Returns the `Status` object.
    pub(super) fn object(&self) -> Value {
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code.as_u16(),
        })
    }
}
