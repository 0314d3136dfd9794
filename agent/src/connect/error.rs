//! Reasons why an attempt to reach a server failed, with the remedy where the agent knows one.

use std::io;

use culvert_host::tls;
use culvert_konnectivity::grpc::CallError;
use culvert_native::hello::HelloError;

use crate::introduction::IntroductionError;

/// Refusal of an agent without a token: upstream's text (`pkg/server/server.go`), which Culvert servers send too.
const NO_TOKEN: &str = "Authentication context was not found in metadata";

/// Reason why an attempt failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    /// The server cannot be reached.
    #[error("cannot reach the server: {0}")]
    Unreachable(String),
    /// The outbound proxy from the environment does not work.
    #[error("cannot reach the server through the proxy of HTTPS_PROXY: {0}")]
    Proxy(String),
    /// The TLS handshake failed.
    #[error("TLS handshake with the server failed: {0}")]
    Tls(String),
    /// The server does not support HTTP/2.
    #[error("the server does not support HTTP/2: {0}")]
    Http(String),
    /// The agent cannot introduce itself.
    #[error(transparent)]
    Own(#[from] IntroductionError),
    /// The server refused the agent.
    #[error("the server refused this agent: {0}")]
    Refused(String),
    /// The connection ended before the answer.
    #[error("the connection ended before the server's answer: {0}")]
    Ended(String),
    /// The server's answer lacks required headers, or a header value is invalid.
    #[error("{0}")]
    Answer(String),
    /// A step took too long.
    #[error("timed out while {0}")]
    TimedOut(&'static str),
}

// === impl ConnectError ===

impl ConnectError {
    /// Returns the error for a refusal with this text.
    pub(crate) fn refused(text: &str) -> Self {
        let advice = match text.contains(NO_TOKEN) {
            true => "; this agent sends no token: set --service-account-token-path",
            false => "",
        };
        Self::Refused(format!("{text}{advice}"))
    }

    /// Returns the error for a connection that ended with this text, if the server refused the agent's certificate.
    pub(crate) fn refused_certificate(text: &str) -> Option<Self> {
        let why = tls::explain_refusal(text)?;
        Some(Self::Tls(format!("{why} (--agent-cert, --agent-key)")))
    }

    /// Returns the error for a connection that ended after the agent's end of the TLS handshake.
    fn ended(error: &io::Error) -> Self {
        if let Some(refused) = Self::refused_certificate(&error.to_string()) {
            return refused;
        }
        Self::Ended(match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
                "the server or a load balancer closed the connection; the server's log may have the reason".to_owned()
            }
            _ => error.to_string(),
        })
    }
}

impl From<HelloError> for ConnectError {
    fn from(error: HelloError) -> Self {
        match error {
            HelloError::Io(error) => Self::ended(&error),
            HelloError::Malformed(_) => Self::Answer(error.to_string()),
            HelloError::Refused(text) => Self::refused(&text),
        }
    }
}

impl From<CallError> for ConnectError {
    fn from(error: CallError) -> Self {
        match &error {
            CallError::NotGrpc(status) => Self::Answer(format!(
                "an HTTP proxy or another server answered (HTTP status {}): check --proxy-server-host and --proxy-server-port, and whether a server is ready",
                status.as_u16()
            )),
            CallError::Connection(broken) => match broken.get_io() {
                Some(broken) => Self::ended(broken),
                None => Self::refused(&error.to_string()),
            },
            _ => Self::refused(&error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_of_an_agent_without_a_token_names_the_flag() {
        let text = |text: &str| ConnectError::from(HelloError::Refused(text.into())).to_string();
        assert!(text(NO_TOKEN).ends_with("set --service-account-token-path"));
        assert_eq!(
            text("no such cluster"),
            "the server refused this agent: no such cluster"
        );
    }

    #[test]
    fn connection_that_ends_before_the_answer_is_not_a_refusal() {
        let text = |error: io::Error| ConnectError::from(HelloError::Io(error)).to_string();
        let end = text(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "peer closed connection without sending TLS close_notify: https://docs.rs/rustls/",
        ));
        assert!(
            end.starts_with("the connection ended before the server's answer: the server or"),
            "{end}"
        );
        let reset = text(io::ErrorKind::ConnectionReset.into());
        assert!(reset.ends_with("answer: connection reset"), "{reset}");
    }

    #[test]
    fn alert_about_the_client_certificate_names_the_flags() {
        let alert = io::Error::other("received fatal alert: CertificateRequired");
        let text = ConnectError::from(HelloError::Io(alert)).to_string();
        assert!(
            text.starts_with("TLS handshake with the server failed: the peer requires"),
            "{text}"
        );
        assert!(text.ends_with("(--agent-cert, --agent-key)"), "{text}");
    }
}
