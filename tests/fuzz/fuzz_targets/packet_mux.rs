//! The two packet muxes against each other; see the library's `mux` for what must hold.
#![no_main]

use culvert_fuzz::mux;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| mux::run(input));
