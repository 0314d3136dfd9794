//! The parts of the machine that programs of a node change, in a form that ends with the test.

use std::path::Path;
use std::process::Command;

use culvert_tests::namespace;
use culvert_tests::process::outcome;

/// Folders with files of the kubelet and of CNI plugins, whatever their configuration is.
const FOLDERS: [&str; 2] = ["/var/lib", "/var/log"];

/// Kernel settings without a namespace that the kubelet writes, unless they already have its value.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Where the hierarchies of cgroups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Hides the machine's folders, kernel settings and cgroups behind private ones. `dir` is a folder for files.
///
/// # Panics
/// If the caller is not in namespaces of its own, or a mount fails.
pub(super) fn isolate(dir: &Path) {
    assert!(namespace::is_inside(), "not in a mount namespace");
    for folder in FOLDERS {
        mount(&["-t", "tmpfs", "tmpfs", folder]);
    }
    for (setting, value) in SETTINGS {
        let file = dir.join(setting.replace('/', "."));
        std::fs::write(&file, format!("{value}\n")).expect("a setting");
        let file = file.display().to_string();
        mount(&["--bind", &file, &format!("/proc/sys/{setting}")]);
    }
    let lines = std::fs::read_to_string("/proc/self/cgroup").expect("cgroups");
    let first_version: Vec<&str> = lines
        .lines()
        .filter_map(|line| line.split(':').nth(1).filter(|it| !it.is_empty()))
        .collect();
    if first_version.is_empty() {
        return mount(&["-t", "cgroup2", "cgroup2", CGROUPS]);
    }
    // The mounts show only the cgroup of this cgroup namespace, as the top of each hierarchy.
    mount(&["-t", "tmpfs", "tmpfs", CGROUPS]);
    for controllers in first_version {
        let name = controllers.trim_start_matches("name=");
        let folder = format!("{CGROUPS}/{name}");
        std::fs::create_dir(&folder).expect("a folder");
        let options = match controllers.starts_with("name=") {
            true => format!("none,{controllers}"),
            false => controllers.to_owned(),
        };
        mount(&["-t", "cgroup", "-o", &options, "cgroup", &folder]);
    }
}

/// Returns the ids of all processes in containers.
pub(super) fn contained() -> Vec<u32> {
    let top = Path::new(CGROUPS);
    let pids = top.join("pids");
    let top = if pids.is_dir() { &pids } else { top };
    let mut found = Vec::new();
    // The top has no containers, and the cgroup of the tests has none below it.
    let mut folders = folders(top);
    folders.retain(|it| !it.ends_with("tests"));
    while let Some(folder) = folders.pop() {
        let processes = std::fs::read_to_string(folder.join("cgroup.procs"));
        let processes = processes.unwrap_or_default();
        found.extend(processes.lines().filter_map(|it| it.parse::<u32>().ok()));
        folders.extend(self::folders(&folder));
    }
    found
}

fn folders(of: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(of).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

fn mount(words: &[&str]) {
    let mounted = outcome(Command::new("mount").args(words));
    mounted.unwrap_or_else(|why| panic!("mount {words:?}: {why}"));
}
