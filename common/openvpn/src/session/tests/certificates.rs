//! Tests of invalid certificates and of the error texts on both sides.

use rcgen::{
    BasicConstraints, CertificateParams, CustomExtension, DistinguishedName,
    ExtendedKeyUsagePurpose, IsCa, date_time_ymd,
};

use super::*;
use crate::tls::tests::{PKI, Pair, Pki, leaf};
use crate::tls::{ClientTls, Identity, MinVersion, NameCheck, ServerCheck, ServerTls};

const CLIENT: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ClientAuth;
const SERVER: ExtendedKeyUsagePurpose = ExtendedKeyUsagePurpose::ServerAuth;
const OLD_CA: &[u8] = include_bytes!("../../tls/tests/old-ca.pem");
const OLD_KEY: &[u8] = include_bytes!("../../tls/tests/old-key.pem");
const SHA1: &[u8] = include_bytes!("../../tls/tests/sha1.pem");
const V1: &[u8] = include_bytes!("../../tls/tests/v1.pem");

/// Returns the error texts of both ends, over both transports: (server, client).
fn texts(server: &Arc<ServerTls>, client: &Arc<ClientTls>) -> [(String, String); 2] {
    BOTH.map(|transport| {
        let server = ServerConfig::new(transport, server.clone());
        let client = ClientConfig::new(transport, client.clone());
        let mut sim = Sim::new(client, server, CLEAN, 1);
        sim.run(Duration::from_secs(20));
        let text = |end: &Endpoint| match end.ended() {
            Some(ended @ Ended::Tls(_)) => ended.to_string(),
            _ => panic!("{:?}", end.events),
        };
        (text(&sim.server), text(&sim.client))
    })
}

fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// Connects a client that the server refuses. Checks the error text of the server, and the client's error
/// text for the server's alert.
fn refused(identity: Identity, server: &[&str], client: &[&str]) {
    refused_by(&PKI.server_tls(), identity, server, client);
}

fn refused_by(tls: &Arc<ServerTls>, identity: Identity, server: &[&str], client: &[&str]) {
    for (server_text, client_text) in texts(tls, &PKI.client_tls_with(identity)) {
        contains(&server_text, server);
        contains(&client_text, client);
    }
}

fn changed(usage: ExtendedKeyUsagePurpose, change: impl FnOnce(&mut CertificateParams)) -> Pair {
    let mut params = leaf("someone", Some(usage));
    change(&mut params);
    PKI.issue(&params)
}

#[test]
fn server_refuses_unsuitable_client_certificates() {
    refused(
        Pki::new().client("stranger").identity(),
        &[
            "\"CN=stranger\" (issued by \"CN=CA\")",
            "not signed by our CA, but by one of the same name",
            "compare `ca`",
        ],
        &["UnknownCA", "the peer's `ca` did not sign our certificate"],
    );
    let expired = changed(CLIENT, |params| {
        params.not_after = date_time_ymd(2020, 1, 1)
    });
    refused(
        expired.identity(),
        &["someone", "expired", "renew"],
        &["CertificateExpired", "clock"],
    );
    let early = changed(CLIENT, |params| {
        params.not_before = date_time_ymd(2999, 1, 1)
    });
    refused(
        early.identity(),
        &["not valid yet", "clocks"],
        &["CertificateExpired"],
    );
    refused(
        changed(SERVER, |_| ()).identity(),
        &["wrong extended key usage", "clientAuth"],
        &["UnsupportedCertificate", "a client clientAuth"],
    );
    let nameless = changed(CLIENT, |params| {
        params.distinguished_name = DistinguishedName::new()
    });
    refused(
        nameless.identity(),
        &["no common name"],
        &["BadCertificate"],
    );
    let ca = changed(CLIENT, |params| {
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained)
    });
    refused(ca.identity(), &["CA:TRUE"], &["its log says why"]);
}

/// Returns `pair` with certificates that webpki does not need: six, and one that is too large.
fn with_long_chains(pair: &Pair) -> [(Pair, &'static str); 2] {
    let mut large = leaf("large", None);
    let extension = CustomExtension::from_oid_content(&[1, 2, 3], vec![0; 16 * 1024]);
    large.custom_extensions.push(extension);
    let large = PKI.issue(&large).certificate;
    let chains = [
        (PKI.ca().repeat(6), "6 intermediate certificates"),
        (large, "1 intermediate certificates"),
    ];
    chains.map(|(more, words)| {
        let certificate = pair.certificate.clone() + &more;
        let key = pair.key.clone();
        (Pair { certificate, key }, words)
    })
}

#[test]
fn long_chains_are_refused_on_either_side() {
    let words = "more than 5 certificates or 16384 bytes";
    let alert = ["AccessDenied", "its log says why"];
    for (pair, count) in with_long_chains(&PKI.client("someone")) {
        refused(pair.identity(), &["someone", count, words], &alert);
    }
    for (pair, count) in with_long_chains(&PKI.server()) {
        let check = ServerCheck::default();
        server_refused(&pair, check, &["openvpn-server", count, words], &alert);
    }
    let mut usual = PKI.client("someone");
    usual.certificate += &PKI.ca().repeat(5);
    let client = ClientConfig::new(Transport::Udp, PKI.client_tls_with(usual.identity()));
    let server = ServerConfig::new(Transport::Udp, PKI.server_tls());
    Sim::new(client, server, CLEAN, 1).connect();
}

#[test]
fn server_refuses_clients_of_another_ca() {
    let identity = Identity::from_pem(SHA1, OLD_KEY).unwrap();
    refused(identity, &["SHA-1"], &["UnknownCA"]);
    let params = leaf("someone", Some(CLIENT));
    let pair = Pki::named("Other CA").issue(&params);
    refused(
        pair.identity(),
        &["issued by \"CN=Other CA\"", "intermediate CA"],
        &["UnknownCA"],
    );
}

#[test]
fn server_explains_the_refusal_of_outdated_certificates() {
    let identity = PKI.server().identity();
    let tls = Arc::new(ServerTls::new(OLD_CA, None, identity, MinVersion::Tls12, false).unwrap());
    for (certificate, words) in [(SHA1, "signed with SHA-1"), (V1, "X.509 v1")] {
        let identity = Identity::from_pem(certificate, OLD_KEY).unwrap();
        refused_by(
            &tls,
            identity,
            &["CN=old", words, "EasyRSA 3"],
            &["its log says why"],
        );
    }
}

#[test]
fn server_refuses_revoked_certificates() {
    let client = PKI.client("user-cluster-client");
    let crl = PKI.crl(&[&client]);
    let identity = PKI.server().identity();
    let tls = ServerTls::new(
        PKI.ca().as_bytes(),
        Some(crl.as_bytes()),
        identity,
        MinVersion::Tls12,
        false,
    );
    let tls = Arc::new(tls.unwrap());
    refused_by(
        &tls,
        client.identity(),
        &["revoked by the CRL"],
        &["CertificateRevoked"],
    );
    let config = ServerConfig::new(Transport::Tcp, tls);
    Sim::new(client_config(Transport::Tcp), config, CLEAN, 1).connect();
}

#[test]
fn server_refuses_all_clients_once_its_crl_has_expired() {
    let crl = PKI.crl_until(&[], 2021);
    let identity = PKI.server().identity();
    let (ca, version) = (PKI.ca(), MinVersion::Tls12);
    let tls = ServerTls::new(
        ca.as_bytes(),
        Some(crl.as_bytes()),
        identity,
        version,
        false,
    );
    refused_by(
        &Arc::new(tls.unwrap()),
        PKI.client("user-cluster-client").identity(),
        &["our CRL has expired"],
        &[],
    );
}

#[test]
fn missing_client_certificate_is_explained_on_both_sides() {
    let tls = ClientTls::new(
        PKI.ca().as_bytes(),
        None,
        ServerCheck::default(),
        MinVersion::Tls12,
    );
    for (server, client) in texts(&PKI.server_tls(), &Arc::new(tls.unwrap())) {
        contains(&server, &["sent no certificate", "`cert` and `key`"]);
        contains(&client, &["CertificateRequired", "we sent none"]);
    }
}

#[test]
fn remote_cert_tls_requires_key_usages() {
    // A certificate without usages is valid for every purpose, except with `remote-cert-tls`.
    let mut params = leaf("user-cluster-client", None);
    params.key_usages.clear();
    let pair = PKI.issue(&params);
    for require in [false, true] {
        let identity = PKI.server().identity();
        let tls = ServerTls::new(
            PKI.ca().as_bytes(),
            None,
            identity,
            MinVersion::Tls12,
            require,
        );
        let tls = Arc::new(tls.unwrap());
        if require {
            refused_by(
                &tls,
                pair.identity(),
                &["remote-cert-tls client"],
                &["UnsupportedCertificate"],
            );
        } else {
            let client = ClientConfig::new(Transport::Udp, PKI.client_tls_with(pair.identity()));
            Sim::new(client, ServerConfig::new(Transport::Udp, tls), CLEAN, 1).connect();
        }
    }
}

/// Connects a client to a server that the client refuses, and checks the error texts of both.
fn server_refused(pair: &Pair, check: ServerCheck, client: &[&str], server: &[&str]) {
    let ca = PKI.ca();
    let tls = ServerTls::new(
        ca.as_bytes(),
        None,
        pair.identity(),
        MinVersion::Tls12,
        false,
    )
    .unwrap();
    let identity = PKI.client("user-cluster-client").identity();
    let ours = ClientTls::new(ca.as_bytes(), Some(identity), check, MinVersion::Tls12).unwrap();
    for (server_text, client_text) in texts(&Arc::new(tls), &Arc::new(ours)) {
        contains(&client_text, client);
        contains(&server_text, server);
    }
}

#[test]
fn client_refuses_unsuitable_server_certificates() {
    let usual = || ServerCheck {
        require_usage: true,
        name: None,
    };
    let other = Pki::new().server();
    server_refused(
        &other,
        usual(),
        &["openvpn-server", "not signed by our CA"],
        &["UnknownCA"],
    );
    let expired = changed(SERVER, |params| {
        params.not_after = date_time_ymd(2020, 1, 1)
    });
    server_refused(
        &expired,
        usual(),
        &["expired"],
        &["our certificate has expired"],
    );
    let client = PKI.client("user-cluster-client");
    server_refused(
        &client,
        usual(),
        &["serverAuth (a server's certificate)"],
        &["a server needs"],
    );
    let unmarked = PKI.issue(&leaf("someone", None));
    server_refused(
        &unmarked,
        usual(),
        &["remote-cert-tls server"],
        &["UnsupportedCertificate"],
    );
    let unsigned = changed(SERVER, |params| params.key_usages.clear());
    server_refused(
        &unsigned,
        usual(),
        &["remote-cert-tls server", "key usage"],
        &["Unsupported"],
    );
}

#[test]
fn verify_x509_name_checks_the_name() {
    use NameCheck::{CommonName, CommonNamePrefix, Subject};
    for (check, fits) in [
        (CommonName("openvpn-server".into()), true),
        (CommonName("openvpn".into()), false),
        (CommonNamePrefix("openvpn-".into()), true),
        (CommonNamePrefix("server".into()), false),
        (Subject("CN=openvpn-server".into()), true),
        (Subject("openvpn-server".into()), false),
    ] {
        let check = ServerCheck {
            require_usage: true,
            name: Some(check),
        };
        if fits {
            let identity = PKI.client("user-cluster-client").identity();
            let tls = ClientTls::new(
                PKI.ca().as_bytes(),
                Some(identity),
                check,
                MinVersion::Tls13,
            );
            let client = ClientConfig::new(Transport::Tcp, Arc::new(tls.unwrap()));
            Sim::new(client, server_config(Transport::Tcp), CLEAN, 1).connect();
        } else {
            server_refused(
                &PKI.server(),
                check,
                &["verify-x509-name: the name does not match"],
                &["AccessDenied"],
            );
        }
    }
}

/// Other failures of a renegotiation do not end a session over UDP.
#[test]
fn a_renegotiation_with_a_bad_certificate_ends_the_session() {
    for transport in BOTH {
        let mut sim = Sim::default(transport);
        sim.connect();
        let other = PKI.client_tls_with(Pki::new().client("user-cluster-client").identity());
        sim.client.session.side = Side::Client(Arc::new(ClientConfig::new(transport, other)));
        let now = sim.now;
        sim.client.session.clocks.renegotiate_at = Some(now);
        sim.run(Duration::from_secs(5));
        let ended = sim.server.ended().unwrap().to_string();
        contains(&ended, &["not signed by our CA"]);
    }
}
