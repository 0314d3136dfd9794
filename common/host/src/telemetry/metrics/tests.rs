#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing)]

use culvert_stream::CloseReason;
use metrics::Counter;

use super::*;

crate::label_values! {
    /// A label of two values.
    pub(super) enum Side("side") {
        /// The first value.
        Left = "left",
        /// The second value.
        Right = "right",
    }
}

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
fn process_metrics_are_on_the_page() {
    let registry = Registry::new(&[]).unwrap();
    let page = registry.render();
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
    // The kernel counts in hundredths of a second.
    assert!(page.contains("# TYPE process_cpu_seconds_total counter\n"));
    let used = || {
        let page = registry.render();
        let seconds = sample(&page, "process_cpu_seconds_total").unwrap();
        seconds.parse::<f64>().unwrap()
    };
    let end = used() + 3.0;
    let mut times = std::iter::repeat_with(used).take_while(|used| *used < end);
    assert!(times.any(|used| used.fract() > 0.0));
    // Tests run without a limit of the address space.
    let limit = sample(&page, "process_virtual_memory_max_bytes").unwrap();
    assert_eq!(limit, u64::MAX.to_string());
    for reason in ["queue_full", "rate_limit", "write_failed"] {
        let series = format!("culvert_log_lost_lines_total{{reason=\"{reason}\"}}");
        assert!(sample(&page, &series).is_some(), "{page}");
    }
}

#[test]
fn registries_do_not_share_series() {
    let (one, two) = (Registry::new(&[]).unwrap(), Registry::new(&[]).unwrap());
    one.counter("only_in_one", &[], "h").increment(1);
    assert!(one.render().contains("only_in_one 1"));
    assert!(!two.render().contains("only_in_one"));
}

#[test]
fn gauge_guard_counts_until_dropped() {
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
fn family_series_appears_on_first_use_or_at_zero() {
    let registry = Registry::new(&[]).unwrap();
    let lazy: Family<Side, Counter> = Family::new(&registry, "lazy", "h");
    let _eager: Family<Side, Counter> = Family::new(&registry, "eager", "h").at_zero(Side::all());
    let page = registry.render();
    assert!(!page.contains("lazy{"));
    assert_eq!(page.matches("\neager{").count(), Side::ALL.len());

    lazy.get(Side::Right).increment(1);
    lazy.get(Side::Right).increment(1);
    let page = registry.render();
    assert_eq!(sample(&page, r#"lazy{side="right"}"#).unwrap(), "2");
    assert_eq!(page.matches("\nlazy{").count(), 1);
}

#[test]
fn closed_connections_are_counted_by_reason() {
    let registry = Registry::new(&[]).unwrap();
    let closed = closed_connections(&registry);
    closed.get(CloseReason::Switched).increment(1);
    let page = registry.render();
    let series = |reason| format!("culvert_connections_closed_total{{reason=\"{reason}\"}}");
    assert_eq!(sample(&page, &series("switched")).unwrap(), "1");
    assert_eq!(sample(&page, &series("finished")).unwrap(), "0");
}

#[test]
fn families_of_one_page_follow_the_registered_series() {
    let registry = Registry::new(&[]).unwrap();
    registry.counter("registered", &[], "h").increment(1);
    let page = registry.render_with(|page| {
        let mut gauges = page.family("own", Kind::Gauge, "Help.");
        gauges.value(("name", "a\"\\\n"), 1);
        gauges.value(("name", "b"), 2);
        page.family("none", Kind::Counter, "No series.");
        let buckets = [(0.5, 1), (1000.0, 2)];
        page.family("times", Kind::Histogram, "h")
            .histogram(("name", "a"), buckets, 3, 9);
    });
    assert_eq!(sample(&page, "registered").unwrap(), "1");
    let added = "# HELP own Help.\n# TYPE own gauge\n\
        own{name=\"a\\\"\\\\\\n\"} 1\nown{name=\"b\"} 2\n\
        # HELP none No series.\n# TYPE none counter\n\
        # HELP times h\n# TYPE times histogram\n\
        times_bucket{name=\"a\",le=\"0.5\"} 1\ntimes_bucket{name=\"a\",le=\"1000\"} 3\n\
        times_bucket{name=\"a\",le=\"+Inf\"} 6\ntimes_sum{name=\"a\"} 9\ntimes_count{name=\"a\"} 6\n";
    assert!(page.ends_with(added), "{page}");
    assert!(!registry.render().contains("own{"));
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
