//! Host and port of a listener, from the bind-address and port flags.

use std::fmt;

/// Address to listen on.
///
/// The host stays a string, because host names are allowed (`--health-bind-address=localhost` is in common
/// use) and are resolved only when the listener is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPort {
    /// IP address without brackets, host name, or `""` for all interfaces, IPv4 and IPv6.
    pub host: String,
    /// TCP port. 0 lets the system choose a port; only tests use 0, the command line does not accept it.
    pub port: u16,
}

impl HostPort {
    /// Joins a host and a port, and removes brackets around an IPv6 address.
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
    fn display_matches_gos_join_host_port() {
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
