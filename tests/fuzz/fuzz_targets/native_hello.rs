//! The introduction of an agent and the answer of a server, see the simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| culvert_fuzz::heads::run_native(input));
