//! Host and port of a listener, as the bind-address and port flags give them.

use std::fmt;

/// Where to listen.
///
/// The host stays text, because host names are allowed (`--health-bind-address=localhost` is in common use) and are
/// resolved only when the listener is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// An IP address without brackets, a host name, or `""` for all interfaces of both families.
    pub host: String,
    /// TCP port. 0 lets the system choose; the command line can not say 0, tests do.
    pub port: u16,
}

impl HostPort {
    /// Joins the two halves. Brackets around an IPv6 address are taken off.
    pub fn new(host: &str, port: u16) -> Self {
        let bare = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        Self {
            host: bare.unwrap_or(host).to_owned(),
            port,
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HostPort;

    #[test]
    fn displays_as_go_joins_host_and_port() {
        let cases = [
            ("", ":8091"),
            ("127.0.0.1", "127.0.0.1:8091"),
            ("localhost", "localhost:8091"),
            ("::", "[::]:8091"),
            ("[::1]", "[::1]:8091"),
        ];
        for (host, shown) in cases {
            assert_eq!(HostPort::new(host, 8091).to_string(), shown, "{host:?}");
        }
    }
}
