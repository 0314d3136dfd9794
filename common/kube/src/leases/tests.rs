//! Tests of the writer, the deletion and the count of leases against an API in memory. The clock is paused, so a
//! sleep ends once every task waits.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod fake;
mod log;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::Method;
use metrics::atomics::AtomicU64;
use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use self::fake::{Fake, Fault, LABEL, lease};
use self::log::Log;
use super::count::count_live;
use super::expired::Collector;
use super::own::{Contents, OwnLease};
use super::*;

const OWN: &str = "konnectivity-proxy-server-a";

/// A server's lease, kept by a task.
struct Kept {
    api: Fake,
    stop: CancellationToken,
    task: JoinHandle<()>,
    /// Bits of the gauge.
    kept: Arc<AtomicU64>,
}

impl Kept {
    fn start(api: &Fake) -> Self {
        let contents = Contents {
            namespace: "n".to_owned(),
            name: OWN.to_owned(),
            holder: "a".to_owned(),
            labels: [("k8s-app".to_owned(), "konnectivity-server".to_owned())].into(),
        };
        let stop = CancellationToken::new();
        let kept = Arc::new(AtomicU64::new(0));
        let gauge = Gauge::from_arc(kept.clone());
        let lease = OwnLease::new(api.client(), contents, "culvert-server", gauge);
        Self {
            kept,
            api: api.clone(),
            task: tokio::spawn(lease.keep(stop.clone())),
            stop,
        }
    }

    fn is_kept(&self) -> bool {
        f64::from_bits(self.kept.load(Ordering::Relaxed)) == 1.0
    }

    fn own(&self) -> Option<Value> {
        self.api.get(OWN)
    }

    /// Stops the task, and returns the time until its end.
    async fn stop(self) -> Duration {
        let asked = Instant::now();
        self.stop.cancel();
        self.task.await.unwrap();
        asked.elapsed()
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[tokio::test(start_paused = true)]
async fn lease_is_created_renewed_and_deleted() {
    let api = Fake::new();
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    let first = kept.own().unwrap();
    assert_eq!(api.calls(), ["GET", "POST"]);
    assert_eq!(
        first["metadata"]["labels"],
        json!({"k8s-app": "konnectivity-server"})
    );
    assert_eq!(first["spec"]["holderIdentity"], "a");
    assert_eq!(first["spec"]["leaseDurationSeconds"], 30);
    assert_eq!(first["spec"].get("acquireTime"), None);
    // The pauses are 15 s to 15.6 s.
    sleep(seconds(15)).await;
    assert_eq!(api.calls(), ["GET", "POST", "PUT"]);
    let second = kept.own().unwrap();
    assert_ne!(first["spec"]["renewTime"], second["spec"]["renewTime"]);
    assert_eq!(first["metadata"]["uid"], second["metadata"]["uid"]);
    sleep(seconds(60 * 60)).await;
    let renewals = api.count("PUT");
    assert!(
        (3600 * 10 / 156..=3616 / 15).contains(&renewals),
        "{renewals}"
    );
    assert_eq!(kept.stop().await, Duration::ZERO);
    assert_eq!(api.names(), [""; 0]);
    assert_eq!(api.calls().last().unwrap(), "DELETE");
}

#[tokio::test(start_paused = true)]
async fn gauge_shows_a_lease_that_expires_until_it_is_written_again() {
    let api = Fake::new();
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    assert!(kept.is_kept());
    api.set_down(true);
    // The last write is at most 15.6 s old, and a lease is live for 30 s.
    sleep(seconds(14)).await;
    assert!(kept.is_kept());
    sleep(seconds(40)).await;
    assert!(!kept.is_kept());
    api.set_down(false);
    sleep(seconds(8)).await;
    assert!(kept.is_kept());
    let gauge = kept.kept.clone();
    kept.stop().await;
    assert!(f64::from_bits(gauge.load(Ordering::Relaxed)).is_nan());
}

#[tokio::test(start_paused = true)]
async fn existing_lease_of_the_same_name_is_taken_over() {
    let api = Fake::new();
    let mut old = lease(OWN, "2001-01-01T00:00:00.000000Z");
    old["metadata"]["labels"] = json!({"other": "label"});
    api.put(old);
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    assert_eq!(api.calls(), ["GET", "PUT"]);
    let own = kept.own().unwrap();
    assert_eq!(
        own["metadata"]["labels"],
        json!({"k8s-app": "konnectivity-server"})
    );
    assert_eq!(own["spec"]["holderIdentity"], "a");
    kept.stop().await;
    assert_eq!(api.names(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn renewal_survives_every_kind_of_failure() {
    let api = Fake::new();
    for method in [Method::GET, Method::POST] {
        api.fault(method.clone(), Fault::Status(429));
        api.fault(method, Fault::Status(500));
    }
    let kept = Kept::start(&api);
    sleep(seconds(5)).await;
    assert!(kept.own().is_some());
    let faults: [fn() -> Fault; 5] = [
        || Fault::Status(429),
        || Fault::Status(503),
        || Fault::Status(403),
        || Fault::Silent,
        || Fault::Renewed(OWN),
    ];
    for fault in faults {
        let before = kept.own().unwrap();
        api.fault(Method::PUT, fault());
        // Renewed before the lease expires.
        sleep(seconds(25)).await;
        let after = kept.own().unwrap();
        assert_ne!(before["spec"]["renewTime"], after["spec"]["renewTime"]);
        assert_eq!(after["spec"]["holderIdentity"], "a");
    }
    // A server with a wrong clock deletes the lease; the next renewal creates the lease again.
    api.delete(OWN);
    sleep(seconds(16)).await;
    assert!(kept.own().is_some());
    // During an outage the pauses grow to 7 s.
    api.set_down(true);
    let before = api.calls().len();
    sleep(seconds(600)).await;
    let attempts = api.calls().len() - before;
    assert!((80..200).contains(&attempts), "{attempts}");
    api.set_down(false);
    let before = kept.own().unwrap();
    sleep(seconds(8)).await;
    assert_ne!(
        before["spec"]["renewTime"],
        kept.own().unwrap()["spec"]["renewTime"]
    );
    kept.stop().await;
    assert_eq!(api.names(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn write_in_progress_at_the_stop_does_not_create_the_lease_again() {
    for method in [Method::POST, Method::PUT] {
        let api = Fake::new();
        if method == Method::PUT {
            api.put(lease(OWN, "2001-01-01T00:00:00.000000Z"));
        }
        let (finish, held) = oneshot::channel();
        api.fault(method, Fault::Held(held));
        let kept = Kept::start(&api);
        sleep(seconds(1)).await;
        kept.stop.cancel();
        sleep(seconds(1)).await;
        assert_eq!(api.calls().len(), 2);
        finish.send(()).unwrap();
        kept.stop().await;
        assert_eq!(api.calls().len(), 3);
        sleep(seconds(60)).await;
        assert_eq!(api.names(), [""; 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn deletion_is_retried_and_bounded() {
    let api = Fake::new();
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    for status in [429, 500] {
        api.fault(Method::DELETE, Fault::Status(status));
    }
    assert!(kept.stop().await < seconds(2));
    assert_eq!(api.names(), [""; 0]);
    // A silent API delays the stop by 2 s for the deletion, and by 2 s for a write in progress.
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    api.fault(Method::DELETE, Fault::Silent);
    assert_eq!(kept.stop().await, seconds(2));
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    api.fault(Method::PUT, Fault::Silent);
    api.fault(Method::DELETE, Fault::Silent);
    sleep(Duration::from_millis(14_900)).await;
    assert_eq!(kept.stop().await, seconds(4));
}

#[tokio::test(start_paused = true)]
async fn stop_leaves_a_lease_that_was_created_by_another_program() {
    let api = Fake::new();
    let kept = Kept::start(&api);
    sleep(seconds(1)).await;
    api.delete(OWN);
    api.put(lease(OWN, "2001-01-01T00:00:00.000000Z"));
    kept.stop().await;
    assert_eq!(api.names(), [OWN]);
    // A server that could write nothing deletes nothing.
    api.set_down(true);
    let kept = Kept::start(&api);
    sleep(seconds(60)).await;
    kept.stop().await;
    assert_eq!(api.count("DELETE"), 1);
}

/// Starts the deletion of expired leases. Returns the number of deletions.
fn collect(api: &Fake) -> (Arc<AtomicU64>, JoinHandle<()>) {
    let deleted = Arc::new(AtomicU64::new(0));
    let counter = Counter::from_arc(Arc::clone(&deleted));
    let (labels, own) = (LABEL.to_owned(), OWN.to_owned());
    let collector = Collector::new(api.client(), "n", labels, own, counter);
    (deleted, tokio::spawn(collector.run(|_| {})))
}

/// Renews leases every 10 s for a while, each by a clock that shows another century.
async fn renew(api: &Fake, names: &[&str], duration: Duration) {
    let end = Instant::now() + duration;
    for second in 0.. {
        for (century, name) in names.iter().enumerate() {
            let time = format!(
                "{}00-01-01T00:{:02}:{:02}.000000Z",
                19 + century,
                second / 60 % 60,
                second % 60
            );
            api.put(lease(name, &time));
        }
        if Instant::now() >= end {
            return;
        }
        sleep(seconds(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_unrenewed_leases_are_deleted() {
    let api = Fake::new();
    api.put(lease(OWN, "2001-01-01T00:00:00.000000Z"));
    api.put(lease("dead-past", "2001-01-01T00:00:00.000000Z"));
    api.put(lease("dead-future", "2999-01-01T00:00:00.000000Z"));
    let mut other = lease("other", "2001-01-01T00:00:00.000000Z");
    other["metadata"]["labels"] = json!({"k8s-app": "something-else"});
    api.put(other);
    let (deleted, _task) = collect(&api);
    renew(&api, &["live-past", "live-now", "live-future"], seconds(19)).await;
    assert_eq!(api.names().len(), 7);
    renew(
        &api,
        &["live-past", "live-now", "live-future"],
        seconds(300),
    )
    .await;
    let left = [OWN, "live-future", "live-now", "live-past", "other"];
    assert_eq!(api.names(), left);
    assert_eq!(deleted.load(Ordering::Relaxed), 2);
}

/// Reports of a collector.
type Reports = Arc<Mutex<Vec<Option<usize>>>>;

/// Starts a collector. Returns its reports so far, and its task.
fn collected(api: &Fake) -> (Reports, JoinHandle<()>) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let (labels, own) = (LABEL.to_owned(), OWN.to_owned());
    let collector = Collector::new(api.client(), "n", labels, own, Counter::noop());
    let reported = reports.clone();
    let run = collector.run(move |count| reported.lock().push(count));
    (reports, tokio::spawn(run))
}

#[tokio::test(start_paused = true)]
async fn server_counts_without_its_lease_and_counts_nothing_without_live_leases() {
    let api = Fake::new();
    let (counts, _task) = collected(&api);
    sleep(seconds(100)).await;
    assert!(counts.lock().is_empty());
    renew(&api, &["b", "c"], seconds(20)).await;
    assert_eq!(counts.lock().pop(), Some(Some(3)));
    // Both expire.
    sleep(seconds(120)).await;
    assert_eq!(counts.lock().pop(), Some(None));
    counts.lock().clear();
    sleep(seconds(100)).await;
    assert!(counts.lock().is_empty());
    renew(&api, &[OWN, "b", "c"], seconds(20)).await;
    assert_eq!(counts.lock().pop(), Some(Some(3)));
}

#[tokio::test(start_paused = true)]
async fn number_of_a_server_is_unknown_once_lists_fail_for_longer_than_a_lease() {
    let api = Fake::new();
    let (counts, _task) = collected(&api);
    renew(&api, &[OWN, "b"], seconds(20)).await;
    assert_eq!(*counts.lock(), [Some(2); 2]);
    for _ in 0..10 {
        api.fault(Method::GET, Fault::Status(403));
    }
    // A short failure changes nothing.
    sleep(seconds(25)).await;
    assert_eq!(counts.lock().len(), 2);
    sleep(seconds(100)).await;
    assert_eq!(*counts.lock(), [Some(2), Some(2), None]);
    sleep(seconds(60)).await;
    assert_eq!(counts.lock().get(3), Some(&Some(2)));
}

#[tokio::test(start_paused = true)]
async fn lease_renewed_between_list_and_deletion_is_kept() {
    let api = Fake::new();
    api.put(lease("late", "2001-01-01T00:00:00.000000Z"));
    let (deleted, _task) = collect(&api);
    sleep(seconds(20)).await;
    let renewed = Fault::Renewed("late");
    api.put(lease("late", "2001-01-01T00:00:15.000000Z"));
    api.fault(Method::DELETE, renewed);
    sleep(seconds(41)).await;
    assert_eq!(api.count("DELETE"), 1);
    assert_eq!(
        (api.names(), deleted.load(Ordering::Relaxed)),
        (vec!["late".to_owned()], 0)
    );
    sleep(seconds(60)).await;
    assert_eq!((api.names().len(), deleted.load(Ordering::Relaxed)), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn outage_of_the_api_does_not_expire_leases() {
    let api = Fake::new();
    api.put(lease("a", "2001-01-01T00:00:00.000000Z"));
    let (deleted, _task) = collect(&api);
    sleep(seconds(20)).await;
    api.set_down(true);
    sleep(seconds(600)).await;
    api.set_down(false);
    // The holder needs a while to renew its lease after the outage.
    sleep(seconds(24)).await;
    api.put(lease("a", "2001-01-01T00:10:00.000000Z"));
    sleep(seconds(25)).await;
    assert_eq!(deleted.load(Ordering::Relaxed), 0);
    for status in [429, 500, 503] {
        api.fault(Method::GET, Fault::Status(status));
    }
    sleep(seconds(200)).await;
    assert_eq!(deleted.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn failure_that_lasts_is_logged_every_ten_minutes() {
    let api = Fake::new();
    let (log, _guard) = Log::of("culvert_kube::request");
    api.set_down(true);
    let (_deleted, _task) = collect(&api);
    sleep(seconds(1300)).await;
    let lines = log.take();
    let [first, second, third] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    assert!(!first.contains("failing_seconds"), "{first}");
    assert!(
        second.contains("attempts=41 failing_seconds=600"),
        "{second}"
    );
    assert!(
        third.contains("attempts=81 failing_seconds=1200"),
        "{third}"
    );
    api.set_down(false);
    sleep(seconds(20)).await;
    let text = format!("INFO message=Leases n/{LABEL} can be used again");
    assert_eq!(log.take(), [text]);
}

/// Starts a count. Returns the last reported number; `None` before the first report, and if the number is unknown.
fn count(api: &Fake) -> (Arc<Mutex<Option<usize>>>, JoinHandle<()>) {
    let last: Arc<Mutex<Option<usize>>> = Arc::default();
    let (reported, client) = (Arc::clone(&last), api.client());
    let task = tokio::spawn(async move {
        count_live(client, "n", LABEL, |count| *reported.lock() = count).await;
    });
    (last, task)
}

#[tokio::test(start_paused = true)]
async fn count_follows_changes_and_expiry() {
    let api = Fake::new();
    api.put(lease("dead", "2999-01-01T00:00:00.000000Z"));
    api.put(lease("a", "2001-01-01T00:00:00.000000Z"));
    let (last, _task) = count(&api);
    sleep(seconds(1)).await;
    assert_eq!(*last.lock(), Some(2));
    renew(&api, &["a", "b", "c"], seconds(20)).await;
    assert_eq!(*last.lock(), Some(4));
    renew(&api, &["a", "b", "c"], seconds(20)).await;
    assert_eq!(*last.lock(), Some(3));
    api.delete("b");
    sleep(seconds(1)).await;
    assert_eq!(*last.lock(), Some(2));
    // While no event proves that the watch works, nothing expires.
    sleep(seconds(300)).await;
    assert_eq!(*last.lock(), Some(2));
    api.put(lease("a", "2001-01-01T00:00:01.000000Z"));
    renew(&api, &["a"], seconds(40)).await;
    assert_eq!(*last.lock(), Some(1));
    api.delete("a");
    api.delete("c");
    api.delete("dead");
    sleep(seconds(1)).await;
    assert_eq!(*last.lock(), Some(0));
}

#[tokio::test(start_paused = true)]
async fn count_survives_outages_and_expired_versions() {
    let api = Fake::new();
    api.set_down(true);
    let (last, _task) = count(&api);
    sleep(seconds(600)).await;
    assert_eq!(*last.lock(), None);
    for status in [429, 500] {
        api.fault(Method::GET, Fault::Status(status));
    }
    api.set_down(false);
    renew(&api, &["a", "b"], seconds(100)).await;
    assert_eq!(*last.lock(), Some(2));
    api.set_down(true);
    // A short outage changes nothing.
    sleep(seconds(25)).await;
    assert_eq!(*last.lock(), Some(2));
    sleep(seconds(600)).await;
    assert_eq!(*last.lock(), None);
    api.set_down(false);
    sleep(seconds(31)).await;
    renew(&api, &["b"], seconds(1)).await;
    assert_eq!(*last.lock(), Some(2));
    renew(&api, &["b"], seconds(60)).await;
    assert_eq!(*last.lock(), Some(1));
    api.expire();
    api.put(lease("c", "2001-01-01T00:00:00.000000Z"));
    sleep(seconds(40)).await;
    assert_eq!(*last.lock(), Some(2));
}

#[tokio::test(start_paused = true)]
async fn missing_leases_are_logged_while_no_lease_is_live() {
    let api = Fake::new();
    let (log, _guard) = Log::of("culvert_kube::leases::count");
    let warning = |found| {
        let text = format!(
            "WARN message=no lease of a server is live, so the number of servers stays the same; check \
             --lease-namespace, --lease-label-selector, and --enable-lease-controller of the servers \
             namespace=\"n\" selector=\"{LABEL}\" found={found}"
        );
        vec![text]
    };
    let (_last, _task) = count(&api);
    sleep(seconds(1)).await;
    assert_eq!(log.take(), warning(0));
    renew(&api, &["a"], seconds(20)).await;
    assert_eq!(
        log.take(),
        ["INFO message=found live leases of servers live=1"]
    );
    // Events of another lease, which is not live, prove that the lease of the server was not renewed.
    let mut undated = lease("undated", "");
    undated["spec"]["renewTime"] = Value::Null;
    for _ in 0..9 {
        api.put(undated.clone());
        sleep(seconds(10)).await;
    }
    assert_eq!(log.take(), warning(2));
    for _ in 0..63 {
        api.put(undated.clone());
        sleep(seconds(10)).await;
    }
    let lines = log.take();
    let [line] = lines.as_slice() else {
        panic!("{lines:?}");
    };
    assert!(line.contains("found=2 missing_seconds=6"), "{line}");
    api.delete("undated");
    api.delete("a");
    sleep(seconds(1)).await;
    assert_eq!(log.take(), [""; 0]);
}
