//! A search in a simulated world: servers behind a random balancer, and time that passes only between events.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::HashMap;

use rand::seq::IndexedRandom as _;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Duration of a handshake in a cluster, and over a long path.
const NEAR: Duration = Duration::from_millis(15);
const FAR: Duration = Duration::from_millis(300);

/// Number of seeds for statements about probabilities.
const SEEDS: u64 = 500;

const DEFAULT: Policy = Policy {
    interval: SECOND,
    cap: Duration::from_secs(10),
    forever: false,
};

const FOREVER: Policy = Policy {
    forever: true,
    ..DEFAULT
};

#[derive(Clone, Copy)]
struct Server {
    id: usize,
    /// Announced number of servers.
    count: usize,
}

struct World {
    search: Search,
    random: StdRng,
    begin: Instant,
    now: Instant,
    handshake: Duration,
    /// Servers behind the balancer. Attempts fail while there is none.
    servers: Vec<Server>,
    follows: bool,
    /// Announced numbers of the connected servers.
    connected: HashMap<usize, usize>,
    announced: usize,
    /// Ends of attempts, and the reached servers.
    attempts: Vec<(Instant, Option<Server>)>,
    /// Times of the starts of all attempts.
    starts: Vec<Duration>,
}

impl World {
    fn new(policy: Policy, seed: u64, servers: usize) -> Self {
        let begin = Instant::now();
        let mut world = Self {
            search: Search::new(policy, seed, begin),
            random: StdRng::seed_from_u64(seed + 1),
            begin,
            now: begin,
            handshake: NEAR,
            servers: Vec::new(),
            follows: false,
            connected: HashMap::new(),
            announced: 1,
            attempts: Vec::new(),
            starts: Vec::new(),
        };
        (0..servers).for_each(|id| world.serve(id, servers));
        world
    }

    /// Creates a world with all servers connected, and a minute later.
    fn settled(policy: Policy, seed: u64, servers: usize) -> Self {
        let mut world = Self::new(policy, seed, servers);
        world.until_connected(servers);
        world.pass(60 * SECOND);
        world
    }

    fn serve(&mut self, id: usize, count: usize) {
        self.servers.push(Server { id, count });
    }

    /// Changes the number that the servers announce.
    fn announce(&mut self, count: usize) {
        let reached = self.attempts.iter_mut().filter_map(|(_, one)| one.as_mut());
        self.servers
            .iter_mut()
            .chain(reached)
            .for_each(|server| server.count = count);
        self.connected.values_mut().for_each(|known| *known = count);
    }

    /// Ends a server and its connection.
    fn lose(&mut self, id: usize) {
        self.servers.retain(|server| server.id != id);
        self.connected.remove(&id);
        self.announced = self
            .connected
            .values()
            .copied()
            .max()
            .unwrap_or(self.announced);
    }

    fn view(&self) -> View {
        View {
            connected: self.connected.len(),
            announced: self.announced,
            follows: self.follows && !self.connected.is_empty(),
        }
    }

    fn elapsed(&self) -> Duration {
        self.now - self.begin
    }

    fn end(&mut self, reached: Option<Server>) {
        let outcome = match reached {
            None => Outcome::Failed,
            Some(server) => match self.connected.insert(server.id, server.count) {
                None => Outcome::Added,
                Some(_) => Outcome::Duplicate,
            },
        };
        self.announced = self
            .connected
            .values()
            .copied()
            .max()
            .unwrap_or(self.announced);
        self.search.ended(self.now, outcome, self.view());
    }

    /// Processes the next event before `limit`. Returns false if there is none.
    fn event(&mut self, limit: Instant) -> bool {
        let next = self.attempts.iter().map(|(end, _)| *end).min();
        let wake = match self.search.step(self.now, self.view()) {
            Step::Attempt => {
                self.starts.push(self.elapsed());
                let reached = self.servers.choose(&mut self.random).copied();
                let takes = self.handshake.mul_f64(self.random.random_range(0.7..1.3));
                self.attempts.push((self.now + takes, reached));
                return true;
            }
            Step::Wait(wake) => wake,
        };
        let Some(at) = [next, wake]
            .into_iter()
            .flatten()
            .min()
            .filter(|at| *at <= limit)
        else {
            self.now = limit;
            return false;
        };
        self.now = at;
        if let Some(place) = self.attempts.iter().position(|(end, _)| *end <= at) {
            let (_, reached) = self.attempts.swap_remove(place);
            self.end(reached.filter(|one| self.servers.iter().any(|server| server.id == one.id)));
        }
        true
    }

    /// Lets time pass. Returns the number of attempts meanwhile.
    fn pass(&mut self, time: Duration) -> usize {
        let (before, limit) = (self.starts.len(), self.now + time);
        while self.event(limit) {}
        self.starts.len() - before
    }

    /// Returns the time until `count` servers are connected.
    fn until_connected(&mut self, count: usize) -> Duration {
        let (begin, limit) = (self.now, self.now + 24 * HOUR);
        while self.connected.len() < count {
            assert!(self.event(limit), "the search ended without a server");
        }
        self.now - begin
    }
}

/// Returns the median, the 99th percentile and the maximum over all seeds.
fn over_seeds(measure: impl Fn(u64) -> Duration) -> [Duration; 3] {
    let mut times: Vec<_> = (0..SEEDS).map(measure).collect();
    times.sort();
    [times.len() / 2, times.len() * 99 / 100, times.len() - 1].map(|place| times[place])
}

#[test]
fn all_servers_are_found_within_two_seconds() {
    for (servers, handshake, median, late) in [
        (3, NEAR, 200, 1200),
        (5, NEAR, 600, 2000),
        (3, FAR, 900, 2500),
        (5, FAR, 1500, 4000),
    ] {
        let found = over_seeds(|seed| {
            let mut world = World::new(DEFAULT, seed, servers);
            world.handshake = handshake;
            world.until_connected(servers)
        });
        let limits = [median, late].map(Duration::from_millis);
        assert!(found[0] <= limits[0], "{servers} {handshake:?}: {found:?}");
        assert!(found[1] <= limits[1], "{servers} {handshake:?}: {found:?}");
    }
}

#[test]
fn single_server_gets_one_attempt() {
    for policy in [
        DEFAULT,
        Policy {
            interval: SECOND / 100,
            ..DEFAULT
        },
    ] {
        let mut world = World::new(policy, 1, 1);
        assert_eq!(world.pass(HOUR), 1);
    }
}

#[test]
fn successor_of_a_lost_server_is_found() {
    for (servers, absent, median) in [(3, 2, 1000), (5, 2, 2000), (3, 20, 3000), (3, 50, 3000)] {
        let found = over_seeds(|seed| {
            let mut world = World::settled(DEFAULT, seed, servers);
            world.lose(0);
            world.pass(absent * SECOND);
            world.serve(100, servers);
            world.until_connected(servers)
        });
        let median = Duration::from_millis(median);
        assert!(found[0] <= median, "{servers} {absent}: {found:?}");
    }
}

#[test]
fn missing_server_costs_ever_fewer_attempts() {
    for seed in 0..SEEDS {
        let mut world = World::settled(DEFAULT, seed, 3);
        world.lose(0);
        assert!(world.pass(SECOND) <= 6);
        assert!(world.pass(59 * SECOND) <= 75);
        // Limited by --sync-interval-cap from now on.
        world.pass(60 * SECOND);
        assert!(world.pass(HOUR) <= 360);
    }
}

#[test]
fn lost_server_spreads_the_attempts_of_a_fleet() {
    let first = |seed| {
        let mut world = World::settled(DEFAULT, seed, 3);
        let lost = world.elapsed();
        world.lose(0);
        world.pass(SECOND);
        let starts = world.starts.iter().copied();
        starts
            .map(|start| start.saturating_sub(lost))
            .find(|start| !start.is_zero())
            .unwrap()
    };
    let [median, _, last] = over_seeds(first);
    assert!(
        SECOND / 5 < median && median < SECOND * 3 / 10,
        "{median:?}"
    );
    assert!(last < SECOND / 2, "{last:?}");
}

#[test]
fn steady_state_costs_no_attempt_without_sync_forever() {
    let mut world = World::settled(DEFAULT, 1, 3);
    assert_eq!(world.pass(HOUR), 0);
}

#[test]
fn sync_forever_costs_a_tenth_of_upstreams_attempts() {
    // Upstream starts an attempt every 1.05 s on average.
    let upstream = 3600.0 / 1.05;
    let mut world = World::settled(FOREVER, 1, 3);
    let attempts = world.pass(HOUR) as f64;
    assert!(attempts <= upstream / 10.0, "{attempts}");
    // The balancer sends a quarter of the attempts to a fourth server.
    let found = over_seeds(|seed| {
        let mut world = World::settled(FOREVER, seed, 3);
        world.pass(HOUR);
        world.serve(3, 4);
        world.until_connected(4)
    });
    assert!(found[0] <= 60 * SECOND, "{found:?}");
}

#[test]
fn sync_forever_probes_ever_less_if_the_number_follows_the_servers() {
    for seed in 0..SEEDS {
        let mut world = World::new(FOREVER, seed, 3);
        world.follows = true;
        world.until_connected(3);
        world.pass(SECOND);
        world.starts.clear();
        world.pass(HOUR);
        let gaps = world.starts.windows(2).map(|two| two[1] - two[0]);
        let pauses = [
            12.0, 18.0, 27.0, 40.5, 60.75, 91.1, 136.6, 205.0, 307.5, 461.3, 600.0,
        ];
        for (gap, pause) in gaps.zip(pauses) {
            let gap = gap.as_secs_f64();
            assert!((pause..pause * 1.11).contains(&gap), "{gap} {pause}");
        }
        assert!((5..=6).contains(&world.pass(HOUR)));
    }
}

/// Returns a world whose number follows the servers, and which has not changed for an hour.
fn unchanged(seed: u64, servers: usize) -> World {
    let mut world = World::new(FOREVER, seed, servers);
    world.follows = true;
    world.until_connected(servers);
    world.pass(HOUR);
    world
}

#[test]
fn change_of_the_numbers_makes_the_gap_between_probes_short_again() {
    let lose = |world: &mut World| {
        world.announce(2);
        world.lose(0);
    };
    // The lease of a killed server expires later.
    let expire = |world: &mut World| {
        world.lose(0);
        world.pass(30 * SECOND);
        world.announce(2);
        world.announced = 2;
    };
    let resume = |world: &mut World| {
        world.connected.insert(3, 3);
    };
    let changes: [&dyn Fn(&mut World); 3] = [&lose, &expire, &resume];
    for change in changes {
        for seed in 0..SEEDS {
            let mut world = unchanged(seed, 3);
            change(&mut world);
            let probes = [10, 20, 60].map(|time| world.pass(time * SECOND));
            let [first, second, third] = probes;
            assert!(first <= 1, "{probes:?}");
            assert!((1..=2).contains(&(first + second)), "{probes:?}");
            assert!((2..=3).contains(&third), "{probes:?}");
        }
    }
}

#[test]
fn server_without_a_lease_is_soon_found_after_a_change() {
    let found = over_seeds(|seed| {
        let mut world = unchanged(seed, 4);
        // A server without a lease replaces a server with a lease.
        world.announce(3);
        world.lose(0);
        world.serve(100, 3);
        world.until_connected(4)
    });
    assert!(found[0] <= 60 * SECOND, "{found:?}");
}

#[test]
fn frequent_changes_and_failures_cost_no_more_probes_than_a_number_that_does_not_follow() {
    let upstream = 3600.0 / 1.05;
    let mut world = unchanged(1, 3);
    let mut attempts = 0;
    for count in (1..=3).cycle().take(3600) {
        world.announced = count;
        attempts += world.pass(SECOND);
    }
    assert!(attempts as f64 <= upstream / 10.0, "{attempts}");
    // Failed probes slow down, too.
    let mut world = unchanged(1, 3);
    world.servers.clear();
    assert!((5..=6).contains(&world.pass(HOUR)));
}

#[test]
fn sync_forever_probes_often_once_the_number_does_not_follow_the_servers() {
    let mut firsts = Vec::new();
    for seed in 0..SEEDS {
        let mut world = World::new(FOREVER, seed, 3);
        world.follows = true;
        world.until_connected(3);
        world.pass(HOUR);
        let (withdrawn, known) = (world.elapsed(), world.starts.len());
        world.follows = false;
        assert!(world.pass(HOUR) >= 3600 / 14);
        firsts.push(world.starts[known] - withdrawn);
    }
    // All agents of a fleet receive the message at once.
    firsts.sort();
    let (median, last) = (firsts[firsts.len() / 2], firsts[firsts.len() - 1]);
    assert!(
        SECOND / 5 < median && last < SECOND / 2,
        "{median:?} {last:?}"
    );
}

#[test]
fn pushed_number_starts_a_fast_search() {
    let found = over_seeds(|seed| {
        let mut world = World::new(DEFAULT, seed, 1);
        world.follows = true;
        world.pass(HOUR);
        world.serve(1, 3);
        world.serve(2, 3);
        world.servers[0].count = 3;
        world.connected.insert(0, 3);
        world.announced = 3;
        world.until_connected(3)
    });
    assert!(found[0] < SECOND && found[1] < 2 * SECOND, "{found:?}");
}

#[test]
fn stale_number_does_not_end_the_search_after_a_loss() {
    for seed in 0..SEEDS {
        let mut world = World::settled(DEFAULT, seed, 3);
        // The remaining servers announce a smaller number.
        world.announce(2);
        world.lose(0);
        assert_eq!((world.announced, world.connected.len()), (2, 2));
        assert!(world.pass(60 * SECOND) >= 50);
        world.serve(100, 2);
        world.until_connected(3);
        assert_eq!(world.pass(HOUR), 0);
    }
}

#[test]
fn smaller_number_is_accepted_in_the_end() {
    let mut world = World::settled(DEFAULT, 1, 3);
    world.announce(2);
    world.lose(0);
    world.pass(HOUR);
    assert!(world.pass(HOUR) <= 6);
    // A number that follows the servers is right at once.
    let mut world = World::settled(DEFAULT, 1, 3);
    world.follows = true;
    world.announce(2);
    world.lose(0);
    assert_eq!(world.pass(HOUR), 0);
}

#[test]
fn sync_forever_soon_finds_a_server_that_returns_after_a_long_time() {
    let found = over_seeds(|seed| {
        let mut world = World::settled(FOREVER, seed, 3);
        // The announced number is smaller than the number of servers.
        world.announce(2);
        world.lose(0);
        world.pass(HOUR);
        world.serve(100, 2);
        world.until_connected(3)
    });
    assert!(found[0] <= 60 * SECOND, "{found:?}");
}

#[test]
fn failures_pause_as_in_upstream() {
    let mut world = World::new(DEFAULT, 1, 0);
    world.pass(60 * SECOND);
    let gaps: Vec<f64> = world
        .starts
        .windows(2)
        .map(|two| (two[1] - two[0]).as_secs_f64())
        .collect();
    let expected = [1.0, 1.5, 2.25, 3.375, 5.0625, 7.59, 10.0, 10.0];
    for (gap, pause) in gaps.iter().zip(expected) {
        assert!((pause..pause * 1.1 + 0.03).contains(gap), "{gaps:?}");
    }
    // A server ends the pauses, and a later failure begins with the interval again.
    world.serve(0, 1);
    world.until_connected(1);
    world.lose(0);
    world.pass(SECOND / 2);
    let failed = world.elapsed();
    world.pass(2 * SECOND);
    let next = world.starts.iter().find(|start| **start > failed).copied();
    assert!(next.unwrap() - failed <= SECOND * 12 / 10);
}

#[test]
fn silent_servers_hold_only_some_attempts() {
    for (unanswered, gap) in [(0, FIRST_HEDGE_GAP), (1, ANSWER_GAP)] {
        let mut search = Search::new(DEFAULT, 1, Instant::now());
        let (mut now, view) = (
            Instant::now(),
            View {
                announced: 1,
                ..View::default()
            },
        );
        let mut starts = Vec::new();
        let begin = now;
        // No attempt ends.
        loop {
            match search.step(now, view) {
                Step::Attempt => starts.push(now - begin),
                Step::Wait(Some(until)) => now = until,
                Step::Wait(None) => break,
            }
            search.set_unanswered(unanswered);
        }
        assert_eq!(starts.len(), MOST_IN_PROGRESS);
        assert!((gap..gap * 3 / 2).contains(&starts[1]), "{starts:?}");
        search.ended(now, Outcome::Failed, view);
        assert!(matches!(search.step(now, view), Step::Wait(Some(_))));
    }
}

#[test]
fn server_that_drops_its_agents_gets_an_attempt_per_interval() {
    let mut world = World::new(DEFAULT, 1, 1);
    let limit = world.now + HOUR;
    while world.event(limit) {
        if !world.connected.is_empty() {
            world.lose(0);
            world.serve(0, 1);
        }
    }
    assert!(
        world.starts.len() <= 3600 + BURST as usize,
        "{}",
        world.starts.len()
    );
}
