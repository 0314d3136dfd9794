//! A peer's options string and its peer-info lines, separated by a NUL, and the cipher chosen from both. The
//! chosen cipher is always an allowed cipher.
#![no_main]

use culvert_openvpn::cipher::Cipher;
use culvert_openvpn::ncp::{choose_as_client, choose_as_server};
use culvert_openvpn::options::{PeerOptions, mirror};
use culvert_openvpn::peer_info::PeerInfo;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let (options, lines) = input.split_once('\0').unwrap_or((input, ""));
    assert_eq!(mirror(&mirror(options)), options);
    let (options, info) = (PeerOptions::parse(options), PeerInfo::parse(lines));
    let fallback = Cipher::Aes256Cbc;
    if let Some(choice) = choose_as_server(&Cipher::DEFAULT, Some(fallback), &info, &options) {
        let negotiated = Cipher::DEFAULT.contains(&choice.cipher);
        assert!(negotiated || choice.cipher == fallback && !choice.push);
        assert_eq!(choice.push, info.can_negotiate());
    }
    if let Ok(cipher) = choose_as_client(&Cipher::DEFAULT, Some(lines), &options) {
        assert!(Cipher::DEFAULT.contains(&cipher));
    }
});
