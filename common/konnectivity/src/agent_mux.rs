//! The agent's end of one server stream, without I/O: a table of connections and the effect of each packet
//! from the server. Connection ids count up. Every dial uses an id, even if the dial fails. The error texts are
//! upstream's.

use std::collections::HashMap;

use bytes::Bytes;
use culvert_stream::Dial;

use crate::message::{ConnectId, DialId, Message};

/// State of one server stream. `T` is the caller's handle for a connection.
#[derive(Debug)]
pub struct Mux<T> {
    connections: HashMap<ConnectId, T>,
    dials: HashMap<DialId, ConnectId>,
    last: i64,
}

/// Action for the caller after a packet from the server.
#[derive(Debug, PartialEq)]
pub enum Effect<T> {
    /// Dial a target; the caller then calls [`Mux::insert`].
    Dial(DialId, ConnectId, Dial),
    /// The server cancelled a pending dial; the table entry is already removed.
    Cancelled(T),
    /// Bytes for an endpoint.
    Data(T, ConnectId, Bytes),
    /// The client has finished sending; the other direction stays open.
    HalfClosed(T),
    /// The client is gone and the table entry is removed. Queued bytes must still reach the endpoint.
    Closed(T),
    /// The packet belongs to no known connection. Send this reply, so that the server forgets the connection.
    Stray(Message),
    /// Send this reply. A stock server keeps the connection until the reply arrives.
    Answer(Message),
    /// No action needed.
    Ignored,
}

impl<T> Default for Mux<T> {
    fn default() -> Self {
        Self::after(ConnectId(0))
    }
}

impl<T> Mux<T> {
    /// Creates a table whose connection ids count up from the id after `last`.
    pub fn after(last: ConnectId) -> Self {
        Self {
            connections: HashMap::new(),
            dials: HashMap::new(),
            last: last.0,
        }
    }
}

impl<T: Clone> Mux<T> {
    /// Processes one packet from the server.
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

    /// Adds a connection after its dial started.
    pub fn insert(&mut self, dial: DialId, connection: ConnectId, handle: T) {
        self.dials.insert(dial, connection);
        self.connections.insert(connection, handle);
    }

    /// Marks a dial as finished, so that the server can no longer cancel the dial.
    pub fn dialed(&mut self, dial: DialId, connection: ConnectId) {
        if self.dials.get(&dial) == Some(&connection) {
            self.dials.remove(&dial);
        }
    }

    /// Removes a connection that ended on the agent's side.
    pub fn remove(&mut self, connection: ConnectId) {
        self.connections.remove(&connection);
    }

    /// Returns the number of connections, including pending dials.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// True if the table is empty.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }
}

/// Returns the message that reports a closed connection.
pub fn closed(connection: ConnectId, error: &str) -> Message {
    Message::CloseResponse {
        connection,
        error: error.to_owned(),
    }
}

#[cfg(test)]
mod tests;
