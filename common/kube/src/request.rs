//! A single request to the Kubernetes API for one object, with a time limit and error texts for operators.

use std::fmt;
use std::time::Duration;

use culvert_host::telemetry::log_once::LogOnce;
use kube::api::PostParams;
use tokio::time::timeout;
use tracing::{error, info};

use crate::client::root;

/// The object of a request.
#[derive(Clone, Debug)]
pub struct Target {
    /// Kind of the object, as in `Service`.
    pub kind: &'static str,
    /// Name of the resource in roles, as in `services`.
    pub resource: &'static str,
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

/// Reason why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// Another writer has changed the object since it was read.
    #[error("{what}: another writer has changed it; it is read again")]
    Conflict {
        /// The attempted request and its object.
        what: String,
    },
    /// The object does not exist.
    #[error("there is no {what}: create it, or correct the flags that name it")]
    Missing {
        /// The requested object.
        what: String,
    },
    /// Any other failure.
    #[error("{what}: {why}")]
    Failed {
        /// The attempted request and its object.
        what: String,
        /// Message from the API and the remedy, or the reason for the missing answer.
        why: String,
    },
}

impl RequestError {
    /// Returns true if the object must be read again.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }
}

/// Failures of the requests for one object, each logged once, and again while the failures last; see [`LogOnce`].
#[derive(Debug, Default)]
pub struct FailureLog(LogOnce);

impl FailureLog {
    /// Logs an error that is new, or has lasted for long. A conflict is not a failure.
    pub fn failed(&mut self, error: &RequestError) {
        if error.is_conflict() {
            return info!("{error}");
        }
        let text = error.to_string();
        if let Some(due) = self.0.failed(&text) {
            let (attempts, failing_seconds) = (due.attempts, due.failing_seconds);
            error!(attempts, failing_seconds, "{text}");
        }
    }

    /// Logs the recovery after a failure.
    pub fn succeeded(&mut self, target: &Target) {
        if self.0.has_recovered() {
            info!("{target} can be used again");
        }
    }
}

/// Awaits an answer for at most `limit`; `verb` is the name of the permission in roles.
pub async fn request<T>(
    verb: &'static str,
    target: &Target,
    limit: Duration,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, RequestError> {
    let what = format!("cannot {verb} {target}");
    let why = match timeout(limit, call).await {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
            return Err(RequestError::Conflict { what });
        }
        Ok(Err(error)) => reason(&error, || {
            let (resource, namespace) = (target.resource, &target.namespace);
            format!("{verb} {resource} in namespace {namespace}")
        }),
        Err(_) => format!("no answer within {limit:?}"),
    };
    Err(RequestError::Failed { what, why })
}

/// Returns the reason of a failed request: the message of the API, or the innermost cause. `permission` completes
/// the advice "allow the account to ...".
pub(crate) fn reason(error: &kube::Error, permission: impl FnOnce() -> String) -> String {
    let kube::Error::Api(status) = error else {
        return root(error);
    };
    match status.code {
        401 => format!(
            "{}; the API does not accept the caller's own credentials: renew the certificate or token of --kubeconfig, \
             or of the pod's account",
            status.message
        ),
        403 => format!("{}; allow the account to {}", status.message, permission()),
        code => format!("{} ({code})", status.message),
    }
}

/// Returns the parameters of every write: the writer's name for `managedFields`.
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
    async fn errors_contain_the_remedy() {
        let conflict = fails("update", status(409)).await;
        assert!(conflict.is_conflict(), "{conflict}");
        let forbidden = fails("update", status(403)).await.to_string();
        let advice = "says the API; allow the account to update services in namespace kubermatic";
        assert!(forbidden.contains(advice), "{forbidden}");
        let unauthorized = fails("get", status(401)).await.to_string();
        let advice = "says the API; the API does not accept the caller's own credentials: renew the certificate or token";
        assert!(unauthorized.contains(advice), "{unauthorized}");
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
