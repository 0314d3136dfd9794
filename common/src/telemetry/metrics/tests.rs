#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use culvert_proto::PacketType;
use tonic::Code;

use super::streams::StreamNames;
use super::*;

fn sample(page: &str, series: &str) -> Option<String> {
    page.lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
        .map(str::to_owned)
}

#[test]
fn names_help_and_values_are_verbatim() {
    let registry = Registry::new(&[]).unwrap();
    registry
        .counter(
            "x_failure_count",
            &[("reason", "no \"agent\"")],
            "Some help. (a)",
        )
        .increment(2);
    registry.gauge("x_ready", &[], "Ready").set(3);
    let page = registry.render();
    assert!(
        page.contains("# HELP x_failure_count Some help. (a)\n# TYPE x_failure_count counter\n")
    );
    assert_eq!(
        sample(&page, r#"x_failure_count{reason="no \"agent\""}"#).unwrap(),
        "2"
    );
    assert!(page.contains("# TYPE x_ready gauge\n"));
    assert_eq!(sample(&page, "x_ready").unwrap(), "3");
}

#[test]
fn histograms_have_their_buckets_from_the_start_and_print_them_as_go_does() {
    let registry = Registry::new(&[("d_seconds", &[0.000_001, 0.000_025, 0.0001, 0.5])]).unwrap();
    let own = registry.histogram("d_seconds", &[], "Duration");
    let _other = registry.histogram("other_seconds", &[], "Default buckets");
    let page = registry.render();
    assert_eq!(sample(&page, "d_seconds_count").unwrap(), "0");
    assert_eq!(
        sample(&page, r#"d_seconds_bucket{le="1e-06"}"#).unwrap(),
        "0"
    );
    assert!(page.contains("# TYPE other_seconds histogram\n"));
    assert!(page.contains(r#"other_seconds_bucket{le="0.005"} 0"#));

    own.record(0.00002);
    own.record(0.4);
    own.record(7.0);
    let page = registry.render();
    for (bound, count) in [
        ("1e-06", "0"),
        ("2.5e-05", "1"),
        ("0.0001", "1"),
        ("0.5", "2"),
        ("+Inf", "3"),
    ] {
        let series = format!("d_seconds_bucket{{le=\"{bound}\"}}");
        assert_eq!(sample(&page, &series).as_deref(), Some(count), "{series}");
    }
    assert_eq!(sample(&page, "d_seconds_count").unwrap(), "3");
}

#[test]
fn an_empty_bucket_list_is_refused() {
    let error = Registry::new(&[("d_seconds", &[])]).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("histogram d_seconds has no usable buckets")
    );
}

#[test]
fn the_process_is_on_the_page() {
    let page = Registry::new(&[]).unwrap().render();
    for name in [
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_start_time_seconds",
    ] {
        assert!(
            sample(&page, name).is_some(),
            "{name} is missing from\n{page}"
        );
    }
    assert!(page.contains("# HELP process_open_fds Number of open file descriptors."));
}

#[test]
fn registries_do_not_share_series() {
    let (one, two) = (Registry::new(&[]).unwrap(), Registry::new(&[]).unwrap());
    one.counter("only_in_one", &[], "h").increment(1);
    assert!(one.render().contains("only_in_one 1"));
    assert!(!two.render().contains("only_in_one"));
}

#[test]
fn a_guard_counts_for_its_life() {
    let registry = Registry::new(&[]).unwrap();
    let gauge = registry.gauge("open", &[], "h");
    let first = GaugeGuard::new(&gauge);
    let second = GaugeGuard::new(&gauge);
    assert_eq!(sample(&registry.render(), "open").unwrap(), "2");
    drop(first);
    assert_eq!(sample(&registry.render(), "open").unwrap(), "1");
    drop(second);
    assert_eq!(sample(&registry.render(), "open").unwrap(), "0");
}

#[test]
fn a_family_shows_a_member_on_first_use_or_at_zero() {
    let registry = Registry::new(&[]).unwrap();
    let lazy: Family<Segment, Counter> = Family::new(&registry, "lazy", "h");
    let _eager: Family<Segment, Counter> =
        Family::new(&registry, "eager", "h").at_zero(Segment::all());
    let page = registry.render();
    assert!(!page.contains("lazy{"));
    assert_eq!(page.matches("\neager{").count(), Segment::ALL.len());

    lazy.get(Segment::ToAgent).increment(1);
    lazy.get(Segment::ToAgent).increment(1);
    let page = registry.render();
    assert_eq!(sample(&page, r#"lazy{segment="to_agent"}"#).unwrap(), "2");
    assert_eq!(page.matches("\nlazy{").count(), 1);
}

#[test]
fn pairs_have_distinct_indices_in_order() {
    let all = <(Segment, PacketType)>::all();
    let indices: Vec<usize> = all.iter().map(|pair| pair.index()).collect();
    assert_eq!(indices, (0..28).collect::<Vec<_>>());
}

#[test]
fn streams_count_packets_errors_bytes_and_ends() {
    let registry = Registry::new(&[]).unwrap();
    let names = StreamNames {
        packets: "p_total",
        errors: "e_total",
    };
    let streams = StreamMetrics::new(&registry, names, &[Segment::ToAgent]);
    streams
        .packets(Segment::ToAgent, PacketType::Data)
        .increment(1);
    streams.tunnel_bytes(Direction::ToEndpoint).increment(4096);
    streams.connections_closed("peer_reset").increment(1);
    streams.stream_error(Segment::FromAgent, Code::Cancelled, None);
    streams.stream_error(
        Segment::ToAgent,
        Code::Unavailable,
        Some(PacketType::DialRsp),
    );

    let page = registry.render();
    for series in [
        r#"p_total{segment="to_agent",packet_type="DATA"} 1"#,
        r#"p_total{segment="to_agent",packet_type="DRAIN"} 0"#,
        r#"culvert_tunnel_bytes_total{direction="to_endpoint"} 4096"#,
        r#"culvert_tunnel_bytes_total{direction="from_endpoint"} 0"#,
        r#"culvert_connections_closed_total{reason="peer_reset"} 1"#,
        r#"e_total{segment="from_agent",code="Canceled",packet_type="Unknown"} 1"#,
        r#"e_total{segment="to_agent",code="Unavailable",packet_type="DIAL_RSP"} 1"#,
    ] {
        assert!(
            page.lines().any(|line| line == series),
            "{series} is missing from\n{page}"
        );
    }
    assert!(!page.contains(r#"p_total{segment="to_client""#));
}

#[tokio::test(start_paused = true)]
async fn upkeep_runs_until_shutdown() {
    let registry = Registry::new(&[]).unwrap();
    registry.histogram("d_seconds", &[], "h").record(1.0);
    let shutdown = CancellationToken::new();
    let task = tokio::spawn({
        let (registry, shutdown) = (registry.clone(), shutdown.clone());
        async move { registry.run_upkeep(shutdown).await }
    });
    tokio::time::sleep(UPKEEP_INTERVAL * 2).await;
    shutdown.cancel();
    task.await.unwrap();
    assert_eq!(sample(&registry.render(), "d_seconds_count").unwrap(), "1");
}
