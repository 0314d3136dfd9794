//! `TokenReview`: what the test says of each token, and what was asked.

use serde_json::{Value, json};

use super::status::Failure;
use super::{State, remember, text};

/// Where reviews are posted.
pub(super) const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// What a review of a token says.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenStatus {
    /// Whether the token is good.
    pub authenticated: bool,
    /// Whose it is, such as `system:serviceaccount:kube-system:konnectivity-agent`.
    pub username: String,
    /// The audiences that it is good for among those asked for; nothing for all of them.
    pub audiences: Option<Vec<String>>,
    /// Why it is not good, or why that is not known.
    pub error: String,
}

/// One review that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Review {
    /// The token.
    pub token: String,
    /// The audiences asked for.
    pub audiences: Vec<String>,
}

// === impl TokenStatus ===

impl TokenStatus {
    /// The token is good, for every audience.
    #[must_use]
    pub fn user(username: &str) -> Self {
        Self {
            authenticated: true,
            username: username.to_owned(),
            ..Self::default()
        }
    }

    /// The token is not good.
    #[must_use]
    pub fn rejected(error: &str) -> Self {
        Self {
            error: error.to_owned(),
            ..Self::default()
        }
    }

    /// The same with these audiences in the answer, whatever was asked for.
    #[must_use]
    pub fn audiences(mut self, audiences: &[&str]) -> Self {
        self.audiences = Some(audiences.iter().copied().map(String::from).collect());
        self
    }

    /// The `status` of a review. As in Go's JSON, what is false or empty is left out.
    fn object(&self, asked: &[String]) -> Value {
        let mut status = json!({"user": {}});
        if self.authenticated {
            status["authenticated"] = json!(true);
            status["audiences"] = json!(self.audiences.as_deref().unwrap_or(asked));
        }
        if !self.username.is_empty() {
            status["user"] = json!({"username": self.username, "groups": ["system:authenticated"]});
        }
        if !self.error.is_empty() {
            status["error"] = json!(self.error);
        }
        status
    }
}

/// Answers one review.
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
