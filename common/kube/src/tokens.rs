//! Authenticates agents by their service account tokens, with TokenReviews of the cluster that
//! they come from. The rules and the texts are upstream's (`pkg/server/server.go`).
//!
//! An accepted token is remembered for [`REMEMBER`], by its hash: agents that all reconnect at
//! once, and those that look for further servers every second, cost one review. All who present a
//! token while it is asked about share the outcome, whatever it is; what was refused, or not
//! answered, is asked for again by those who come later.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tonic::metadata::MetadataMap;

use crate::client::client;

/// How long an accepted token is accepted without asking again. A token that is revoked meanwhile
/// still opens streams; those that are open stay anyway, as upstream.
pub const REMEMBER: Duration = Duration::from_secs(10);

/// How long one review may take, once it has its turn.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a review waits for its turn: as long as a peer has for its handshake. The native transport
/// waits no longer than that, and a stock agent must not wait forever.
const TURN_TIMEOUT: Duration = Duration::from_secs(15);

/// How many reviews are asked for at once.
const REVIEWS: usize = 16;

/// How many tokens are remembered; beyond, each is asked for anew.
const MAX_REMEMBERED: usize = 10_000;

/// Whose tokens are good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAuth {
    /// The namespace of the service account.
    pub namespace: String,
    /// Its name.
    pub service_account: String,
    /// Whom the tokens have to be for.
    pub audience: String,
    /// The account that asks for reviews; `None` is the pod's own.
    pub kubeconfig: Option<PathBuf>,
}

/// Why an agent is not let in; the texts are upstream's, and say no token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// No `authorization`.
    #[error("Authentication context was not found in metadata")]
    Missing,
    /// More than one.
    #[error("too many ({0}) tokens are received")]
    Several(usize),
    /// Another scheme.
    #[error("received token does not have \"Bearer \" prefix")]
    Scheme,
    /// The API refused the token, or could not be asked.
    #[error("Failed to validate authentication token, err:{0}")]
    Invalid(String),
}

/// Asks, and remembers.
pub struct Tokens {
    reviews: Api<TokenReview>,
    auth: AgentAuth,
    turns: Semaphore,
    known: Mutex<HashMap<[u8; 32], Known>>,
}

type Outcome = BoxFuture<'static, Result<(), String>>;

/// One token.
enum Known {
    /// Is asked about, as long as somebody waits for the outcome. Any of those drives the review,
    /// so that it does not end with who came first.
    Asked(WeakShared<Outcome>),
    /// Was accepted then.
    Accepted(Instant),
}

// === impl Tokens ===

impl Tokens {
    /// Reads the credentials of the account that asks.
    ///
    /// # Errors
    /// When they are missing or can not be used.
    pub async fn new(auth: AgentAuth) -> anyhow::Result<Self> {
        let client = client(auth.kubeconfig.as_deref()).await?;
        Ok(Self::with(client, auth))
    }

    fn with(client: Client, auth: AgentAuth) -> Self {
        Self {
            reviews: Api::all(client),
            auth,
            turns: Semaphore::new(REVIEWS),
            known: Mutex::default(),
        }
    }

    /// Lets an agent in, or says why not.
    ///
    /// # Errors
    /// [`AuthError`].
    pub async fn check(self: &Arc<Self>, metadata: &MetadataMap) -> Result<(), AuthError> {
        let values: Vec<_> = metadata.get_all("authorization").iter().collect();
        let value = match values.as_slice() {
            [] => return Err(AuthError::Missing),
            [value] => value,
            several => return Err(AuthError::Several(several.len())),
        };
        let token = value.as_bytes().strip_prefix(b"Bearer ");
        let token = token.and_then(|token| std::str::from_utf8(token).ok());
        let token = token.ok_or(AuthError::Scheme)?;
        match self.pending(token) {
            Some(review) => review.await.map_err(AuthError::Invalid),
            None => Ok(()),
        }
    }

    /// The review to wait for, which is another's if there is one; none if the token is known to
    /// be good.
    fn pending(self: &Arc<Self>, token: &str) -> Option<Shared<Outcome>> {
        let digest = digest(token);
        let mut known = self.known.lock();
        match known.get(&digest) {
            Some(Known::Accepted(at)) if at.elapsed() < REMEMBER => return None,
            Some(Known::Asked(review)) => {
                if let Some(review) = review.upgrade() {
                    return Some(review);
                }
            }
            _ => {}
        }
        let (tokens, token) = (self.clone(), token.to_owned());
        let review = async move {
            let outcome = tokens.review(&token).await;
            // Whoever comes from here on does not join.
            let mut known = tokens.known.lock();
            match (&outcome, known.get_mut(&digest)) {
                (Ok(()), Some(known)) => *known = Known::Accepted(Instant::now()),
                _ => drop(known.remove(&digest)),
            }
            outcome
        };
        let review = review.boxed().shared();
        if known.len() >= MAX_REMEMBERED {
            known.retain(|_, token| match token {
                Known::Asked(review) => review.upgrade().is_some(),
                Known::Accepted(at) => at.elapsed() < REMEMBER,
            });
        }
        if known.len() < MAX_REMEMBERED
            && let Some(review) = review.downgrade()
        {
            known.insert(digest, Known::Asked(review));
        }
        Some(review)
    }

    async fn review(&self, token: &str) -> Result<(), String> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: Some(vec![self.auth.audience.clone()]),
            },
            ..TokenReview::default()
        };
        let failed = |why: String| format!("Failed to authenticate request. err:{why}");
        let turn = timeout(TURN_TIMEOUT, self.turns.acquire()).await;
        let _turn =
            turn.map_err(|_| failed(format!("no turn for a TokenReview within {TURN_TIMEOUT:?}")))?;
        let params = PostParams::default();
        let asked = self.reviews.create(&params, &review);
        let answer = timeout(REVIEW_TIMEOUT, asked).await;
        let answer = answer
            .map_err(|_| {
                failed(format!(
                    "no answer to the TokenReview within {REVIEW_TIMEOUT:?}"
                ))
            })?
            .map_err(|error| failed(error.to_string()))?;
        let status = answer.status.unwrap_or_default();
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            return Err(format!("lookup failed: {error}"));
        }
        if status.authenticated != Some(true) {
            return Err("lookup failed: service account jwt not valid".into());
        }
        let user = status.user.and_then(|user| user.username);
        self.is_ours(&user.unwrap_or_default())
    }

    /// Whether that is the agents' service account.
    fn is_ours(&self, user: &str) -> Result<(), String> {
        let parts: Vec<&str> = user.split(':').collect();
        let [system, kind, namespace, name] = parts.as_slice() else {
            return Err("lookup failed: unexpected username format".into());
        };
        if [*system, *kind] != ["system", "serviceaccount"] {
            return Err("lookup failed: username returned is not a service account".into());
        }
        let AgentAuth {
            namespace: own_namespace,
            service_account: own_name,
            ..
        } = &self.auth;
        if namespace != own_namespace {
            return Err(format!(
                "lookup failed: incoming request from {namespace:?} namespace. Expected {own_namespace:?}"
            ));
        }
        if name != own_name {
            return Err(format!(
                "lookup failed: incoming request from {name:?} service account. Expected {own_name:?}"
            ));
        }
        Ok(())
    }
}

fn digest(token: &str) -> [u8; 32] {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, token.as_bytes());
    let mut digest = [0; 32];
    digest.copy_from_slice(hash.as_ref());
    digest
}

#[cfg(test)]
mod tests;
