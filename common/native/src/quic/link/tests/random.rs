//! Random loads on the connections of one link.

use rand::Rng as _;

use super::*;
use crate::random_loads::Loads;

const SEEDS: u64 = 3;

#[tokio::test]
async fn random_loads_arrive() {
    for seed in 0..SEEDS {
        let pair = Pair::new().await;
        let mut loads = Loads::new(seed, Duration::from_secs(1), LIMIT);
        for _ in 0..loads.random().random_range(1..8) {
            let (near, far) = pair.open().await;
            loads.start(near, far, QuicSink::end);
        }
        loads.end().await;
    }
}
