//! Reload of files while the program runs: certificates, keys, CA bundles, kubeconfigs.
//!
//! A [`Reloader`] checks all file sets of a program every [`CHECK_EVERY`]. The files of a set are loaded together,
//! so that users never see a half of a change. If the changed files cannot be loaded, the last good content stays
//! in use. A value with limited validity is loaded again before its end. Users keep a [`Latest`] and call
//! [`Latest::get`] for each new connection; open connections continue.

mod metrics;

use std::fmt::Display;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use time::OffsetDateTime;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::metrics::{FileMetrics, Outcome};
use crate::file_follower::{self, FileFollower, ReadError};
use crate::telemetry::log_once::LogOnce;
use crate::telemetry::metrics::{LabelSet, Registry};

/// Interval of the checks. A change is in use after the second check that reads the same content. Kubernetes takes
/// up to two minutes to deliver a changed Secret, so a shorter interval gains nothing. A check of unchanged files
/// costs one system call per file.
pub const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Time of a check after which the operator is warned.
const SLOW_CHECK: Duration = Duration::from_secs(30);

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
    /// its files are unchanged.
    fn valid_until(&self) -> Option<i64> {
        None
    }
}

/// A loaded value, and the times at which its certificates expire.
#[derive(Clone, Copy, Debug)]
pub struct Loaded<T> {
    /// The value.
    pub value: T,
    /// Expiry of the certificates.
    pub expiry: Expiry,
}

/// Times at which the first certificate or CRL of a kind expires, in Unix seconds; `None` without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expiry {
    /// The program's own certificate, with its chain.
    pub own: Option<i64>,
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

/// A file set, its state, and the conversion that publishes the value.
struct Followed<F> {
    files: F,
    /// The files of the set without references.
    base: Vec<PathBuf>,
    follower: FileFollower,
    failures: LogOnce,
    expiry: Expiry,
    /// End of the validity of the value, in Unix seconds; `None` without a limit.
    valid_until: Option<i64>,
    /// Time of the last load, successful or not.
    loaded: Instant,
    reload: Box<Reload>,
}

/// A file set that is loaded for the first time.
struct First<S: FileSet> {
    set: S,
    base: Vec<PathBuf>,
    follower: FileFollower,
    loaded: Loaded<S::Value>,
}

/// Loads and publishes the value. Returns the expiry of the certificates, and the end of the value's validity.
type Reload = dyn FnMut(&mut FileFollower) -> Result<(Expiry, Option<i64>), String> + Send;

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

    /// Loads files for the first time, and follows the files once [`Reloader::run`] runs.
    ///
    /// # Errors
    /// Fails if the files cannot be loaded.
    pub fn follow<S: FileSet>(&mut self, files: F, set: S) -> Result<Latest<S::Value>, S::Error> {
        Ok(self.adopt(files, First::load(set)?))
    }

    /// As [`follow`](Self::follow), for files whose load may take any time, such as a kubeconfig with a credential plugin:
    /// the first load runs on a thread of its own.
    ///
    /// # Errors
    /// Fails if the files cannot be loaded.
    pub async fn follow_slow<S>(&mut self, files: F, set: S) -> Result<Latest<S::Value>, S::Error>
    where
        S: FileSet<Value: Send, Error: Send>,
    {
        let loading = spawn_blocking(move || First::load(set));
        match warn_if_slow(loading, "this program does not start").await {
            Ok(first) => Ok(self.adopt(files, first?)),
            Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
            // The runtime ends.
            Err(_) => std::future::pending().await,
        }
    }

    fn adopt<S: FileSet>(&mut self, files: F, first: First<S>) -> Latest<S::Value> {
        let First {
            mut set,
            base,
            follower,
            loaded,
        } = first;
        self.metrics.start(files, loaded.expiry);
        let (sender, receiver) = watch::channel(loaded.value);
        let valid_until = set.valid_until();
        let reload = move |follower: &mut FileFollower| {
            let read = add_references(follower, &set);
            read.map_err(|error| error.to_string())?;
            let loaded = set.load(follower.contents());
            let loaded = loaded.map_err(|error| format!("{error:#}"))?;
            sender.send_replace(loaded.value);
            Ok((loaded.expiry, set.valid_until()))
        };
        self.sets.push(Followed {
            files,
            base,
            follower,
            failures: LogOnce::default(),
            expiry: loaded.expiry,
            valid_until,
            loaded: Instant::now(),
            reload: Box::new(reload),
        });
        Latest(receiver)
    }

    /// Checks all files every [`CHECK_EVERY`] until the token fires. The checks run on a thread of their own: a file
    /// system over the network or a credential plugin of a kubeconfig may take any time.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut tick = interval(CHECK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while shutdown.run_until_cancelled(tick.tick()).await.is_some() {
            let checking = spawn_blocking(move || {
                self.check();
                self
            });
            let checked = warn_if_slow(checking, "changes of files have no effect");
            self = match shutdown.run_until_cancelled(checked).await {
                Some(Ok(reloader)) => reloader,
                Some(Err(error)) if error.is_panic() => resume_unwind(error.into_panic()),
                _ => return,
            };
        }
    }

    /// Checks all files once.
    pub fn check(&mut self) {
        for set in &mut self.sets {
            set.check(&self.metrics);
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

/// Waits for a check, and warns if it takes long. `meanwhile` names the effect.
async fn warn_if_slow<T>(mut checking: JoinHandle<T>, meanwhile: &str) -> Result<T, JoinError> {
    match timeout(SLOW_CHECK, &mut checking).await {
        Ok(checked) => checked,
        Err(_) => {
            warn!(
                "the check of certificates, keys and kubeconfigs takes more than {SLOW_CHECK:?}: until it ends, {meanwhile}; \
                 check the file systems of the files, and credential plugins of kubeconfigs"
            );
            checking.await
        }
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
    fn check(&mut self, metrics: &FileMetrics<F>) {
        match self.follower.check() {
            file_follower::Outcome::Same if !self.follower.is_current() => {}
            file_follower::Outcome::Same if self.is_expiring() => {
                if self.loaded.elapsed() >= RENEW_PAUSE
                    && let Err(why) = self.load(metrics)
                {
                    self.fail(&why, metrics);
                }
            }
            file_follower::Outcome::Same => {
                if self.failures.has_recovered() {
                    metrics.in_use(self.files, true);
                    info!(
                        files = name(self.files),
                        "the files can be read again and are unchanged"
                    );
                }
            }
            file_follower::Outcome::Changed => {
                if let Err(why) = self.load(metrics) {
                    self.follower.retry();
                    self.fail(&why, metrics);
                }
            }
            file_follower::Outcome::Unreadable { why, .. } => {
                self.fail(&why, metrics);
                // A missing reference must not hide a change of the first file, which may drop the reference.
                if self.follower.paths() != self.base {
                    self.follower = FileFollower::unit(self.base.clone(), MAX_BYTES);
                }
            }
        }
    }

    fn is_expiring(&self) -> bool {
        let soon = OffsetDateTime::now_utc().unix_timestamp() + RENEW_BEFORE;
        self.valid_until.is_some_and(|until| until <= soon)
    }

    fn load(&mut self, metrics: &FileMetrics<F>) -> Result<(), String> {
        self.loaded = Instant::now();
        let (expiry, valid_until) = (self.reload)(&mut self.follower)?;
        self.valid_until = valid_until;
        self.succeed(expiry, metrics);
        Ok(())
    }

    fn succeed(&mut self, expiry: Expiry, metrics: &FileMetrics<F>) {
        self.failures.has_recovered();
        metrics.expires(self.files, self.expiry, expiry);
        self.expiry = expiry;
        metrics.count(self.files, Outcome::Ok);
        metrics.in_use(self.files, true);
        info!(
            files = name(self.files),
            certificate_expires = expiry.own.map(instant),
            ca_expires = expiry.ca.map(instant),
            "files reloaded; new connections use them"
        );
    }

    fn fail(&mut self, why: &str, metrics: &FileMetrics<F>) {
        metrics.in_use(self.files, false);
        if self.failures.is_new(why) {
            warn!(
                files = name(self.files),
                "cannot reload files: {why}; the last good content stays in use until the files can be used"
            );
            metrics.count(self.files, Outcome::Failed);
        }
    }
}

/// Returns the text of a label with a single value.
fn name<F: LabelSet>(files: F) -> &'static str {
    let labels = files.labels();
    labels.first().map_or("", |(_, value)| *value)
}

fn instant(seconds: i64) -> String {
    OffsetDateTime::from_unix_timestamp(seconds)
        .map_or_else(|_| format!("{seconds} s"), |time| time.to_string())
}

#[cfg(test)]
mod tests;
