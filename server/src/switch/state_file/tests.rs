#![allow(clippy::unwrap_used)]

use super::*;

fn saved(phase: Phase, clocks: Clocks) -> Saved {
    let saved = Saved::new(Mode::Openvpn, SetBy::Switch, Mode::Konnectivity, None);
    saved.with_phase(phase, clocks)
}

fn draining(clocks: Clocks, left: u64) -> Phase {
    Phase::Draining {
        deadline: clocks.now + Duration::from_secs(left),
        since: clocks.now,
        closing: false,
        overdue: false,
    }
}

const LONGEST: Duration = Duration::from_secs(300);

/// Returns the clocks of a process that starts later.
fn later(clocks: Clocks, seconds: u64) -> Clocks {
    let time = Duration::from_secs(seconds);
    Clocks {
        now: clocks.now + 10 * time,
        wall: clocks.wall + time,
    }
}

#[tokio::test]
async fn saved_state_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let file = StateFile::new(&path);
    assert_eq!(file.load(), Ok(None));
    let clocks = Clocks::read();
    let waiting = Phase::Waiting {
        first: Kind::Konnectivity,
        drain: LONGEST,
        since: clocks.now,
    };
    for phase in [waiting, draining(clocks, 60), Phase::Settled] {
        let saved = saved(phase, clocks);
        file.save(&saved).await.unwrap().unwrap();
        assert_eq!(file.load(), Ok(Some(saved)));
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn drain_time_passes_while_the_program_is_down() {
    let clocks = Clocks::read();
    let saved = saved(draining(clocks, 60), clocks);
    for (down, left) in [(0, 60), (20, 40), (60, 0), (4000, 0)] {
        let clocks = later(clocks, down);
        let Phase::Draining { deadline, .. } = saved.phase(LONGEST, clocks) else {
            panic!("{saved:?}");
        };
        // Times are saved in ms.
        let found = (deadline - clocks.now + Duration::from_millis(5)).as_secs();
        assert_eq!(found, left, "{down}");
    }
    // A clock that was set back by a year does not extend the drain by a year.
    let back = Clocks {
        now: clocks.now,
        wall: clocks.wall - Duration::from_secs(365 * 86_400),
    };
    let Phase::Draining { deadline, .. } = saved.phase(LONGEST, back) else {
        panic!("{saved:?}");
    };
    assert!(deadline - back.now <= LONGEST);
}

#[tokio::test]
async fn invalid_state_file_is_refused_with_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let file = StateFile::new(&path);
    for text in [
        "",
        "openvpn",
        "{\"version\":1}",
        "{\"version\":1,\"mode\":\"vpn\",\"setBy\":\"switch\",\"flag\":\"konnectivity\"}",
        "{\"version\":2,\"mode\":\"openvpn\",\"setBy\":\"switch\",\"flag\":\"konnectivity\"}",
        &" ".repeat(100_000),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = file.load().unwrap_err();
        assert!(error.starts_with("--tunnel-state-file "), "{error}");
    }
    std::fs::write(&path, b"\xff").unwrap();
    assert!(file.load().is_err());
    let nowhere = StateFile::new(&folder.path().join("no/state"));
    let saved = saved(Phase::Settled, Clocks::read());
    let error = nowhere.save(&saved).await.unwrap().unwrap_err();
    assert!(error.contains("cannot save --tunnel-state-file"), "{error}");
}

#[test]
fn a_link_beside_the_file_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let [path, new, other] = ["state", "state.new", "other"].map(|name| folder.path().join(name));
    fs::write(&other, "precious").unwrap();
    std::os::unix::fs::symlink(&other, &new).unwrap();
    replace(&path, b"text").unwrap_err();
    assert_eq!(fs::read(&other).unwrap(), b"precious");
    assert!(!path.exists());
}
