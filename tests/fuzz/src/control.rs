//! Control packets of OpenVPN that the fuzzer makes up, and the peers of the sessions under test.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use culvert_openvpn::packet::{ControlPacket, KeyId, Opcode, SessionId};
use culvert_openvpn::session::{ClientConfig, Push, ServerConfig, Transport};
use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};

use crate::{Bytes, pki};

/// Returns the configuration of a client with this common name.
pub fn client(name: &str, transport: Transport) -> Arc<ClientConfig> {
    let identity = pki::identity(&pki::leaf(name, ClientAuth)).expect("an identity");
    let mut config = ClientConfig::new(transport, pki::client_tls(identity));
    config.common.timers.ping = Some(Duration::from_secs(5));
    Arc::new(config)
}

/// Returns the configuration of a server that renegotiates keys at the age of `reneg`.
pub fn server(transport: Transport, reneg: Duration) -> Arc<ServerConfig> {
    let identity = pki::identity(&pki::leaf("server", ServerAuth)).expect("an identity");
    let mut config = ServerConfig::new(transport, pki::server_tls(identity));
    config.common.timers.reneg = reneg;
    config.common.timers.tran_window = 2 * reneg;
    config.common.timers.ping_restart = Some(Duration::from_secs(30));
    Arc::new(config)
}

/// Returns the options for an accepted client.
pub fn push() -> Push {
    let options = ["topology net30", "ifconfig 10.20.0.6 10.20.0.5"];
    Push {
        options: options.map(str::to_owned).to_vec(),
    }
}

/// Returns a control packet with the session ids of the client and the server. `bytes` selects all other fields,
/// and may leave out the server's session id. A payload may be repeated up to `large` bytes.
pub fn made_up(
    bytes: &mut Bytes<'_>,
    (client, server): (SessionId, SessionId),
    large: usize,
) -> Vec<u8> {
    let (shape, key) = (bytes.byte(), bytes.byte());
    let opcodes = [
        Opcode::HardResetClientV2,
        Opcode::ControlV1,
        Opcode::AckV1,
        Opcode::SoftResetV1,
    ];
    let echoes = shape & 4 == 0;
    let opcode = opcodes[usize::from(shape & 3)];
    // Half of the ids are in the upper half of the numbers, where a session expects repetitions.
    let id = i32::from(bytes.byte() as i8) as u32;
    let mut payload = bytes.some();
    if shape & 8 != 0 && !payload.is_empty() {
        payload = payload.into_iter().cycle().take(large).collect();
    }
    let packet = ControlPacket {
        opcode,
        key_id: KeyId::of(key),
        session: client,
        acks: Vec::from_iter(echoes.then_some(u32::from(shape >> 4))),
        peer_session: echoes.then_some(server),
        id: (opcode != Opcode::AckV1).then_some(id),
        payload: &payload,
    };
    let mut out = BytesMut::new();
    packet.write(&mut out);
    out.to_vec()
}
