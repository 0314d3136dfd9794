//! Test PKI in the style of KKP, and tests of unusable certificates and files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::sync::LazyLock;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
    DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, KeyIdMethod, KeyPair,
    KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use rustls::CertificateError;
use rustls::server::danger::ClientCertVerifier as _;
use rustls_pki_types::UnixTime;
use rustls_pki_types::pem::PemObject as _;

use super::error::explain_certificate;
use super::*;
use crate::Role;

/// CA with a P-256 key.
pub(crate) struct Pki(CertifiedIssuer<'static, KeyPair>);

/// PKI of most tests; the CN of the CA is "CA".
pub(crate) static PKI: LazyLock<Pki> = LazyLock::new(Pki::new);

/// Certificate and key, in PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Pair {
    pub(crate) fn identity(&self) -> Identity {
        Identity::from_pem(self.certificate.as_bytes(), self.key.as_bytes()).unwrap()
    }
}

fn serial(pem: &str) -> Vec<u8> {
    use x509_parser::prelude::{FromDer, X509Certificate};
    let der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
    let (_, certificate) = X509Certificate::from_der(&der).unwrap();
    certificate.raw_serial().to_vec()
}

pub(crate) fn leaf(common_name: &str, usage: Option<ExtendedKeyUsagePurpose>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, common_name);
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    params.extended_key_usages = usage.into_iter().collect();
    params
}

impl Pki {
    pub(crate) fn new() -> Self {
        Self::named("CA")
    }

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    pub(crate) fn named(name: &str) -> Self {
        let params = Self::params(name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Returns a certificate of another CA, signed by this CA, in PEM.
    fn cross_sign(&self, other: &Self) -> String {
        let params = Self::params("CA");
        params.signed_by(other.0.key(), &self.0).unwrap().pem()
    }

    pub(crate) fn ca(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn issue(&self, params: &CertificateParams) -> Pair {
        let key = KeyPair::generate().unwrap();
        let certificate = params.clone().signed_by(&key, &self.0).unwrap();
        Pair {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        }
    }

    pub(crate) fn client(&self, common_name: &str) -> Pair {
        self.issue(&leaf(
            common_name,
            Some(ExtendedKeyUsagePurpose::ClientAuth),
        ))
    }

    pub(crate) fn server(&self) -> Pair {
        self.issue(&leaf(
            "openvpn-server",
            Some(ExtendedKeyUsagePurpose::ServerAuth),
        ))
    }

    /// Returns a CRL in PEM.
    pub(crate) fn crl(&self, revoked: &[&Pair]) -> String {
        self.crl_until(revoked, 2999)
    }

    /// Returns a CRL in PEM that expires at the start of a year.
    pub(crate) fn crl_until(&self, revoked: &[&Pair], year: i32) -> String {
        let now = rcgen::date_time_ymd(2020, 1, 1);
        let revoked = revoked.iter().map(|pair| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&serial(&pair.certificate)),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let params = CertificateRevocationListParams {
            this_update: now,
            next_update: rcgen::date_time_ymd(year, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        params.signed_by(&self.0).unwrap().pem().unwrap()
    }

    pub(crate) fn server_tls(&self) -> Arc<ServerTls> {
        let identity = self.server().identity();
        Arc::new(
            ServerTls::new(
                self.ca().as_bytes(),
                None,
                identity,
                MinVersion::Tls12,
                false,
            )
            .unwrap(),
        )
    }

    pub(crate) fn client_tls(&self, common_name: &str) -> Arc<ClientTls> {
        self.client_tls_with(self.client(common_name).identity())
    }

    pub(crate) fn client_tls_with(&self, identity: Identity) -> Arc<ClientTls> {
        let check = ServerCheck {
            require_usage: true,
            name: None,
        };
        Arc::new(
            ClientTls::new(
                self.ca().as_bytes(),
                Some(identity),
                check,
                MinVersion::Tls12,
            )
            .unwrap(),
        )
    }
}

#[test]
fn certificates_that_peers_refuse_are_found() {
    let problem_of = |pair: &Pair, role| certificate_problem(pair.certificate.as_bytes(), role);
    let (server, client) = (PKI.server(), PKI.client("a"));
    assert_eq!(problem_of(&server, Role::Server), None);
    assert_eq!(problem_of(&client, Role::Client), None);
    assert_eq!(
        problem_of(&PKI.issue(&leaf("any", None)), Role::Server),
        None
    );
    let mut expired = leaf("expired", None);
    expired.not_after = rcgen::date_time_ymd(2020, 1, 1);
    let mut early = leaf("early", None);
    early.not_before = rcgen::date_time_ymd(2999, 1, 1);
    for (pair, role, text) in [
        (&server, Role::Client, "clientAuth is needed"),
        (&client, Role::Server, "serverAuth is needed"),
        (&PKI.issue(&expired), Role::Server, "expired at"),
        (&PKI.issue(&early), Role::Client, "not valid before"),
    ] {
        let problem = problem_of(pair, role).unwrap();
        assert!(problem.contains(text), "{problem}");
    }
    assert_eq!(certificate_problem(b"", Role::Server), None);
}

#[test]
fn unusable_files_are_named_in_the_error() {
    let text = |result: Result<Identity, ConfigError>| result.unwrap_err().to_string();
    let (ours, other) = (PKI.server(), PKI.server());
    let of = |pem: &str| pem.as_bytes().to_vec();
    let mixed = Identity::from_pem(&of(&ours.certificate), &of(&other.key));
    assert!(text(mixed).contains("does not belong to the certificate"));
    let empty = Identity::from_pem(b"", &of(&ours.key));
    assert!(text(empty).contains("certificate file contains no certificate"));
    let swapped = Identity::from_pem(&of(&ours.key), &of(&ours.certificate));
    assert!(text(swapped).contains("contains no certificate"));
    let keyless = Identity::from_pem(&of(&ours.certificate), &of(&ours.certificate));
    assert!(text(keyless).contains("private key"));
    let garbage = b"-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n";
    assert!(text(Identity::from_pem(garbage, b"")).contains("not valid PEM"));
    let server = |ca: &[u8], crl: Option<&[u8]>| {
        ServerTls::new(ca, crl, PKI.server().identity(), MinVersion::Tls12, false)
            .unwrap_err()
            .to_string()
    };
    assert!(server(b"", None).contains("CA file contains no certificate"));
    // As after `cat` of a file without a final newline.
    let joined = |text: String| text.trim_end().to_owned() + &text;
    assert!(server(joined(PKI.ca()).as_bytes(), None).contains("CA is not valid PEM: -----END"));
    let crl = joined(PKI.crl(&[]));
    let error = server(PKI.ca().as_bytes(), Some(crl.as_bytes()));
    assert!(error.contains("CRL is not valid PEM: -----END"), "{error}");
    assert!(
        server(
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            None
        )
        .contains("CA")
    );
    let crl = b"-----BEGIN X509 CRL-----\n!\n-----END X509 CRL-----\n";
    assert!(server(PKI.ca().as_bytes(), Some(crl)).contains("CRL"));
}

/// In a rotation of a CA, both CAs often have one name.
#[test]
fn crl_of_a_ca_does_not_affect_another_ca_of_the_same_name() {
    let [old, new, stranger] = [(); 3].map(|()| Pki::new());
    let [of_old, of_new] = [&old, &new].map(|pki| [pki.client("good"), pki.client("bad")]);
    let crls = [old.crl(&[&of_old[1]]), new.crl(&[&of_new[1]])];
    let outcome = |crls: &[&String], pair: &Pair| {
        let crls: String = crls.iter().copied().cloned().collect();
        let ca = Pki::named("another CA").ca() + &old.ca() + &new.ca();
        let (identity, version) = (PKI.server().identity(), MinVersion::Tls12);
        let tls = ServerTls::new(
            ca.as_bytes(),
            Some(crls.as_bytes()),
            identity,
            version,
            false,
        );
        let verifier = tls.unwrap().verifier;
        let names = verifier.root_hint_subjects();
        assert!(!names.is_empty());
        let chain = certificates("certificate", pair.certificate.as_bytes()).unwrap();
        let verified = verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now());
        let refusal = || verifier.refused.get().unwrap().1.clone();
        verified.map(drop).map_err(|_| refusal())
    };
    let revoked = Err("revoked by the CRL".to_owned());
    let [crl_of_old, crl_of_new] = &crls;
    for crls in [[crl_of_old, crl_of_new], [crl_of_new, crl_of_old]] {
        for [good, bad] in [&of_old, &of_new] {
            assert_eq!(outcome(&crls, good), Ok(()));
            assert_eq!(outcome(&crls, bad), revoked);
        }
        let problem = outcome(&crls, &stranger.client("good")).unwrap_err();
        assert!(problem.starts_with("not signed by our CA"), "{problem}");
    }
    // The other CA has no CRL.
    for pair in of_new.iter().chain(&of_old[..1]) {
        assert_eq!(outcome(&[crl_of_old], pair), Ok(()));
    }
    // A revoked client may send a second certificate of its CA, signed by the other CA.
    let crossed = new.cross_sign(&old);
    let [good, bad] = [0, 1].map(|index| Pair {
        certificate: of_old[index].certificate.clone() + &crossed,
        key: String::new(),
    });
    assert_eq!(outcome(&[crl_of_old], &good), Ok(()));
    assert_eq!(outcome(&[crl_of_old], &bad), revoked);
    // A CRL that none of the CAs signed may be a mistake, or the CRL of a CA that was removed.
    let other = stranger.crl(&[]);
    assert!(outcome(&[&other], &of_old[0]).is_err());
    assert_eq!(outcome(&[&other, crl_of_old], &of_old[0]), Ok(()));
    assert_eq!(outcome(&[&other, crl_of_old], &of_old[1]), revoked);
}

#[test]
fn errors_about_signature_algorithms_are_short() {
    let (signature_algorithm_id, public_key_algorithm_id) = (vec![0; 9], vec![0; 9]);
    for (problem, expected) in [
        (
            CertificateError::UnsupportedSignatureAlgorithmContext {
                signature_algorithm_id: signature_algorithm_id.clone(),
                supported_algorithms: Vec::new(),
            },
            "issue it again with SHA-256",
        ),
        (
            CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext {
                signature_algorithm_id,
                public_key_algorithm_id,
            },
            "another kind of key",
        ),
    ] {
        let problem = explain_certificate(&problem.into());
        assert!(problem.contains(expected), "{problem}");
        assert!(problem.len() < 200, "{problem}");
    }
}
