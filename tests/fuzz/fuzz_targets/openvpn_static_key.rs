//! Static key files: only a text with the markers and at least 512 hexadecimal digits is a key.
#![no_main]

use culvert_openvpn::wrap::static_key;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    if static_key::parse(input).is_ok() {
        let digits = input.bytes().filter(u8::is_ascii_hexdigit).count();
        assert!(digits >= 512 && input.contains("-----END OpenVPN Static key V1-----"));
    }
});
