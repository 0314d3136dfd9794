//! The standard metrics of a process, as Go's client library has them.

use metrics_process::collector::collect;

use super::page::{Kind, Page};

/// Adds the `process_*` families. Families that `/proc` does not provide are left out.
pub(super) fn add(page: &mut Page) {
    let found = collect();
    // Go's client library shows a missing limit as the largest number, and the collector shows it as 0.
    let limit = |limit| if limit == 0 { u64::MAX } else { limit };
    if let Some(seconds) = found.cpu_seconds_total {
        let help = "Total user and system CPU time spent in seconds.";
        page.single("process_cpu_seconds_total", Kind::Counter, help, seconds);
    }
    let gauges = [
        (
            "process_max_fds",
            "Maximum number of open file descriptors.",
            found.max_fds.map(limit),
        ),
        (
            "process_open_fds",
            "Number of open file descriptors.",
            found.open_fds,
        ),
        (
            "process_resident_memory_bytes",
            "Resident memory size in bytes.",
            found.resident_memory_bytes,
        ),
        (
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            found.start_time_seconds,
        ),
        (
            "process_threads",
            "Number of OS threads in the process.",
            found.threads,
        ),
        (
            "process_virtual_memory_bytes",
            "Virtual memory size in bytes.",
            found.virtual_memory_bytes,
        ),
        (
            "process_virtual_memory_max_bytes",
            "Maximum amount of virtual memory available in bytes.",
            found.virtual_memory_max_bytes.map(limit),
        ),
    ];
    for (name, help, value) in gauges {
        if let Some(value) = value {
            page.single(name, Kind::Gauge, help, value);
        }
    }
}
