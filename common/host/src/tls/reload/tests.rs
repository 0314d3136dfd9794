#![allow(clippy::unwrap_used)]

use rcgen::CertificateParams;
use rustls::HandshakeKind;
use rustls::sign::SingleCertAndKey;
use rustls::version::{TLS12, TLS13};

use super::super::tests::{Authority, Files, handshake};
use super::*;
use crate::label_values;
use crate::reload::Reloader;
use crate::telemetry::metrics::Registry;

const H2: &[&[u8]] = &[b"h2"];

label_values! {
    enum Set("files") {
        Ours = "ours",
    }
}

/// A folder with `ca`, `cert` and `key`, and a reloader.
struct Lab {
    dir: tempfile::TempDir,
    registry: Arc<Registry>,
    reloader: Reloader<Set>,
}

impl Lab {
    fn new(authorities: &[&Authority], pair: &Files) -> Self {
        let registry = Registry::new(&[]).unwrap();
        let lab = Self {
            dir: tempfile::tempdir().unwrap(),
            reloader: Reloader::new(&registry),
            registry,
        };
        lab.trust(authorities);
        lab.pair(pair);
        lab
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn trust(&self, authorities: &[&Authority]) {
        let pem: String = authorities
            .iter()
            .map(|authority| authority.ca.pem())
            .collect();
        std::fs::write(self.path("ca"), pem).unwrap();
    }

    fn pair(&self, pair: &Files) {
        std::fs::copy(&pair.cert, self.path("cert")).unwrap();
        std::fs::copy(&pair.key, self.path("key")).unwrap();
    }

    async fn server(&mut self) -> ServerTls {
        let ca = self.path("ca");
        let (cert, key) = (self.path("cert"), self.path("key"));
        let set = ServerFiles::new(&cert, &key, Some(&ca), H2, &TlsOptions::default());
        let followed = self.reloader.follow(Set::Ours, set.unwrap()).await;
        followed.unwrap()
    }

    async fn client(&mut self) -> ClientTls {
        let (cert, key) = (self.path("cert"), self.path("key"));
        let set = ClientFiles::new(
            &self.path("ca"),
            Some((&cert, &key)),
            H2,
            &TlsOptions::default(),
        );
        let followed = self.reloader.follow(Set::Ours, set.unwrap()).await;
        followed.unwrap()
    }

    fn check(&mut self) {
        self.reloader.check();
        self.reloader.check();
    }

    fn expiry(&self, kind: &str) -> String {
        let name = "culvert_certificate_expiry_seconds";
        let name = format!("{name}{{files=\"ours\",certificate=\"{kind}\"}} ");
        let page = self.registry.render();
        let value = page.lines().find_map(|line| line.strip_prefix(&name));
        value.unwrap_or_else(|| panic!("{page}")).to_owned()
    }
}

/// Returns a fixed client that has a certificate of `from` and trusts `trusted`.
async fn client_of(from: &Authority, trusted: &Authority) -> Arc<ClientConfig> {
    let mut lab = Lab::new(&[trusted], &from.leaf("client"));
    lab.client().await.get()
}

async fn is_accepted(server: &ServerTls, client: &Arc<ClientConfig>) -> bool {
    let outcome = handshake(server.get(), client.clone()).await;
    outcome.server.is_ok()
}

#[tokio::test]
async fn ca_rotation_of_a_server_never_refuses_a_valid_client() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut lab = Lab::new(&[&old], &old.leaf("server"));
    let server = lab.server().await;
    let (of_old, of_new) = (client_of(&old, &old).await, client_of(&new, &new).await);
    assert!(is_accepted(&server, &of_old).await);
    assert!(!is_accepted(&server, &of_new).await);
    // Both CAs sign clients; the server still has its old certificate.
    lab.trust(&[&old, &new]);
    lab.check();
    assert!(is_accepted(&server, &of_old).await);
    assert!(is_accepted(&server, &client_of(&new, &old).await).await);
    lab.pair(&new.leaf("server"));
    lab.check();
    assert!(is_accepted(&server, &of_new).await);
    lab.trust(&[&new]);
    lab.check();
    assert!(is_accepted(&server, &of_new).await);
    let outcome = handshake(server.get(), client_of(&old, &new).await).await;
    let advice = outcome.server_advice();
    assert!(advice.contains("signed by a CA that is not in our CA bundle"));
    assert_eq!(
        outcome.client.unwrap_err().kind(),
        std::io::ErrorKind::InvalidData
    );
}

#[tokio::test]
async fn client_of_a_removed_ca_cannot_resume_its_session() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    for version in [&TLS12, &TLS13] {
        let mut lab = Lab::new(&[&old], &old.leaf("server"));
        let server = lab.server().await;
        // The client trusts the server throughout, and keeps its store of sessions.
        let client = lab_client(&old, version);
        for _ in 0..2 {
            assert!(is_accepted(&server, &client).await);
        }
        lab.trust(&[&new]);
        lab.check();
        assert!(
            !is_accepted(&server, &client).await,
            "{:?}",
            version.version
        );
    }
}

/// Returns a client of one TLS version, with a certificate of `authority`.
fn lab_client(
    authority: &Authority,
    version: &'static rustls::SupportedProtocolVersion,
) -> Arc<ClientConfig> {
    let files = authority.leaf("client");
    let (cert, key) = (read(&files.cert), read(&files.key));
    let identity = Identity::from_pem(Pem::new(&files.cert, &cert), Pem::new(&files.key, &key));
    let ca = authority.ca.pem();
    let trust = TrustBundle::from_pem(Pem::new(Path::new("ca"), ca.as_bytes())).unwrap();
    let resolver = SingleCertAndKey::from(identity.unwrap().certified_key());
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[version])
        .unwrap()
        .with_root_certificates(trust.roots())
        .with_client_cert_resolver(Arc::new(resolver));
    Arc::new(config)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[tokio::test]
async fn client_resumes_no_session_of_a_server_with_tickets() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    // A server that allows clients to resume sessions, as stock servers do.
    let files = old.leaf("server");
    let (cert, key) = (read(&files.cert), read(&files.key));
    let identity = Identity::from_pem(Pem::new(&files.cert, &cert), Pem::new(&files.key, &key));
    let resolver = SingleCertAndKey::from(identity.unwrap().certified_key());
    let mut server = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(resolver));
    server.alpn_protocols = vec![b"h2".to_vec()];
    let server = Arc::new(server);

    let mut lab = Lab::new(&[&old], &old.leaf("client"));
    let client = lab.client().await;
    for _ in 0..2 {
        let outcome = handshake(server.clone(), client.get()).await;
        outcome.client.unwrap();
        assert_eq!(outcome.kind, Some(HandshakeKind::Full));
    }
    lab.trust(&[&new]);
    lab.check();
    let outcome = handshake(server.clone(), client.get()).await;
    let advice = outcome.client_advice();
    assert!(advice.contains("not in our CA bundle"), "{advice}");
    lab.trust(&[&new, &old]);
    lab.check();
    let outcome = handshake(server, client.get()).await;
    assert_ne!(outcome.kind, Some(HandshakeKind::Resumed));
    outcome.client.unwrap();
}

#[tokio::test]
async fn files_that_do_not_fit_together_leave_the_last_good_set_in_use() {
    let ca = Authority::new("ca");
    let other = ca.leaf("other");
    let mut lab = Lab::new(&[&ca], &ca.leaf("server"));
    let server = lab.server().await;
    let client = client_of(&ca, &ca).await;
    let first = server.get();
    let text = read(&other.cert);
    for half in [
        // The certificate without its key.
        text.as_slice(),
        // A part of a file that is written in place.
        text.get(..text.len() / 2).unwrap(),
        b"",
    ] {
        std::fs::write(lab.path("cert"), half).unwrap();
        lab.check();
        assert!(Arc::ptr_eq(&first, &server.get()));
        assert!(is_accepted(&server, &client).await);
    }
    // A bad CA bundle also keeps the new pair out: the files are one set.
    lab.pair(&other);
    std::fs::write(lab.path("ca"), "no certificate").unwrap();
    lab.check();
    assert!(Arc::ptr_eq(&first, &server.get()));
    lab.trust(&[&ca]);
    lab.check();
    assert!(!Arc::ptr_eq(&first, &server.get()));
    assert!(is_accepted(&server, &client).await);
}

#[tokio::test]
async fn secret_that_kubernetes_swaps_is_followed() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let mut lab = Lab::new(&[&old], &old.leaf("server"));
    for (folder, authority) in [("..1", &old), ("..2", &new)] {
        std::fs::create_dir(lab.path(folder)).unwrap();
        let pair = authority.leaf(folder);
        let at = |name: &str| lab.path(folder).join(name);
        std::fs::write(at("ca"), authority.ca.pem()).unwrap();
        std::fs::copy(&pair.cert, at("cert")).unwrap();
        std::fs::copy(&pair.key, at("key")).unwrap();
    }
    let swap = |lab: &Lab, to: &str| {
        std::os::unix::fs::symlink(to, lab.path("..data_tmp")).unwrap();
        std::fs::rename(lab.path("..data_tmp"), lab.path("..data")).unwrap();
    };
    swap(&lab, "..1");
    for name in ["ca", "cert", "key"] {
        std::fs::remove_file(lab.path(name)).unwrap();
        std::os::unix::fs::symlink(format!("..data/{name}"), lab.path(name)).unwrap();
    }
    let server = lab.server().await;
    let (of_old, of_new) = (client_of(&old, &old).await, client_of(&new, &new).await);
    assert!(is_accepted(&server, &of_old).await);
    swap(&lab, "..2");
    std::fs::remove_dir_all(lab.path("..1")).unwrap();
    lab.check();
    assert!(is_accepted(&server, &of_new).await);
    assert!(!is_accepted(&server, &of_old).await);
}

#[tokio::test]
async fn settings_are_the_same_after_a_reload() {
    let ca = Authority::new("ca");
    let mut lab = Lab::new(&[&ca], &ca.leaf("server"));
    let options = TlsOptions {
        min_version: super::super::MinVersion::Tls13,
        ..TlsOptions::default()
    };
    let (cert, key) = (lab.path("cert"), lab.path("key"));
    let set = ServerFiles::new(&cert, &key, None, &[b"one", b"h2"], &options).unwrap();
    let server = lab.reloader.follow(Set::Ours, set).await.unwrap();
    let first = server.get();
    lab.pair(&ca.leaf("renewed"));
    lab.check();
    let second = server.get();
    assert!(!Arc::ptr_eq(&first, &second));
    assert_eq!(second.alpn_protocols, first.alpn_protocols);
    assert_eq!(second.send_tls13_tickets, 0);
    assert!(Arc::ptr_eq(
        first.crypto_provider(),
        second.crypto_provider()
    ));
    let outcome = handshake(second.clone(), client_of(&ca, &ca).await).await;
    assert_eq!(outcome.client.unwrap().unwrap(), b"h2");
    let outcome = handshake(second, lab_client(&ca, &TLS12)).await;
    assert!(outcome.server_advice().contains("no TLS version in common"));
}

#[tokio::test]
async fn expiry_is_that_of_the_first_certificate_to_expire() {
    let ca = Authority::new("ca");
    let until = |name: &str, year| {
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        ca.issue(name, params)
    };
    let (late, early) = (until("late", 2050), until("early", 2040));
    let mut lab = Lab::new(&[&ca], &late);
    lab.server().await;
    assert_eq!(lab.expiry("own"), "2524608000");
    // The second certificate of the chain expires earlier.
    std::fs::write(
        lab.path("cert"),
        [read(&late.cert), read(&early.cert)].concat(),
    )
    .unwrap();
    lab.check();
    assert_eq!(lab.expiry("own"), "2208988800");
    // rcgen's authorities expire in the year 4096.
    assert_eq!(lab.expiry("ca"), "67090118400");
}

#[tokio::test]
async fn expired_certificate_does_not_replace_a_valid_one() {
    let ca = Authority::new("ca");
    let until = |name: &str, year| {
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        ca.issue(name, params)
    };
    let (valid, old, older) = (until("a", 2050), until("b", 2021), until("c", 2020));
    let mut lab = Lab::new(&[&ca], &older);
    let server = lab.server().await;
    let mut before = server.get();
    // A restored backup, and a chain with an expired certificate that peers may not need.
    let chain = [read(&valid.cert), read(&older.cert)].concat();
    for (pair, is_used) in [(&old, true), (&valid, true), (&old, false), (&valid, true)] {
        lab.pair(pair);
        if is_used && pair.cert == valid.cert {
            std::fs::write(lab.path("cert"), &chain).unwrap();
        }
        lab.check();
        assert_eq!(!Arc::ptr_eq(&before, &server.get()), is_used);
        before = server.get();
    }
}

#[tokio::test]
async fn missing_files_are_reported_like_at_the_first_load() {
    let ca = Authority::new("ca");
    let mut lab = Lab::new(&[&ca], &ca.leaf("server"));
    std::fs::remove_file(lab.path("ca")).unwrap();
    let paths = ["cert", "key", "ca"].map(|name| lab.path(name));
    let mut follow = async || {
        let [cert, key, ca] = &paths;
        let set = ServerFiles::new(cert, key, Some(ca), H2, &TlsOptions::default()).unwrap();
        lab.reloader
            .follow(Set::Ours, set)
            .await
            .err()
            .unwrap()
            .to_string()
    };
    let error = follow().await;
    assert!(
        error.starts_with("failed to load CA cert: cannot read "),
        "{error}"
    );
    std::fs::remove_file(&paths[0]).unwrap();
    let error = follow().await;
    assert!(
        error.starts_with("cannot read ") && error.contains("is mounted"),
        "{error}"
    );
}
