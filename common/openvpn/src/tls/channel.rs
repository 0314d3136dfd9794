//! One TLS connection of the control channel, with TLS bytes on one side and whole messages on the other
//! side.

use std::collections::VecDeque;
use std::io::BufRead as _;
use std::io::Write as _;

use rustls::Connection;

use super::certificate::PeerIdentity;
use super::error::TlsError;
use super::verify::Refused;
use crate::keys::{EXPORTER_LABEL, KEY_BLOCK_LEN};

/// TLS connection of one negotiation.
pub(crate) struct Channel {
    tls: Connection,
    refused: Refused,
    /// TLS bytes to be sent.
    output: VecDeque<u8>,
}

impl Channel {
    pub(super) fn new(tls: impl Into<Connection>, refused: Refused) -> Self {
        let mut channel = Self {
            tls: tls.into(),
            refused,
            output: VecDeque::new(),
        };
        channel.collect();
        channel
    }

    /// Processes TLS bytes from the peer, in order. The plaintext of each record is appended to `messages`,
    /// because peers write one message as one record. After an error the output contains the alert for the
    /// peer.
    pub(crate) fn receive(
        &mut self,
        mut bytes: &[u8],
        messages: &mut VecDeque<Vec<u8>>,
    ) -> Result<(), TlsError> {
        while !bytes.is_empty() {
            let taken = self
                .tls
                .read_tls(&mut bytes)
                .map_err(|error| TlsError::Other(error.to_string()))?;
            let processed = self.tls.process_new_packets();
            self.collect();
            processed.map_err(|error| TlsError::new(&error, self.refused.get()))?;
            while let Ok(record) = self.tls.reader().into_first_chunk() {
                if record.is_empty() {
                    break;
                }
                let message = record.to_vec();
                self.tls.reader().consume(message.len());
                messages.push_back(message);
            }
            if taken == 0 {
                return Err(TlsError::Other("the peer closed TLS".into()));
            }
        }
        Ok(())
    }

    /// Sends one message as one record.
    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), TlsError> {
        self.tls
            .writer()
            .write_all(message)
            .map_err(|error| TlsError::Other(error.to_string()))?;
        self.collect();
        Ok(())
    }

    fn collect(&mut self) {
        while self.tls.wants_write() {
            // A deque accepts all bytes, so a write without progress means that rustls will never progress.
            if !matches!(self.tls.write_tls(&mut self.output), Ok(1..)) {
                break;
            }
        }
    }

    pub(crate) fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    /// Removes and returns up to `most` TLS bytes.
    pub(crate) fn take_output(&mut self, most: usize) -> Vec<u8> {
        self.output.drain(..most.min(self.output.len())).collect()
    }

    /// Returns true after the handshake, when messages can be exchanged.
    pub(crate) fn is_established(&self) -> bool {
        !self.tls.is_handshaking()
    }

    /// Returns the names in the peer's verified certificate.
    pub(crate) fn identity(&self) -> Option<PeerIdentity> {
        PeerIdentity::new(self.tls.peer_certificates()?.first()?)
    }

    /// Exports key material for the data channel.
    pub(crate) fn export_data_keys(&self) -> Result<[u8; KEY_BLOCK_LEN], TlsError> {
        self.tls
            .export_keying_material([0; KEY_BLOCK_LEN], EXPORTER_LABEL, None)
            .map_err(|error| TlsError::new(&error, None))
    }

    /// Returns TLS version and cipher suite, for the log.
    pub(crate) fn describe(&self) -> String {
        match (
            self.tls.protocol_version(),
            self.tls.negotiated_cipher_suite(),
        ) {
            (Some(version), Some(suite)) => format!("{version:?} {:?}", suite.suite()),
            _ => "none".into(),
        }
    }
}
