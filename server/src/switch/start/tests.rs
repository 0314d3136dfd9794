#![allow(clippy::unwrap_used)]

use std::pin::pin;
use std::time::Duration;

use futures_util::future::poll_immediate;
use rustix::fs::{CWD, OFlags, mkfifoat, open};
use tokio::time::Instant;

use super::*;
use crate::router::Side;
use crate::tunnel::{Health, Kind};

const FLAG: Mode = Mode::Konnectivity;

fn saved(mode: Mode, flag: Mode, file: Option<Mode>) -> Saved {
    Saved::new(mode, SetBy::Switch, flag, file)
}

#[test]
fn the_last_change_wins() {
    let (k, o, prefer) = (Mode::Konnectivity, Mode::Openvpn, Mode::PreferOpenvpn);
    let decided = |flag, file, saved: Option<Saved>| {
        let decision = decide(flag, file, saved.as_ref());
        (decision.mode, decision.set_by)
    };
    // Without a saved state: the file, or else the flag.
    assert_eq!(decided(k, None, None), (k, SetBy::Flag));
    assert_eq!(decided(k, Some(o), None), (o, SetBy::File));
    // A switch survives a restart if the flag is unchanged.
    assert_eq!(
        decided(k, None, Some(saved(o, k, None))),
        (o, SetBy::Switch)
    );
    assert_eq!(
        decided(prefer, None, Some(saved(o, k, None))),
        (prefer, SetBy::Flag)
    );
    // With a file, a switch survives if the file is unchanged, whatever the flag.
    let state = || Some(saved(prefer, k, Some(o)));
    assert_eq!(decided(k, Some(o), state()), (prefer, SetBy::Switch));
    assert_eq!(decided(o, Some(o), state()), (prefer, SetBy::Switch));
    assert_eq!(decided(k, Some(k), state()), (k, SetBy::File));
    // A new file, and a removed file.
    assert_eq!(
        decided(k, Some(k), Some(saved(o, k, None))),
        (k, SetBy::File)
    );
    assert_eq!(decided(k, None, state()), (prefer, SetBy::Switch));
}

fn view(openvpn: bool) -> View {
    let side = Side {
        health: Health::Absent,
        in_use: 0,
    };
    View {
        konnectivity: side,
        openvpn: openvpn.then_some(side),
    }
}

fn settings(folder: &tempfile::TempDir) -> Settings {
    Settings {
        mode: FLAG,
        mode_file: Some(folder.path().join("mode")),
        state_file: Some(folder.path().join("state")),
        drain: Duration::from_secs(60),
    }
}

#[tokio::test]
async fn unusable_state_is_renamed() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let state = StateFile::new(settings.state_file.as_ref().unwrap());
    let in_openvpn = saved(Mode::Openvpn, FLAG, None);
    state.save(&in_openvpn).await.unwrap().unwrap();
    let mut start = Start::read(settings.clone()).unwrap();
    assert!(start.unreadable.as_ref().unwrap().contains("cannot read"));
    let (machine, set_by) = start.machine(&view(false), Clocks::read()).unwrap();
    assert_eq!((machine.mode(), set_by), (FLAG, SetBy::Flag));
    let lost = start.lost.unwrap();
    for part in ["needs an OpenVPN tunnel", "the file is now"] {
        assert!(lost.contains(part), "{lost}");
    }
    let kept = StateFile::new(&folder.path().join("state.bad"));
    assert_eq!(kept.load(), Ok(Some(in_openvpn.clone())));
    assert_eq!(state.load(), Ok(None));

    state.save(&in_openvpn).await.unwrap().unwrap();
    let mut start = Start::read(settings.clone()).unwrap();
    let (machine, set_by) = start.machine(&view(true), Clocks::read()).unwrap();
    assert_eq!((machine.mode(), set_by), (Mode::Openvpn, SetBy::Switch));

    std::fs::write(settings.state_file.as_ref().unwrap(), "nonsense").unwrap();
    let mut start = Start::read(settings).unwrap();
    let (machine, _) = start.machine(&view(true), Clocks::read()).unwrap();
    assert_eq!(machine.mode(), FLAG);
    let lost = start.lost.unwrap();
    assert!(lost.contains("the file is now"), "{lost}");
    let kept = std::fs::read(folder.path().join("state.bad")).unwrap();
    assert_eq!(kept, b"nonsense");
}

#[test]
fn folder_as_state_file_is_refused_and_stays_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let state = settings.state_file.clone().unwrap();
    std::fs::create_dir(&state).unwrap();
    let error = Start::read(settings).err().unwrap().to_string();
    assert!(error.contains("not a regular file"), "{error}");
    assert!(state.is_dir());
}

#[test]
fn mode_that_has_changed_with_the_restart_waits_for_a_healthy_peer() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mode"), "konnectivity").unwrap();
    let start = |saved: Saved| {
        let mut start = Start::read(settings(&folder)).unwrap();
        start.saved = Some(saved);
        let (machine, set_by) = start.machine(&view(true), Clocks::read()).unwrap();
        assert_eq!((machine.mode(), set_by), (Mode::Konnectivity, SetBy::File));
        machine
    };
    let in_openvpn = saved(Mode::Openvpn, FLAG, Some(Mode::Openvpn));
    let route = start(in_openvpn).route();
    assert_eq!((route.first, route.both), (Kind::Openvpn, true));
    // The file now has the mode that a switch waits for.
    let waiting = Phase::Waiting {
        first: Kind::Openvpn,
        drain: Duration::from_secs(60),
        since: Instant::now(),
    };
    let in_switch = saved(Mode::Konnectivity, FLAG, Some(Mode::Openvpn));
    let route = start(in_switch.with_phase(waiting, Clocks::read())).route();
    assert_eq!((route.first, route.both), (Kind::Openvpn, true));
}

#[tokio::test]
async fn mode_file_without_a_valid_mode_leaves_the_saved_mode_in_force() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    std::fs::write(folder.path().join("mode"), "vpn").unwrap();
    let state = StateFile::new(settings.state_file.as_ref().unwrap());
    let in_openvpn = saved(Mode::PreferOpenvpn, FLAG, Some(Mode::Konnectivity));
    state.save(&in_openvpn).await.unwrap().unwrap();
    let mut start = Start::read(settings.clone()).unwrap();
    let (machine, set_by) = start.machine(&view(true), Clocks::read()).unwrap();
    assert_eq!(
        (machine.mode(), set_by),
        (Mode::PreferOpenvpn, SetBy::Switch)
    );
    assert_eq!(start.file, Some(Mode::Konnectivity));
    assert!(start.wrong.unwrap().to_string().contains("\"vpn\""));
    // The flag has changed, too.
    let changed = saved(Mode::PreferOpenvpn, Mode::Openvpn, None);
    state.save(&changed).await.unwrap().unwrap();
    let mut start = Start::read(settings.clone()).unwrap();
    let (machine, _) = start.machine(&view(true), Clocks::read()).unwrap();
    assert_eq!(machine.mode(), Mode::PreferOpenvpn);
    // The server no longer has the tunnel of the saved mode.
    let mut start = Start::read(settings).unwrap();
    let error = start.machine(&view(false), Clocks::read()).unwrap_err();
    assert!(error.to_string().contains("\"vpn\""), "{error}");
}

#[test]
fn mode_file_without_a_possible_mode_prevents_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mode");
    std::fs::write(&path, "vpn").unwrap();
    let error = Start::read(settings(&folder)).err().unwrap().to_string();
    assert!(
        error.contains("--tunnel-mode-file") && error.contains("\"vpn\""),
        "{error}"
    );

    std::fs::write(&path, "konnectivityEnabled: false").unwrap();
    let mut start = Start::read(settings(&folder)).unwrap();
    let error = start.machine(&view(false), Clocks::read()).unwrap_err();
    let expected = Unavailable(Mode::Openvpn).to_string();
    assert_eq!(error.to_string(), expected);
    let mut start = Start::read(settings(&folder)).unwrap();
    let (machine, set_by) = start.machine(&view(true), Clocks::read()).unwrap();
    assert_eq!((machine.mode(), set_by), (Mode::Openvpn, SetBy::File));
}

#[tokio::test]
async fn mode_file_that_cannot_be_read_in_time_blocks_only_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let settings = settings(&folder);
    let file = settings.mode_file.clone().unwrap();
    mkfifoat(CWD, &file, rustix::fs::Mode::RWXU).unwrap();
    let (going_on, is_going_on) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        // Waits for the reader, which then waits for an end of the file.
        let pipe = open(&file, OFlags::WRONLY, rustix::fs::Mode::empty()).unwrap();
        rustix::io::write(&pipe, b"openvpn").unwrap();
        is_going_on.recv_timeout(Duration::from_secs(10))
    });
    let mut load = pin!(Start::load(settings));
    assert!(poll_immediate(load.as_mut()).await.is_none());
    going_on.send(()).unwrap();
    assert_eq!(load.await.unwrap().file, Some(Mode::Openvpn));
    writer.join().unwrap().unwrap();
}
