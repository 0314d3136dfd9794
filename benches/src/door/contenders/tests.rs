#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]
use culvert_kit::pattern;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::endpoint::Endpoints;

/// Returns our programs, as Cargo has built them beside this test.
pub(crate) fn programs() -> Programs {
    let door = culvert_tests::process::ours(PROXY);
    Programs::at(door.parent().unwrap().to_owned()).unwrap()
}

/// Returns every installed contender that has a row of this kind, with the entry point of the row.
pub(crate) fn installed(kind: impl Fn(Kind) -> bool) -> Vec<(Contender, Front)> {
    let mut found = Vec::new();
    for contender in CONTENDERS.into_iter().filter(|c| !c.missing()) {
        for front in [Front::Sni, Front::Node] {
            let mut rows = front.rows().iter();
            if rows.any(|row| kind(row.kind) && contender.has(front, row.kind)) {
                found.push((contender, front));
            }
        }
    }
    found
}

#[tokio::test]
async fn installed_contenders_carry_data() {
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
async fn change_fails_with_a_fixed_configuration() {
    let (programs, endpoints) = (programs(), Endpoints::start().await.unwrap());
    let direct = CONTENDERS[3];
    let starting = Door::start(direct, Front::Node, &programs, endpoints.lean(), 1);
    let mut door = starting.await.unwrap();
    door.change(0, endpoints.lean()).unwrap_err();
}
