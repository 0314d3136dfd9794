//! OpenVPN configuration files, read in both roles: every text gives either settings or problems that name
//! the file.
#![no_main]

use culvert_openvpn_io::config_file;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    let client = config_file::client(text, "f");
    if let Ok(read) = &client {
        assert!(read.config.remotes.iter().all(|remote| remote.port != 0));
        assert!(read.notes.iter().all(|note| note.starts_with("f:")));
    }
    let server = config_file::server(text, "f");
    for problems in [client.err(), server.err()].into_iter().flatten() {
        assert!(!problems.is_empty());
        assert!(problems.iter().all(|problem| problem.starts_with("f:")));
    }
});
