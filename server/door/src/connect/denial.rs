//! The responses to requests that get no connection.

use http::StatusCode;

use super::super::upstream::ConnectError;

/// Reason why a request gets no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denial {
    /// The authority is not exposed, or the method is not CONNECT.
    Unknown,
    /// The Service does not allow the address of the client.
    Address,
    /// The limit `--max-connections` or the share of the client's address is reached.
    TooMany,
    /// No endpoint accepted the connection.
    Unavailable,
}

impl Denial {
    /// Returns the status of the response, as in Envoy with KKP's configuration.
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Unknown => StatusCode::NOT_FOUND,
            Self::Address => StatusCode::FORBIDDEN,
            Self::TooMany | Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the body of the response.
    pub(super) fn body(self) -> &'static str {
        match self {
            Self::Unknown => "",
            Self::Address => "the Service does not allow the address of the client\n",
            Self::TooMany => "too many connections of the client or to the Service\n",
            Self::Unavailable => "no endpoint of the Service accepted the connection\n",
        }
    }
}

impl From<&ConnectError> for Denial {
    fn from(error: &ConnectError) -> Self {
        match error {
            ConnectError::Overflow | ConnectError::Share => Self::TooMany,
            _ => Self::Unavailable,
        }
    }
}
