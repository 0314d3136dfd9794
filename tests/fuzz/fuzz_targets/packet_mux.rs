//! The two packet muxes against each other; the `mux` module of the library checks the invariants.
#![no_main]

use culvert_fuzz::mux;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| mux::run(input));
