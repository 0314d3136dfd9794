//! A packet that decodes is still the same after another round of encoding and decoding.
#![no_main]

use culvert_proto::Packet;
use libfuzzer_sys::fuzz_target;
use prost::Message;

fuzz_target!(|input: &[u8]| {
    let Ok(packet) = Packet::decode(input) else {
        return;
    };
    let encoded = packet.encode_to_vec();
    assert_eq!(encoded.len(), packet.encoded_len());
    assert_eq!(Packet::decode(&encoded[..]).expect("encoded by us"), packet);
});
