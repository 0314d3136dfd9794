//! Control packets and the headers of data packets: an accepted packet is written back byte for byte.
#![no_main]

use bytes::BytesMut;
use culvert_openvpn::packet::{ControlPacket, DataHeader, MAX_ACKS, Opcode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut written = BytesMut::new();
    if let Ok(packet) = ControlPacket::parse(input) {
        assert!(!matches!(packet.opcode, Opcode::DataV1 | Opcode::DataV2));
        assert!(packet.acks.as_slice().len() <= MAX_ACKS);
        assert_eq!(packet.id.is_none(), packet.opcode == Opcode::AckV1);
        packet.write(&mut written);
        assert_eq!(written, input);
    } else if let Some(header) = DataHeader::parse(input) {
        header.write(&mut written);
        assert_eq!(written, input[..header.wire_len()]);
    }
});
