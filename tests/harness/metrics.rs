//! Scraping, and plain HTTP to the programs' own listeners.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Longest accepted body, in bytes.
const MAX_BODY: usize = 64 << 20;

/// Sends `GET path` on a new connection.
///
/// # Errors
/// If the answer is missing or broken. An answer with any status is a success.
pub async fn http_get(
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    request(Method::GET, addr, path).await
}

/// Sends a POST without a body, like [`http_get`].
///
/// # Errors
/// As [`http_get`].
pub async fn http_post(
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    request(Method::POST, addr, path).await
}

async fn request(
    method: Method,
    addr: SocketAddr,
    path: &str,
) -> anyhow::Result<(StatusCode, HeaderMap, Bytes)> {
    let stream = TcpStream::connect(addr).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async move {
        let request = Request::builder().method(method).uri(path);
        let request = request.header(HOST, addr.to_string());
        let response = sender
            .send_request(request.body(Empty::<Bytes>::new())?)
            .await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_BODY).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!(error))?.to_bytes();
        anyhow::Ok((head.status, head.headers, body))
    };
    // The connection task moves the bytes. The exchange reports any error of the connection.
    let (answer, _closed) = tokio::join!(exchange, connection);
    answer
}

/// Sends `GET /metrics`.
///
/// # Errors
/// If the request fails, the status is not 200, or the answer is not Prometheus text.
pub async fn scrape(addr: SocketAddr) -> anyhow::Result<Metrics> {
    let (status, _, body) = http_get(addr, "/metrics").await?;
    ensure!(status == StatusCode::OK, "status {status}");
    Metrics::parse(std::str::from_utf8(&body)?)
}

/// A sample: a single line of a scrape.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The name with its suffix, as in `x_bucket`.
    pub name: String,
    /// The labels by name.
    pub labels: BTreeMap<String, String>,
    /// The value.
    pub value: f64,
}

/// The parsed result of a scrape.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metrics {
    samples: Vec<Sample>,
    text: String,
}

impl Metrics {
    /// Parses the Prometheus text format.
    ///
    /// # Errors
    /// Names the first line that is not valid.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let lines = text.lines().map(str::trim);
        let samples = lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| parse_sample(line).with_context(|| format!("in {line:?}")))
            .collect::<anyhow::Result<_>>()?;
        Ok(Self {
            samples,
            text: text.to_owned(),
        })
    }

    /// Returns the sum of all samples of `name` that have all of the `labels`, and possibly more labels;
    /// `None` if no sample matches.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.samples(name)
            .filter(|sample| {
                labels
                    .iter()
                    .all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
            })
            .map(|sample| sample.value)
            .reduce(|a, b| a + b)
    }

    /// Returns all samples of `name`.
    pub fn samples<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Sample> {
        self.samples
            .iter()
            .filter(move |sample| sample.name == name)
    }

    /// Returns the text of the scrape as received, including HELP and TYPE lines.
    pub fn text(&self) -> &str {
        &self.text
    }
}

fn parse_sample(line: &str) -> anyhow::Result<Sample> {
    let name_end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(name_end);
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = parse_labels(inner, &mut labels)?;
    }
    // A timestamp may follow.
    let value = rest.split_whitespace().next().context("no value")?;
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse()?,
    })
}

/// Parses `key="value",...}` into `labels` and returns the text behind the brace.
fn parse_labels<'a>(
    mut rest: &'a str,
    labels: &mut BTreeMap<String, String>,
) -> anyhow::Result<&'a str> {
    loop {
        rest = rest.trim_start_matches([',', ' ']);
        if let Some(after) = rest.strip_prefix('}') {
            return Ok(after);
        }
        let (key, quoted) = rest.split_once("=\"").context("no label value")?;
        let mut value = String::new();
        let mut chars = quoted.char_indices();
        let end = loop {
            match chars.next().context("unterminated label value")? {
                (at, '"') => break at,
                (_, '\\') => match chars.next().context("unterminated label value")?.1 {
                    'n' => value.push('\n'),
                    other => value.push(other),
                },
                (_, other) => value.push(other),
            }
        };
        labels.insert(key.to_owned(), value);
        rest = &quoted[end + 1..];
    }
}

#[cfg(test)]
mod tests {
    use culvert_kit::services::{HELLO, Services};

    use super::*;

    const TEXT: &str = r#"
# HELP dials Dials.
# TYPE dials counter
dials{reason="no_agent"} 2
dials{reason="error_response",code="a\"b,}\\\n"} 3 1395066363000
up 1
took_bucket{le="+Inf"} 4
took_sum 1.5e-05
ratio NaN
"#;

    #[test]
    fn values_are_found_by_name_and_labels() {
        let metrics = Metrics::parse(TEXT).unwrap();
        assert_eq!(metrics.value("up", &[]), Some(1.0));
        assert_eq!(metrics.value("dials", &[]), Some(5.0));
        assert_eq!(metrics.value("dials", &[("reason", "no_agent")]), Some(2.0));
        assert_eq!(metrics.value("dials", &[("code", "a\"b,}\\\n")]), Some(3.0));
        assert_eq!(metrics.value("dials", &[("reason", "x")]), None);
        assert_eq!(metrics.value("took", &[]), None);
        assert_eq!(metrics.value("took_bucket", &[("le", "+Inf")]), Some(4.0));
        assert_eq!(metrics.value("took_sum", &[]), Some(1.5e-05));
        assert!(metrics.value("ratio", &[]).unwrap().is_nan());
        assert_eq!(metrics.text(), TEXT);
    }

    #[test]
    fn invalid_text_is_an_error() {
        for text in ["up", "up x", "up{a=\"b\" 1", "up{a} 1", "up{a=\"b\\"] {
            assert!(Metrics::parse(text).is_err(), "{text:?}");
        }
    }

    #[tokio::test]
    async fn http_get_accepts_any_status() {
        let services = Services::start().await.unwrap();
        let (status, headers, body) = http_get(services.http, "/").await.unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(headers["content-length"], HELLO.len().to_string().as_str());
        assert_eq!(body, HELLO);
        let (status, _, _) = http_get(services.http, "/none").await.unwrap();
        assert_eq!(status, StatusCode::NOT_FOUND);
        assert!(scrape(services.http).await.is_err());
    }
}
