//! A simulation of several candidates on a bad network: requests and answers are late or lost, candidates
//! freeze and die, and every clock shows a different time.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// One tick of the simulated time.
const TICK: Duration = Duration::from_millis(100);

/// Time that a candidate waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A request to the API; the API may process it long after the sender has given up.
struct Message {
    from: usize,
    number: u64,
    action: Action,
    arrives: Duration,
    answered: Duration,
}

/// An answer of the API.
struct Answer {
    to: usize,
    number: u64,
    comes: Duration,
    outcome: Outcome,
}

enum Outcome {
    Read(Option<Lease>),
    Written(Lease),
    Conflict,
}

struct Node {
    election: Election,
    /// Difference between this node's clock and the true time.
    clock: Duration,
    /// Number of the pending request, and the time when it was sent on the node's own clock.
    waiting: Option<(u64, Instant)>,
    stands_still_until: Duration,
    alive: bool,
}

struct World {
    random: StdRng,
    start: Instant,
    time: Duration,
    calm: bool,
    version: u64,
    lease: Option<Lease>,
    nodes: Vec<Node>,
    messages: Vec<Message>,
    answers: Vec<Answer>,
    sent: u64,
}

impl Node {
    fn is_awake(&self, time: Duration) -> bool {
        self.alive && self.stands_still_until <= time
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let start = Instant::now();
        let mut random = StdRng::seed_from_u64(seed);
        let nodes = (0..3).map(|index| {
            let clock = seconds(random.random_range(0..100_000));
            Node {
                election: candidate(&format!("node-{index}"), start + clock),
                clock,
                waiting: None,
                stands_still_until: Duration::ZERO,
                alive: true,
            }
        });
        let nodes = nodes.collect();
        Self {
            random,
            start,
            time: Duration::ZERO,
            calm: false,
            version: 0,
            lease: None,
            nodes,
            messages: Vec::new(),
            answers: Vec::new(),
            sent: 0,
        }
    }

    fn clock(&self, node: usize) -> Instant {
        self.start + self.time + self.nodes[node].clock
    }

    /// Returns the latency of a message; occasionally more than any candidate waits.
    fn latency(&mut self) -> Duration {
        let longest = match self.random.random_range(0..10) {
            _ if self.calm => 10,
            0 => 30_000,
            1..4 => 3_000,
            _ => 100,
        };
        Duration::from_millis(self.random.random_range(0..longest))
    }

    fn leaders(&self) -> Vec<usize> {
        let leads = |index: &usize| {
            let node = &self.nodes[*index];
            let until = node.election.leads_until();
            node.alive && until.is_some_and(|until| self.clock(*index) < until)
        };
        (0..self.nodes.len()).filter(leads).collect()
    }

    fn tick(&mut self) {
        self.time += TICK;
        let time = self.time;
        let arrived = self.messages.extract_if(.., |it| it.arrives <= time);
        for message in arrived.collect::<Vec<_>>() {
            let outcome = self.perform(message.action);
            self.answers.push(Answer {
                to: message.from,
                number: message.number,
                comes: message.answered,
                outcome,
            });
        }
        let answers = self.answers.extract_if(.., |it| it.comes <= time);
        for answer in answers.collect::<Vec<_>>() {
            self.deliver(answer);
        }
        for index in 0..self.nodes.len() {
            self.act(index);
        }
    }

    /// Performs a request as the API does: a write succeeds if the lease is unchanged since it was read.
    fn perform(&mut self, action: Action) -> Outcome {
        let Action::Write(mut lease) = action else {
            return Outcome::Read(self.lease.clone());
        };
        let present = self.lease.as_ref();
        let present = present.and_then(|lease| lease.metadata.resource_version.clone());
        if present != lease.metadata.resource_version {
            return Outcome::Conflict;
        }
        self.version += 1;
        lease.metadata.resource_version = Some(self.version.to_string());
        self.lease = Some((*lease).clone());
        Outcome::Written(*lease)
    }

    fn deliver(&mut self, answer: Answer) {
        let lost = !self.calm && self.random.random_range(0..10) == 0;
        let now = self.clock(answer.to);
        let node = &mut self.nodes[answer.to];
        let waiting = node.waiting.filter(|(number, _)| *number == answer.number);
        let Some((_, sent)) = waiting else {
            return;
        };
        if lost || !node.is_awake(self.time) {
            return;
        }
        node.waiting = None;
        match answer.outcome {
            Outcome::Read(lease) => node.election.read(now, lease),
            Outcome::Written(lease) => node.election.written(sent, now, lease),
            Outcome::Conflict => node.election.failed(now, true),
        }
    }

    fn act(&mut self, index: usize) {
        let now = self.clock(index);
        let chance = self.random.random_range(0..20_000);
        let others = self.nodes.iter().filter(|node| node.alive).count() > 1;
        let node = &mut self.nodes[index];
        match chance {
            _ if self.calm => {}
            0..20 => node.stands_still_until = self.time + seconds(chance * 2),
            20 if others => node.alive = false,
            _ => {}
        }
        if !node.is_awake(self.time) {
            return;
        }
        if let Some((_, sent)) = node.waiting {
            if now < sent + TIMEOUT {
                return;
            }
            node.waiting = None;
            node.election.failed(now, false);
        }
        let shown = now.duration_since(self.start).as_secs();
        let action = node.election.next(now, &wall(shown.try_into().unwrap()));
        if matches!(action, Action::Wait(_)) {
            return;
        }
        self.sent += 1;
        node.waiting = Some((self.sent, now));
        let arrives = self.time + self.latency();
        let answered = arrives + self.latency();
        self.messages.push(Message {
            from: index,
            number: self.sent,
            action,
            arrives,
            answered,
        });
    }
}

#[test]
fn at_most_one_leads_at_any_time_and_exactly_one_in_the_end() {
    let mut handovers = 0;
    for seed in 0..300 {
        let mut world = World::new(seed);
        let mut last = None;
        while world.time < seconds(300) {
            world.tick();
            let leaders = world.leaders();
            assert!(leaders.len() <= 1, "{leaders:?} lead at once, seed {seed}");
            if let Some(leader) = leaders.first() {
                handovers += usize::from(last.is_some_and(|last| last != *leader));
                last = Some(*leader);
            }
        }
        world.calm = true;
        while world.time < seconds(400) {
            world.tick();
            assert!(world.leaders().len() <= 1, "seed {seed}");
        }
        assert_eq!(world.leaders().len(), 1, "seed {seed}");
    }
    // With fewer handovers the simulation would prove nothing.
    assert!(handovers > 300, "{handovers}");
}
