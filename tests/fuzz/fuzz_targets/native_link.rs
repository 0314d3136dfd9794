//! Either end of a native connection with a hostile peer, see the simulation.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| culvert_fuzz::native::run(input));
