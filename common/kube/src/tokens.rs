//! Authenticates agents by their service account tokens. The agents' own cluster reviews each token
//! (TokenReview). The rules and the error texts are upstream's (`pkg/server/server.go`).
//!
//! The answer must list the requested audience; otherwise the API may have ignored the audience. Upstream has no such
//! check.
//!
//! The server remembers the hash of an accepted token for [`REMEMBER`]. Agents with the same token cost one
//! review, even if all of them reconnect at once or look for further servers every second. Agents share the
//! outcome of a pending review, good or bad. After a refusal, or without an answer, the next agent with the
//! token causes a new review.
//!
//! A review that the API has received goes on without the agents that wait for it. While many agents connect and the API is
//! slow, newer agents displace the waiting ones, which try again later: without the answers, none would ever be accepted.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use k8s_openapi::api::authentication::v1::{
    TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo,
};
use kube::api::PostParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use rand::Rng as _;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::metadata::MetadataMap;

use crate::pace::{Pace, Pacer};
use crate::request::reason;
use crate::turns::{Turn, Turns};

/// Time for which an accepted token is accepted without another review. A token revoked within this time still
/// opens streams; open streams stay open in any case, as in upstream.
pub const REMEMBER: Duration = Duration::from_secs(10);

/// The same for a token whose agents have left before the answer: longer than the pause of agents between two attempts, 11 s
/// at most by default (`--sync-interval-cap`).
const REMEMBER_UNSEEN: Duration = Duration::from_secs(30);

/// Longest time for one review with its repeats, counted from the start of its turn.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// Number of repeats of a review that an overloaded API refuses. A review keeps its turn meanwhile, so repeats do not add
/// reviews in progress.
const REPEATS: u32 = 2;

/// Shortest pause before the first repeat, equal to the `Retry-After` of an overloaded kube-apiserver. The second pause is
/// twice as long. The actual pause is random, up to half longer.
const REPEAT_PAUSE: Duration = Duration::from_secs(1);

/// Longest wait of a review for its turn, equal to the time a peer has for its handshake: the native transport
/// waits no longer, and stock agents do not wait forever.
const TURN_TIMEOUT: Duration = Duration::from_secs(15);

/// Largest number of reviews in progress at once.
const REVIEWS: usize = 16;

/// Permission of the account that requests reviews, and the role that grants it.
const PERMISSION: &str =
    "create tokenreviews.authentication.k8s.io (ClusterRole system:auth-delegator)";

/// Remedy if the API cannot be reached.
const ADVICE: &str = "; the server asks the API of its --kubeconfig, or of its own cluster: check address, CA and network";

/// Key in the user's extra fields with the name of the pod that a token is bound to (Kubernetes'
/// `pkg/serviceaccount`).
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// Largest number of tokens to remember. Beyond this number, a new token is reviewed every time.
const MAX_REMEMBERED: usize = 10_000;

/// Requirements for agents' tokens, and the account that requests the reviews.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAuth {
    /// Namespace of the service account.
    pub namespace: String,
    /// Name of the service account.
    pub service_account: String,
    /// Audience of the tokens.
    pub audience: String,
    /// Kubeconfig of the account that requests reviews; `None` means the pod's own account.
    pub kubeconfig: Option<PathBuf>,
    /// Limit of reviews per time; `None` sets no limit.
    pub pace: Option<Pace>,
}

/// The account of an accepted token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Name of the pod that the token is bound to; `None` if the token is not bound to a pod.
    pub pod: Option<Arc<str>>,
}

/// Reason for refusing an agent. The texts are upstream's and never contain the token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The `authorization` metadata is missing.
    #[error("Authentication context was not found in metadata")]
    Missing,
    /// More than one `authorization` value.
    #[error("too many ({0}) tokens are received")]
    Several(usize),
    /// The authorization scheme is not `Bearer`.
    #[error("received token does not have \"Bearer \" prefix")]
    Scheme,
    /// The API refused the token.
    #[error("Failed to validate authentication token, err:{0}")]
    Invalid(String),
    /// The review of the token has no outcome.
    #[error("Failed to validate authentication token, err:{0}")]
    NotReviewed(String),
}

/// Reviews tokens and remembers the accepted ones.
pub struct Tokens {
    reviews: Api<TokenReview>,
    auth: AgentAuth,
    turns: Arc<Turns>,
    pacer: Option<Pacer>,
    known: Mutex<HashMap<[u8; 32], Known>>,
}

type Outcome = BoxFuture<'static, Result<Account, AuthError>>;

/// State of one token.
enum Known {
    /// A review waits for its turn as long as a caller waits for the outcome. Every waiting caller drives the
    /// review, so the review continues when the first caller leaves.
    Waiting(WeakShared<Outcome>),
    /// The API is asked, by a task of its own.
    Asked(Shared<Outcome>),
    /// The token is accepted until this time.
    Accepted(Instant, Account),
}

// === impl Tokens ===

impl Tokens {
    /// Reviews tokens with the account of `client`.
    pub fn new(client: Client, auth: AgentAuth) -> Self {
        Self {
            reviews: Api::all(client),
            pacer: auth.pace.map(Pacer::new),
            auth,
            turns: Turns::new(REVIEWS),
            known: Mutex::default(),
        }
    }

    /// Checks the token of an agent. `from` is the agent's address: while many reviews wait, hosts take turns.
    ///
    /// # Errors
    /// [`AuthError`] if the agent is refused.
    pub async fn check(
        self: &Arc<Self>,
        metadata: &MetadataMap,
        from: IpAddr,
    ) -> Result<Account, AuthError> {
        let values: Vec<_> = metadata.get_all("authorization").iter().collect();
        let value = match values.as_slice() {
            [] => return Err(AuthError::Missing),
            [value] => value,
            several => return Err(AuthError::Several(several.len())),
        };
        let token = value.as_bytes().strip_prefix(b"Bearer ");
        let token = token.and_then(|token| std::str::from_utf8(token).ok());
        let token = token.ok_or(AuthError::Scheme)?;
        match self.pending(token, from) {
            Ok(account) => Ok(account),
            Err(review) => review.await,
        }
    }

    /// Returns the account of a token that was accepted recently. Otherwise returns the review to wait for,
    /// shared by all callers with the same token.
    fn pending(self: &Arc<Self>, token: &str, from: IpAddr) -> Result<Account, Shared<Outcome>> {
        let digest = digest(token);
        let mut known = self.known.lock();
        match known.get(&digest) {
            Some(Known::Accepted(until, account)) if Instant::now() < *until => {
                return Ok(account.clone());
            }
            // A finished review is still here only if its task has failed.
            Some(Known::Asked(review)) if review.peek().is_none() => return Err(review.clone()),
            Some(Known::Waiting(review)) => {
                if let Some(review) = review.upgrade() {
                    return Err(review);
                }
            }
            _ => {}
        }
        let (tokens, token) = (self.clone(), token.to_owned());
        let review = async move {
            match timeout(TURN_TIMEOUT, tokens.turn(from)).await {
                Ok(turn) => tokens.ask(digest, token, turn).await,
                Err(_) => {
                    tokens.known.lock().remove(&digest);
                    Err(failed(format!(
                        "no turn for a TokenReview within {TURN_TIMEOUT:?}"
                    )))
                }
            }
        };
        let review = review.boxed().shared();
        if known.len() >= MAX_REMEMBERED {
            known.retain(|_, token| match token {
                Known::Waiting(review) => review.upgrade().is_some(),
                Known::Asked(_) => true,
                Known::Accepted(until, _) => Instant::now() < *until,
            });
        }
        if known.len() < MAX_REMEMBERED
            && let Some(review) = review.downgrade()
        {
            known.insert(digest, Known::Waiting(review));
        }
        Err(review)
    }

    /// Starts the review of a token.
    fn ask(self: &Arc<Self>, digest: [u8; 32], token: String, turn: Turn) -> Shared<Outcome> {
        // The task cannot end before its entry is here.
        let mut known = self.known.lock();
        let tokens = self.clone();
        let task = tokio::spawn(async move {
            let outcome = tokens.review(&token).await;
            tokens.answered(&digest, &outcome);
            drop(turn);
            outcome
        });
        let outcome = async move {
            let ended = task.await;
            ended.unwrap_or_else(|error| Err(failed(error.to_string())))
        };
        let outcome = outcome.boxed().shared();
        if let Some(known) = known.get_mut(&digest) {
            *known = Known::Asked(outcome.clone());
        }
        outcome
    }

    /// Remembers the outcome of a review. No further caller can join the review.
    fn answered(&self, digest: &[u8; 32], outcome: &Result<Account, AuthError>) {
        let mut known = self.known.lock();
        match (outcome, known.get_mut(digest)) {
            (Ok(account), Some(known)) => {
                let owners = match known {
                    Known::Asked(review) => review.strong_count(),
                    _ => None,
                };
                let time = match owners {
                    Some(0..=1) => REMEMBER_UNSEEN,
                    _ => REMEMBER,
                };
                *known = Known::Accepted(Instant::now() + time, account.clone());
            }
            _ => drop(known.remove(digest)),
        }
    }

    async fn review(&self, token: &str) -> Result<Account, AuthError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: Some(vec![self.auth.audience.clone()]),
            },
            ..TokenReview::default()
        };
        let (params, end) = (PostParams::default(), Instant::now() + REVIEW_TIMEOUT);
        let mut refused = 0;
        let answer = loop {
            let asked = self.reviews.create(&params, &review);
            let answer = timeout_at(end, asked).await.map_err(|_| {
                failed(format!(
                    "no answer to the TokenReview within {REVIEW_TIMEOUT:?}{ADVICE}"
                ))
            })?;
            let error = match answer {
                Ok(answer) => break answer,
                Err(error) => error,
            };
            refused += 1;
            let may_repeat = is_overload(&error)
                && refused <= REPEATS
                && timeout_at(end, self.pause(refused)).await.is_ok();
            if !may_repeat {
                let why = reason(&error, || PERMISSION.to_owned());
                let advice = match error {
                    kube::Error::Api(_) => "",
                    _ => ADVICE,
                };
                return Err(failed(format!(
                    "the Kubernetes API of the server: {why}{advice}"
                )));
            }
        };
        let status = answer.status.unwrap_or_default();
        self.account(status).map_err(AuthError::Invalid)
    }

    /// Waits until a review may be repeated.
    async fn pause(&self, refused: u32) {
        let pause = (REPEAT_PAUSE * refused).mul_f64(rand::rng().random_range(1.0..=1.5));
        sleep(pause).await;
        self.keep_pace().await;
    }

    /// Returns the account of a reviewed token, or the reason of the refusal.
    fn account(&self, status: TokenReviewStatus) -> Result<Account, String> {
        if let Some(error) = status.error.filter(|error| !error.is_empty()) {
            return Err(format!("lookup failed: {error}"));
        }
        if status.authenticated != Some(true) {
            return Err("lookup failed: service account jwt not valid".into());
        }
        let user = status.user.unwrap_or_default();
        self.is_ours(user.username.as_deref().unwrap_or_default())?;
        let (audience, audiences) = (&self.auth.audience, status.audiences.unwrap_or_default());
        if !audiences.contains(audience) {
            return Err(format!(
                "lookup failed: the token is valid for the audiences {audiences:?}. Expected {audience:?}"
            ));
        }
        Ok(Account { pod: pod(user) })
    }

    /// Waits until a review may start. Only a review that has its turn waits for the pace, so reviews that give up
    /// early do not delay others.
    async fn turn(&self, from: IpAddr) -> Turn {
        let turn = self.turns.take(from).await;
        self.keep_pace().await;
        turn
    }

    async fn keep_pace(&self) {
        if let Some(pacer) = &self.pacer {
            pacer.wait().await;
        }
    }

    /// Checks that a user is the agents' service account.
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

/// Returns true if the API, or a proxy in front of it, has no capacity for the request at the moment.
fn is_overload(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 429 | 502 | 503 | 504))
}

/// Returns the error of a review without an outcome.
fn failed(why: String) -> AuthError {
    AuthError::NotReviewed(format!("Failed to authenticate request. err:{why}"))
}

/// Returns the name of the pod that the token of a user is bound to.
fn pod(mut user: UserInfo) -> Option<Arc<str>> {
    let names = user.extra.as_mut()?.remove(POD_NAME)?;
    match names.as_slice() {
        [name] if !name.is_empty() => Some(name.as_str().into()),
        _ => None,
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
