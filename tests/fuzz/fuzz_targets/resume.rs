//! Frames and introductions of resumable links, see the simulation. The first byte chooses between honest ends over
//! transports that break, and a hostile peer.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| match input.split_first() {
    Some((0..128, operations)) => culvert_fuzz::resume::run(operations),
    Some((_, bytes)) => culvert_fuzz::resume::run_hostile(bytes),
    None => {}
});
