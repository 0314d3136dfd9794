//! Files of the client-config-dir: every text gives a bounded number of networks, and each problem names the
//! file and the line.
#![no_main]

use culvert_server::backend::openvpn::settings::{ClientConfig, PushChange};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &str| {
    let config = ClientConfig::parse(input, "f");
    assert!(config.iroutes.len() <= 256);
    assert!(config.iroutes.iter().all(|net| net.addr() == net.network()));
    for change in &config.push {
        if let PushChange::Add(words) | PushChange::Remove(words) = change {
            assert!(!words.trim().is_empty());
        }
    }
    let lines = input.lines().count();
    assert!(config.problems.len() <= lines);
    for problem in &config.problems {
        let line = problem
            .strip_prefix("f:")
            .and_then(|rest| rest.split_once(':'));
        let line = line.and_then(|(line, _)| line.parse().ok());
        assert!(
            line.is_some_and(|line| (1..=lines).contains(&line)),
            "{problem}"
        );
    }
});
