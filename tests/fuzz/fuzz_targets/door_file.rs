//! The front door's file of routes: every text gives either routes or a list of problems with line numbers.
#![no_main]

use culvert_door::file::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else {
        return;
    };
    match parse(text, "door.yaml") {
        Ok(routes) => {
            assert!(routes.upstreams.values().all(|backend| !backend.endpoints.is_empty()));
            let named = routes.server_names.values().chain(routes.authorities.values());
            let named = named.chain(routes.node_ports.values());
            assert!(named.into_iter().all(|key| routes.upstreams.contains_key(key)));
        }
        Err(problems) => {
            assert!(!problems.0.is_empty());
            for problem in problems.0 {
                let line = problem.strip_prefix("door.yaml:").and_then(|rest| rest.split_once(':'));
                assert!(line.is_some_and(|(line, _)| line.parse::<u64>().is_ok()), "{problem}");
            }
        }
    }
});
