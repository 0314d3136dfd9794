//! The answer of an HTTP proxy to a CONNECT request, see the simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| culvert_fuzz::heads::run_proxy(input));
