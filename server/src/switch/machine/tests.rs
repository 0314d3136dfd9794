#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::router::Side;
use crate::tunnel::Health;

const DRAIN: Duration = Duration::from_secs(300);

/// A machine, its view of the tunnels, and the time.
struct Sim {
    switch: Switch,
    view: View,
    now: Instant,
}

impl Sim {
    fn new(mode: Mode) -> Self {
        let side = Side {
            health: Health::Healthy,
            in_use: 0,
        };
        Self {
            switch: Switch::new(mode, Phase::Settled, DRAIN),
            view: View {
                konnectivity: side,
                openvpn: Some(side),
            },
            now: Instant::now(),
        }
    }

    fn side(&mut self, kind: Kind) -> &mut Side {
        match kind {
            Kind::Konnectivity => &mut self.view.konnectivity,
            Kind::Openvpn => self.view.openvpn.as_mut().unwrap(),
        }
    }

    fn request(&mut self, mode: Mode, drain: Option<Duration>) {
        let view = self.view;
        self.switch.request(mode, drain, self.now, &view).unwrap();
    }

    /// Ticks until nothing changes, as the driver does.
    fn tick(&mut self) {
        loop {
            let before = self.switch.phase();
            self.switch.tick(self.now, &self.view);
            if self.switch.phase() == before {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.tick();
    }

    fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.switch.poll_event()).collect()
    }

    fn is_settled(&self) -> bool {
        self.switch.phase() == Phase::Settled
    }
}

const K: Kind = Kind::Konnectivity;
const O: Kind = Kind::Openvpn;

fn both(first: Kind) -> Route {
    Route { first, both: true }
}

#[test]
fn a_switch_waits_drains_and_cuts() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(O).health = Health::Doubtful;
    sim.side(K).in_use = 3;
    sim.request(Mode::Openvpn, None);
    sim.pass(Duration::from_secs(1000));
    assert_eq!(sim.switch.route(), both(K));
    let requested = Event::Requested {
        from: Mode::Konnectivity,
        to: Mode::Openvpn,
        turned: false,
    };
    assert_eq!(sim.events(), [requested, Event::Waits(O)]);

    sim.side(O).health = Health::Healthy;
    sim.tick();
    assert_eq!(sim.switch.route(), both(O));
    assert_eq!(sim.events(), [Event::Diverted(O), Event::Drains(K, DRAIN)]);
    assert_eq!(sim.switch.poll_timeout(), Some(sim.now + DRAIN));

    sim.pass(DRAIN - Duration::from_millis(1));
    assert_eq!(sim.events(), []);
    sim.pass(Duration::from_millis(1));
    let took = Duration::from_secs(1000) + DRAIN;
    assert_eq!(sim.events(), [Event::Cut(K), Event::Finished(took)]);
    assert_eq!(sim.switch.route(), Route::only(O));
}

#[test]
fn a_switch_ends_as_soon_as_nothing_is_left() {
    let mut sim = Sim::new(Mode::Openvpn);
    sim.side(O).in_use = 1;
    sim.request(Mode::Konnectivity, None);
    sim.pass(Duration::from_secs(20));
    assert!(!sim.is_settled());
    sim.side(O).in_use = 0;
    sim.tick();
    assert!(sim.is_settled());
    assert!(
        sim.events()
            .ends_with(&[Event::Finished(Duration::from_secs(20))])
    );
}

#[test]
fn a_dial_that_was_on_its_way_keeps_the_drain_open() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.request(Mode::Openvpn, None);
    // New dials do not use the old tunnel; this dial had read the earlier route.
    assert_eq!(sim.switch.route(), Route::only(O));
    sim.side(K).in_use = 1;
    sim.tick();
    assert_eq!(sim.switch.route(), both(O));
    assert!(!sim.is_settled());
    sim.pass(DRAIN);
    assert!(sim.events().contains(&Event::Cut(K)));
}

#[test]
fn a_switch_can_be_reversed_in_every_phase() {
    // While it waits.
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(K).in_use = 5;
    sim.side(O).health = Health::Absent;
    sim.request(Mode::Openvpn, None);
    sim.request(Mode::Konnectivity, None);
    sim.tick();
    assert!(sim.is_settled());
    assert_eq!(sim.switch.route(), Route::only(K));

    // While it drains: connections of the old tunnel stay, connections of the new tunnel drain.
    sim.side(O).health = Health::Healthy;
    sim.request(Mode::Openvpn, None);
    sim.side(O).in_use = 2;
    sim.pass(DRAIN / 2);
    sim.events();
    sim.request(Mode::Konnectivity, None);
    sim.tick();
    assert_eq!(sim.switch.route(), both(K));
    sim.pass(DRAIN);
    let events = sim.events();
    assert!(events.contains(&Event::Drains(O, DRAIN)), "{events:?}");
    assert!(events.contains(&Event::Cut(O)), "{events:?}");
    assert!(!events.contains(&Event::Cut(K)), "{events:?}");
}

#[test]
fn the_drain_of_a_switch_in_progress_can_be_changed() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(K).in_use = 1;
    sim.request(Mode::Openvpn, None);
    sim.request(Mode::Openvpn, None);
    sim.pass(Duration::from_secs(10));
    assert_eq!(
        sim.switch.poll_timeout(),
        Some(sim.now + DRAIN - Duration::from_secs(10))
    );
    sim.request(Mode::Openvpn, Some(Duration::from_secs(1)));
    sim.pass(Duration::from_secs(1));
    assert!(sim.events().contains(&Event::Cut(K)));
    assert!(sim.is_settled());
}

#[test]
fn nothing_is_cut_while_the_target_is_not_healthy() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(K).in_use = 1;
    sim.request(Mode::Openvpn, None);
    sim.side(O).health = Health::Absent;
    sim.pass(DRAIN);
    sim.pass(DRAIN);
    assert_eq!(sim.switch.route(), both(O));
    let events = sim.events();
    assert_eq!(events.last(), Some(&Event::Overdue(K)));
    // Time alone changes nothing.
    assert_eq!(sim.switch.poll_timeout(), None);
    sim.side(O).health = Health::Healthy;
    sim.tick();
    assert!(matches!(
        sim.events().as_slice(),
        [Event::Cut(K), Event::Finished(_)]
    ));
}

#[test]
fn preference_mode_ends_no_connection() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(K).in_use = 4;
    sim.request(Mode::PreferOpenvpn, None);
    assert!(sim.is_settled());
    assert_eq!(sim.switch.route(), both(O));
    // A tunnel without a peer is waited for, as in other modes.
    sim.request(Mode::Konnectivity, None);
    sim.tick();
    assert!(sim.is_settled());
    sim.side(O).health = Health::Absent;
    sim.request(Mode::PreferOpenvpn, None);
    assert_eq!(sim.switch.route(), both(K));
    assert!(!sim.is_settled());
}

#[test]
fn fallback_drains_when_a_mode_gives_it_up() {
    let mut sim = Sim::new(Mode::PreferKonnectivity);
    sim.side(O).in_use = 1;
    sim.request(Mode::Konnectivity, None);
    assert_eq!(sim.events().last(), Some(&Event::Drains(O, DRAIN)));
    // If the remaining tunnel has no peer, the switch waits for one.
    let mut sim = Sim::new(Mode::PreferKonnectivity);
    sim.side(K).health = Health::Absent;
    sim.request(Mode::Konnectivity, None);
    assert_eq!(sim.events().last(), Some(&Event::Waits(K)));
    assert_eq!(sim.switch.route(), both(K));
    // A switch that adds a fallback does not wait.
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.side(K).health = Health::Absent;
    sim.request(Mode::PreferKonnectivity, None);
    assert!(sim.is_settled());
}

#[test]
fn missing_tunnel_is_refused_and_never_waited_for() {
    let mut sim = Sim::new(Mode::Konnectivity);
    sim.view.openvpn = None;
    sim.side(K).health = Health::Absent;
    for mode in [Mode::Openvpn, Mode::PreferOpenvpn] {
        let view = sim.view;
        let refused = sim.switch.request(mode, None, sim.now, &view);
        assert_eq!(refused, Err(Unavailable(mode)));
    }
    assert_eq!(sim.events(), []);
    for mode in [Mode::PreferKonnectivity, Mode::Konnectivity] {
        sim.request(mode, None);
        assert!(sim.is_settled());
        assert_eq!(sim.switch.mode(), mode);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Request(Mode, Option<u64>),
    Health(Kind, Health),
    InUse(Kind, usize),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let kind = || prop_oneof![Just(K), Just(O)];
    let health = prop_oneof![
        Just(Health::Absent),
        Just(Health::Doubtful),
        Just(Health::Healthy)
    ];
    let mode = proptest::sample::select(Mode::ALL);
    let step = prop_oneof![
        (mode, proptest::option::of(0..20u64)).prop_map(|(mode, drain)| Step::Request(mode, drain)),
        (kind(), health).prop_map(|(kind, health)| Step::Health(kind, health)),
        (kind(), 0..3usize).prop_map(|(kind, count)| Step::InUse(kind, count)),
        (0..20u64).prop_map(Step::Pass),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    /// While a switch is in progress, dials can reach every healthy tunnel; new dials move only to a
    /// healthy tunnel; and no connection is closed early or left behind.
    #[test]
    fn no_switch_puts_a_healthy_tunnel_out_of_reach(steps in steps()) {
        let mut sim = Sim::new(Mode::Konnectivity);
        let mut earliest = sim.now;
        for step in steps {
            let (mode_before, route_before) = (sim.switch.mode(), sim.switch.route());
            match step {
                Step::Request(mode, drain) => {
                    let drain = drain.map(Duration::from_secs);
                    if mode != mode_before || drain.is_some() {
                        earliest = sim.now + drain.unwrap_or(DRAIN);
                    }
                    sim.request(mode, drain);
                }
                Step::Health(kind, health) => sim.side(kind).health = health,
                Step::InUse(kind, count) => {
                    // No dial reaches a tunnel outside the route.
                    let route = sim.switch.route();
                    let side = sim.side(kind);
                    if route.includes(kind) || count < side.in_use {
                        side.in_use = count;
                    }
                }
                Step::Pass(seconds) => sim.now += Duration::from_secs(seconds),
            }
            let healthy_target = sim.view.is_healthy(sim.switch.mode().tunnel());
            sim.tick();
            let mut cut = None;
            for event in sim.events() {
                if let Event::Cut(kind) = event {
                    prop_assert!(sim.now >= earliest);
                    prop_assert_eq!(kind, sim.switch.mode().tunnel().other());
                    cut = Some(kind);
                }
            }
            if let Some(kind) = cut {
                sim.side(kind).in_use = 0;
            }
            let route = sim.switch.route();
            if route.first != route_before.first {
                prop_assert!(healthy_target);
            }
            if !sim.is_settled() {
                prop_assert!(route.both);
            } else {
                prop_assert_eq!(route.first, sim.switch.mode().tunnel());
                prop_assert_eq!(route.both, sim.switch.mode().prefers());
                if !route.both {
                    let left = sim.side(route.first.other()).in_use;
                    prop_assert_eq!(left, 0);
                }
            }
        }
    }
}
