//! Health and metrics for probes and dashboards.

use std::collections::BTreeSet;

use culvert_kit::services::{BANNER, Services};
use culvert_tests::eventually;
use culvert_tests::metrics::{Metrics, http_get, http_post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::clients::{Way, hello, http2, http2_rest, http2_status, open, rest, say};
use super::{Pair, Side, Verdicts, authority, exposed, server_name};
use crate::support::{Http2, LIMIT, timely};

/// Returns the page of metrics.
pub(super) async fn page(side: &Side) -> String {
    let (status, _, body) = http_get(side.stats, "/stats/prometheus").await.unwrap();
    assert!(status.is_success(), "{status}");
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn health_answers_match_envoy() {
    let Some(pair) = Pair::start(&[]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let health = async |side: &Side| {
        let (status, _, body) = http_get(side.stats, "/healthz").await.unwrap();
        format!("{} {:?}", status.as_u16(), String::from_utf8_lossy(&body))
    };
    verdicts.same("/healthz", pair.see(health).await, "200 \"\"");
    let unknown = async |side: &Side| {
        let (status, ..) = http_get(side.stats, "/").await.unwrap();
        status.as_u16().to_string()
    };
    verdicts.same("/", pair.see(unknown).await, "404");
}

#[tokio::test]
async fn healthcheck_answers_match_envoy() {
    let Some(pair) = Pair::start(&[]).await else {
        return;
    };
    let mut verdicts = Verdicts::default();
    let health = async |side: &Side| http_get(side.stats, "/healthz").await.unwrap().0;
    for (path, expected) in [
        ("/healthcheck/fail", "200 \"OK\\n\", then 503"),
        ("/healthcheck/fail", "200 \"OK\\n\", then 503"),
        ("/healthcheck/ok", "200 \"OK\\n\", then 200"),
    ] {
        let post = async |side: &Side| {
            let (status, _, body) = http_post(pair.admin(side), path).await.unwrap();
            let body = String::from_utf8_lossy(&body);
            format!(
                "{} {body:?}, then {}",
                status.as_u16(),
                health(side).await.as_u16()
            )
        };
        verdicts.same(path, pair.see(post).await, expected);
    }
    let get = async |side: &Side| {
        let (status, ..) = http_get(pair.admin(side), "/healthcheck/fail")
            .await
            .unwrap();
        format!("{}, then {}", status.as_u16(), health(side).await.as_u16())
    };
    verdicts.same("GET", pair.see(get).await, "405, then 200");
}

/// Opens connections with every outcome that the metrics distinguish. Two connections are by server name, and
/// one connection of the two stays open. The CONNECT tunnels are ended by the client, ended by the endpoint,
/// reset, or refused.
async fn traffic(side: &Side) -> (Http2, TcpStream) {
    let echo = BANNER.len() + hello(Some(&server_name("first"))).len();
    let mut named = Vec::new();
    for _ in 0..2 {
        let mut stream = open(side, Way::Sni, "first").await;
        let mut heard = vec![0; echo];
        timely("an echo", stream.read_exact(&mut heard))
            .await
            .unwrap();
        named.push(stream);
    }
    let mut last = named.pop().unwrap();
    last.shutdown().await.unwrap();
    assert_eq!(rest(&mut last).await, "end");
    let client = Http2::connect(side.tunnel).await;
    let mut tunnel = http2(&client, "asked").await.unwrap();
    say(&mut tunnel, b"echo\n0123456789");
    assert_eq!(tunnel.hear(10).await.len(), 10);
    tunnel.finish();
    assert_eq!(http2_rest(&mut tunnel).await, "end");
    let mut tunnel = http2(&client, "told").await.unwrap();
    say(&mut tunnel, b"download 10\n");
    assert_eq!(tunnel.hear(11).await.len(), 10);
    let mut tunnel = http2(&client, "reset").await.unwrap();
    tunnel.send.send_reset(h2::Reason::CANCEL);
    assert_eq!(http2_status(&client, &authority("gone")).await, "503");
    assert_eq!(http2_status(&client, &authority("other")).await, "404");
    (client, named.pop().unwrap())
}

/// Returns the value of one series of a cluster, or `absent`.
pub(super) fn value(page: &str, name: &str, series: &str) -> String {
    let name = format!("demo/{name}");
    let labels = [("envoy_cluster_name", name.as_str())];
    let metrics = Metrics::parse(page).unwrap();
    let value = metrics.value(&format!("envoy_cluster_{series}"), &labels);
    value.map_or("absent".to_owned(), |value| value.to_string())
}

/// Returns name and type of every metric family with Envoy's prefix.
fn families(page: &str) -> BTreeSet<String> {
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let theirs = types.filter(|line| line.starts_with("envoy_"));
    theirs.map(str::to_owned).collect()
}

/// Returns the upper bounds of the histogram's buckets.
fn bounds(page: &str) -> BTreeSet<String> {
    let metrics = Metrics::parse(page).unwrap();
    let buckets = metrics.samples("envoy_cluster_upstream_rq_time_bucket");
    buckets.map(|bucket| bucket.labels["le"].clone()).collect()
}

#[tokio::test]
async fn dashboards_find_the_same_series_as_with_envoy() {
    let services = Services::start().await.unwrap();
    let mut upstreams = vec![
        exposed("first", services.first),
        exposed("gone", ([127, 0, 0, 1], 1).into()),
    ];
    upstreams.extend(["asked", "told", "reset"].map(|name| exposed(name, services.raw)));
    let Some(pair) = Pair::start(&upstreams).await else {
        return;
    };
    let _open = pair.see(traffic).await;
    // Envoy updates its histograms every 5 s.
    eventually("the request time is counted", LIMIT, async || {
        let time = async |side: &Side| value(&page(side).await, "asked", "upstream_rq_time_count");
        let seen = pair.see(time).await;
        (seen == ["1", "1"]).then_some(()).ok_or(seen.join(", "))
    })
    .await;
    let pages = pair.see(page).await;
    let mut verdicts = Verdicts::default();
    let hello = hello(Some(&server_name("first"))).len();
    let sent = (2 * hello).to_string();
    let received = (2 * (hello + BANNER.len())).to_string();
    for (name, series, both) in [
        ("first", "membership_total", "1"),
        ("first", "membership_healthy", "1"),
        ("first", "upstream_cx_total", "2"),
        ("first", "upstream_cx_active", "1"),
        ("first", "upstream_cx_connect_fail", "0"),
        ("first", "upstream_cx_tx_bytes_total", sent.as_str()),
        ("first", "upstream_cx_rx_bytes_total", received.as_str()),
        ("first", "upstream_rq_total", "2"),
        ("first", "upstream_rq_time_count", "absent"),
        ("asked", "upstream_cx_total", "1"),
        ("asked", "upstream_cx_active", "0"),
        ("asked", "upstream_cx_tx_bytes_total", "15"),
        ("asked", "upstream_cx_rx_bytes_total", "10"),
        ("asked", "upstream_rq_total", "1"),
        ("asked", "upstream_rq_time_count", "1"),
        ("told", "upstream_rq_total", "1"),
        ("told", "upstream_rq_time_count", "absent"),
        ("reset", "upstream_rq_time_count", "absent"),
        ("gone", "upstream_cx_total", "1"),
        ("gone", "upstream_cx_connect_fail", "1"),
        ("gone", "upstream_rq_total", "0"),
        ("gone", "upstream_rq_time_count", "absent"),
    ] {
        let seen = [0, 1].map(|door| value(&pages[door], name, series));
        verdicts.same(&format!("{series} of {name}"), seen, both);
    }
    let http = |door: usize, series: [&str; 2]| {
        let metrics = Metrics::parse(&pages[door]).unwrap();
        let labels = [("envoy_http_conn_manager_prefix", "ingress_http")];
        series.map(|series| {
            let name = format!("envoy_http_downstream_{series}");
            metrics.value(&name, &labels).unwrap_or_default()
        })
    };
    let seen = [0, 1].map(|door| {
        let [connections, requests] = http(door, ["cx_active", "rq_total"]);
        format!("{connections}, {requests}")
    });
    verdicts.same("connections and requests", seen, "1, 5");
    let seen = [0, 1].map(|door| {
        let [received, sent] = http(door, ["cx_rx_bytes_total", "cx_tx_bytes_total"]);
        // Envoy also counts the bytes of HTTP/2 itself.
        match received > 27.0 && sent > 20.0 {
            true => "more".to_owned(),
            false => format!("{received}, {sent}"),
        }
    });
    verdicts.differ("bytes of CONNECT streams", seen, "more", "27, 20");
    assert_eq!(bounds(&pages[0]), bounds(&pages[1]));
    let (theirs, own) = (families(&pages[0]), families(&pages[1]));
    let strange: Vec<&String> = own.difference(&theirs).collect();
    assert!(strange.is_empty(), "Envoy does not have {strange:?}");
}
