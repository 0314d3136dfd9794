#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{CWD, Mode, OFlags, mkfifoat, open};
use tokio::time::{advance, pause, resume, timeout};

use super::*;

label_values! {
    enum Set("files") {
        Numbers = "numbers",
        Hanging = "hanging",
    }
}

use crate::label_values;

/// A set whose files contain numbers. The value is the sum; a certificate "expires" at the first number. Further
/// lines of the first file name further files.
struct Numbers {
    files: Vec<PathBuf>,
}

impl FileSet for Numbers {
    type Value = i64;
    type Error = String;

    fn paths(&self) -> Vec<PathBuf> {
        self.files.clone()
    }

    fn references(&self, first: &[u8]) -> Vec<PathBuf> {
        let text = String::from_utf8_lossy(first);
        text.lines().skip(1).map(PathBuf::from).collect()
    }

    fn unreadable(&self, error: ReadError) -> String {
        format!("unreadable: {error}")
    }

    fn load(&mut self, contents: &[Vec<u8>]) -> Result<Loaded<i64>, String> {
        let number = |text: &Vec<u8>| {
            let text = String::from_utf8_lossy(text);
            let line = text.lines().next().unwrap_or_default();
            line.parse::<i64>()
                .map_err(|error| format!("{line:?}: {error}"))
        };
        let numbers: Vec<i64> = contents.iter().map(number).collect::<Result<_, _>>()?;
        let own = numbers.first().copied().filter(|number| *number != 0);
        Ok(Loaded {
            doubts: Vec::new(),
            value: numbers.iter().sum(),
            expiry: Expiry {
                own,
                ..Expiry::default()
            },
        })
    }
}

/// A set whose loads wait until the test allows them.
struct Hanging {
    file: PathBuf,
    begun: tokio::sync::mpsc::UnboundedSender<()>,
    allowed: std::sync::mpsc::Receiver<()>,
}

impl FileSet for Hanging {
    type Value = ();
    type Error = String;

    fn paths(&self) -> Vec<PathBuf> {
        vec![self.file.clone()]
    }

    fn unreadable(&self, error: ReadError) -> String {
        error.to_string()
    }

    fn load(&mut self, _: &[Vec<u8>]) -> Result<Loaded<()>, String> {
        self.begun.send(()).map_err(|error| error.to_string())?;
        self.allowed.recv().map_err(|error| error.to_string())?;
        Ok(Loaded {
            doubts: Vec::new(),
            value: (),
            expiry: Expiry::default(),
        })
    }
}

/// A set that cannot be loaded while its counter of failures is above 0, like a kubeconfig with a credential plugin.
struct Failing {
    file: PathBuf,
    failures: Arc<AtomicU32>,
    loads: Arc<AtomicU32>,
}

impl FileSet for Failing {
    type Value = u32;
    type Error = String;

    fn paths(&self) -> Vec<PathBuf> {
        vec![self.file.clone()]
    }

    fn unreadable(&self, error: ReadError) -> String {
        error.to_string()
    }

    fn load(&mut self, _: &[Vec<u8>]) -> Result<Loaded<u32>, String> {
        let loads = self.loads.fetch_add(1, Relaxed) + 1;
        let left = self.failures.load(Relaxed);
        self.failures.store(left.saturating_sub(1), Relaxed);
        match left {
            0 => Ok(Loaded {
                doubts: Vec::new(),
                value: loads,
                expiry: Expiry::default(),
            }),
            _ => Err("the plugin has failed".to_owned()),
        }
    }
}

struct Lab {
    dir: tempfile::TempDir,
    registry: Arc<Registry>,
    reloader: Reloader<Set>,
}

impl Lab {
    fn new() -> Self {
        let registry = Registry::new(&[]).unwrap();
        Self {
            dir: tempfile::tempdir().unwrap(),
            reloader: Reloader::new(&registry),
            registry,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    async fn follow(&mut self, files: &[&Path]) -> Latest<i64> {
        let files = files.iter().map(|path| (*path).to_owned()).collect();
        self.reloader
            .follow(Set::Numbers, Numbers { files })
            .await
            .unwrap()
    }

    fn check(&mut self, times: usize) {
        for _ in 0..times {
            self.reloader.check();
        }
    }

    /// Checks the series: changes in use and failed, and the gauge of the last reload.
    fn shows(&self, ok: u32, failed: u32, is_in_use: u32) {
        let page = self.registry.render();
        for line in series("numbers", ok, failed, is_in_use) {
            assert!(page.lines().any(|shown| shown == line), "{line} in {page}");
        }
    }

    fn shows_expiry(&self, value: &str) {
        let name = "culvert_certificate_expiry_seconds{files=\"numbers\",certificate=\"own\"}";
        let page = self.registry.render();
        let line = format!("{name} {value}");
        assert!(page.lines().any(|shown| shown == line), "{line} in {page}");
    }
}

fn series(files: &str, ok: u32, failed: u32, is_in_use: u32) -> [String; 3] {
    [
        format!("culvert_reloads_total{{files=\"{files}\",result=\"ok\"}} {ok}"),
        format!("culvert_reloads_total{{files=\"{files}\",result=\"failed\"}} {failed}"),
        format!("culvert_last_reload_successful{{files=\"{files}\"}} {is_in_use}"),
    ]
}

#[tokio::test]
async fn first_load_fails_with_the_error_of_the_set() {
    let mut lab = Lab::new();
    let files = vec![lab.path("missing")];
    let error = lab.reloader.follow(Set::Numbers, Numbers { files });
    let error = error.await.err();
    assert!(error.unwrap().starts_with("unreadable: cannot read "));
    let files = vec![lab.write("text", "x")];
    let error = lab.reloader.follow(Set::Numbers, Numbers { files });
    let error = error.await.err();
    assert!(error.unwrap().starts_with("\"x\": "));
}

#[tokio::test]
async fn change_is_in_use_once_all_files_are_stable() {
    let mut lab = Lab::new();
    let (one, two) = (lab.write("one", "1"), lab.write("two", "2"));
    let latest = lab.follow(&[&one, &two]).await;
    assert_eq!(latest.get(), 3);
    lab.shows(0, 0, 1);
    lab.shows_expiry("1");
    lab.check(3);
    lab.shows(0, 0, 1);
    lab.write("one", "10");
    lab.check(1);
    lab.write("two", "20");
    lab.check(1);
    assert_eq!(latest.get(), 3);
    lab.check(1);
    assert_eq!(latest.get(), 30);
    lab.shows(1, 0, 1);
    lab.shows_expiry("10");
    // The certificate is gone.
    lab.write("one", "0");
    lab.check(2);
    assert_eq!(latest.get(), 20);
    lab.shows_expiry("NaN");
}

#[tokio::test]
async fn unusable_content_leaves_the_last_value_and_counts_once_per_reason() {
    let mut lab = Lab::new();
    let one = lab.write("one", "1");
    let latest = lab.follow(&[&one]).await;
    for (text, failed) in [("x", 1), ("y", 2)] {
        lab.write("one", text);
        lab.check(6);
        lab.shows(0, failed, 0);
        assert_eq!(latest.get(), 1);
    }
    std::fs::remove_file(&one).unwrap();
    lab.check(3);
    lab.shows(0, 3, 0);
    lab.write("one", "2");
    lab.check(2);
    lab.shows(1, 3, 1);
    assert_eq!(latest.get(), 2);
    // A file that was missing for a while is no change.
    std::fs::remove_file(&one).unwrap();
    lab.check(1);
    lab.shows(1, 4, 0);
    lab.write("one", "2");
    lab.check(2);
    lab.shows(1, 4, 1);
}

#[tokio::test(start_paused = true)]
async fn unchanged_files_are_loaded_again_10_s_after_a_failure() {
    let mut lab = Lab::new();
    let file = lab.write("one", "1");
    let (failures, loads) = <(Arc<AtomicU32>, Arc<AtomicU32>)>::default();
    let set = Failing {
        file,
        failures: Arc::clone(&failures),
        loads: Arc::clone(&loads),
    };
    let latest = lab.reloader.follow(Set::Numbers, set).await.unwrap();
    assert_eq!(latest.get(), 1);
    failures.store(2, Relaxed);
    lab.write("one", "2");
    lab.check(8);
    assert_eq!(loads.load(Relaxed), 2);
    for loads_then in [3, 4] {
        advance(RENEW_PAUSE - Duration::from_millis(1)).await;
        lab.check(4);
        assert_eq!(loads.load(Relaxed), loads_then - 1);
        advance(Duration::from_millis(1)).await;
        lab.check(4);
        assert_eq!(loads.load(Relaxed), loads_then);
    }
    assert_eq!(latest.get(), 4);
    lab.shows(1, 1, 1);
}

#[tokio::test]
async fn references_of_the_first_file_are_followed() {
    let mut lab = Lab::new();
    let (a, b) = (lab.write("a", "10"), lab.write("b", "20"));
    let one = lab.write("one", &format!("1\n{}\n", a.display()));
    let latest = lab.follow(&[&one]).await;
    assert_eq!(latest.get(), 11);
    lab.write("a", "11");
    lab.check(2);
    assert_eq!(latest.get(), 12);
    lab.write("one", &format!("1\n{}\n", b.display()));
    lab.check(2);
    assert_eq!(latest.get(), 21);
    // A missing reference does not hide a change that drops the reference.
    lab.write("one", &format!("2\n{}\n", lab.path("missing").display()));
    lab.check(6);
    lab.shows(2, 1, 0);
    assert_eq!(latest.get(), 21);
    lab.write("one", "3\n");
    lab.check(3);
    lab.shows(3, 1, 1);
    assert_eq!(latest.get(), 3);
}

#[tokio::test(start_paused = true)]
async fn running_reloader_publishes_changes_until_the_shutdown() {
    let mut lab = Lab::new();
    let one = lab.write("one", "1");
    let mut latest = lab.follow(&[&one]).await;
    let stop = CancellationToken::new();
    let task = tokio::spawn(lab.reloader.run(stop.clone()));
    std::fs::write(&one, "2").unwrap();
    assert_eq!(latest.changed().await, Some(2));
    stop.cancel();
    task.await.unwrap();
    assert_eq!(latest.changed().await, None);
    assert_eq!(latest.get(), 2);
}

#[tokio::test]
async fn a_file_that_cannot_be_read_in_time_blocks_nothing() {
    let mut lab = Lab::new();
    let one = lab.write("one", "1");
    let latest = lab.follow(&[&one]).await;
    std::fs::remove_file(&one).unwrap();
    // A reader of a pipe waits for the first writer.
    mkfifoat(CWD, &one, Mode::RUSR | Mode::WUSR).unwrap();
    let (going_on, is_going_on) = std::sync::mpsc::channel();
    let rescued = one.clone();
    let rescue = std::thread::spawn(move || {
        let outcome = is_going_on.recv_timeout(Duration::from_secs(10));
        if outcome.is_err() {
            std::fs::write(rescued, "2").unwrap();
        }
        outcome
    });
    let stop = CancellationToken::new();
    let task = tokio::spawn(lab.reloader.run(stop.clone()));
    // A writer that does not wait can open the pipe only while a reader waits.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    let opened = async {
        loop {
            match open(&one, flags, Mode::empty()) {
                Ok(writer) => return writer,
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        }
    };
    let writer = timeout(Duration::from_secs(10), opened).await.unwrap();
    stop.cancel();
    task.await.unwrap();
    going_on.send(()).unwrap();
    rescue.join().unwrap().unwrap();
    drop(writer);
    assert_eq!(latest.get(), 1);
}

#[tokio::test]
async fn first_load_that_hangs_blocks_nothing() {
    let mut lab = Lab::new();
    let (begun, mut is_begun) = tokio::sync::mpsc::unbounded_channel();
    let (allow, allowed) = std::sync::mpsc::channel();
    let set = Hanging {
        file: lab.write("file", "1"),
        begun,
        allowed,
    };
    let mut following = std::pin::pin!(lab.reloader.follow(Set::Hanging, set));
    tokio::select! {
        _ = &mut following => unreachable!("the load has not ended"),
        begun = is_begun.recv() => begun.unwrap(),
    }
    allow.send(()).unwrap();
    assert!(following.await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn hanging_check_stops_no_other_set_and_counts_as_a_failed_reload() {
    let mut lab = Lab::new();
    let (file, one) = (lab.write("file", "1"), lab.write("one", "1"));
    let (begun, mut is_begun) = tokio::sync::mpsc::unbounded_channel();
    let (allow, allowed) = std::sync::mpsc::channel();
    allow.send(()).unwrap();
    let set = Hanging {
        file: file.clone(),
        begun,
        allowed,
    };
    // The hanging set is checked first.
    let mut hanging = lab.reloader.follow(Set::Hanging, set).await.unwrap();
    is_begun.recv().await.unwrap();
    let mut latest = lab.follow(&[&one]).await;
    let registry = lab.registry.clone();
    let shows = async |ok, failed, is_in_use| {
        let series = series("hanging", ok, failed, is_in_use);
        let is_shown = || {
            let page = registry.render();
            let mut series = series.iter();
            series.all(|line| page.lines().any(|shown| shown == line))
        };
        while !is_shown() {
            tokio::task::yield_now().await;
        }
    };
    let stop = CancellationToken::new();
    let task = tokio::spawn(lab.reloader.run(stop.clone()));
    for round in 1..3 {
        std::fs::write(&file, format!("changed {round}")).unwrap();
        is_begun.recv().await.unwrap();
        // The paused clock would wait for the hanging check.
        resume();
        std::fs::write(&one, format!("{}", 10 * round)).unwrap();
        let changed = timeout(Duration::from_secs(30), latest.changed()).await;
        assert_eq!(changed.unwrap(), Some(10 * round));
        pause();
        advance(file_follower::SLOW_READ).await;
        shows(round as u32 - 1, round as u32, 0).await;
        // No second check has begun.
        assert!(is_begun.try_recv().is_err());
        allow.send(()).unwrap();
        hanging.changed().await.unwrap();
        shows(round as u32, round as u32, 1).await;
    }
    stop.cancel();
    task.await.unwrap();
}
