#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, PKCS_ED25519, SigningKey as _,
};
use rustls::{CertificateError, Error, HandshakeKind};
use rustls_pki_types::ServerName;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

const H2: &[&[u8]] = &[b"h2"];

/// A CA, and a directory for the files that the CA issues.
pub(super) struct Authority {
    pub(super) ca: CertifiedIssuer<'static, KeyPair>,
    pub(super) dir: TempDir,
}

pub(super) struct Files {
    pub(super) cert: PathBuf,
    pub(super) key: PathBuf,
}

impl Authority {
    pub(super) fn new(name: &str) -> Self {
        Self::with_key(name, KeyPair::generate().unwrap())
    }

    fn with_key(name: &str, key: KeyPair) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let ca = CertifiedIssuer::self_signed(params, key).unwrap();
        Self {
            ca,
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(super) fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    fn trust(&self) -> TrustBundle {
        TrustBundle::load(self.write("ca.pem", self.ca.pem())).unwrap()
    }

    pub(super) fn issue(&self, name: &str, params: CertificateParams) -> Files {
        let key = KeyPair::generate().unwrap();
        let cert = params.signed_by(&key, &self.ca).unwrap();
        Files {
            cert: self.write(&format!("{name}.crt"), cert.pem()),
            key: self.write(&format!("{name}.key"), key.serialize_pem()),
        }
    }

    /// Issues a certificate for `localhost`.
    pub(super) fn leaf(&self, name: &str) -> Files {
        self.issue(
            name,
            CertificateParams::new(vec!["localhost".into()]).unwrap(),
        )
    }

    /// Issues an X.509 v1 certificate, as `openssl x509 -req` does without extensions.
    fn v1_leaf(&self, name: &str) -> Files {
        let key = KeyPair::generate().unwrap();
        let v3 = CertificateParams::new(vec!["localhost".into()])
            .unwrap()
            .signed_by(&key, &self.ca)
            .unwrap();
        let outer = der_fields(v3.der());
        // Drop the fields [0] version and [3] extensions, and sign the rest.
        let kept: Vec<u8> = der_fields(&outer[0])
            .into_iter()
            .filter(|field| field[0] != 0xa0 && field[0] != 0xa3)
            .flatten()
            .collect();
        let tbs = der(0x30, &kept);
        let signature = [vec![0], self.ca.key().sign(&tbs).unwrap()].concat();
        let cert = der(
            0x30,
            &[tbs, outer[1].clone(), der(0x03, &signature)].concat(),
        );
        let pem = pem_of(&cert);
        Files {
            cert: self.write(&format!("{name}.crt"), pem),
            key: self.write(&format!("{name}.key"), key.serialize_pem()),
        }
    }

    /// Issues a certificate that names ECDSA with SHA-1 as its signature algorithm. The signature is of another algorithm,
    /// but nobody verifies it.
    fn sha1_leaf(&self, name: &str) -> Files {
        // 1.2.840.10045.4.1 (RFC 3279, 2.2.3).
        let algorithm = der(0x30, b"\x06\x07\x2a\x86\x48\xce\x3d\x04\x01");
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(vec!["localhost".into()])
            .unwrap()
            .signed_by(&key, &self.ca)
            .unwrap();
        let outer = der_fields(leaf.der());
        // The fields are version, serial number, signature algorithm and others.
        let mut fields = der_fields(&outer[0]);
        fields[2].clone_from(&algorithm);
        let tbs = der(0x30, &fields.concat());
        let cert = der(0x30, &[tbs, algorithm, outer[2].clone()].concat());
        Files {
            cert: self.write(&format!("{name}.crt"), pem_of(&cert)),
            key: self.write(&format!("{name}.key"), key.serialize_pem()),
        }
    }
}

impl Files {
    fn load(&self) -> Identity {
        Identity::load(&self.cert, &self.key).unwrap()
    }
}

/// Encodes one DER element, with its length in the shortest form.
fn der(tag: u8, content: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(content.len()).unwrap().to_be_bytes();
    let header = match (high, low) {
        (0, 0..=0x7f) => vec![tag, low],
        (0, _) => vec![tag, 0x81, low],
        _ => vec![tag, 0x82, high, low],
    };
    [&header, content].concat()
}

/// Returns the elements inside the outermost element, each with its header.
fn der_fields(element: &[u8]) -> Vec<Vec<u8>> {
    let header = |bytes: &[u8]| match bytes[1] {
        short @ 0..=0x7f => (2, usize::from(short)),
        0x81 => (3, usize::from(bytes[2])),
        0x82 => (4, usize::from(bytes[2]) << 8 | usize::from(bytes[3])),
        _ => panic!("element too long"),
    };
    let (mut at, length) = header(element);
    let end = at + length;
    let mut fields = Vec::new();
    while at < end {
        let (head, length) = header(&element[at..]);
        fields.push(element[at..at + head + length].to_vec());
        at += head + length;
    }
    fields
}

fn pem_of(cert: &[u8]) -> String {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::from("-----BEGIN CERTIFICATE-----\n");
    for line in cert.chunks(48) {
        for group in line.chunks(3) {
            let word = (0..3).fold(0_u32, |word, i| {
                word << 8 | u32::from(group.get(i).copied().unwrap_or(0))
            });
            for i in 0..4 {
                let sextet = (word >> (18 - 6 * i)) & 0x3f;
                let padding = i > group.len();
                text.push(char::from(if padding {
                    b'='
                } else {
                    ALPHABET[sextet as usize]
                }));
            }
        }
        text.push('\n');
    }
    text + "-----END CERTIFICATE-----\n"
}

/// Results on both sides of a handshake, followed by one byte in each direction.
pub(super) struct Outcome {
    pub(super) client: io::Result<Option<Vec<u8>>>,
    pub(super) server: io::Result<Option<Vec<u8>>>,
    /// `None` if the handshake failed.
    pub(super) kind: Option<HandshakeKind>,
}

impl Outcome {
    pub(super) fn client_advice(&self) -> String {
        explain(self.client.as_ref().unwrap_err())
    }

    pub(super) fn server_advice(&self) -> String {
        explain(self.server.as_ref().unwrap_err())
    }
}

pub(super) async fn handshake(server: Arc<ServerConfig>, client: Arc<ClientConfig>) -> Outcome {
    handshake_as(server, client, "localhost").await
}

async fn handshake_as(
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
    name: &'static str,
) -> Outcome {
    let (near, far) = tokio::io::duplex(64 << 10);
    let client = async {
        let name = ServerName::try_from(name).unwrap();
        let mut stream = TlsConnector::from(client).connect(name, near).await?;
        stream.write_all(b"?").await?;
        // In TLS 1.3 the client notices a refused certificate only at the first read.
        stream.read_exact(&mut [0]).await?;
        Ok(stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec))
    };
    let mut kind = None;
    let server = async {
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        kind = stream.get_ref().1.handshake_kind();
        stream.read_exact(&mut [0]).await?;
        stream.write_all(b"!").await?;
        Ok(stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec))
    };
    let (client, server) = tokio::join!(client, server);
    Outcome {
        client,
        server,
        kind,
    }
}

fn defaults() -> TlsOptions {
    TlsOptions::default()
}

fn mutual_server(ca: &Authority, identity: &Identity) -> Arc<ServerConfig> {
    server_config(identity, Some(&ca.trust()), H2, &defaults()).unwrap()
}

fn client_of(ca: &Authority, identity: Option<&Identity>) -> Arc<ClientConfig> {
    client_config(&ca.trust(), identity, H2, &defaults()).unwrap()
}

#[tokio::test]
async fn mutual_tls_works_and_negotiates_alpn() {
    let ca = Authority::new("ca");
    let (server, client) = (ca.leaf("server").load(), ca.leaf("client").load());
    let outcome = handshake(mutual_server(&ca, &server), client_of(&ca, Some(&client))).await;
    assert_eq!(outcome.client.unwrap().unwrap(), b"h2");
    assert_eq!(outcome.server.unwrap().unwrap(), b"h2");
}

#[tokio::test]
async fn clients_cannot_resume_their_sessions() {
    let ca = Authority::new("ca");
    let (server, client) = (ca.leaf("server").load(), ca.leaf("client").load());
    let server = mutual_server(&ca, &server);
    for version in [&TLS12, &TLS13] {
        let provider = Arc::new(suites::provider(&defaults()).unwrap());
        let resolver = SingleCertAndKey::from(client.certified_key());
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .unwrap()
            .with_root_certificates(ca.trust().roots())
            .with_client_cert_resolver(Arc::new(resolver));
        let client = Arc::new(client);
        for _ in 0..2 {
            let outcome = handshake(server.clone(), client.clone()).await;
            outcome.client.unwrap();
            let is_full = matches!(
                outcome.kind,
                Some(HandshakeKind::Full | HandshakeKind::FullWithHelloRetryRequest)
            );
            assert!(is_full, "{:?}: {:?}", version.version, outcome.kind);
        }
    }
}

#[tokio::test]
async fn names_of_many_cas_do_not_break_the_handshake() {
    let ca = Authority::new("ca");
    let others = (0..300).map(|number| Authority::new(&format!("{number:0250}")).ca.pem());
    let bundle = ca.ca.pem() + &others.collect::<String>();
    let trust = TrustBundle::load(ca.write("bundle.pem", bundle)).unwrap();
    let names = trust.roots().subjects();
    let bytes: usize = names.iter().map(|name| name.as_ref().len()).sum();
    assert!(bytes > usize::from(u16::MAX));
    let (server, client) = (ca.leaf("server").load(), ca.leaf("client").load());
    let server = server_config(&server, Some(&trust), H2, &defaults()).unwrap();
    let outcome = handshake(server, client_of(&ca, Some(&client))).await;
    outcome.client.unwrap();
    outcome.server.unwrap();
}

#[tokio::test]
async fn a_client_without_certificate_is_refused() {
    let ca = Authority::new("ca");
    let server = ca.leaf("server").load();
    let outcome = handshake(mutual_server(&ca, &server), client_of(&ca, None)).await;
    let advice = outcome.server_advice();
    assert!(
        advice.starts_with("the peer presented no client certificate"),
        "{advice}"
    );
    let advice = outcome.client_advice();
    assert!(
        advice.starts_with("the peer requires a client certificate"),
        "{advice}"
    );
}

#[tokio::test]
async fn a_wrong_ca_is_refused_on_either_side() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let (server, client) = (ca.leaf("server").load(), other.leaf("client").load());
    let outcome = handshake(mutual_server(&ca, &server), client_of(&ca, Some(&client))).await;
    let advice = outcome.server_advice();
    assert!(
        advice.contains("signed by a CA that is not in our CA bundle"),
        "{advice}"
    );
    let advice = outcome.client_advice();
    assert!(
        advice.contains("does not know the CA of our certificate"),
        "{advice}"
    );

    let outcome = handshake(mutual_server(&ca, &server), client_of(&other, None)).await;
    let advice = outcome.client_advice();
    assert!(
        advice.contains("signed by a CA that is not in our CA bundle"),
        "{advice}"
    );
}

#[tokio::test]
async fn long_chains_are_refused_on_either_side() {
    let ca = Authority::new("ca");
    let files = ca.leaf("leaf");
    let leaf = std::fs::read_to_string(&files.cert).unwrap();
    // webpki needs none of these certificates, because a trusted CA signed the leaf.
    let with = |more: String| {
        let chain = ca.write("chain.crt", leaf.clone() + &more);
        Identity::load(chain, &files.key).unwrap()
    };
    let usual = with(ca.ca.pem().repeat(5));
    let outcome = handshake(mutual_server(&ca, &usual), client_of(&ca, Some(&usual))).await;
    outcome.client.unwrap();

    for (chain, count) in [
        (ca.ca.pem().repeat(6), "6 intermediate certificates"),
        (
            pem_of(&[0; 16 * 1024 + 1]),
            "1 intermediate certificates of 16385 bytes",
        ),
    ] {
        let (long, short) = (with(chain), files.load());
        let outcome = handshake(mutual_server(&ca, &short), client_of(&ca, Some(&long))).await;
        let advice = outcome.server_advice();
        assert!(advice.contains(count), "{advice}");
        assert!(advice.contains("more than 5 certificates"), "{advice}");

        let config = server_config(&long, None, H2, &defaults()).unwrap();
        let outcome = handshake(config, client_of(&ca, None)).await;
        let advice = outcome.client_advice();
        assert!(advice.contains(count), "{advice}");
    }
}

#[tokio::test]
async fn ca_with_the_same_name_and_another_key_is_detected() {
    let (ca, reissued) = (Authority::new("ca"), Authority::new("ca"));
    let server = ca.leaf("server").load();
    let outcome = handshake(mutual_server(&ca, &server), client_of(&reissued, None)).await;
    let advice = outcome.client_advice();
    assert!(advice.contains("was not signed with its key"), "{advice}");

    let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
    let reissued = Authority::with_key("ca", key);
    let outcome = handshake(mutual_server(&ca, &server), client_of(&reissued, None)).await;
    let advice = outcome.client_advice();
    assert!(advice.contains("another kind of key"), "{advice}");
}

#[tokio::test]
async fn a_wrong_name_lists_the_names_presented() {
    let ca = Authority::new("ca");
    let server = ca.leaf("server").load();
    let config = server_config(&server, None, H2, &defaults()).unwrap();
    let outcome = handshake_as(config, client_of(&ca, None), "konnectivity.example").await;
    let advice = outcome.client_advice();
    assert!(
        advice.contains("certificate is valid for localhost, not for konnectivity.example;"),
        "{advice}"
    );
}

#[test]
fn names_of_a_certificate_are_plain() {
    let advice = |presented: &[&str]| {
        explain_tls(&Error::InvalidCertificate(
            CertificateError::NotValidForNameContext {
                expected: ServerName::try_from("a.example").unwrap(),
                presented: presented.iter().copied().map(str::to_owned).collect(),
            },
        ))
    };
    let text = advice(&[
        "DnsName(\"localhost\")",
        "DnsName(\"*.b.example\")",
        "IpAddress(127.0.0.1)",
        "IpAddress(0::1)",
        "UniformResourceIdentifier(\"spiffe://c/d\")",
        "Unsupported(0x01)",
        "DirectoryName",
    ]);
    let names = "localhost, *.b.example, 127.0.0.1, ::1, spiffe://c/d, a name of another kind, a name of another kind";
    assert!(
        text.contains(&format!("is valid for {names}, not for a.example;")),
        "{text}"
    );
    let text = advice(&[]);
    assert!(text.contains("has no subject alternative name"), "{text}");
}

#[tokio::test]
async fn certificate_with_an_unsupported_signature_is_refused_on_either_side() {
    let ca = Authority::new("ca");
    let (sha1, server) = (ca.sha1_leaf("sha1").load(), ca.leaf("server").load());
    let refused = handshake(mutual_server(&ca, &server), client_of(&ca, Some(&sha1))).await;
    let config = server_config(&sha1, None, H2, &defaults()).unwrap();
    let refusing = handshake(config, client_of(&ca, None)).await;
    for advice in [refused.server_advice(), refusing.client_advice()] {
        assert!(advice.contains("not supported, such as SHA-1"), "{advice}");
        assert!(advice.contains("reissue it with SHA-256"), "{advice}");
        assert!(advice.len() < 200, "{advice}");
    }
}

#[test]
#[allow(deprecated)]
fn errors_about_signature_algorithms_are_short() {
    for (problem, expected) in [
        (
            CertificateError::UnsupportedSignatureAlgorithm,
            "reissue it with SHA-256",
        ),
        (
            CertificateError::UnsupportedSignatureAlgorithmContext {
                signature_algorithm_id: vec![0; 9],
                supported_algorithms: Vec::new(),
            },
            "reissue it with SHA-256",
        ),
        (
            CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
                signature_algorithm_id: vec![0; 9],
                public_key_algorithm_id: vec![0; 9],
            },
            "another kind of key",
        ),
    ] {
        let advice = explain_tls(&Error::InvalidCertificate(problem));
        assert!(advice.contains(expected) && advice.len() < 200, "{advice}");
    }
}

#[tokio::test]
async fn an_expired_certificate_loads_but_peers_refuse_it() {
    let ca = Authority::new("ca");
    let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
    params.not_before = rcgen::date_time_ymd(2019, 1, 1);
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let server = ca.issue("server", params).load();
    let config = server_config(&server, None, H2, &defaults()).unwrap();
    let outcome = handshake(config, client_of(&ca, None)).await;
    let advice = outcome.client_advice();
    assert!(advice.contains("expired at 2020-01-01"), "{advice}");
    let advice = outcome.server_advice();
    assert!(advice.contains("our certificate has expired"), "{advice}");
}

#[tokio::test]
async fn a_certificate_for_another_purpose_is_refused() {
    let ca = Authority::new("ca");
    let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let server = ca.issue("server", params).load();
    let config = server_config(&server, None, H2, &defaults()).unwrap();
    let outcome = handshake(config, client_of(&ca, None)).await;
    let advice = outcome.client_advice();
    assert!(advice.contains("serverAuth"), "{advice}");
}

#[tokio::test]
async fn client_learns_after_its_handshake_that_its_certificate_was_refused() {
    let ca = Authority::new("ca");
    let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let wrong = ca.issue("wrong", params).load();
    let server = mutual_server(&ca, &ca.leaf("server").load());
    for (identity, expected) in [
        (None, "requires a client certificate"),
        (Some(&wrong), "clientAuth"),
    ] {
        let outcome = handshake(server.clone(), client_of(&ca, identity)).await;
        let error = outcome.client.unwrap_err().to_string();
        let advice = explain_refusal(&error).unwrap();
        assert!(advice.contains(expected), "{advice}");
    }
    assert_eq!(explain_refusal("unexpected end of file"), None);
}

#[tokio::test]
async fn failed_write_reports_why_the_certificate_was_refused() {
    let ca = Authority::new("ca");
    let server = mutual_server(&ca, &ca.leaf("server").load());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await;
    let accept = async {
        let (stream, _) = listener.accept().await.unwrap();
        TlsAcceptor::from(server).accept(stream).await.unwrap_err()
    };
    let name = ServerName::try_from("localhost").unwrap();
    let connect = ClientStream::connect(client_of(&ca, None), name, stream.unwrap());
    // The server has sent its alert, and has closed the connection.
    let (connected, _) = tokio::join!(connect, accept);
    let mut client = connected.unwrap();
    let write = async {
        loop {
            if let Err(error) = client.write_all(b"?").await {
                break error.to_string();
            }
        }
    };
    let error = tokio::time::timeout(Duration::from_secs(60), write).await;
    let advice = explain_refusal(&error.unwrap()).unwrap();
    assert!(advice.contains("requires a client certificate"), "{advice}");
}

#[tokio::test]
async fn v1_certificates_work_as_our_identity_and_are_refused_from_peers() {
    let ca = Authority::new("ca");
    let v1 = ca.v1_leaf("v1").load();
    let server = ca.leaf("server").load();

    // Both sides use the key and send the certificate; only the peer refuses it.
    let outcome = handshake(mutual_server(&ca, &server), client_of(&ca, Some(&v1))).await;
    let advice = outcome.server_advice();
    assert!(
        advice.contains("X.509 v1") && advice.contains("-extfile"),
        "{advice}"
    );

    let config = server_config(&v1, None, H2, &defaults()).unwrap();
    let outcome = handshake(config, client_of(&ca, None)).await;
    let advice = outcome.client_advice();
    assert!(
        advice.contains("X.509 v1") && advice.contains("-extfile"),
        "{advice}"
    );
}

#[tokio::test]
async fn versions_and_suites_are_honoured() {
    let ca = Authority::new("ca");
    let server = ca.leaf("server").load();
    let strict = TlsOptions {
        min_version: MinVersion::Tls13,
        ..defaults()
    };
    let config = server_config(&server, None, H2, &strict).unwrap();
    let outcome = handshake(config.clone(), client_of(&ca, None)).await;
    assert!(outcome.client.is_ok());

    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut old = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS12])
        .unwrap()
        .with_root_certificates(ca.trust().roots())
        .with_no_client_auth();
    old.alpn_protocols = vec![b"h2".to_vec()];
    let old = Arc::new(old);
    let outcome = handshake(config, old.clone()).await;
    let advice = outcome.server_advice();
    assert!(advice.contains("no TLS version in common"), "{advice}");
    let advice = outcome.client_advice();
    assert!(advice.contains("none of our TLS versions"), "{advice}");

    let listed = |name: &str| TlsOptions {
        cipher_suites: vec![name.to_owned()],
        ..defaults()
    };
    let suite = listed("TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256");
    let config = server_config(&server, None, H2, &suite).unwrap();
    assert!(handshake(config, old.clone()).await.client.is_ok());

    // Only suites for RSA keys: no common suite with this server's ECDSA key in TLS 1.2.
    let suite = listed("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256");
    let config = server_config(&server, None, H2, &suite).unwrap();
    assert!(handshake(config, old.clone()).await.client.is_err());

    // A list without a usable TLS 1.2 suite leaves TLS 1.3.
    let suite = listed("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA");
    let config = server_config(&server, None, H2, &suite).unwrap();
    assert!(handshake(config.clone(), old).await.client.is_err());
    assert!(handshake(config, client_of(&ca, None)).await.client.is_ok());
}

#[tokio::test]
async fn an_alpn_mismatch_is_explained_on_both_sides() {
    let ca = Authority::new("ca");
    let server = ca.leaf("server").load();
    let config = server_config(&server, None, &[b"http/1.1"], &defaults()).unwrap();
    let outcome = handshake(config, client_of(&ca, None)).await;
    assert!(outcome.server_advice().contains("ALPN"));
    assert!(outcome.client_advice().contains("ALPN"));
}

#[tokio::test]
async fn a_peer_without_tls_is_explained() {
    let ca = Authority::new("ca");
    let config = mutual_server(&ca, &ca.leaf("server").load());
    let (mut near, far) = tokio::io::duplex(4096);
    near.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        .await
        .unwrap();
    let error = TlsAcceptor::from(config.clone())
        .accept(far)
        .await
        .unwrap_err();
    assert!(
        explain(&error).contains("does not speak TLS"),
        "{}",
        explain(&error)
    );

    let (near, far) = tokio::io::duplex(4096);
    drop(near);
    let error = TlsAcceptor::from(config).accept(far).await.unwrap_err();
    assert!(explain(&error).contains("closed the connection during the handshake"));
}

#[test]
fn suites_are_known_by_gos_names() {
    let supported = |name: &str| matches!(go_suite(name), SuiteSupport::Supported(_));
    for cipher in [
        "AES_128_GCM_SHA256",
        "AES_256_GCM_SHA384",
        "CHACHA20_POLY1305_SHA256",
    ] {
        assert!(supported(&format!("TLS_{cipher}")));
        assert!(!supported(&format!("TLS13_{cipher}")));
        for key in ["ECDSA", "RSA"] {
            assert!(supported(&format!("TLS_ECDHE_{key}_WITH_{cipher}")));
        }
    }
    assert_eq!(
        go_suite("TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA"),
        SuiteSupport::KnownButUnsupported
    );
    assert_eq!(go_suite("TLS_RSA_WITH_RC4_128_SHA"), SuiteSupport::Unknown);

    let ca = Authority::new("ca");
    let options = TlsOptions {
        cipher_suites: vec!["TLS_NONE".into()],
        ..defaults()
    };
    let error = server_config(&ca.leaf("server").load(), None, H2, &options).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("cipher suite TLS_NONE not supported")
    );
}

#[test]
fn pkcs1_and_sec1_keys_load() {
    for (cert, key) in [("rsa.crt", "rsa.pkcs1.key"), ("ec.crt", "ec.sec1.key")] {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join(cert), dir.path().join(key));
        let is_rsa = cert.ends_with("rsa.crt");
        if !openssl_issue(is_rsa, &cert, &key) {
            return;
        }
        let head = std::fs::read_to_string(&key).unwrap();
        let kind = if is_rsa { "RSA" } else { "EC" };
        assert!(
            head.contains(&format!("BEGIN {kind} PRIVATE KEY")),
            "{head}"
        );
        Identity::load(&cert, &key).unwrap();
    }
}

/// Issues a self-signed certificate with a key in the old PEM form of its type. Returns false if `openssl` is
/// missing; continuous integration must have `openssl`.
fn openssl_issue(is_rsa: bool, cert: &Path, key: &Path) -> bool {
    let run = |arguments: &[&str]| {
        std::process::Command::new("openssl")
            .args(arguments)
            .output()
    };
    let (cert, key) = (cert.to_str().unwrap(), key.to_str().unwrap());
    let made = if is_rsa {
        run(&["genrsa", "-traditional", "-out", key, "2048"])
    } else {
        run(&["ecparam", "-name", "prime256v1", "-genkey", "-out", key])
    };
    match made {
        Ok(output) => assert!(output.status.success(), "{output:?}"),
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: openssl does not run ({error})");
            return false;
        }
        Err(error) => panic!("openssl does not run: {error}"),
    }
    let output = run(&[
        "req", "-x509", "-new", "-key", key, "-subj", "/CN=x", "-out", cert,
    ]);
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    true
}

#[test]
fn unusable_files_are_reported_with_path_and_reason() {
    let ca = Authority::new("ca");
    let (one, two) = (ca.leaf("one"), ca.leaf("two"));
    let missing = ca.dir.path().join("missing.pem");
    let broken = ca.write(
        "broken.pem",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    );
    let cut = ca.write("cut.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n");
    let text = |cert: &Path, key: &Path| Identity::load(cert, key).unwrap_err().to_string();

    let error = text(&missing, &one.key);
    assert!(
        error.starts_with(&format!("cannot read {}: ", missing.display())),
        "{error}"
    );
    let error = text(&one.key, &one.key);
    assert!(error.contains("one.key holds no certificate"), "{error}");
    let error = text(&one.cert, &two.cert);
    assert!(error.contains("two.crt holds no private key"), "{error}");
    let error = text(&one.cert, &two.key);
    assert!(
        error.contains("two.key does not belong to the certificate in"),
        "{error}"
    );
    let error = text(&broken, &one.key);
    assert!(
        error.contains("broken.pem holds a malformed certificate"),
        "{error}"
    );
    let error = text(&cut, &one.key);
    assert!(
        error.contains("cut.pem holds a malformed certificate"),
        "{error}"
    );
    let junk = ca.write(
        "junk.key",
        "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    );
    let error = text(&one.cert, &junk);
    assert!(
        error.contains("junk.key holds an unusable private key"),
        "{error}"
    );
}

#[test]
fn error_about_a_key_does_not_show_the_key() {
    let ca = Authority::new("ca");
    let one = ca.leaf("one");
    let key = std::fs::read_to_string(&one.key).unwrap();
    let secret = key.lines().nth(1).unwrap();
    let numbers = format!("{:?}", secret.as_bytes());
    let numbers = numbers.trim_matches(['[', ']']);
    for (name, text) in [
        ("one-line.key", key.replace('\n', "")),
        ("literal.key", key.replace('\n', "\\n")),
        ("cut.key", key[..key.len() / 2].to_owned()),
        ("unended.key", key.replace("-----\n", "\n")),
    ] {
        let bad = ca.write(name, text);
        let error = Identity::load(&one.cert, &bad).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
        assert!(
            !error.contains(secret) && !error.contains(numbers),
            "{error}"
        );
    }
}

#[test]
fn incomplete_bundle_is_refused() {
    let ca = Authority::new("ca");
    let other = Authority::new("other");
    let both = ca.write("both.pem", ca.ca.pem() + &other.ca.pem());
    assert_eq!(TrustBundle::load(both).unwrap().roots().len(), 2);

    let malformed = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let joined = ca.ca.pem().trim_end().to_owned() + &other.ca.pem();
    for (name, text) in [
        ("joined.pem", joined),
        ("spoiled.pem", ca.ca.pem() + malformed),
        ("empty.pem", String::new()),
        ("key-only.pem", ca.ca.key().serialize_pem()),
    ] {
        let error = TrustBundle::load(ca.write(name, text))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("failed to load CA cert: "), "{error}");
        assert!(error.contains(name), "{error}");
    }
    let huge = ca.write("huge.pem", vec![b'\n'; MAX_PEM_BYTES as usize + 1]);
    let error = TrustBundle::load(huge).unwrap_err().to_string();
    assert!(error.contains("is larger than"), "{error}");
}
