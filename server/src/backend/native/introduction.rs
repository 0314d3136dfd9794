//! The introduction of a native agent: authentication, and the answer.

use std::io::ErrorKind;

use culvert_konnectivity::message::{SERVER_COUNT_HEADER, SERVER_ID_HEADER};
use culvert_native::COUNT_PUSHED_HEADER;
use culvert_native::hello::{self, HelloError};
use culvert_native::resume::{self, Binding, Offer, Process, Ticket};
use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::metadata::MetadataMap;

use super::super::Place;
use super::super::agent::Hello;
use super::super::announced::{Announced, Announcements};
use super::super::identity::AgentRefusal;
use super::super::resume::{Owner, Resumption};
use super::super::second_link::Offered;
use super::super::service::Agents;
use super::claim::Claim;
use super::has_left;

/// Result of an introduction.
pub(super) enum Introduced {
    /// The agent is accepted.
    New(Box<NewAgent>),
    /// The agent is already connected.
    AlreadyConnected,
    /// The connection continues a session; see [`Agents::confirm`] for the claim.
    Resumed(Resumption, Box<Claim>),
    /// The agent asked for a session that does not exist here.
    NotResumed,
}

/// An accepted agent.
pub(super) struct NewAgent {
    pub(super) hello: Hello,
    pub(super) place: Place,
    pub(super) announcements: Announcements,
    pub(super) owner: Owner,
    /// Ticket that the agent has received; `None` if the link cannot resume.
    pub(super) ticket: Option<Ticket>,
    /// The agent's second link, over QUIC. `None` if the server offers no QUIC.
    pub(super) offered: Option<Offered>,
}

/// Reason why no agent was introduced.
#[derive(Debug, thiserror::Error)]
pub(super) enum IntroductionError {
    /// The peer did not complete an introduction.
    #[error(transparent)]
    Hello(#[from] HelloError),
    /// The agent was refused.
    #[error("{refusal}")]
    Agent {
        /// Id of the agent, as in [`Hello`].
        agent_id: String,
        /// Reason that the agent has received.
        refusal: AgentRefusal,
    },
}

impl Agents {
    /// Answers the introduction, except for a session that continues.
    pub(super) async fn introduce<S>(
        &self,
        stream: &mut S,
        binding: Option<Binding>,
    ) -> Result<Introduced, IntroductionError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let headers = hello::read(stream).await?;
        let offer = resume::offer(&headers)?;
        let process = Process::of(&headers);
        let is_connected = hello::has_connected(&headers, &self.server_id);
        let metadata = MetadataMap::from_headers(headers);
        let mut hello = match Hello::from_metadata(&metadata) {
            Ok(hello) => hello,
            Err(text) => {
                let refused = hello::refuse(stream, &text).await;
                refused.map_err(HelloError::Io)?;
                return Err(HelloError::Malformed(text).into());
            }
        };
        let is_new = offer == Offer::New;
        if let Offer::Resume(request) = offer {
            let claim = Claim {
                request,
                hello,
                process,
                metadata,
            };
            return self.find(stream, claim, binding.as_ref()).await;
        }
        if is_connected {
            // Before the review of the token, so that searching agents cost little.
            let answer = self.answer(*self.announced.borrow())?;
            let answered = hello::already_connected(stream, &answer).await;
            answered.map_err(HelloError::Io)?;
            return Ok(Introduced::AlreadyConnected);
        }
        let identified = match self.authenticate(&metadata, &mut hello).await {
            // An agent waits for less time than a review can take. One that has left must not take a place as an agent that is
            // away.
            Ok(_) if has_left(stream).await => {
                return Err(HelloError::Io(ErrorKind::UnexpectedEof.into()).into());
            }
            Ok(identity) => {
                let place = self.place(&identity, &hello);
                place.map(|place| (identity, place)).map_err(Into::into)
            }
            Err(error) => Err(error),
        };
        let (identity, place) = match identified {
            Ok(identified) => identified,
            Err(refusal) => {
                let refused = hello::refuse(stream, &refusal.to_string()).await;
                refused.map_err(HelloError::Io)?;
                let agent_id = hello.agent_id;
                return Err(IntroductionError::Agent { agent_id, refusal });
            }
        };
        let owner = self.owner(&hello, identity, process);
        let announced = *self.announced.borrow();
        let mut answer = self.answer(announced)?;
        let is_offered = is_new && binding.is_some();
        let ticket = is_offered.then(|| self.sessions.ticket()).flatten();
        if let Some(ticket) = &ticket {
            resume::add_ticket(&mut answer, ticket);
        }
        let links = self.second_links.as_ref();
        let offered = links.map(|links| links.begin(&owner, &mut answer));
        let accepted = hello::accept(stream, &answer).await;
        accepted.map_err(HelloError::Io)?;
        let announcements = Announcements::after(announced, self.announced.clone());
        Ok(Introduced::New(Box::new(NewAgent {
            hello,
            place,
            announcements,
            owner,
            ticket,
            offered,
        })))
    }

    /// Finds the session that an agent wants to resume, without a review of its token. Answers a request for another session.
    async fn find<S>(
        &self,
        stream: &mut S,
        claim: Claim,
        binding: Option<&Binding>,
    ) -> Result<Introduced, IntroductionError>
    where
        S: AsyncWrite + Unpin,
    {
        let request = &claim.request;
        let answered = match request.is_for(&self.server_id) {
            true => {
                let may_own = |owner: &Owner| self.may_own(&claim, owner);
                if let Some(resumption) = self.sessions.find(request, binding, may_own) {
                    return Ok(Introduced::Resumed(resumption, Box::new(claim)));
                }
                resume::over(stream).await
            }
            // The agent asks the next server at once.
            false => resume::misdirected(stream).await,
        };
        answered.map_err(HelloError::Io)?;
        Ok(Introduced::NotResumed)
    }

    /// Returns the headers for an agent.
    pub(in crate::backend) fn answer(&self, announced: Announced) -> Result<HeaderMap, HelloError> {
        let mut answer = HeaderMap::new();
        let server_id = HeaderValue::try_from(&self.server_id)
            .map_err(|_| HelloError::Malformed("the server id is not a header value".into()))?;
        answer.insert(SERVER_ID_HEADER, server_id);
        answer.insert(SERVER_COUNT_HEADER, announced.servers.into());
        if announced.follows {
            answer.insert(COUNT_PUSHED_HEADER, HeaderValue::from_static("1"));
        }
        Ok(answer)
    }
}
