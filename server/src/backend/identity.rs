//! The identity of an agent: what its client certificate or its token proves. Without authentication, the identity is
//! the id that the agent claims.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use culvert_host::tls::common_name;
use culvert_kube::tokens::{Account, AuthError};
use rustls::pki_types::CertificateDer;

use super::registry::NoPlace;
use crate::listener::path_aware::LinkPath;
use crate::metrics::RejectReason;

/// Source of agents' ids (`--agent-id-from`). The id that an agent claims is then ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentIdFrom {
    /// `certificate`: the common name of the client certificate.
    Certificate,
    /// `token`: the name of the pod that the service account token is bound to.
    Token,
}

/// The connection of an agent, before the agent's introduction.
#[derive(Clone)]
pub(crate) struct AgentPeer {
    /// Address of the agent, or of a load balancer.
    pub address: SocketAddr,
    /// Common name of the agent's certificate, empty if the certificate has no usable name. `None` without a
    /// certificate.
    common_name: Option<Arc<str>>,
    /// Tells the connection's socket about the path of the agent's link.
    pub path: LinkPath,
}

/// Reason for refusing an agent. The agent receives the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AgentRefusal {
    /// The agent's token was not accepted or not reviewed.
    #[error(transparent)]
    Token(#[from] AuthError),
    /// The certificate or the token has no name of a single agent.
    #[error("{}", no_name(*.0))]
    NoName(AgentIdFrom),
    /// Too many agent connections.
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
}

// === impl AgentIdFrom ===

impl AgentIdFrom {
    /// Returns the value of `--agent-id-from`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Certificate => "certificate",
            Self::Token => "token",
        }
    }
}

// === impl AgentPeer ===

impl AgentPeer {
    /// Creates the peer of a connection from `address`. `certificates` is the chain that the TLS handshake has
    /// verified.
    pub(crate) fn new(address: SocketAddr, certificates: Option<&[CertificateDer<'_>]>) -> Self {
        // A socket for IPv4 and IPv6 reports IPv4 addresses as IPv6 addresses.
        let address = SocketAddr::new(address.ip().to_canonical(), address.port());
        let leaf = certificates.and_then(<[_]>::first);
        let common_name = leaf.map(|leaf| common_name(leaf).unwrap_or_default().into());
        Self {
            path: LinkPath::default(),
            address,
            common_name,
        }
    }

    /// Returns the common name of the agent's certificate.
    pub(crate) fn common_name(&self) -> Option<Arc<str>> {
        self.common_name.clone()
    }

    /// Returns the identity that the source `from` proves; without a source, the identity of the token, or else of
    /// the certificate. The identity is empty if the token or the certificate has no name of a single agent.
    /// Returns `None` for an agent that proves nothing.
    pub(crate) fn identity(
        &self,
        from: Option<AgentIdFrom>,
        account: Option<Account>,
    ) -> Option<Arc<str>> {
        let pod = account.map(|account| account.pod.unwrap_or_default());
        match from {
            Some(AgentIdFrom::Certificate) => self.common_name.clone(),
            Some(AgentIdFrom::Token) => pod,
            None => pod.or_else(|| self.common_name.clone()),
        }
    }
}

impl Default for AgentPeer {
    fn default() -> Self {
        Self::new((Ipv4Addr::UNSPECIFIED, 0).into(), None)
    }
}

// === impl AgentRefusal ===

impl AgentRefusal {
    /// Returns the reason for the metric.
    pub(crate) fn reason(&self) -> RejectReason {
        match self {
            Self::NoPlace(_) => RejectReason::TooManyConnections,
            Self::Token(AuthError::NotReviewed(_)) => RejectReason::ReviewFailed,
            Self::Token(_) | Self::NoName(_) => RejectReason::Unauthenticated,
        }
    }
}

fn no_name(id_from: AgentIdFrom) -> &'static str {
    match id_from {
        AgentIdFrom::Certificate => {
            "the server runs with --agent-id-from=certificate, and the agent's certificate does not have exactly one \
             printable common name; issue another certificate"
        }
        AgentIdFrom::Token => {
            "the server runs with --agent-id-from=token, and the agent's token is not bound to a pod; mount a \
             projected service account token"
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn configured_source_decides_if_an_agent_has_a_certificate_and_a_token() {
        let peer = AgentPeer {
            common_name: Some("node-7".into()),
            ..AgentPeer::default()
        };
        let token = |pod: Option<&str>| {
            Some(Account {
                pod: pod.map(Into::into),
            })
        };
        let identity = |from, pod| peer.identity(from, token(pod)).unwrap();
        let (certificate, from_token) = (Some(AgentIdFrom::Certificate), Some(AgentIdFrom::Token));
        assert_eq!(&*identity(certificate, Some("agent-x")), "node-7");
        assert_eq!(&*identity(certificate, None), "node-7");
        assert_eq!(&*identity(from_token, Some("agent-x")), "agent-x");
        assert_eq!(&*identity(from_token, None), "");
        assert_eq!(&*identity(None, Some("agent-x")), "agent-x");
        assert_eq!(peer.identity(None, None).as_deref(), Some("node-7"));
    }
}
