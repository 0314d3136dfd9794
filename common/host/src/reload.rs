//! Reload of files while the program runs: certificates, keys, CA bundles, kubeconfigs.
//!
//! A [`Reloader`] checks all file sets of a program every [`CHECK_EVERY`]. The files of a set are loaded together,
//! so that users never see a half of a change. If the changed files cannot be loaded, the last good content stays
//! in use. A value with limited validity is loaded again before its end. Users keep a [`Latest`] and call
//! [`Latest::get`] for each new connection; open connections continue.
//!
//! A file system over the network or a credential plugin of a kubeconfig may never answer. Each set therefore has its
//! own checks, one at a time, on a blocking thread. A check that takes longer than 30 s counts as a failed reload.

mod metrics;

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::metrics::{FileMetrics, Outcome};
use crate::file_follower::{self, FileFollower, ReadError, read_in_background};
use crate::telemetry::log_once::LogOnce;
use crate::telemetry::metrics::{LabelSet, Registry};

/// Interval of the checks. A change is in use after the second check that reads the same content. Kubernetes takes
/// up to two minutes to deliver a changed Secret, so a shorter interval gains nothing. A check of unchanged files
/// costs one system call per file.
pub const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Reason and remedy for a check, or a first load of files, that takes longer than
/// [`SLOW_READ`](file_follower::SLOW_READ).
const TOO_SLOW: &str = "reading the files, or a credential plugin of a kubeconfig, takes more than 30 s; \
                        check the volumes of the files, and the plugin";

/// Time before the end of a value's validity at which its set is loaded again, in seconds.
const RENEW_BEFORE: i64 = 60;

/// Shortest pause between two loads of unchanged files. A credential plugin may fail, or return credentials that expire
/// at once.
const RENEW_PAUSE: Duration = Duration::from_secs(10);

/// Largest file, in bytes. The system's whole CA bundle is about 220 KiB long.
pub const MAX_BYTES: u64 = 4 << 20;

/// The files of one set, and the conversion of their contents into a value.
pub trait FileSet: Send + 'static {
    /// Type of the value.
    type Value: Clone + Send + Sync + 'static;
    /// Reason why files cannot be loaded; the text names the file and the remedy.
    type Error: Display;

    /// Returns the files.
    fn paths(&self) -> Vec<PathBuf>;

    /// Returns further files of the set, named by the content of the first file.
    fn references(&self, _first: &[u8]) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Converts the reason why a file cannot be read.
    fn unreadable(&self, error: ReadError) -> Self::Error;

    /// Converts the contents of all files, in the order of [`FileSet::paths`] and [`FileSet::references`].
    ///
    /// # Errors
    /// Fails if the files cannot be used.
    fn load(&mut self, contents: &[Vec<u8>]) -> Result<Loaded<Self::Value>, Self::Error>;

    /// Returns the end of the validity of the last loaded value, in Unix seconds; `None` if the value is valid as long as
    /// its files are unchanged. Each check calls this method, so the end may change at any time.
    fn valid_until(&self) -> Option<i64> {
        None
    }
}

/// A loaded value, and the times at which its certificates expire.
#[derive(Clone, Debug)]
pub struct Loaded<T> {
    /// The value.
    pub value: T,
    /// Expiry of the certificates.
    pub expiry: Expiry,
    /// Reasons why peers may refuse the value. The log has them as warnings once the value is in use.
    pub doubts: Vec<String>,
}

/// Times at which the first certificate or CRL of a kind expires, in Unix seconds; `None` without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expiry {
    /// The program's own certificate, with its chain.
    pub own: Option<i64>,
    /// The program's own certificate alone; `None` also if the set does not report this time. A chain may have expired
    /// certificates that peers do not need.
    pub leaf: Option<i64>,
    /// The CAs that peers are verified with.
    pub ca: Option<i64>,
    /// The CRLs that peers are verified with. An expired CRL refuses all peers of its CA.
    pub crl: Option<i64>,
}

/// The latest value of a file set.
#[derive(Clone, Debug)]
pub struct Latest<T>(watch::Receiver<T>);

/// All file sets of a program; `F` names the sets in metrics and logs.
pub struct Reloader<F> {
    metrics: Arc<FileMetrics<F>>,
    sets: Vec<Followed<F>>,
}

/// A file set, and the log and metrics of its checks.
struct Followed<F> {
    report: Report<F>,
    checks: Checks,
}

/// The state of a file set in logs and metrics.
struct Report<F> {
    files: F,
    metrics: Arc<FileMetrics<F>>,
    failures: LogOnce,
    expiry: Expiry,
}

/// The files of a set, and the conversion that publishes the value.
struct Checks {
    /// The files of the set without references.
    base: Vec<PathBuf>,
    follower: FileFollower,
    /// Time of the last load, successful or not.
    loaded: Instant,
    /// True if the contents in effect could not be loaded.
    has_failed: bool,
    source: Box<dyn Source>,
}

/// Result of a check.
enum Checked {
    /// The files are in use.
    InUse,
    /// The result depends on the next check.
    Undecided,
    /// The files were loaded. Their certificates expire at these times.
    Loaded(Expiry),
    /// The files cannot be used, for this reason.
    Failed(String),
}

/// A file set that is loaded for the first time.
struct First<S: FileSet> {
    set: S,
    base: Vec<PathBuf>,
    follower: FileFollower,
    loaded: Loaded<S::Value>,
}

/// A file set whose value is published.
struct Published<S: FileSet> {
    set: S,
    value: watch::Sender<S::Value>,
    /// Expiry of the published value's own certificate, in Unix seconds; see [`Expiry::leaf`].
    leaf: Option<i64>,
}

/// The part of a file set that does not depend on the type of its value.
trait Source: Send {
    /// Loads and publishes the value. Returns the expiry of the certificates.
    fn reload(&mut self, follower: &mut FileFollower) -> Result<Expiry, String>;

    /// Returns [`FileSet::valid_until`].
    fn valid_until(&self) -> Option<i64>;
}

// === impl Latest ===

impl<T: Clone> Latest<T> {
    /// Creates a value that never changes.
    pub fn fixed(value: T) -> Self {
        Self(watch::Sender::new(value).subscribe())
    }

    /// Returns the value.
    pub fn get(&self) -> T {
        self.0.borrow().clone()
    }

    /// Returns the value if it has changed since the last call.
    pub fn take_change(&mut self) -> Option<T> {
        let has_changed = self.0.has_changed().unwrap_or(false);
        has_changed.then(|| self.0.borrow_and_update().clone())
    }

    /// Waits for the next change and returns the new value; `None` if there will be no change.
    pub async fn changed(&mut self) -> Option<T> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().clone())
    }
}

// === impl Reloader ===

impl<F: LabelSet + Send + Sync + 'static> Reloader<F> {
    /// Creates a reloader without files. Its metrics are part of `registry`.
    pub fn new(registry: &Arc<Registry>) -> Self {
        Self {
            metrics: Arc::new(FileMetrics::new(registry)),
            sets: Vec::new(),
        }
    }

    /// Loads files for the first time, on a thread of its own, and follows the files once [`Reloader::run`] runs. Logs a
    /// warning if the load takes longer than [`SLOW_READ`](file_follower::SLOW_READ).
    ///
    /// # Errors
    /// Fails if the files cannot be loaded.
    pub async fn follow<S>(&mut self, files: F, set: S) -> Result<Latest<S::Value>, S::Error>
    where
        S: FileSet<Error: Send>,
    {
        let paths = set.paths();
        let is_slow = || {
            let files = name(files);
            warn!(
                files,
                ?paths,
                "cannot load files yet: {TOO_SLOW}; this program does not start"
            );
        };
        let (first, _) = read_in_background(move || First::load(set), is_slow).await;
        Ok(self.adopt(files, first?))
    }

    fn adopt<S: FileSet>(&mut self, files: F, first: First<S>) -> Latest<S::Value> {
        let First {
            set,
            base,
            follower,
            loaded,
        } = first;
        warn_of(&loaded.doubts);
        self.metrics.start(files, loaded.expiry);
        let (value, receiver) = watch::channel(loaded.value);
        self.sets.push(Followed {
            report: Report {
                files,
                metrics: self.metrics.clone(),
                failures: LogOnce::default(),
                expiry: loaded.expiry,
            },
            checks: Checks {
                base,
                follower,
                loaded: Instant::now(),
                has_failed: false,
                source: Box::new(Published {
                    set,
                    value,
                    leaf: loaded.expiry.leaf,
                }),
            },
        });
        Latest(receiver)
    }

    /// Checks all files every [`CHECK_EVERY`] until the token fires.
    pub async fn run(self, shutdown: CancellationToken) {
        let runs = self.sets.into_iter().map(Followed::run);
        shutdown.run_until_cancelled(join_all(runs)).await;
        // A program without files runs until the shutdown, too.
        shutdown.cancelled().await;
    }

    /// Checks all files once.
    pub fn check(&mut self) {
        for set in &mut self.sets {
            set.report.note(set.checks.check());
        }
    }
}

impl<S: FileSet> First<S> {
    fn load(mut set: S) -> Result<Self, S::Error> {
        let base = set.paths();
        let mut follower = FileFollower::unit(base.clone(), MAX_BYTES);
        let read = follower.read_now().map(drop);
        let read = read.and_then(|()| add_references(&mut follower, &set));
        read.map_err(|error| set.unreadable(error))?;
        let loaded = set.load(follower.contents())?;
        Ok(Self {
            set,
            base,
            follower,
            loaded,
        })
    }
}

/// Adds the referenced files to the follower of a set, and reads all files, if the references have changed.
fn add_references<S: FileSet>(follower: &mut FileFollower, set: &S) -> Result<(), ReadError> {
    let first = follower.contents().first();
    let references = first.map(|first| set.references(first));
    let mut paths = set.paths();
    paths.extend(references.unwrap_or_default());
    if paths != follower.paths() {
        *follower = FileFollower::unit(paths, MAX_BYTES);
        follower.read_now()?;
    }
    Ok(())
}

// === impl Followed ===

impl<F: LabelSet> Followed<F> {
    /// Checks the files every [`CHECK_EVERY`].
    async fn run(self) {
        let Self {
            mut report,
            mut checks,
        } = self;
        let mut tick = interval(CHECK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let check = move || (checks.check(), checks);
            let is_slow = || report.fail(TOO_SLOW);
            let (checked, was_slow);
            ((checked, checks), was_slow) = read_in_background(check, is_slow).await;
            // The next check decides if the files can be read again.
            if !(was_slow && matches!(checked, Checked::InUse)) {
                report.note(checked);
            }
        }
    }
}

// === impl Checks ===

impl Checks {
    fn check(&mut self) -> Checked {
        match self.follower.check() {
            file_follower::Outcome::Same if !self.follower.is_current() => Checked::Undecided,
            file_follower::Outcome::Same if !self.has_failed && !self.is_expiring() => {
                Checked::InUse
            }
            file_follower::Outcome::Same if self.loaded.elapsed() < RENEW_PAUSE => {
                Checked::Undecided
            }
            file_follower::Outcome::Same | file_follower::Outcome::Changed => self.load(),
            file_follower::Outcome::Unreadable { why, .. } => {
                // A missing reference must not hide a change of the first file, which may drop the reference.
                if self.follower.paths() != self.base {
                    self.follower = FileFollower::unit(self.base.clone(), MAX_BYTES);
                }
                Checked::Failed(why)
            }
        }
    }

    fn is_expiring(&self) -> bool {
        let soon = OffsetDateTime::now_utc().unix_timestamp() + RENEW_BEFORE;
        self.source.valid_until().is_some_and(|until| until <= soon)
    }

    fn load(&mut self) -> Checked {
        let loaded = self.source.reload(&mut self.follower);
        self.loaded = Instant::now();
        self.has_failed = loaded.is_err();
        match loaded {
            Ok(expiry) => Checked::Loaded(expiry),
            Err(why) => Checked::Failed(why),
        }
    }
}

impl<S: FileSet> Source for Published<S> {
    fn reload(&mut self, follower: &mut FileFollower) -> Result<Expiry, String> {
        let read = add_references(follower, &self.set);
        read.map_err(|error| error.to_string())?;
        let loaded = self.set.load(follower.contents());
        let loaded = loaded.map_err(|error| format!("{error:#}"))?;
        let now = OffsetDateTime::now_utc().unix_timestamp();
        if let (Some(before), Some(expired)) = (self.leaf, loaded.expiry.leaf)
            && expired <= now
            && now < before
        {
            let (expired, before) = (date(expired), date(before));
            return Err(format!(
                "the new certificate has expired ({expired}), and the one in use is valid until {before}"
            ));
        }
        self.leaf = loaded.expiry.leaf;
        warn_of(&loaded.doubts);
        self.value.send_replace(loaded.value);
        Ok(loaded.expiry)
    }

    fn valid_until(&self) -> Option<i64> {
        self.set.valid_until()
    }
}

// === impl Report ===

impl<F: LabelSet> Report<F> {
    fn note(&mut self, checked: Checked) {
        match checked {
            Checked::InUse => {
                if self.failures.has_recovered() {
                    self.metrics.in_use(self.files, true);
                    info!(
                        files = name(self.files),
                        "the files can be read again and are unchanged"
                    );
                }
            }
            Checked::Undecided => {}
            Checked::Loaded(expiry) => self.succeed(expiry),
            Checked::Failed(why) => self.fail(&why),
        }
    }

    fn succeed(&mut self, expiry: Expiry) {
        self.failures.has_recovered();
        self.metrics.expires(self.files, self.expiry, expiry);
        self.expiry = expiry;
        self.metrics.count(self.files, Outcome::Ok);
        self.metrics.in_use(self.files, true);
        info!(
            files = name(self.files),
            certificate_expires = expiry.own.map(date),
            ca_expires = expiry.ca.map(date),
            "files reloaded; new connections use them"
        );
    }

    fn fail(&mut self, why: &str) {
        self.metrics.in_use(self.files, false);
        let Some(due) = self.failures.failed(why) else {
            return;
        };
        warn!(
            files = name(self.files),
            failing_seconds = due.failing_seconds,
            "cannot reload files: {why}; the last good content stays in use until the files can be used"
        );
        if due.is_new() {
            self.metrics.count(self.files, Outcome::Failed);
        }
    }
}

fn warn_of(doubts: &[String]) {
    for doubt in doubts {
        warn!("{doubt}");
    }
}

/// Returns the text of a label with a single value.
fn name<F: LabelSet>(files: F) -> &'static str {
    let labels = files.labels();
    labels.first().map_or("", |(_, value)| *value)
}

/// Returns a time in Unix seconds as text, such as `2026-12-08T06:39:45Z`.
pub(crate) fn date(seconds: i64) -> String {
    OffsetDateTime::from_unix_timestamp(seconds)
        .ok()
        .and_then(|time| time.format(&Rfc3339).ok())
        .unwrap_or_else(|| format!("{seconds} s"))
}

#[cfg(test)]
mod tests;
