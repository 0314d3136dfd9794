//! The limit of open files, which limits the connections of a program.

use std::path::Path;

use rustix::process::{Resource, getrlimit, setrlimit};
use tracing::{info, warn};

/// Memory of an idle connection for each of its descriptors, in bytes: the program's part, and the sockets, which the
/// kernel charges to the same limit. A connection through the front door has two descriptors.
const DESCRIPTOR_BYTES: u64 = 8 * 1024;

/// Descriptors that a memory limit leaves in any case.
const MIN_DESCRIPTORS: u64 = 4096;

/// Smallest value that stands for no limit in the first version of control groups, which shows the largest number of bytes
/// in whole pages (Linux `include/linux/page_counter.h`, `PAGE_COUNTER_MAX`). The size of a page depends on the machine.
const UNLIMITED_BYTES: u64 = 1 << 62;

/// Sets the soft limit of open files to the hard limit, as the Go runtime does at startup, because every tunnelled
/// connection needs a descriptor. If the memory limit of the process is too small for so many connections, sets the
/// soft limit to as many descriptors as fit: the program refuses further connections instead of being killed.
pub fn set_open_file_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    let memory = memory_limit();
    let soft = soft_limit(limit.maximum, memory);
    if soft != limit.maximum {
        info!(
            descriptors = soft,
            memory_limit_bytes = memory,
            "the memory limit sets the limit of open files"
        );
    }
    if limit.current != soft {
        limit.current = soft;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            warn!(%error, "cannot set the limit of open files");
        }
    }
}

/// Returns the memory limit of the process in bytes, from its control groups; `None` without a limit.
pub fn memory_limit() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    smallest_limit(Path::new("/sys/fs/cgroup"), &own)
}

/// Returns the soft limit for a hard limit and a memory limit in bytes; `None` stands for no limit.
fn soft_limit(hard: Option<u64>, memory: Option<u64>) -> Option<u64> {
    let fitting = memory.map(|bytes| (bytes / DESCRIPTOR_BYTES).max(MIN_DESCRIPTORS));
    match (hard, fitting) {
        (Some(hard), Some(fitting)) => Some(hard.min(fitting)),
        (hard, fitting) => hard.or(fitting),
    }
}

/// Returns the smallest memory limit in bytes of a process's control groups, which are mounted at `root`. `own` has the
/// form of `/proc/self/cgroup` (cgroups(7)). In a container, the path in `own` may not exist below `root`, and `root`
/// shows the group of the container.
fn smallest_limit(root: &Path, own: &str) -> Option<u64> {
    let groups = own.lines().filter_map(|line| {
        let (_, group) = line.split_once(':')?;
        let (controllers, path) = group.split_once(':')?;
        match controllers {
            "" => Some((root.to_path_buf(), "memory.max", path)),
            "memory" => Some((root.join("memory"), "memory.limit_in_bytes", path)),
            _ => None,
        }
    });
    groups
        .flat_map(|(root, file, path)| {
            let path = Path::new(path.trim_start_matches('/'));
            let limit = move |group: &Path| {
                let text = std::fs::read_to_string(root.join(group).join(file)).ok()?;
                // Without a limit, the file of the second version contains "max".
                let bytes = text.trim().parse().ok();
                bytes.filter(|bytes| *bytes < UNLIMITED_BYTES)
            };
            path.ancestors().filter_map(limit).collect::<Vec<u64>>()
        })
        .min()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;

    #[test]
    fn a_memory_limit_lowers_the_limit_of_open_files() {
        let mebibytes = |count: u64| Some(count * 1024 * 1024);
        assert_eq!(soft_limit(Some(1_048_576), None), Some(1_048_576));
        assert_eq!(soft_limit(Some(1_048_576), mebibytes(512)), Some(65_536));
        assert_eq!(soft_limit(Some(20_000), mebibytes(512)), Some(20_000));
        assert_eq!(
            soft_limit(Some(1_048_576), mebibytes(1)),
            Some(MIN_DESCRIPTORS)
        );
        assert_eq!(soft_limit(None, mebibytes(512)), Some(65_536));
        assert_eq!(soft_limit(None, None), None);
    }

    #[test]
    fn the_smallest_limit_of_the_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("kubepods/pod1/container");
        fs::create_dir_all(&group).unwrap();
        let own = "0::/kubepods/pod1/container\n";
        assert_eq!(smallest_limit(root.path(), own), None);
        fs::write(group.join("memory.max"), "max\n").unwrap();
        assert_eq!(smallest_limit(root.path(), own), None);
        fs::write(root.path().join("kubepods/pod1/memory.max"), "536870912\n").unwrap();
        assert_eq!(smallest_limit(root.path(), own), Some(536_870_912));
        fs::write(group.join("memory.max"), "1048576\n").unwrap();
        assert_eq!(smallest_limit(root.path(), own), Some(1_048_576));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_from_within_a_container() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("memory")).unwrap();
        let file = root.path().join("memory/memory.limit_in_bytes");
        let own = "5:cpu,cpuacct:/\n4:memory:/docker/0123\n0::/\n";
        fs::write(&file, "9223372036854771712\n").unwrap();
        assert_eq!(smallest_limit(root.path(), own), None);
        fs::write(file, "268435456\n").unwrap();
        assert_eq!(smallest_limit(root.path(), own), Some(268_435_456));
    }
}
