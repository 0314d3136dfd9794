//! A peer's certificate. If the first byte is even it is the rest as it is, otherwise the rest is its contents,
//! and our CA has signed them. Who is let in, by either role, has a certificate of the CA and a name in it; what is
//! said of the others has an end, and no control characters.
#![no_main]

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use bytes::BytesMut;
use culvert_fuzz::pki;
use culvert_openvpn::Role;
use culvert_openvpn::session::{
    Authenticated, ClientConfig, Event, ServerConfig, Session, Transport,
};
use culvert_openvpn::tls::{ClientTls, Identity, PeerIdentity, ServerTls, doubt};
use libfuzzer_sys::fuzz_target;
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
use rustls_pki_types::CertificateDer;

/// Well above two names and what is said of them.
const MAX_TEXT: usize = 4096;

static GOOD: LazyLock<[Identity; 2]> = LazyLock::new(|| {
    let good = |name, usage| pki::identity(&pki::leaf(name, usage)).expect("an identity");
    [good("client", ClientAuth), good("server", ServerAuth)]
});

/// Lets the two negotiate until nobody has anything to say. Gives whom the server takes for a client, which
/// comes after the client has taken it for a server.
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
    panic!("they never end");
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
        let doubt = doubt(pem.as_bytes(), role);
        assert!(doubt.is_none_or(|why| !why.is_empty()));
    }
    // What nobody can read takes no handshake to find out, mostly.
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
