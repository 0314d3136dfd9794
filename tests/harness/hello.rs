//! The first message of a TLS client, for front doors that need no further bytes.

use std::sync::Arc;

use rustls::{ClientConfig, ClientConnection, RootCertStore};
use rustls_pki_types::ServerName;

/// Returns the first bytes of a TLS client that connects to the server name `name`: one record with a
/// complete ClientHello.
///
/// # Panics
/// If `name` is not a DNS name.
pub fn client_hello(name: &str) -> Vec<u8> {
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    let config = ClientConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = ServerName::try_from(name.to_owned()).expect("a DNS name");
    let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    hello
}
