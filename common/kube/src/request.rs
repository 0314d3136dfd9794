//! One request to the Kubernetes API about one object: bounded in time, and with errors that tell
//! an operator what to do.

use std::fmt;
use std::time::Duration;

use kube::api::PostParams;
use tokio::time::timeout;
use tracing::{error, info};

use crate::client::root;

/// What a request is about.
#[derive(Clone, Debug)]
pub struct Target {
    /// What objects of the kind are called.
    pub kind: &'static str,
    /// What roles call them.
    pub resource: &'static str,
    /// The object's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Another one has written the object since it was read.
    #[error("{what}: somebody else has written it meanwhile; it is read anew")]
    Conflict {
        /// What was tried, with what.
        what: String,
    },
    /// The account may not do that.
    #[error("{what}: {why}; allow the account to {verb} {resource} in namespace {namespace}")]
    Forbidden {
        /// What was tried, with what.
        what: String,
        /// The API's text.
        why: String,
        /// The verb that its role lacks.
        verb: &'static str,
        /// The resource in that role.
        resource: &'static str,
        /// Where it lacks it.
        namespace: String,
    },
    /// There is no such object.
    #[error("there is no {what}: create it, or correct the flags that name it")]
    Missing {
        /// What was looked for.
        what: String,
    },
    /// Nothing came back in time.
    #[error("{what}: no answer within {limit:?}")]
    Timeout {
        /// What was tried, with what.
        what: String,
        /// How long an answer may take.
        limit: Duration,
    },
    /// Anything else.
    #[error("{what}: {why}")]
    Failed {
        /// What was tried, with what.
        what: String,
        /// The API's text, or why there is none.
        why: String,
    },
}

impl RequestError {
    /// Whether the object has to be read anew.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }
}

/// What fails at present, so that the log has it once.
#[derive(Debug, Default)]
pub struct Failing(Option<String>);

impl Failing {
    /// Logs an error, unless it is the last one again. A conflict is none.
    pub fn say(&mut self, failed: &RequestError) {
        if failed.is_conflict() {
            return info!("{failed}");
        }
        let text = failed.to_string();
        if self.0.as_ref() != Some(&text) {
            error!("{text}");
            self.0 = Some(text);
        }
    }

    /// Logs that it works again, if it did not.
    pub fn over(&mut self, target: &Target) {
        if self.0.take().is_some() {
            info!("{target} can be used again");
        }
    }
}

/// Awaits an answer for at most `limit`; `verb` is what a role has to allow.
///
/// # Errors
/// [`RequestError`].
pub async fn request<T>(
    verb: &'static str,
    target: &Target,
    limit: Duration,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, RequestError> {
    let what = || format!("cannot {verb} {target}");
    let answer = timeout(limit, call).await;
    let error = match answer {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(error)) => error,
        Err(_) => {
            return Err(RequestError::Timeout {
                what: what(),
                limit,
            });
        }
    };
    let what = what();
    Err(match error {
        kube::Error::Api(status) if status.code == 409 => RequestError::Conflict { what },
        kube::Error::Api(status) if status.code == 403 => RequestError::Forbidden {
            what,
            why: status.message,
            verb,
            resource: target.resource,
            namespace: target.namespace.clone(),
        },
        kube::Error::Api(status) => {
            let why = format!("{} ({})", status.message, status.code);
            RequestError::Failed { what, why }
        }
        error => {
            let why = root(&error);
            RequestError::Failed { what, why }
        }
    })
}

/// Returns the parameters of every write by `program`, which Kubernetes keeps in `managedFields`.
pub fn writes(program: &str) -> PostParams {
    PostParams {
        field_manager: Some(program.to_owned()),
        ..PostParams::default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use kube::core::Status;

    use super::*;

    async fn fails(verb: &'static str, error: kube::Error) -> RequestError {
        let target = Target {
            kind: "Service",
            resource: "services",
            namespace: "kubermatic".to_owned(),
            name: "nodeport-proxy".to_owned(),
        };
        let call = async { Err::<(), _>(error) };
        request(verb, &target, Duration::from_secs(1), call)
            .await
            .unwrap_err()
    }

    fn status(code: u16) -> kube::Error {
        kube::Error::Api(Box::new(Status {
            code,
            message: "says the API".to_owned(),
            ..Status::default()
        }))
    }

    #[tokio::test]
    async fn errors_say_what_to_do() {
        let conflict = fails("update", status(409)).await;
        assert!(conflict.is_conflict(), "{conflict}");
        let forbidden = fails("update", status(403)).await.to_string();
        let advice = "says the API; allow the account to update services in namespace kubermatic";
        assert!(forbidden.contains(advice), "{forbidden}");
        let failed = fails("get", status(500)).await;
        assert_eq!(
            failed.to_string(),
            "cannot get Service kubermatic/nodeport-proxy: says the API (500)"
        );
        let refused = std::io::Error::other("connection refused");
        let failed = fails("get", kube::Error::Service(refused.into())).await;
        assert!(
            failed.to_string().ends_with(": connection refused"),
            "{failed}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn no_answer_is_an_error() {
        let target = Target {
            kind: "Service",
            resource: "services",
            namespace: "a".to_owned(),
            name: "b".to_owned(),
        };
        let never = std::future::pending::<kube::Result<()>>();
        let failed = request("get", &target, Duration::from_secs(1), never).await;
        let failed = failed.unwrap_err().to_string();
        assert_eq!(failed, "cannot get Service a/b: no answer within 1s");
    }
}
