//! The claim of an agent to a session. The secret of the session proves the claim at once; the review of the agent's token
//! follows while the link works, because reviews wait for the Kubernetes API.

use culvert_kube::tokens::AuthError;
use culvert_native::resume::{Process, ResumeRequest};
use tonic::metadata::MetadataMap;
use tracing::warn;

use super::super::agent::Hello;
use super::super::identity::AgentRefusal;
use super::super::resume::{Owner, Resumed};
use super::super::service::Agents;
use crate::listener::ListenerContext;
use crate::metrics::{RejectReason, ResumeOutcome};

/// Reason for the end of a link whose agent has a token that was refused.
const REFUSED: &str = "the token of the agent was refused when the link resumed";

/// Introduction of an agent that requests to resume a session.
pub(super) struct Claim {
    pub(super) request: ResumeRequest,
    pub(super) hello: Hello,
    pub(super) process: Option<Process>,
    /// Headers of the introduction, with the token.
    pub(super) metadata: MetadataMap,
}

impl Agents {
    /// Returns true if the session of `owner` may be the agent's, as far as this is known without a review of its token.
    pub(super) fn may_own(&self, claim: &Claim, owner: &Owner) -> bool {
        // An id that comes from an identity is compared with the identity.
        let has_id = self.id_from.is_some() || claim.hello.agent_id == owner.agent_id;
        has_id && self.peer.common_name() == owner.common_name && claim.process == owner.process
    }

    /// Reviews the token of an agent whose link has resumed. A refused token, or the token of another identity, ends the
    /// link. If the review has no outcome, the link stays: its token was accepted when the link began, and a link that
    /// does not break gets no further review either.
    pub(super) async fn confirm(&self, context: &ListenerContext, claim: Claim, resumed: &Resumed) {
        let Claim {
            mut hello,
            process,
            metadata,
            ..
        } = claim;
        let review = async {
            let _turn = resumed.turn().await?;
            let identity = self.authenticate(&metadata, &mut hello).await;
            Some(identity.map(|identity| self.owner(&hello, identity, process)))
        };
        let reviewed = tokio::select! {
            reviewed = review => reviewed,
            () = resumed.ended() => return,
            () = context.shutdown.cancelled() => return,
        };
        let agent = &resumed.owner().agent_id;
        let (reason, why) = match reviewed {
            Some(Ok(owner)) if owner != *resumed.owner() => {
                let why = "its identity is not the identity of the link".to_owned();
                (RejectReason::Unauthenticated, why)
            }
            Some(Err(AgentRefusal::Token(AuthError::NotReviewed(error)))) => {
                self.sessions.count(ResumeOutcome::Unreviewed);
                warn!(
                    agent,
                    error,
                    "the token of an agent that has resumed its link was not reviewed; the link stays"
                );
                return;
            }
            Some(Err(refusal)) => (refusal.reason(), refusal.to_string()),
            // Or a later request has the link.
            Some(Ok(_)) | None => return self.sessions.count(ResumeOutcome::Resumed),
        };
        resumed.revoke(REFUSED);
        self.sessions.count(ResumeOutcome::Refused);
        let why = format!("the link that the agent has resumed ends: {why}");
        self.reject(agent, reason, &why);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use culvert_native::resume::{Offer, Ticket, add_request, offer};
    use http::HeaderMap;

    use super::*;
    use crate::backend::identity::AgentIdFrom;
    use crate::backend::registry::AgentLimits;

    fn claim(agent_id: &str, process: Option<Process>) -> Claim {
        let mut headers = HeaderMap::new();
        add_request(&mut headers, &Ticket::random().unwrap(), "s", &[0; 32], 0);
        let Offer::Resume(request) = offer(&headers).unwrap() else {
            panic!("no request");
        };
        headers.insert("agentid", agent_id.parse().unwrap());
        let metadata = MetadataMap::from_headers(headers);
        Claim {
            request,
            hello: Hello::from_metadata(&metadata).unwrap(),
            process,
            metadata,
        }
    }

    #[test]
    fn claim_with_another_id_certificate_or_process_is_refused_without_a_review() {
        let mut agents = Agents::plain(AgentLimits::NONE);
        let process = Process::new(&["here"]);
        let owner = |common_name: Option<&str>, process| Owner {
            agent_id: "a".to_owned(),
            identity: "pod".into(),
            is_proven: true,
            common_name: common_name.map(Into::into),
            process,
        };
        assert!(agents.may_own(&claim("a", process), &owner(None, process)));
        assert!(!agents.may_own(&claim("b", process), &owner(None, process)));
        assert!(!agents.may_own(&claim("a", process), &owner(Some("node"), process)));
        for other in [None, Process::new(&["here"])] {
            assert!(!agents.may_own(&claim("a", other), &owner(None, process)));
        }
        // The review tells the id.
        agents.id_from = Some(AgentIdFrom::Token);
        assert!(agents.may_own(&claim("b", process), &owner(None, process)));
        assert!(!agents.may_own(&claim("a", process), &owner(Some("node"), process)));
    }
}
