#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn pairs_have_distinct_indices_in_order() {
    let all = <(Segment, Kind)>::all();
    let indices: Vec<usize> = all.iter().map(|pair| pair.index()).collect();
    assert_eq!(indices, (0..28).collect::<Vec<_>>());
}

#[test]
fn stream_metrics_count_packets_errors_bytes_and_closes() {
    let registry = Registry::new(&[]).unwrap();
    let names = StreamNames {
        packets: "p_total",
        errors: "e_total",
    };
    let streams = StreamMetrics::new(&registry, names, &[Segment::ToAgent]);
    streams
        .packets(Segment::ToAgent, PacketType::Data)
        .increment(1);
    let [to_endpoint, _] = streams.both_directions();
    to_endpoint.increment(4096);
    streams.closed.get(CloseReason::Stalled).increment(1);
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
        r#"culvert_connections_closed_total{reason="stalled"} 1"#,
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
