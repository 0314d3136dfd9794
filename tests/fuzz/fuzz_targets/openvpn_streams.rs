//! The flows of two OpenVPN peers with their handles, see the simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| culvert_fuzz::streams::run(input));
