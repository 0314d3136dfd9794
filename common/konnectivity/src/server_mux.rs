//! The server's end of one agent stream, without I/O: which dials wait for an answer, which
//! connections are open, and what each packet of the agent means.
//!
//! Ids belong to this stream. Two streams of one agent id have a [`Mux`] each and can not reach
//! each other's connections. An agent that answers for ids it was not given gets a close back and
//! reaches nobody.

use std::collections::HashMap;

use bytes::Bytes;

use crate::message::{ConnectId, DialId, Message};

/// How many connections may wait for the agent's word that they are closed. They cost a map entry
/// each; beyond this number late packets of theirs are answered as stray ones.
const MAX_CLOSING: usize = 65_536;

/// The state of one agent stream. `T` is the handle by which the caller reaches a connection.
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
    /// We asked the agent to close; what still arrives is dropped.
    Closing,
}

/// What a packet of the agent means for the caller.
#[derive(Debug, PartialEq)]
pub enum Effect<T> {
    /// A dial succeeded; the connection is now open under this id.
    Opened(T, ConnectId),
    /// A dial failed at the agent, with its text.
    Refused(T, String),
    /// The agent gave up a dial.
    Abandoned(T),
    /// Bytes for a connection.
    Data(T, ConnectId, Bytes),
    /// The endpoint sends no more; the other direction stays open.
    HalfClosed(T),
    /// A connection is closed; the text is mostly empty.
    Closed(T, String),
    /// A dial response that nobody waits for, and the close to send if it opened something.
    Unrecognized(Option<Message>),
    /// A packet of no known connection: tell the agent to forget it.
    Stray(Message),
    /// The agent prefers to get no new dials.
    Drain,
    /// Nothing to do.
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
    /// Registers a dial. Gives the handle back if the id is taken or the stream ended.
    ///
    /// # Errors
    /// The handle, so that the caller can try another id.
    pub fn dial(&mut self, dial: DialId, handle: T) -> Result<(), T> {
        if self.ended || self.pending.contains_key(&dial) {
            return Err(handle);
        }
        self.pending.insert(dial, handle);
        Ok(())
    }

    /// Gives up a dial: what to tell the agent, if it still waits for an answer. A late answer is
    /// then a stray one and is closed.
    pub fn cancel(&mut self, dial: DialId) -> Option<Message> {
        self.pending.remove(&dial)?;
        Some(Message::CloseDial { dial })
    }

    /// Forgets a connection: what to tell the agent, unless it said itself that it is closed.
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

    /// Takes one packet of the agent.
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

    /// The stream ended: everything that was pending or open, for the caller to fail. Later dials
    /// are refused.
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

    /// How many dials wait for an answer, and how many connections are open.
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
            // An id that is open belongs to somebody else: closing it would let an agent's
            // mistake, or a late answer, end a connection that works.
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
