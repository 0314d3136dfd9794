//! Timeouts, limits, floods, and endpoints that do not accept.

use std::net::SocketAddr;
use std::time::Duration;

use culvert_kit::services::{BANNER, Services};
use culvert_tests::envoy::Settings;
use culvert_tests::{BlackHole, black_hole};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::clients::{Way, converse, hello, http2, http2_rest, http2_status, open, rest, say};
use super::endpoints::{Endpoint, counts_late};
use super::stats::{page, value};
use super::{Pair, Side, Verdicts, authority, exposed, server_name};
use crate::abuse::{answered_flood, reset_many};
use crate::frames::{self, CONTINUATION, GOAWAY, HEADERS, SETTINGS, connect_fields, field, frame};
use crate::support::{Http2, LIMIT, Upstream, timely};

const GONE: ([u8; 4], u16) = ([127, 0, 0, 1], 1);

/// Starts a pair with two upstreams: `two` has a good and a bad endpoint, and `one` has only the bad endpoint.
async fn bad(bad: SocketAddr, good: SocketAddr) -> Option<Pair> {
    let mut two = exposed("two", good);
    two.endpoints.push(bad);
    Pair::start(&[two, exposed("one", bad)]).await
}

/// Opens eight connections by server name. Returns the share that reached the good endpoint: `all`, `some` or
/// `none`.
async fn reached(side: &Side) -> String {
    let mut reached = 0;
    for _ in 0..8 {
        let mut stream = open(side, Way::Sni, "two").await;
        let mut heard = vec![0; BANNER.len()];
        let read = timely("the banner", stream.read_exact(&mut heard)).await;
        reached += usize::from(read.is_ok());
    }
    match reached {
        8 => "all",
        0 => "none",
        _ => "some",
    }
    .to_owned()
}

#[tokio::test]
async fn a_refusing_endpoint_is_replaced_by_another_endpoint() {
    let services = Services::start().await.unwrap();
    let Some(pair) = bad(GONE.into(), services.first).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let hello = hello(Some(&server_name("one")));
    let seen = pair
        .see(async |side| converse(side.sni, &hello).await)
        .await;
    verdicts.differ("the only endpoint, by server name", seen, "reset", "end");
    verdicts.differ(
        "next to a good endpoint",
        pair.see(reached).await,
        "some",
        "all",
    );
}

#[tokio::test]
async fn an_unresponsive_endpoint_is_replaced_by_another_endpoint() {
    let services = Services::start().await.unwrap();
    let hole: BlackHole = black_hole().await;
    let Some(pair) = bad(hole.addr(), services.first).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let hello = hello(Some(&server_name("one")));
    let seen = pair
        .see_together(async |side| converse(side.sni, &hello).await)
        .await;
    verdicts.differ("the only endpoint, by server name", seen, "reset", "end");
    let status = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        http2_status(&client, &authority("one")).await
    };
    // The 503 is the only answer: there is no 200 before the endpoint has accepted.
    let seen = pair.see_together(status).await;
    verdicts.same("the only endpoint, by CONNECT", seen, "503");
    let seen = pair.see_together(reached).await;
    verdicts.differ("next to a good endpoint", seen, "some", "all");
}

#[tokio::test]
async fn idle_connections_are_closed_after_the_timeout() {
    let services = Services::start().await.unwrap();
    let settings = Settings {
        sni_idle: Some("1s"),
        connection_idle: Some("1s"),
        stream_idle: Some("1s"),
        ..Settings::default()
    };
    let upstreams = [exposed("first", services.first)];
    let Some(pair) = Pair::start_with(&upstreams, settings).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let banner = String::from_utf8(BANNER.to_vec()).unwrap();
    for way in [Way::Sni, Way::Http1] {
        let look = async |side: &Side| {
            let mut stream = open(side, way, "first").await;
            let heard = rest(&mut stream).await;
            // With a server name, the ClientHello comes back before the end.
            assert!(heard.starts_with(&banner), "{heard}");
            let is_reset = heard.ends_with("reset");
            if is_reset { "reset" } else { "end" }.to_owned()
        };
        let seen = pair.see_together(look).await;
        verdicts.same(&format!("{way:?}"), seen, "end");
    }
    let stream = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "first").await.unwrap();
        let heard = http2_rest(&mut tunnel).await;
        heard.strip_prefix(&banner).unwrap().to_owned()
    };
    let seen = pair.see_together(stream).await;
    verdicts.same("an HTTP/2 stream", seen, "reset");
    let connection = async |side: &Side| {
        let (mut frames, _write) = frames::connect(side.tunnel, &[]).await;
        let goaway = frames.next_of(GOAWAY).await;
        goaway.map_or("end".to_owned(), |frame| format!("goaway {}", frame.code()))
    };
    let seen = pair.see_together(connection).await;
    verdicts.same("HTTP/2 without streams", seen, "goaway 0");
}

#[tokio::test]
async fn an_open_tunnel_has_no_answer_timeout() {
    let services = Services::start().await.unwrap();
    let late = Endpoint::start(counts_late).await;
    let upstreams = [exposed("raw", services.raw), exposed("late", late.address)];
    let Some(pair) = Pair::start(&upstreams).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let look = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut open = http2(&client, "raw").await.unwrap();
        say(&mut open, b"echo\nx");
        assert_eq!(open.hear(1).await, b"x");
        let mut ended = http2(&client, "late").await.unwrap();
        say(&mut ended, b"go12345");
        ended.finish();
        let late = http2_rest(&mut ended).await;
        say(&mut open, b"y");
        let echo = open.hear(1).await;
        format!("{late}, {}", String::from_utf8_lossy(&echo))
    };
    let seen = pair.see_together(look).await;
    // Envoy's route timeout of 15 s starts when the client has closed its sending side.
    verdicts.differ("an answer after 16 s", seen, "reset, y", "5 end, y");
}

#[tokio::test]
async fn connections_beyond_max_connections_are_refused() {
    let services = Services::start().await.unwrap();
    let settings = Settings {
        max_connections: Some(2),
        ..Settings::default()
    };
    let other = Upstream::new("demo/other", services.raw).authority(&authority("other"));
    let first = exposed("first", services.first);
    let upstreams = [exposed("raw", services.raw), first, other];
    let Some(pair) = Pair::start_with(&upstreams, settings).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let connect = async |side: &Side| {
        let client = Http2::connect(side.tunnel).await;
        let mut open = Vec::new();
        for _ in 0..2 {
            open.push(http2(&client, "raw").await.unwrap());
        }
        let known = authority("raw");
        let mut third = Box::pin(http2_status(&client, &known));
        // Only Envoy lets the request wait. Our 503 may be late on a busy machine.
        let patience = match side.stats == pair.ours.stats {
            true => LIMIT,
            false => Duration::from_secs(1),
        };
        let at_once = timeout(patience, &mut third).await;
        let fourth = http2_status(&client, &known).await;
        let page = page(side).await;
        let full =
            ["raw", "other"].map(|name| value(&page, name, "circuit_breakers_default_cx_open"));
        let full = full.join(" and ");
        let others = http2_status(&client, &authority("other")).await;
        open.pop().unwrap().finish();
        let seen = match at_once {
            Ok(status) => status,
            Err(_) => format!("waits, {}", third.await),
        };
        format!("{seen}; next {fourth}; other {others}; full {full}")
    };
    let seen = pair.see(connect).await;
    verdicts.differ(
        "CONNECT",
        seen,
        "waits, 200; next 503 overloaded=true; other 200; full 1 and 0",
        "503 overloaded=true; next 503 overloaded=true; other 200; full 1 and 0",
    );
    let by_name = async |side: &Side| {
        let mut streams = Vec::new();
        for _ in 0..2 {
            let mut stream = open(side, Way::Sni, "first").await;
            let mut heard = vec![0; BANNER.len()];
            timely("the banner", stream.read_exact(&mut heard))
                .await
                .unwrap();
            streams.push(stream);
        }
        let third = hello(Some(&server_name("first")));
        converse(side.sni, &third).await
    };
    verdicts.differ("by name", pair.see(by_name).await, "reset", "end");
}

#[tokio::test]
async fn defaults_that_kkp_does_not_set_are_as_documented() {
    let services = Services::start().await.unwrap();
    let Some(pair) = Pair::start(&[exposed("raw", services.raw)]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let settings = async |side: &Side| {
        let (mut frames, _write) = frames::connect(side.tunnel, &[]).await;
        let settings = frames.next_of(SETTINGS).await.unwrap();
        let [streams, window] = [3, 4].map(|id| settings.setting(id).unwrap_or(0));
        format!("{streams} streams, {window} bytes ahead")
    };
    let seen = pair.see(settings).await;
    verdicts.differ(
        "HTTP/2",
        seen,
        "1024 streams, 16777216 bytes ahead",
        "1024 streams, 1048576 bytes ahead",
    );
    let admin = pair.running.admin;
    let text = async |path| {
        let (_, _, body) = culvert_tests::metrics::http_get(admin, path).await.unwrap();
        String::from_utf8(body.to_vec()).unwrap()
    };
    let clusters = text("/clusters").await;
    for (limit, known) in [
        ("connections", 1024),
        ("pending_requests", 1024),
        ("requests", 1024),
        ("retries", 3),
    ] {
        let line = format!("demo/raw::default_priority::max_{limit}::{known}\n");
        assert!(clusters.contains(&line), "{clusters}");
    }
    pair.door
        .program
        .wait_for_log("max-connections=1024", LIMIT)
        .await;
    let info = text("/server_info").await;
    assert!(info.contains("\"drain_time\": \"600s\""), "{info}");
}

#[tokio::test]
async fn a_client_that_reads_nothing_stops_its_endpoint_from_sending() {
    let services = Services::start().await.unwrap();
    let Some(pair) = Pair::start(&[exposed("raw", services.raw)]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let stall = async |side: &Side| {
        let mut stream = open(side, Way::Http1, "raw").await;
        stream.write_all(b"download 1000000000\n").await.unwrap();
        let client = Http2::connect(side.tunnel).await;
        let mut tunnel = http2(&client, "raw").await.unwrap();
        say(&mut tunnel, b"download 1000000000\n");
        let received = async || {
            let metrics = culvert_tests::metrics::http_get(side.stats, "/stats/prometheus");
            let (_, _, body) = metrics.await.unwrap();
            let page = std::str::from_utf8(&body).unwrap();
            let metrics = culvert_tests::metrics::Metrics::parse(page).unwrap();
            let cluster = [("envoy_cluster_name", "demo/raw")];
            let name = "envoy_cluster_upstream_cx_rx_bytes_total";
            metrics.value(name, &cluster).unwrap_or_default()
        };
        let mut before = 0.0;
        culvert_tests::eventually("the endpoint stops sending", LIMIT, async || {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let last = std::mem::replace(&mut before, received().await);
            (last > 0.0 && last == before).then_some(()).ok_or(before)
        })
        .await;
        // Far less than the requested bytes: only the buffers of the proxy and of the kernel are full.
        if before < 64e6 { "stopped" } else { "goes on" }.to_owned()
    };
    verdicts.same("unread", pair.see(stall).await, "stopped");
}

#[tokio::test]
async fn floods_close_the_connection() {
    let services = Services::start().await.unwrap();
    let Some(pair) = Pair::start(&[exposed("silent", services.silent)]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let resets = async |side: &Side| {
        let (closed, _) = reset_many(side.tunnel, &authority("silent")).await;
        if closed { "closed" } else { "open" }.to_owned()
    };
    let seen = pair.see_together(resets).await;
    verdicts.same("streams that are reset at once", seen, "closed");
    let endless = async |side: &Side| {
        let begin = frame(HEADERS, 0, 1, &connect_fields(&authority("silent")));
        let more = frame(CONTINUATION, 0, 1, &field("x", "y"));
        // Panics unless the connection is closed.
        answered_flood(side.tunnel, &begin, &more).await;
        "closed".to_owned()
    };
    let seen = pair.see_together(endless).await;
    verdicts.same("an endless header block", seen, "closed");
}
