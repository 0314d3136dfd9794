//! The messages of a gRPC call across cuts into frames, see the simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| culvert_fuzz::messages::run(input));
