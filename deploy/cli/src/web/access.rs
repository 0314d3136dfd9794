//! The requests that the page answers, and the headers of its answers.
//!
//! Other users of the machine and other pages of the browser can reach the listener. The token keeps both out. The `Host`
//! header keeps pages out whose name resolves to this machine (DNS rebinding).

use std::net::{IpAddr, SocketAddr};

use aws_lc_rs::{constant_time, digest, rand};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use culvert_host::admin::Reply;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{Request, StatusCode};

/// Length of the token, in bytes.
const TOKEN_BYTES: usize = 16;

/// Decides which requests are answered.
pub(super) struct Access {
    address: SocketAddr,
    token: String,
}

impl Access {
    /// Creates a random token for a listener.
    ///
    /// # Errors
    /// Fails if the system has no random numbers.
    pub(super) fn new(address: SocketAddr) -> anyhow::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        rand::fill(&mut bytes).map_err(|_| anyhow::anyhow!("no random numbers for a token"))?;
        let token = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { address, token })
    }

    /// Returns the URL of the page.
    pub(super) fn url(&self) -> String {
        format!("http://{}/?token={}", self.address, self.token)
    }

    /// Returns the answer for a request that is refused.
    pub(super) fn refusal(&self, request: &Request<Bytes>) -> Option<Reply> {
        if !self.has_own_host(request) {
            let text = "wrong Host header: open the URL that `culvert status --web` printed\n";
            return Some(Reply::text(StatusCode::MISDIRECTED_REQUEST, text));
        }
        if !self.has_token(request) {
            let text = "wrong or missing token: open the URL that `culvert status --web` printed\n";
            return Some(Reply::text(StatusCode::FORBIDDEN, text));
        }
        None
    }

    fn has_own_host(&self, request: &Request<Bytes>) -> bool {
        let mut hosts = request.headers().get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return false;
        };
        // A request for a proxy has a URL with a name of its own, which counts more (RFC 9112, 3.2.2).
        let authority = request.uri().authority();
        let named = authority.is_none_or(|authority| self.is_own(authority.as_str()));
        named && host.to_str().is_ok_and(|host| self.is_own(host))
    }

    fn is_own(&self, host: &str) -> bool {
        let port = self.address.port();
        // Clients leave the default port out.
        let name = match host.strip_suffix(&format!(":{port}")) {
            Some(name) => name,
            None if port == 80 => host,
            None => return false,
        };
        let own = match self.address.ip() {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        let name = name.to_ascii_lowercase();
        name == own || ["127.0.0.1", "[::1]", "localhost"].contains(&name.as_str())
    }

    fn has_token(&self, request: &Request<Bytes>) -> bool {
        let query = request.uri().query().unwrap_or_default();
        let given = query
            .split('&')
            .find_map(|pair| pair.strip_prefix("token="));
        let token = self.token.as_bytes();
        given.is_some_and(|given| {
            constant_time::verify_slices_are_equal(given.as_bytes(), token).is_ok()
        })
    }
}

/// Returns the content security policy for a page with one inline style and one inline script.
pub(super) fn policy(style: &str, script: &str) -> String {
    let hash = |text: &str| {
        let digest = digest::digest(&digest::SHA256, text.as_bytes());
        STANDARD.encode(digest.as_ref())
    };
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; \
         frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        hash(style),
        hash(script)
    )
}

/// Adds the headers of every answer with content. The listener answers unknown paths and methods with constant texts.
pub(super) fn protected(reply: Reply, policy: &HeaderValue) -> Reply {
    let own = HeaderValue::from_static("same-origin");
    let resource = HeaderName::from_static("cross-origin-resource-policy");
    reply
        .with(CONTENT_SECURITY_POLICY, policy.clone())
        .with(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"))
        .with(CACHE_CONTROL, HeaderValue::from_static("no-store"))
        .with(REFERRER_POLICY, HeaderValue::from_static("no-referrer"))
        .with(resource, own)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn access(address: &str) -> Access {
        Access {
            address: address.parse().unwrap(),
            token: "0123456789abcdef".to_owned(),
        }
    }

    /// Returns true if the request is answered.
    fn answers(access: &Access, uri: &str, hosts: &[&str]) -> bool {
        let mut request = Request::builder().uri(uri);
        for host in hosts {
            request = request.header(HOST, *host);
        }
        access
            .refusal(&request.body(Bytes::new()).unwrap())
            .is_none()
    }

    #[test]
    fn token_must_be_complete() {
        let access = access("127.0.0.1:8000");
        for (uri, expected) in [
            ("/?token=0123456789abcdef", true),
            ("/data?x=1&token=0123456789abcdef", true),
            ("/", false),
            ("/?token=", false),
            ("/?token=0123456789abcde", false),
            ("/?token=0123456789abcdef0", false),
            ("/?token=0123456789ABCDEF", false),
            ("/?nottoken=0123456789abcdef", false),
            ("/?token=wrong&token=0123456789abcdef", false),
        ] {
            assert_eq!(
                answers(&access, uri, &["127.0.0.1:8000"]),
                expected,
                "{uri}"
            );
        }
    }

    #[test]
    fn host_must_be_the_own_loopback_address() {
        let uri = "/?token=0123456789abcdef";
        let usual = access("127.0.0.1:8000");
        for (hosts, expected) in [
            (&["127.0.0.1:8000"][..], true),
            (&["localhost:8000"][..], true),
            (&["LOCALHOST:8000"][..], true),
            (&["[::1]:8000"][..], true),
            (&["localhost"][..], false),
            (&["127.0.0.1:80"][..], false),
            (&["127.0.0.2:8000"][..], false),
            (&["evil.example:8000"][..], false),
            (&["localhost.evil.example:8000"][..], false),
            (&["localhost:8000", "evil.example:8000"][..], false),
            (&[][..], false),
        ] {
            assert_eq!(answers(&usual, uri, hosts), expected, "{hosts:?}");
        }
        let absolute = "http://evil.example:8000/?token=0123456789abcdef";
        assert!(!answers(&usual, absolute, &["127.0.0.1:8000"]));
        let other = access("127.0.0.2:8000");
        assert!(answers(&other, uri, &["127.0.0.2:8000"]));
        let port_80 = access("[::1]:80");
        assert!(answers(&port_80, uri, &["localhost"]));
        assert!(answers(&port_80, uri, &["[::1]:80"]));
    }

    #[test]
    fn tokens_are_random_and_have_128_bits() {
        let address = "[::1]:8000".parse().unwrap();
        let [first, second] = [(), ()].map(|()| Access::new(address).unwrap());
        assert_eq!(first.token.len(), 32);
        assert_ne!(first.token, second.token);
        assert!(first.url().starts_with("http://[::1]:8000/?token="));
    }

    #[test]
    fn policy_has_the_hashes_of_style_and_script() {
        // `printf '' | openssl dgst -sha256 -binary | base64`
        let empty = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='";
        let policy = policy("", "");
        assert!(policy.contains(&format!("style-src {empty}; script-src {empty};")));
    }
}
