//! Tests of the whole switch over tunnels in memory, in virtual time.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bytes::Bytes;
use culvert_stream::{CloseReason, Sink as _, Source as _};
use proptest::prelude::*;
use rustix::fs::OFlags;
use tokio::time::{Instant, advance, resume, sleep, timeout};
use tokio_util::task::TaskTracker;

use super::*;
use crate::backend::{Connection, DialError};
use crate::router::tests::World;
use crate::switch::Settings;
use crate::tunnel::{Health, Kind};

const K: Kind = Kind::Konnectivity;
const O: Kind = Kind::Openvpn;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

struct Running {
    world: Arc<World>,
    switcher: Switcher,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Running {
    fn start(settings: Settings) -> Self {
        let world = Arc::new(World::new());
        let (router, metrics) = (world.router.clone(), world.metrics.clone());
        let read = Start::read(settings).unwrap();
        let (switcher, driver) = start(read, router, metrics).unwrap();
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        tasks.spawn(driver.run(stop.clone()));
        Self {
            world,
            switcher,
            tasks,
            stop,
        }
    }

    async fn switch(&self, mode: Mode, drain: Option<Duration>) {
        self.switcher.request(mode, drain).await.unwrap();
    }

    async fn settled(&self) {
        while self.switcher.status().switch != Progress::Settled {
            sleep(ms(50)).await;
        }
    }

    /// Runs an echo until the connection is cut or the test ends. The flag is set by a cut.
    fn stream(&self, connection: Connection) -> Arc<AtomicBool> {
        let cut = Arc::new(AtomicBool::new(false));
        let (seen, stop) = (cut.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = echo(connection) => seen.store(true, Ordering::Relaxed),
                () = stop.cancelled() => {}
            }
        });
        cut
    }

    async fn end(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Returns only when the connection is cut.
async fn echo(connection: Connection) {
    let Connection {
        mut source,
        mut sink,
        cut,
    } = connection;
    let talk = async {
        loop {
            sink.send(Bytes::from_static(b"ping")).await.unwrap();
            assert_eq!(source.recv().await.unwrap().unwrap(), "ping");
            sleep(ms(50)).await;
        }
    };
    tokio::select! {
        () = talk => {}
        reason = cut.due() => assert_eq!(reason, CloseReason::Switched),
    }
}

fn progress(running: &Running) -> (Mode, Vec<Kind>, Progress) {
    let status = running.switcher.status();
    (status.mode, status.new_dials, status.switch)
}

#[tokio::test(start_paused = true)]
async fn twenty_switches_under_load_fail_no_dial_and_cut_no_stream() {
    // Longer than a round, and short because every connection runs over a real flow.
    let drain = ms(10_000);
    let running = Arc::new(Running::start(Settings {
        drain,
        ..Settings::default()
    }));
    running.world.konnectivity.set_delay(ms(30));
    running.world.openvpn.set_delay(ms(80));
    let (opened, failed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut streams = Vec::new();
    let load = {
        let (running, opened, failed) = (running.clone(), opened.clone(), failed.clone());
        tokio::spawn(async move {
            while !running.stop.is_cancelled() {
                let (running, opened, failed) = (running.clone(), opened.clone(), failed.clone());
                tokio::spawn(async move {
                    match running.world.dial().await {
                        Ok(connection) => {
                            opened.fetch_add(1, Ordering::Relaxed);
                            // A cut connection counts as a failure, like a failed dial.
                            let talk = tokio::time::timeout(ms(200), echo(connection));
                            let cut = usize::from(talk.await.is_ok());
                            failed.fetch_add(cut, Ordering::Relaxed);
                        }
                        Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
                    }
                });
                sleep(ms(5)).await;
            }
        })
    };
    for round in 0..20 {
        let mode = [Mode::Openvpn, Mode::Konnectivity][round % 2];
        streams.push(running.stream(running.world.dial().await.unwrap()));
        // Only some of the switches have to wait for a peer.
        let target = [&running.world.openvpn, &running.world.konnectivity][round % 2];
        if round % 3 == 0 {
            target.set_health(Health::Absent);
        }
        running.switch(mode, None).await;
        sleep(ms(500)).await;
        target.set_health(Health::Healthy);
        sleep(ms(2500)).await;
        let (now, new_dials, _) = progress(&running);
        assert_eq!((now, new_dials[0]), (mode, mode.tunnel()));
    }
    assert_eq!(failed.load(Ordering::Relaxed), 0);
    let opened = opened.load(Ordering::Relaxed);
    assert!(opened > 10_000, "{opened}");
    let (k, o) = (&running.world.konnectivity, &running.world.openvpn);
    for tunnel in [k, o] {
        assert!(tunnel.dials.load(Ordering::Relaxed) > 4000);
    }
    let cut = |streams: &[Arc<AtomicBool>]| {
        let cut = streams.iter().filter(|cut| cut.load(Ordering::Relaxed));
        cut.count()
    };
    assert_eq!(cut(&streams), 0);
    // The deadline of the last switch ends the streams of the old tunnel, and only those streams.
    sleep(drain).await;
    running.settled().await;
    assert_eq!(cut(&streams), 10);
    assert_eq!(failed.load(Ordering::Relaxed), 0);
    running.stop.cancel();
    load.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn deadline_cuts_on_time_and_the_status_shows_the_switch() {
    let running = Running::start(Settings::default());
    let old = running.stream(running.world.dial().await.unwrap());
    running.switch(Mode::Openvpn, Some(ms(10_000))).await;
    let status = running.switcher.status();
    assert_eq!((status.mode, status.set_by), (Mode::Openvpn, SetBy::Switch));
    assert_eq!(status.new_dials, [O, K]);
    let Progress::Draining {
        tunnel,
        left,
        seconds_left,
        ..
    } = status.switch
    else {
        panic!("{status:?}");
    };
    assert_eq!((tunnel, left, seconds_left), (K, 1, 10.0));
    let connections: Vec<_> = status
        .tunnels
        .iter()
        .map(|t| (t.tunnel, t.connections))
        .collect();
    assert_eq!(connections, [(K, 1), (O, 0)]);
    assert_eq!(status.tunnels[1].peers[0].name, "openvpn-peer");
    assert!(running.world.shows("culvert_tunnel_switching 1"));
    assert!(
        running
            .world
            .shows("culvert_tunnel_mode{mode=\"openvpn\"} 1")
    );
    assert!(
        running
            .world
            .shows("culvert_tunnel_mode{mode=\"konnectivity\"} 0")
    );

    let new = running.stream(running.world.dial().await.unwrap());
    sleep(ms(9_900)).await;
    assert!(!old.load(Ordering::Relaxed));
    sleep(ms(200)).await;
    assert!(old.load(Ordering::Relaxed) && !new.load(Ordering::Relaxed));
    let status = running.switcher.status();
    assert_eq!(
        (status.switch, status.new_dials),
        (Progress::Settled, vec![O])
    );
    assert_eq!(status.last_switch_seconds, Some(10.0));
    assert!(
        running
            .world
            .shows("culvert_tunnel_switch_duration_seconds_count 1")
    );
    assert!(running.world.shows("culvert_tunnel_switching 0"));
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn streams_of_the_old_tunnel_stay_if_a_switch_is_reversed() {
    let running = Running::start(Settings::default());
    let old = running.stream(running.world.dial().await.unwrap());
    running.switch(Mode::Openvpn, Some(ms(10_000))).await;
    let new = running.stream(running.world.dial().await.unwrap());
    sleep(ms(5_000)).await;
    running.switch(Mode::Konnectivity, Some(ms(20_000))).await;
    assert_eq!(running.world.opened_by().await, K);
    sleep(ms(19_500)).await;
    assert!(!old.load(Ordering::Relaxed) && !new.load(Ordering::Relaxed));
    sleep(ms(1_000)).await;
    assert!(!old.load(Ordering::Relaxed) && new.load(Ordering::Relaxed));
    assert_eq!(progress(&running).2, Progress::Settled);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_target_without_a_peer_is_waited_for() {
    let running = Running::start(Settings::default());
    running.world.openvpn.set_health(Health::Absent);
    running.switch(Mode::Openvpn, None).await;
    assert_eq!(running.world.opened_by().await, K);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(running.world.opened_by().await, K);
    let Progress::Waiting { tunnel, seconds } = progress(&running).2 else {
        panic!("not waiting");
    };
    assert!(tunnel == O && seconds > 3600.0);
    running.world.openvpn.set_health(Health::Healthy);
    running.settled().await;
    assert_eq!(running.world.opened_by().await, O);
    running.end().await;
}

/// Mounts a ConfigMap as the kubelet does: a folder for each version, and a symbolic link to the current
/// version.
fn mount(folder: &Path, version: &str, text: &str) {
    std::fs::create_dir(folder.join(version)).unwrap();
    std::fs::write(folder.join(version).join("mode"), text).unwrap();
    let (new, data) = (folder.join("..data_tmp"), folder.join("..data"));
    symlink(version, &new).unwrap();
    std::fs::rename(&new, &data).unwrap();
    symlink("..data/mode", folder.join("mode")).ok();
}

#[tokio::test(start_paused = true)]
async fn mode_file_is_followed_through_links_and_a_wrong_file_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    mount(folder.path(), "..1", "konnectivityEnabled: true\n");
    let running = Running::start(Settings {
        mode: Mode::Openvpn,
        mode_file: Some(folder.path().join("mode")),
        ..Settings::default()
    });
    let shows = async |mode, set_by, problem: &str| {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = running.switcher.status();
            let problems = status.problems.join("\n");
            let as_expected =
                problems.is_empty() == problem.is_empty() && problems.contains(problem);
            if (status.mode, status.set_by, as_expected) == (mode, set_by, true) {
                return;
            }
            assert!(Instant::now() < deadline, "{status:?}");
            sleep(ms(50)).await;
        }
    };
    shows(Mode::Konnectivity, SetBy::File, "").await;
    mount(folder.path(), "..2", "konnectivityEnabled: false\n");
    shows(Mode::Openvpn, SetBy::File, "").await;
    running.switch(Mode::PreferKonnectivity, None).await;
    shows(Mode::PreferKonnectivity, SetBy::Switch, "").await;
    // A new text with the same mode is not a change.
    mount(
        folder.path(),
        "..2b",
        "other: 1\nkonnectivityEnabled: false\n",
    );
    sleep(POLL * 4).await;
    shows(Mode::PreferKonnectivity, SetBy::Switch, "").await;
    mount(folder.path(), "..3", "konnectivityEnabled: perhaps\n");
    shows(Mode::PreferKonnectivity, SetBy::Switch, "mode: ").await;
    std::fs::remove_file(folder.path().join("..data")).unwrap();
    shows(Mode::PreferKonnectivity, SetBy::Switch, "cannot read").await;
    assert_eq!(running.switcher.status().problems.len(), 1);
    mount(folder.path(), "..4", "prefer-openvpn");
    shows(Mode::PreferOpenvpn, SetBy::File, "").await;
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn mode_file_that_returns_with_the_same_mode_undoes_no_switch() {
    let folder = tempfile::tempdir().unwrap();
    let settings = || Settings {
        mode_file: Some(folder.path().join("mode")),
        state_file: Some(folder.path().join("state")),
        ..Settings::default()
    };
    mount(folder.path(), "..1", "konnectivity");
    let first = Running::start(settings());
    first.switch(Mode::Openvpn, None).await;
    first.settled().await;
    first.end().await;

    std::fs::remove_file(folder.path().join("..data")).unwrap();
    let second = Running::start(settings());
    sleep(POLL * 4).await;
    mount(folder.path(), "..2", "konnectivity");
    while !second.switcher.status().problems.is_empty() {
        sleep(ms(50)).await;
    }
    sleep(POLL * 4).await;
    let status = second.switcher.status();
    assert_eq!((status.mode, status.set_by), (Mode::Openvpn, SetBy::Switch));
    // A different mode is a change.
    mount(folder.path(), "..3", "prefer-konnectivity");
    while second.switcher.status().mode != Mode::PreferKonnectivity {
        sleep(ms(50)).await;
    }
    second.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_switch_in_progress_survives_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let settings = || Settings {
        state_file: Some(folder.path().join("state")),
        ..Settings::default()
    };
    let first = Running::start(settings());
    first.world.openvpn.set_health(Health::Absent);
    first.switch(Mode::Openvpn, None).await;
    first.end().await;

    // The switch still waits.
    let second = Running::start(settings());
    second.world.openvpn.set_health(Health::Absent);
    sleep(ms(1000)).await;
    assert_eq!(second.world.opened_by().await, K);
    assert_eq!(progress(&second).0, Mode::Openvpn);
    let stream = second.stream(second.world.dial().await.unwrap());
    second.world.openvpn.set_health(Health::Healthy);
    sleep(ms(1000)).await;
    assert_eq!(second.world.opened_by().await, O);
    assert!(!stream.load(Ordering::Relaxed));
    second.end().await;

    // The switch still drains: until the target is back, the old tunnel is the fallback.
    let third = Running::start(settings());
    third.world.openvpn.set_health(Health::Absent);
    sleep(ms(1000)).await;
    let (mode, new_dials, switch) = progress(&third);
    assert_eq!((mode, new_dials), (Mode::Openvpn, vec![O, K]));
    assert!(matches!(switch, Progress::Draining { .. }), "{switch:?}");
    assert_eq!(third.world.opened_by().await, K);
    third.world.openvpn.set_health(Health::Healthy);
    third.settled().await;
    third.end().await;

    let fourth = Running::start(settings());
    assert_eq!(
        progress(&fourth),
        (Mode::Openvpn, vec![O], Progress::Settled)
    );
    assert_eq!(fourth.switcher.status().set_by, SetBy::Switch);
    fourth.end().await;
}

#[tokio::test(start_paused = true)]
async fn state_that_cannot_be_saved_is_reported_and_blocks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("gone/state");
    let running = Running::start(Settings {
        state_file: Some(state.clone()),
        ..Settings::default()
    });
    running.switch(Mode::Openvpn, None).await;
    assert_eq!(running.world.opened_by().await, O);
    let problems = running.switcher.status().problems;
    assert!(problems[0].contains("cannot save"), "{problems:?}");
    let shows = |count: u32| {
        let line = format!("culvert_tunnel_switch_problems {count}\n");
        let page = running.world.metrics.registry().render();
        assert!(page.contains(&line), "{page}");
    };
    shows(1);
    running.settled().await;
    std::fs::create_dir(state.parent().unwrap()).unwrap();
    sleep(SAVE_PAUSE + TICK).await;
    assert_eq!(running.switcher.status().problems, [""; 0]);
    shows(0);
    assert!(state.exists());

    // A switch back leads to the saved state, which the failed saves may have changed.
    let away = folder.path().join("away");
    std::fs::rename(state.parent().unwrap(), &away).unwrap();
    running.switch(Mode::Konnectivity, None).await;
    running.settled().await;
    shows(1);
    running.switch(Mode::Openvpn, None).await;
    running.settled().await;
    std::fs::rename(&away, state.parent().unwrap()).unwrap();
    sleep(SAVE_PAUSE + TICK).await;
    shows(0);
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn volume_that_does_not_answer_is_reported_and_stops_no_switch() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    let new = folder.path().join("state.new");
    let mode = rustix::fs::Mode::RWXU;
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &new, kind, mode, 0).unwrap();
    let running = Running::start(Settings {
        state_file: Some(state.clone()),
        ..Settings::default()
    });
    // While a thread writes, only the test advances the clock.
    let wait = async |done: &dyn Fn(&Status) -> bool| {
        while !done(&running.switcher.status()) {
            advance(ms(50)).await;
        }
    };
    wait(&|status| !status.problems.is_empty()).await;
    assert!(running.switcher.status().unsaved);
    running.switch(Mode::Openvpn, None).await;
    wait(&|status| status.switch == Progress::Settled).await;
    assert_eq!(progress(&running).1, [O]);
    // The write ends with an error, and the next one succeeds.
    std::fs::read(&new).unwrap();
    std::fs::remove_file(&new).unwrap();
    wait(&|status| status.problems.is_empty()).await;
    assert!(state.exists());
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn mode_file_that_cannot_be_read_in_time_is_reported_and_stops_no_switch() {
    let folder = tempfile::tempdir().unwrap();
    let [file, new] = ["mode", "new"].map(|name| folder.path().join(name));
    std::fs::write(&file, "konnectivity").unwrap();
    let running = Running::start(Settings {
        mode_file: Some(file.clone()),
        ..Settings::default()
    });
    let mode = rustix::fs::Mode::RWXU;
    rustix::fs::mkfifoat(rustix::fs::CWD, &new, mode).unwrap();
    std::fs::rename(&new, &file).unwrap();
    // Opens once the driver has begun to read, and makes the driver wait for an end of the file.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    let writer = loop {
        match rustix::fs::open(&file, flags, rustix::fs::Mode::empty()) {
            Ok(writer) => break writer,
            Err(_) => advance(ms(50)).await,
        }
    };
    // While a thread reads, only the test advances the clock.
    let wait = async |done: &dyn Fn(&Status) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = running.switcher.status();
            if done(&status) {
                return;
            }
            assert!(Instant::now() < deadline, "{status:?}");
            advance(ms(50)).await;
        }
    };
    tokio::select! {
        () = running.switch(Mode::Openvpn, None) => {}
        () = wait(&|_| false) => {}
    }
    wait(&|status| status.switch == Progress::Settled).await;
    assert_eq!(progress(&running).1, [O]);
    wait(&|status| status.problems.iter().any(|why| why.contains("volume"))).await;
    wait(&|_| running.world.shows("culvert_tunnel_switch_problems 1")).await;
    // The read ends without a change, and the new file is followed.
    std::fs::write(&new, "prefer-konnectivity").unwrap();
    std::fs::rename(&new, &file).unwrap();
    rustix::io::write(&writer, b"konnectivity").unwrap();
    drop(writer);
    // The threads of the next reads need real time.
    resume();
    let is_followed = async {
        loop {
            let status = running.switcher.status();
            if status.problems.is_empty() && status.mode == Mode::PreferKonnectivity {
                return;
            }
            sleep(ms(50)).await;
        }
    };
    timeout(Duration::from_secs(60), is_followed).await.unwrap();
    running.end().await;
}

#[tokio::test(start_paused = true)]
async fn lost_state_is_reported_until_the_next_request() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    std::fs::write(&state, "nonsense").unwrap();
    let running = Running::start(Settings {
        state_file: Some(state.clone()),
        ..Settings::default()
    });
    sleep(SAVE_PAUSE).await;
    assert!(StateFile::new(&state).load().unwrap().is_some());
    let status = running.switcher.status();
    assert!(
        status.problems[0].contains("state.bad") && !status.unsaved,
        "{status:?}"
    );
    running.switch(Mode::Konnectivity, None).await;
    assert_eq!(running.switcher.status().problems, [""; 0]);
    running.end().await;
}

#[derive(Clone, Debug)]
enum Move {
    Switch(Mode, u64),
    /// The health of this tunnel changes, and the other tunnel becomes healthy.
    Health(Kind, Health),
    Delay(Kind, u64),
    Rest(u64),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let kind = || prop_oneof![Just(K), Just(O)];
    let health = prop_oneof![
        Just(Health::Absent),
        Just(Health::Doubtful),
        Just(Health::Healthy)
    ];
    let mode = proptest::sample::select(Mode::ALL);
    let one = prop_oneof![
        3 => (mode, 0..3000u64).prop_map(|(mode, drain)| Move::Switch(mode, drain)),
        2 => (kind(), health).prop_map(|(kind, health)| Move::Health(kind, health)),
        1 => (kind(), 0..2000u64).prop_map(|(kind, delay)| Move::Delay(kind, delay)),
        4 => (0..1500u64).prop_map(Move::Rest),
    ];
    proptest::collection::vec(one, 1..60)
}

/// Plays the moves. A dial may fail only if the tunnel of the mode in force is not healthy.
async fn play(moves: Vec<Move>) -> Result<(), String> {
    let running = Arc::new(Running::start(Settings::default()));
    let fault = Arc::new(Mutex::new(None));
    let dialer = {
        let (running, fault) = (running.clone(), fault.clone());
        tokio::spawn(async move {
            while !running.stop.is_cancelled() {
                let (one, fault) = (running.clone(), fault.clone());
                tokio::spawn(async move {
                    let outcome = one.world.dial().await;
                    let status = one.switcher.status();
                    match outcome {
                        Ok(connection) => {
                            sleep(ms(300)).await;
                            drop(connection);
                        }
                        Err(error) if is_excused(&error, &status) => {}
                        Err(error) => *fault.lock() = Some(format!("{error}: {status:?}")),
                    }
                });
                sleep(ms(20)).await;
            }
        })
    };
    for one in moves {
        let world = &running.world;
        let tunnel = |kind| match kind {
            K => &world.konnectivity,
            O => &world.openvpn,
        };
        match one {
            Move::Switch(mode, drain) => running.switch(mode, Some(ms(drain))).await,
            Move::Health(kind, health) => {
                tunnel(kind.other()).set_health(Health::Healthy);
                tunnel(kind).set_health(health);
            }
            Move::Delay(kind, delay) => tunnel(kind).set_delay(ms(delay)),
            Move::Rest(time) => sleep(ms(time)).await,
        }
    }
    sleep(ms(5000)).await;
    running.stop.cancel();
    dialer.await.unwrap();
    let fault = fault.lock().take();
    fault.map_or(Ok(()), Err)
}

fn is_excused(error: &DialError, status: &Status) -> bool {
    let [only] = status.new_dials.as_slice() else {
        return false;
    };
    let health = status.tunnels.iter().find(|tunnel| tunnel.tunnel == *only);
    let unhealthy = health.is_some_and(|tunnel| tunnel.health != Health::Healthy);
    matches!(error, DialError::NoAgent | DialError::NoClient) && unhealthy
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_dial_fails_because_of_a_switch(moves in moves()) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let outcome = runtime.block_on(play(moves));
        prop_assert!(outcome.is_ok(), "{outcome:?}");
    }
}
