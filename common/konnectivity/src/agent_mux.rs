//! The agent's end of one server stream, without I/O: which connections are there, and what each
//! packet of the server means. Connection ids count up from 1 on every stream, one for each dial,
//! also for those that fail. The error texts are upstream's.

use std::collections::HashMap;

use bytes::Bytes;
use culvert_stream::Dial;

use crate::message::{ConnectId, DialId, Message};

/// The state of one server stream. `T` is the handle by which the caller reaches a connection.
#[derive(Debug)]
pub struct Mux<T> {
    connections: HashMap<ConnectId, T>,
    dials: HashMap<DialId, ConnectId>,
    last: i64,
}

/// What a packet of the server means for the caller.
#[derive(Debug, PartialEq)]
pub enum Effect<T> {
    /// Dial a target; [`Mux::insert`] follows.
    Dial(DialId, ConnectId, Dial),
    /// The server gave a pending dial up; its entry is gone.
    Cancelled(T),
    /// Bytes for an endpoint.
    Data(T, ConnectId, Bytes),
    /// The client sends no more; the other direction stays open.
    HalfClosed(T),
    /// The client is gone: what was queued is still to be delivered. The entry is gone.
    Closed(T),
    /// A packet of no known connection: tell the server to forget it.
    Stray(Message),
    /// The server waits for this answer: a stock one keeps its connection until it comes.
    Answer(Message),
    /// Nothing to do.
    Ignored,
}

impl<T> Default for Mux<T> {
    fn default() -> Self {
        Self {
            connections: HashMap::new(),
            dials: HashMap::new(),
            last: 0,
        }
    }
}

impl<T: Clone> Mux<T> {
    /// Takes one packet of the server.
    pub fn on_message(&mut self, message: Message) -> Effect<T> {
        match message {
            Message::DialRequest {
                protocol,
                address,
                dial,
            } => {
                self.last += 1;
                Effect::Dial(dial, ConnectId(self.last), Dial { protocol, address })
            }
            Message::CloseDial { dial } => {
                let connection = self.dials.remove(&dial);
                connection
                    .and_then(|connection| self.connections.remove(&connection))
                    .map_or(Effect::Ignored, Effect::Cancelled)
            }
            Message::Data { connection, bytes } => match self.connections.get(&connection) {
                _ if connection == ConnectId(0) || bytes.is_empty() => Effect::Ignored,
                Some(handle) => Effect::Data(handle.clone(), connection, bytes),
                None => Effect::Stray(closed(connection, "unrecognized connectID")),
            },
            Message::HalfClose { connection } => match self.connections.get(&connection) {
                Some(handle) => Effect::HalfClosed(handle.clone()),
                None => Effect::Ignored,
            },
            Message::CloseRequest { connection } => match self.connections.remove(&connection) {
                Some(handle) => Effect::Closed(handle),
                None => Effect::Answer(closed(connection, "Unknown connectID")),
            },
            Message::DialResponse { .. }
            | Message::CloseResponse { .. }
            | Message::Drain
            | Message::Unknown(_) => Effect::Ignored,
        }
    }

    /// Enters a connection whose dial has begun.
    pub fn insert(&mut self, dial: DialId, connection: ConnectId, handle: T) {
        self.dials.insert(dial, connection);
        self.connections.insert(connection, handle);
    }

    /// The dial has an outcome: it can not be given up any more.
    pub fn dialed(&mut self, dial: DialId, connection: ConnectId) {
        if self.dials.get(&dial) == Some(&connection) {
            self.dials.remove(&dial);
        }
    }

    /// Forgets a connection that ended on our side.
    pub fn remove(&mut self, connection: ConnectId) {
        self.connections.remove(&connection);
    }

    /// How many connections there are, pending ones included.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }
}

/// The word that a connection is closed.
pub fn closed(connection: ConnectId, error: &str) -> Message {
    Message::CloseResponse {
        connection,
        error: error.to_owned(),
    }
}

#[cfg(test)]
mod tests;
