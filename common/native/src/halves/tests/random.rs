//! Random loads on the connections of one link.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::random_loads::Loads;

const SEEDS: u64 = 20;

/// Changes the delay of the path and the memory in use.
async fn weather(link: [Arc<Inbound>; 2], delay: watch::Sender<Duration>, mut random: StdRng) {
    loop {
        sleep(Duration::from_millis(random.random_range(0..2000))).await;
        let _ = delay.send(Duration::from_millis(random.random_range(0..60)));
        let inbound = &link[usize::from(random.random_bool(0.5))];
        inbound.held.fetch_add(1 << 24, Ordering::Relaxed);
        sleep(Duration::from_millis(random.random_range(0..2000))).await;
        inbound.held.fetch_sub(1 << 24, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn random_loads_on_a_changing_path_arrive() {
    for seed in 0..SEEDS {
        let (delays, delay) = watch::channel(Duration::ZERO);
        let mut link = Link::along(delay).await;
        let mut loads = Loads::new(seed, Duration::from_secs(20), Duration::from_secs(3600));
        let inbound = [link.server.clone(), link.agent.clone()];
        let weather = tokio::spawn(weather(inbound, delays, StdRng::from_rng(loads.random())));
        for _ in 0..loads.random().random_range(1..8) {
            let (near, far) = link.open().await;
            loads.start(near, far, NativeSink::end);
        }
        loads.end().await;
        weather.abort();
        let _ = weather.await;
        link.works().await;
    }
}
