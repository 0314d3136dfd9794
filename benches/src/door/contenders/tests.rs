#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
use culvert_kit::pattern;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::door::change;
use crate::door::rows::ROWS;
use crate::endpoint::Endpoints;

/// Our programs as Cargo has built them beside this test.
fn programs() -> Programs {
    let door = culvert_tests::process::ours(PROXY);
    Programs::at(door.parent().unwrap().to_owned()).unwrap()
}

/// Everyone who is installed and has a row of this kind.
fn installed(kind: impl Fn(Kind) -> bool) -> Vec<(Contender, Front)> {
    let mut found = Vec::new();
    for contender in CONTENDERS.into_iter().filter(|c| !c.missing()) {
        for front in [Front::Sni, Front::Node] {
            let rows = ROWS.iter().filter(|row| row.front == front);
            let mut rows = rows.filter(|row| kind(row.kind) && contender.has(row));
            if rows.next().is_some() {
                found.push((contender, front));
            }
        }
    }
    found
}

#[tokio::test]
async fn what_is_installed_carries() {
    let (programs, endpoints) = (programs(), Endpoints::start().await.unwrap());
    let target = endpoints.lean();
    for (contender, front) in installed(|kind| matches!(kind, Kind::Load(_))) {
        let starting = Door::start(contender, front, &programs, target, 1);
        let mut door = starting.await.unwrap();
        let mut stream = door.entry().open(target).await.unwrap();
        stream.write_all(b"download 100000\n").await.unwrap();
        let mut received = vec![0; 100_000];
        stream.read_exact(&mut received).await.unwrap();
        assert!(received == pattern::prefix(100_000), "{contender:?}");
        let memory = door.rss().unwrap();
        assert_eq!(memory.is_some(), contender.name != DIRECT, "{contender:?}");
        assert!(memory.is_none_or(|bytes| bytes > 100_000), "{memory:?}");
    }
}

#[tokio::test]
async fn one_service_changes_and_the_others_stay() {
    let (programs, old) = (programs(), Endpoints::start().await.unwrap());
    let new = Endpoints::start().await.unwrap();
    for (contender, front) in installed(|kind| kind == Kind::Change) {
        let starting = Door::start(contender, front, &programs, old.lean(), 25);
        let mut door = starting.await.unwrap();
        let figures = change::measure(&mut door, old.lean(), new.lean(), 25);
        let figures = figures.await.unwrap();
        assert!(figures[0].1 > 0.0, "{contender:?}: {figures:?}");
        assert_eq!(figures[1].1, 0.0, "{contender:?}: {figures:?}");
    }
}

#[tokio::test]
async fn who_reads_its_configuration_once_can_not_be_told() {
    let (programs, endpoints) = (programs(), Endpoints::start().await.unwrap());
    let direct = CONTENDERS[3];
    let starting = Door::start(direct, Front::Node, &programs, endpoints.lean(), 1);
    let mut door = starting.await.unwrap();
    door.change(0, endpoints.lean()).unwrap_err();
}
