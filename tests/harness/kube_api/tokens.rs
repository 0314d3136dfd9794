//! `TokenReview`: the results that the test sets for tokens, and a record of the reviews.

use serde_json::{Value, json};

use super::status::Failure;
use super::{State, remember, text};

/// Path that reviews are posted to.
pub(super) const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// Result of a review of a token.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenStatus {
    /// True if the token is valid.
    pub authenticated: bool,
    /// User of the token, for example `system:serviceaccount:kube-system:konnectivity-agent`.
    pub username: String,
    /// Audiences in the answer; `None` repeats the requested audiences.
    pub audiences: Option<Vec<String>>,
    /// Pod that the token is bound to; `None` for a token that is not bound to a pod.
    pub pod: Option<String>,
    /// Reason why the token is invalid, or why the review failed.
    pub error: String,
}

/// A review that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Review {
    /// The reviewed token.
    pub token: String,
    /// The requested audiences.
    pub audiences: Vec<String>,
}

// === impl TokenStatus ===

impl TokenStatus {
    /// Creates the result for a token that is valid for every audience.
    #[must_use]
    pub fn user(username: &str) -> Self {
        Self {
            authenticated: true,
            username: username.to_owned(),
            ..Self::default()
        }
    }

    /// Creates the result for an invalid token.
    #[must_use]
    pub fn rejected(error: &str) -> Self {
        Self {
            error: error.to_owned(),
            ..Self::default()
        }
    }

    /// Sets the audiences in the answer, independent of the requested audiences.
    #[must_use]
    pub fn audiences(mut self, audiences: &[&str]) -> Self {
        self.audiences = Some(audiences.iter().copied().map(String::from).collect());
        self
    }

    /// Binds the token to a pod.
    #[must_use]
    pub fn pod(mut self, name: &str) -> Self {
        self.pod = Some(name.to_owned());
        self
    }

    /// Returns the `status` of a review. As in Go's JSON, false and empty fields are omitted.
    fn object(&self, asked: &[String]) -> Value {
        let mut status = json!({"user": {}});
        if self.authenticated {
            status["authenticated"] = json!(true);
            status["audiences"] = json!(self.audiences.as_deref().unwrap_or(asked));
        }
        if !self.username.is_empty() {
            status["user"] = json!({"username": self.username, "groups": ["system:authenticated"]});
        }
        if let Some(pod) = &self.pod {
            let key = "authentication.kubernetes.io/pod-name";
            status["user"]["extra"] = json!({ key: [pod] });
        }
        if !self.error.is_empty() {
            status["error"] = json!(self.error);
        }
        status
    }
}

/// Answers a review.
pub(super) fn review(state: &mut State, mut object: Value) -> Result<Value, Failure> {
    let token = text(&object, "/spec/token").to_owned();
    if token.is_empty() {
        return Err(Failure::bad_request("the review has no spec.token"));
    }
    let asked = object.pointer("/spec/audiences").and_then(Value::as_array);
    let asked = asked.into_iter().flatten().filter_map(Value::as_str);
    let audiences: Vec<String> = asked.map(String::from).collect();
    object["apiVersion"] = json!("authentication.k8s.io/v1");
    object["kind"] = json!("TokenReview");
    object["status"] = match state.tokens.get(&token) {
        Some(status) => status.object(&audiences),
        None => TokenStatus::rejected("invalid bearer token").object(&audiences),
    };
    remember(&mut state.reviews, Review { token, audiences });
    Ok(object)
}
