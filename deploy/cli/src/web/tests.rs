#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use culvert_kit::metrics::Metrics;
use culvert_server::tunnel::{Health, Kind, Mode, Peer, TunnelStatus};
use serde_json::Value;

use super::*;

/// Returns the status of a server with healthy agents.
fn status(names: &[&str]) -> Status {
    let peer = |name: &&str| Peer {
        name: (*name).to_owned(),
        kind: "agent, native".to_owned(),
        health: Health::Healthy,
        connections: 1,
        address: None,
        identifiers: Vec::new(),
        more_identifiers: 0,
    };
    Status {
        draining: false,
        server_id: None,
        version: None,
        link_congestion: None,
        mode: Mode::Konnectivity,
        set_by: culvert_server::switch::SetBy::Flag,
        new_dials: vec![Kind::Konnectivity],
        switch: culvert_server::switch::status::Progress::Settled,
        tunnels: vec![TunnelStatus {
            tunnel: Kind::Konnectivity,
            health: Health::Healthy,
            connections: 1,
            dials: 0,
            peers: names.iter().map(peer).collect(),
        }],
        last_switch_seconds: None,
        problems: Vec::new(),
        unsaved: false,
    }
}

/// Returns an answer of a server with agents, opened dials, and refused agents.
fn answer(names: &[&str], dials: u32, refused: u32) -> Answer {
    let page = format!(
        "culvert_tunnel_dials_total{{tunnel=\"konnectivity\",outcome=\"opened\"}} {dials}\n\
         culvert_rejected_total{{listener=\"agent\",reason=\"garbage\"}} {refused}\n"
    );
    Answer {
        at: Instant::now(),
        clock: 1.8e9,
        status: status(names),
        figures: Figures::read(&Metrics::parse(&page).unwrap()),
    }
}

fn view(watched: &Watched) -> Value {
    serde_json::to_value(watched.view(Instant::now(), 1.8e9)).unwrap()
}

/// Returns the values of the curve of dials.
fn dials(view: &Value) -> &Value {
    let curves = view["curves"].as_array().unwrap();
    let dials = curves.iter().find(|curve| curve["name"] == "dials");
    &dials.unwrap()["values"]
}

#[test]
fn only_loopback_addresses_are_accepted() {
    for good in ["127.0.0.1:0", "127.0.0.2:8000", "[::1]:0"] {
        assert!(address(good).is_ok(), "{good}");
    }
    for bad in [
        "0.0.0.0:0",
        "[::]:0",
        "192.0.2.1:80",
        "[::ffff:127.0.0.1]:0",
    ] {
        let error = address(bad).unwrap_err();
        assert!(error.contains("has no TLS"), "{bad}: {error}");
    }
    for bad in ["localhost:0", "127.0.0.1", "8000", ""] {
        let error = address(bad).unwrap_err();
        assert!(error.contains("such as 127.0.0.1:8000"), "{bad}: {error}");
    }
}

#[tokio::test(start_paused = true)]
async fn rates_survive_a_restart_and_a_silence_of_the_server() {
    let second = |seconds| sleep(Duration::from_secs(seconds));
    let mut watched = Watched::new("x".to_owned(), answer(&["a"], 100, 5));
    second(2).await;
    watched.add(Ok(answer(&["a"], 110, 5)));
    second(2).await;
    // The server has started again.
    watched.add(Ok(answer(&["a"], 4, 1)));
    second(2).await;
    watched.add(Err(anyhow::anyhow!("silent")));
    second(2).await;
    watched.add(Ok(answer(&["a"], 12, 1)));
    let shown = view(&watched);
    assert_eq!(
        *dials(&shown),
        serde_json::json!([null, 5.0, 2.0, null, 2.0])
    );
    assert_eq!(shown["ages"], serde_json::json!([8.0, 6.0, 4.0, 2.0, 0.0]));
    let row = serde_json::json!({
        "labels": ["agent", "garbage"], "perSecond": 0.0, "recent": 1.0, "total": 1.0,
    });
    assert_eq!(shown["refusals"], serde_json::json!([row]));

    // Old points leave the history.
    second(299).await;
    watched.add(Ok(answer(&["a"], 12, 1)));
    assert_eq!(dials(&view(&watched)).as_array().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn peer_that_leaves_is_shown_as_gone_until_it_returns_or_is_old() {
    let mut watched = Watched::new("x".to_owned(), answer(&["a", "b", "c"], 0, 0));
    sleep(Duration::from_secs(2)).await;
    watched.add(Ok(answer(&["c"], 0, 0)));
    sleep(Duration::from_secs(60)).await;
    let gone = |watched: &Watched| {
        let view = view(watched);
        let gone = view["gone"].as_array().unwrap().clone();
        let gone = gone
            .iter()
            .map(|peer| (peer["name"].clone(), peer["minutes"].clone()));
        gone.map(|(name, minutes)| format!("{name} {minutes}"))
            .collect::<Vec<_>>()
    };
    assert_eq!(gone(&watched), ["\"b\" 1", "\"a\" 1"]);
    watched.add(Ok(answer(&["a", "c"], 0, 0)));
    assert_eq!(gone(&watched), ["\"b\" 1"]);
    sleep(history::GONE_FOR).await;
    assert_eq!(gone(&watched), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn data_are_old_once_the_server_does_not_answer() {
    let mut watched = Watched::new("x".to_owned(), answer(&["a"], 0, 0));
    assert_eq!(view(&watched)["reasons"], serde_json::json!([]));
    assert_eq!(view(&watched)["verdict"], "ok");
    assert_eq!(view(&watched)["isOld"], false);
    sleep(Duration::from_secs(13)).await;
    let late = "the server has not answered for 13 s: no answer yet";
    assert_eq!(view(&watched)["reasons"], serde_json::json!([late]));
    assert_eq!(view(&watched)["verdict"], "degraded");
    watched.add(Err(anyhow::anyhow!("cannot reach\n it")));
    let late = "the server has not answered for 13 s: cannot reach\\n it";
    assert_eq!(view(&watched)["reasons"], serde_json::json!([late]));
    assert_eq!(view(&watched)["isOld"], true);
    watched.add(Ok(answer(&["a"], 0, 0)));
    assert_eq!(view(&watched)["isOld"], false);
}

#[tokio::test(start_paused = true)]
async fn hostile_peers_stay_text_and_have_a_limit() {
    let hostile = "</script><b>\u{202e}agent</b>&";
    let mut names = vec!["agent"; 700];
    names.push(hostile);
    let mut answer = answer(&names, 0, 0);
    let last = &mut answer.status.tunnels[0].peers[700];
    last.health = Health::Doubtful;
    last.address = Some(([192, 0, 2, 1], 1000).into());
    last.identifiers = vec!["host=<b>".to_owned()];
    last.more_identifiers = 2;
    let view = view(&Watched::new("x".to_owned(), answer));
    let tunnel = &view["tunnels"][0];
    assert_eq!(tunnel["leftOut"], 201);
    let row = serde_json::json!([
        hostile,
        "agent, native",
        "doubtful",
        1,
        "192.0.2.1:1000",
        "host=<b>, and 2 more"
    ]);
    assert_eq!(tunnel["peers"][0], row);
    assert_eq!(view["reasons"][0], "konnectivity: 1 of 701 peers doubtful");
}

#[test]
fn page_needs_no_other_resource_and_never_sets_markup() {
    for marker in [
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
    ] {
        assert!(!SCRIPT.contains(marker), "{marker}");
    }
    for marker in ["src=", "href=", "url(", "@import", " style=", " onclick="] {
        assert!(!PAGE.contains(marker), "{marker}");
    }
    // The hashes belong to the exact texts between the tags.
    assert!(PAGE.contains(&format!("<style>{STYLE}</style>")));
    assert!(PAGE.contains(&format!("<script>{SCRIPT}</script>")));
}
