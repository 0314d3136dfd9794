//! The server's end of an agent stream, without I/O: pending dials, open connections, and the meaning of
//! each packet from the agent.
//!
//! Ids belong to this stream. Streams of the same agent id have separate [`Mux`] values and cannot reach
//! each other's connections. An agent that answers for unknown ids gets a close back and reaches no
//! connection.

use std::collections::HashMap;

use bytes::Bytes;

use crate::message::{ConnectId, DialId, Message};

/// Maximum number of connections that wait for the agent to confirm a close. A waiting connection costs a map
/// entry; beyond this number, late packets of closed connections count as stray.
const MAX_CLOSING: usize = 65_536;

/// State of an agent stream. `T` is the caller's handle of a connection.
#[derive(Debug)]
pub struct Mux<T> {
    pending: HashMap<DialId, T>,
    open: HashMap<ConnectId, State<T>>,
    closing: usize,
    ended: bool,
}

#[derive(Debug)]
enum State<T> {
    Open(T),
    /// A close request was sent to the agent; packets still arriving are dropped.
    Closing,
}

/// Meaning of an agent packet for the caller.
#[derive(Debug, PartialEq)]
pub enum Effect<T> {
    /// A dial succeeded; the connection is now open under this id.
    Opened(T, ConnectId),
    /// A dial failed at the agent; contains the agent's text.
    Refused(T, String),
    /// The agent abandoned a dial.
    Abandoned(T),
    /// Bytes for a connection.
    Data(T, ConnectId, Bytes),
    /// The endpoint has ended its direction; the other direction stays open.
    HalfClosed(T),
    /// The agent closed a connection; the text is usually empty.
    Closed(T, String),
    /// A response to an unknown dial, with the close to send if the agent opened a connection.
    Unrecognized(Option<Message>),
    /// A packet of an unknown connection, with the close to send to the agent.
    Stray(Message),
    /// The agent prefers to get no new dials.
    Drain,
    /// No action is required.
    Ignored,
}

impl<T> Default for Mux<T> {
    fn default() -> Self {
        Self {
            pending: HashMap::new(),
            open: HashMap::new(),
            closing: 0,
            ended: false,
        }
    }
}

impl<T: Clone> Mux<T> {
    /// Registers a dial.
    ///
    /// # Errors
    /// Returns the handle if the id is in use or the stream has ended, so that the caller can try another
    /// id.
    pub fn dial(&mut self, dial: DialId, handle: T) -> Result<(), T> {
        if self.ended || self.pending.contains_key(&dial) {
            return Err(handle);
        }
        self.pending.insert(dial, handle);
        Ok(())
    }

    /// Cancels a dial. Returns the message to the agent if the dial was still pending. A late answer is
    /// then unrecognized, and its connection gets closed.
    pub fn cancel(&mut self, dial: DialId) -> Option<Message> {
        self.pending.remove(&dial)?;
        Some(Message::CloseDial { dial })
    }

    /// Forgets a connection. Returns the close request to the agent, unless the agent closed the connection
    /// first.
    pub fn close(&mut self, connection: ConnectId) -> Option<Message> {
        match self.open.get_mut(&connection) {
            Some(state @ State::Open(_)) => {
                if self.closing < MAX_CLOSING {
                    *state = State::Closing;
                    self.closing += 1;
                } else {
                    self.open.remove(&connection);
                }
                Some(Message::CloseRequest { connection })
            }
            Some(State::Closing) | None => None,
        }
    }

    /// Processes a packet from the agent.
    pub fn on_message(&mut self, message: Message) -> Effect<T> {
        match message {
            Message::DialResponse {
                dial,
                connection,
                error,
            } => self.on_dial_response(dial, connection, error),
            Message::CloseDial { dial } => self
                .pending
                .remove(&dial)
                .map_or(Effect::Ignored, Effect::Abandoned),
            Message::Data { connection, bytes } => match self.open.get(&connection) {
                _ if connection == ConnectId(0) || bytes.is_empty() => Effect::Ignored,
                Some(State::Open(handle)) => Effect::Data(handle.clone(), connection, bytes),
                Some(State::Closing) => Effect::Ignored,
                None => Effect::Stray(Message::CloseRequest { connection }),
            },
            Message::HalfClose { connection } => match self.open.get(&connection) {
                Some(State::Open(handle)) => Effect::HalfClosed(handle.clone()),
                Some(State::Closing) | None => Effect::Ignored,
            },
            Message::CloseResponse { connection, error } => match self.open.remove(&connection) {
                Some(State::Open(handle)) => Effect::Closed(handle, error),
                Some(State::Closing) => {
                    self.closing -= 1;
                    Effect::Ignored
                }
                None => Effect::Ignored,
            },
            Message::Drain => Effect::Drain,
            Message::DialRequest { .. } | Message::CloseRequest { .. } | Message::Unknown(_) => {
                Effect::Ignored
            }
        }
    }

    /// Ends the stream. Returns the pending dials and the open connections, for the caller to fail. Later
    /// dials are refused.
    pub fn end(&mut self) -> (Vec<T>, Vec<T>) {
        self.ended = true;
        self.closing = 0;
        let pending = self.pending.drain().map(|(_, handle)| handle).collect();
        let open = self.open.drain().filter_map(|(_, state)| match state {
            State::Open(handle) => Some(handle),
            State::Closing => None,
        });
        (pending, open.collect())
    }

    /// Returns the number of pending dials and the number of open connections.
    pub fn counts(&self) -> (usize, usize) {
        (self.pending.len(), self.open.len() - self.closing)
    }

    fn on_dial_response(
        &mut self,
        dial: DialId,
        connection: ConnectId,
        error: String,
    ) -> Effect<T> {
        let Some(handle) = self.pending.remove(&dial) else {
            // If the connection id in this answer is already open, the id belongs to another dial, and no
            // close is sent: a close would end that working connection because of an agent's mistake or a
            // late answer.
            let orphan = connection != ConnectId(0) && !self.open.contains_key(&connection);
            return Effect::Unrecognized(orphan.then_some(Message::CloseRequest { connection }));
        };
        if !error.is_empty() {
            return Effect::Refused(handle, error);
        }
        if connection == ConnectId(0) || self.open.contains_key(&connection) {
            let text = format!(
                "agent answered with an unusable connection id {}",
                connection.0
            );
            return Effect::Refused(handle, text);
        }
        self.open.insert(connection, State::Open(handle.clone()));
        Effect::Opened(handle, connection)
    }
}

#[cfg(test)]
mod tests;
