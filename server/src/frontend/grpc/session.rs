//! The session of a `Proxy` stream, without I/O: interprets the front end's packets.
//!
//! Stock clients open one connection on each stream. The error texts are upstream's.

use bytes::Bytes;
use culvert_konnectivity::message::{ConnectId, DialId, Message};
use culvert_stream::Dial;

/// State of the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// No dial yet.
    #[default]
    Idle,
    /// A dial waits for a backend.
    Dialing(DialId),
    /// A connection is open.
    Open(ConnectId),
    /// The connection or the dial has ended. Closes and bytes are answered with a close, and the client ends the call.
    Ended,
}

/// State of a stream.
#[derive(Debug, Default)]
pub(crate) struct Session {
    state: State,
}

/// Action that a packet requires.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    /// Open a connection.
    Dial(Dial),
    /// Pass bytes on to the endpoint.
    Data(Bytes),
    /// The client cancelled its dial or closed its connection. The reply, if any, is due once all earlier
    /// bytes were passed on.
    Close(Option<Message>),
    /// Send the reply, and go on.
    Reply(Message),
    /// Send the replies, close the connection if open, and ignore later packets.
    Fail(Vec<Message>),
    /// Do nothing.
    Ignore,
}

impl Session {
    /// Processes a packet from the client.
    pub(crate) fn on_message(&mut self, message: Message) -> Step {
        match message {
            Message::DialRequest {
                protocol,
                address,
                dial,
            } => self.on_dial(dial, Dial { protocol, address }),
            Message::Data { connection, bytes } => self.on_data(connection, bytes),
            Message::CloseRequest { connection } => self.on_close(connection),
            Message::CloseDial { dial } if self.state == State::Dialing(dial) => {
                self.state = State::Ended;
                Step::Close(None)
            }
            _ => Step::Ignore,
        }
    }

    /// Records a successful dial. Returns the response for the caller to send to the client.
    pub(crate) fn opened(&mut self, connection: ConnectId) -> Option<Message> {
        let State::Dialing(dial) = self.state else {
            return None;
        };
        self.state = State::Open(connection);
        Some(Message::DialResponse {
            dial,
            connection,
            error: String::new(),
        })
    }

    /// Records a failed dial. Returns the response for the caller to send to the client.
    pub(crate) fn refused(&mut self, error: String) -> Option<Message> {
        let State::Dialing(dial) = self.state else {
            return None;
        };
        self.state = State::Ended;
        Some(Message::DialResponse {
            dial,
            connection: ConnectId(0),
            error,
        })
    }

    /// Records an end of the connection not caused by the client. Returns the close message for the caller to
    /// send to the client; `None` if the connection is not open.
    pub(crate) fn closed(&mut self, error: &str) -> Option<Message> {
        let State::Open(connection) = self.state else {
            return None;
        };
        self.state = State::Ended;
        Some(close(connection, error))
    }

    fn on_dial(&mut self, dial: DialId, request: Dial) -> Step {
        match self.state {
            State::Idle => {
                self.state = State::Dialing(dial);
                Step::Dial(request)
            }
            State::Ended | State::Dialing(_) | State::Open(_) => {
                Step::Reply(Message::DialResponse {
                    dial,
                    connection: ConnectId(0),
                    error: "this stream accepts no dial any more: open a stream for each dial"
                        .into(),
                })
            }
        }
    }

    fn on_data(&mut self, connection: ConnectId, bytes: Bytes) -> Step {
        match self.state {
            _ if connection == ConnectId(0) => Step::Ignore,
            // The client has missed the close if it was sent before the client had registered the connection.
            State::Ended => Step::Reply(close(connection, "")),
            State::Idle => {
                self.state = State::Ended;
                Step::Fail(vec![close(connection, "backend not initialized")])
            }
            _ if bytes.is_empty() => Step::Ignore,
            State::Open(open) if open == connection => Step::Data(bytes),
            State::Open(open) => {
                self.state = State::Ended;
                let text = "mismatched connection IDs";
                Step::Fail(vec![close(open, text), close(connection, text)])
            }
            State::Dialing(_) => {
                self.state = State::Ended;
                Step::Fail(vec![close(connection, "backend not initialized")])
            }
        }
    }

    fn on_close(&mut self, connection: ConnectId) -> Step {
        match self.state {
            State::Idle => Step::Reply(close(connection, "backend uninitialized")),
            // The client may close a connection that the server has just closed, and then waits for an
            // answer.
            State::Ended => Step::Reply(close(connection, "")),
            State::Dialing(_) | State::Open(_) => {
                self.state = State::Ended;
                Step::Close(Some(close(connection, "")))
            }
        }
    }
}

fn close(connection: ConnectId, error: &str) -> Message {
    Message::CloseResponse {
        connection,
        error: error.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ConnectId = ConnectId(42);

    fn dial(random: i64) -> Message {
        Message::DialRequest {
            protocol: "tcp".into(),
            address: "10.0.0.1:443".into(),
            dial: DialId(random),
        }
    }

    fn data(connection: ConnectId) -> Message {
        Message::Data {
            connection,
            bytes: Bytes::from_static(b"x"),
        }
    }

    fn open() -> Session {
        let mut session = Session::default();
        assert!(matches!(session.on_message(dial(7)), Step::Dial(_)));
        assert!(session.opened(ID).is_some());
        session
    }

    #[test]
    fn data_before_a_dial_ends_the_stream_with_upstreams_text() {
        let mut session = Session::default();
        let answer = close(ID, "backend not initialized");
        assert_eq!(session.on_message(data(ID)), Step::Fail(vec![answer]));
        assert!(matches!(session.on_message(dial(1)), Step::Reply(_)));
    }

    #[test]
    fn a_close_before_a_dial_is_answered_and_the_stream_goes_on() {
        let mut session = Session::default();
        let request = Message::CloseRequest { connection: ID };
        let answer = close(ID, "backend uninitialized");
        assert_eq!(session.on_message(request), Step::Reply(answer));
        assert!(matches!(session.on_message(dial(1)), Step::Dial(_)));
    }

    #[test]
    fn data_for_another_connection_id_closes_both() {
        let mut session = open();
        assert_eq!(
            session.on_message(data(ID)),
            Step::Data(Bytes::from_static(b"x"))
        );
        let text = "mismatched connection IDs";
        let answers = vec![close(ID, text), close(ConnectId(43), text)];
        assert_eq!(session.on_message(data(ConnectId(43))), Step::Fail(answers));
        assert_eq!(session.closed(""), None);
    }

    #[test]
    fn id_zero_is_ignored() {
        assert_eq!(open().on_message(data(ConnectId(0))), Step::Ignore);
    }

    #[test]
    fn data_after_the_end_is_answered_with_a_close() {
        let mut session = open();
        assert_eq!(session.closed(""), Some(close(ID, "")));
        assert_eq!(session.on_message(data(ID)), Step::Reply(close(ID, "")));
        assert_eq!(session.on_message(data(ConnectId(0))), Step::Ignore);
    }

    #[test]
    fn second_dial_is_refused_and_the_connection_stays_open() {
        let mut session = open();
        assert!(matches!(session.on_message(dial(8)), Step::Reply(_)));
        assert!(matches!(session.on_message(data(ID)), Step::Data(_)));
    }

    #[test]
    fn only_the_pending_dial_can_be_cancelled() {
        let mut session = Session::default();
        session.on_message(dial(7));
        let other = Message::CloseDial { dial: DialId(8) };
        assert_eq!(session.on_message(other), Step::Ignore);
        let own = Message::CloseDial { dial: DialId(7) };
        assert_eq!(session.on_message(own), Step::Close(None));
        assert_eq!(session.opened(ID), None);
    }

    #[test]
    fn every_close_is_answered() {
        let mut session = open();
        let request = Message::CloseRequest { connection: ID };
        let answer = close(ID, "");
        let step = session.on_message(request.clone());
        assert_eq!(step, Step::Close(Some(answer.clone())));
        assert_eq!(session.closed(""), None);
        assert_eq!(session.on_message(request), Step::Reply(answer));
    }
}
