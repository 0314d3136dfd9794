//! Runs the fuzz targets' simulations as property tests, for machines without a fuzzer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

#[allow(unreachable_pub, reason = "the fuzz targets share this module")]
#[path = "../fuzz/src/mux.rs"]
mod mux;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn packet_muxes_never_mix_up_connections(input in prop::collection::vec(any::<u8>(), 0..900)) {
        mux::run(&input);
    }

    /// Only operations without forged packets, so that the stricter invariants are always checked.
    #[test]
    fn muxes_without_forged_packets_deliver_every_byte_to_its_own_connection(
        input in prop::collection::vec((0..9_u8, any::<u8>(), any::<u8>()), 0..300)
    ) {
        let input: Vec<u8> = input.into_iter().flat_map(|(k, a, b)| [k, a, b]).collect();
        mux::run(&input);
    }
}
