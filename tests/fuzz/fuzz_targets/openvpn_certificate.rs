//! A peer's certificate. If the first byte is even, the rest of the input is the certificate. If the first
//! byte is odd, the rest is the certificate's contents, and our CA signs the contents. In both roles, a peer
//! is accepted only if its certificate is signed by the CA and contains a name. The reason for a refusal is
//! short and has no control characters.
#![no_main]

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use bytes::BytesMut;
use culvert_fuzz::pki;
use culvert_openvpn::Role;
use culvert_openvpn::session::{
    Authenticated, ClientConfig, Event, ServerConfig, Session, Transport,
};
use culvert_openvpn::tls::{ClientTls, Identity, PeerIdentity, ServerTls, certificate_problem};
use libfuzzer_sys::fuzz_target;
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use rustls_pki_types::CertificateDer;

/// Bound for the length of a refusal's reason, in bytes: far more than two names and the text around the
/// names need.
const MAX_TEXT: usize = 4096;

static GOOD: LazyLock<[Identity; 2]> = LazyLock::new(|| {
    let good = |name, usage| pki::identity(&pki::leaf(name, usage)).expect("an identity");
    [good("client", ClientAuth), good("server", ServerAuth)]
});

/// Runs both sessions until neither has any output. Returns the client's identity if the server has
/// authenticated the client, which happens only after the client has accepted the server.
fn meet(client: Arc<ClientTls>, server: Arc<ServerTls>) -> Option<Box<Authenticated>> {
    let now = Instant::now();
    let client = ClientConfig::new(Transport::Udp, client);
    let server = ServerConfig::new(Transport::Udp, server);
    let mut client = Session::client(Arc::new(client), now);
    let mut server = Session::server(Arc::new(server), 0, now);
    let mut authenticated = None;
    for _ in 0..100 {
        let mut silent = true;
        let mut out = BytesMut::new();
        while client.poll_output(now, &mut out) {
            silent = false;
            let _ = server.input(&mut out.split(), now, &mut |_| {});
        }
        while server.poll_output(now, &mut out) {
            silent = false;
            let _ = client.input(&mut out.split(), now, &mut |_| {});
        }
        for event in [client.poll_event(), server.poll_event()] {
            match event {
                Some(Event::Authenticated(who)) => authenticated = Some(who),
                Some(Event::Ended(why)) => {
                    let why = why.to_string();
                    let harmless = !why.chars().any(char::is_control);
                    assert!(harmless && why.len() < MAX_TEXT, "{why:?}");
                }
                _ => {}
            }
        }
        if silent {
            return authenticated;
        }
    }
    panic!("the sessions still have output after 100 rounds");
}

fuzz_target!(|input: &[u8]| {
    let Some((choice, input)) = input.split_first() else {
        return;
    };
    let signed = choice % 2 == 1;
    let der = match signed {
        true => pki::sign(input),
        false => input.to_vec(),
    };
    let pem = pki::pem(&der);
    let named = PeerIdentity::new(&CertificateDer::from(&der[..]));
    for role in [Role::Client, Role::Server] {
        let problem = certificate_problem(pem.as_bytes(), role);
        assert!(problem.is_none_or(|why| !why.is_empty()));
    }
    // Most certificates without a readable name need no handshake: run one for a quarter of these inputs.
    if named.is_none() && choice % 8 < 6 {
        return;
    }
    let Some(identity) = pki::identity(&der) else {
        return;
    };
    let [client, server] = &*GOOD;
    let strange_client = meet(
        pki::client_tls(identity.clone()),
        pki::server_tls(server.clone()),
    );
    if let Some(who) = strange_client {
        assert!(signed, "not signed by the CA");
        assert_eq!(Some(who.identity), named);
    }
    let strange_server = meet(pki::client_tls(client.clone()), pki::server_tls(identity));
    if let Some(who) = strange_server {
        assert!(signed, "not signed by the CA");
        assert_eq!(who.identity.common_name, "client");
    }
});
