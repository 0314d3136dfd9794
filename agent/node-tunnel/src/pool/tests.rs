//! Tests of the pool, with a proxy in memory.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU32};

use culvert_native::link::{Incoming, Taker, TakerLimits};
use futures_util::future::join_all;
use http::{Response, StatusCode};
use tokio::io::{DuplexStream, duplex};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;
use crate::config::PINGS;

/// Duration of a dial.
const DIAL_TAKES: Duration = Duration::from_millis(10);

/// A pool, and the proxy behind the pool.
pub(crate) struct Proxy {
    pub pool: Arc<ConnectionPool<Dialer>>,
    pub metrics: Arc<TunnelMetrics>,
    pub script: Arc<Script>,
    /// The proxy's ends of the connections, in the order of opening.
    pub far: mpsc::UnboundedReceiver<FarEnd>,
    stop: CancellationToken,
    runs: JoinHandle<()>,
}

/// Behaviour of the proxy from now on.
pub(crate) struct Script {
    pub dials: AtomicUsize,
    /// The thread of each dial.
    pub threads: Mutex<Vec<ShardId>>,
    pub refuses: AtomicBool,
    /// Set when the proxy accepts connections but never sends anything.
    pub mute: AtomicBool,
    pub max_streams: AtomicU32,
}

pub(crate) struct Dialer {
    script: Arc<Script>,
    far: mpsc::UnboundedSender<FarEnd>,
}

/// The proxy's end of one connection.
pub(crate) struct FarEnd {
    pub streams: mpsc::UnboundedReceiver<Incoming>,
    pub inbound: Arc<Inbound>,
    pub driver: JoinHandle<()>,
    drain: Arc<Notify>,
    /// Silences the proxy's end but keeps the connection open.
    pub mute: Arc<Notify>,
    /// Ends the silence.
    pub unmute: Arc<Notify>,
}

impl Proxy {
    pub(crate) fn start(limit: usize) -> Self {
        Self::start_on(1, limit)
    }

    pub(crate) fn start_on(threads: usize, limit: usize) -> Self {
        let script = Arc::new(Script {
            dials: AtomicUsize::new(0),
            threads: Mutex::default(),
            refuses: AtomicBool::new(false),
            mute: AtomicBool::new(false),
            max_streams: AtomicU32::new(1000),
        });
        let (sender, far) = mpsc::unbounded_channel();
        let dialer = Dialer {
            script: script.clone(),
            far: sender,
        };
        let metrics = TunnelMetrics::new().unwrap();
        let shards = Shards::start(threads).unwrap();
        let pool = ConnectionPool::new(dialer, limit, PINGS, shards, metrics.clone());
        let stop = CancellationToken::new();
        let runs = tokio::spawn(pool.clone().run(stop.clone()));
        Self {
            pool,
            metrics,
            script,
            far,
            stop,
            runs,
        }
    }

    pub(crate) async fn next_connection(&mut self) -> FarEnd {
        self.far.recv().await.unwrap()
    }

    fn dials(&self) -> usize {
        self.script.dials.load(Ordering::Relaxed)
    }

    async fn open(&self) -> Result<Stream, PoolError> {
        self.pool
            .open(&Uri::from_static("a.b.svc.cluster.local:443"))
            .await
    }
}

impl Reach for Dialer {
    type Stream = DuplexStream;

    async fn reach(&self) -> Result<DuplexStream, String> {
        self.script.dials.fetch_add(1, Ordering::Relaxed);
        self.script.threads.lock().extend(Shards::current());
        sleep(DIAL_TAKES).await;
        if self.script.refuses.load(Ordering::Relaxed) {
            return Err("connection refused".into());
        }
        let (near, far) = duplex(64 * 1024);
        let _ = self.far.send(FarEnd::start(far, &self.script));
        Ok(near)
    }
}

impl FarEnd {
    fn start(stream: DuplexStream, script: &Script) -> Self {
        let (sender, streams) = mpsc::unbounded_channel();
        let inbound = Arc::<Inbound>::default();
        let [drain, mute, unmute] = [(); 3].map(|()| Arc::<Notify>::default());
        let max_streams = script.max_streams.load(Ordering::Relaxed);
        let driver = if script.mute.load(Ordering::Relaxed) {
            tokio::spawn(async move {
                let _held = (stream, sender);
                pending::<()>().await;
            })
        } else {
            let (inbound, drain) = (inbound.clone(), drain.clone());
            let take = take(stream, inbound, max_streams, drain, sender);
            let (mute, unmute) = (mute.clone(), unmute.clone());
            tokio::spawn(async move {
                let mut take = pin!(take);
                loop {
                    tokio::select! {
                        () = &mut take => return,
                        // Keeps the connection open.
                        () = mute.notified() => unmute.notified().await,
                    }
                }
            })
        };
        Self {
            streams,
            inbound,
            driver,
            drain,
            mute,
            unmute,
        }
    }

    pub(crate) async fn next_stream(&mut self) -> Incoming {
        self.streams.recv().await.unwrap()
    }
}

async fn take(
    stream: DuplexStream,
    inbound: Arc<Inbound>,
    max_streams: u32,
    drain: Arc<Notify>,
    streams: mpsc::UnboundedSender<Incoming>,
) {
    let limits = TakerLimits {
        streams: max_streams,
        ..TakerLimits::trusting()
    };
    let Ok(mut taker) = Taker::new(stream, inbound, limits).await else {
        return;
    };
    loop {
        let next = tokio::select! {
            next = taker.next() => next,
            () = drain.notified() => {
                taker.drain();
                continue;
            }
        };
        match next {
            Ok(Some(incoming)) => {
                let _ = streams.send(incoming);
            }
            _ => return,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_clients_share_one_dial_and_send_only_the_authority() {
    let mut proxy = Proxy::start(1);
    assert!(!proxy.pool.is_up());
    let opened = join_all((0..20).map(|_| proxy.open())).await;
    assert!(opened.iter().all(Result::is_ok));
    assert_eq!(proxy.dials(), 1);
    assert!(proxy.pool.is_up());
    let mut far = proxy.next_connection().await;
    for _ in 0..20 {
        let (request, _) = far.next_stream().await;
        assert_eq!(request.method(), Method::CONNECT);
        assert_eq!(*request.uri(), "a.b.svc.cluster.local:443");
        assert!(request.headers().is_empty(), "{:?}", request.headers());
    }
}

#[tokio::test(start_paused = true)]
async fn new_stream_uses_the_connection_with_the_fewest_streams() {
    let mut proxy = Proxy::start(2);
    let _first = proxy.open().await.unwrap();
    let (mut a, mut b) = (proxy.next_connection().await, proxy.next_connection().await);
    let _in_a = a.next_stream().await;
    sleep(DIAL_TAKES).await;
    let second = proxy.open().await.unwrap();
    let _in_b = b.next_stream().await;
    let _third = proxy.open().await.unwrap();
    let _also_in_a = a.next_stream().await;
    drop(second);
    let _fourth = proxy.open().await.unwrap();
    let _again_in_b = b.next_stream().await;
    let _fifth = proxy.open().await.unwrap();
    let _second_in_b = b.next_stream().await;
    assert!(a.streams.try_recv().is_err());
    // The limit is two connections.
    sleep(LAST_PAUSE * 2).await;
    assert_eq!(proxy.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn second_connection_opens_only_once_the_first_is_used() {
    let mut proxy = Proxy::start(2);
    let _a = proxy.next_connection().await;
    sleep(LAST_PAUSE * 2).await;
    assert_eq!(proxy.dials(), 1);
    let _stream = proxy.open().await.unwrap();
    let _b = proxy.next_connection().await;
}

#[tokio::test]
async fn new_connection_uses_the_thread_with_the_fewest_connections() {
    let mut proxy = Proxy::start_on(2, 2);
    let _first = proxy.open().await.unwrap();
    let (_a, mut b) = (proxy.next_connection().await, proxy.next_connection().await);
    let in_b = timeout(CONNECT_TIMEOUT, async {
        loop {
            let opened = proxy.open().await.unwrap();
            if Some(opened.seat.shard()) == proxy.pool.shards().ids().nth(1) {
                break opened;
            }
            sleep(DIAL_TAKES).await;
        }
    });
    let _in_b = in_b.await.unwrap();
    let _stream = b.next_stream().await;
    // The connection accepts no more streams, but keeps the open stream.
    b.drain.notify_one();
    let replaced = timeout(CONNECT_TIMEOUT, async {
        loop {
            if let Ok(far) = proxy.far.try_recv() {
                break far;
            }
            let _ = proxy.open().await;
            sleep(DIAL_TAKES).await;
        }
    });
    let _c = replaced.await.unwrap();
    let ids: Vec<_> = proxy.pool.shards().ids().collect();
    assert_eq!(*proxy.script.threads.lock(), [ids[0], ids[1], ids[1]]);
    proxy.stop.cancel();
}

#[tokio::test(start_paused = true)]
async fn broken_connection_is_replaced() {
    let mut proxy = Proxy::start(1);
    let lost = proxy.open().await.unwrap();
    let a = proxy.next_connection().await;
    a.driver.abort();
    assert!(lost.answer.await.is_err());
    let _stream = proxy.open().await.unwrap();
    let mut b = proxy.next_connection().await;
    let _in_b = b.next_stream().await;
    assert_eq!(proxy.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn connection_after_goaway_gets_no_new_streams_and_ends_with_its_last_stream() {
    let mut proxy = Proxy::start(1);
    let opened = proxy.open().await.unwrap();
    let Stream {
        answer, send, seat, ..
    } = opened;
    let mut a = proxy.next_connection().await;
    let (request, mut respond) = a.next_stream().await;
    a.drain.notify_one();
    sleep(DIAL_TAKES).await;
    let _stream = proxy.open().await.unwrap();
    let mut b = proxy.next_connection().await;
    let _in_b = b.next_stream().await;
    assert!(a.streams.try_recv().is_err());
    respond.send_response(Response::new(()), true).unwrap();
    assert_eq!(answer.await.unwrap().status(), StatusCode::OK);
    drop((send, seat, request, respond));
    assert!(a.streams.recv().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn connection_after_goaway_is_replaced_without_a_client() {
    let mut proxy = Proxy::start(1);
    let _stream = proxy.open().await.unwrap();
    let mut a = proxy.next_connection().await;
    let _in_a = a.next_stream().await;
    a.drain.notify_one();
    let _b = proxy.next_connection().await;
    sleep(DIAL_TAKES).await;
    assert!(proxy.pool.is_up());
}

#[tokio::test(start_paused = true)]
async fn client_waits_for_a_second_dial_while_the_proxy_works() {
    let mut proxy = Proxy::start(1);
    let _stream = proxy.open().await.unwrap();
    let mut a = proxy.next_connection().await;
    let _in_a = a.next_stream().await;
    // The first dial after the end of a connection fails.
    proxy.script.refuses.store(true, Ordering::Relaxed);
    a.driver.abort();
    let works_again = async {
        while proxy.dials() < 2 {
            sleep(DIAL_TAKES / 2).await;
        }
        sleep(DIAL_TAKES).await;
        proxy.script.refuses.store(false, Ordering::Relaxed);
    };
    let opened = async {
        sleep(DIAL_TAKES / 4).await;
        proxy.open().await.map(|_| ())
    };
    let (opened, ()) = tokio::join!(opened, works_again);
    assert_eq!((opened, proxy.dials()), (Ok(()), 3));
}

#[tokio::test(start_paused = true)]
async fn connection_to_a_silent_proxy_never_counts_as_up() {
    let mut proxy = Proxy::start(1);
    proxy.script.mute.store(true, Ordering::Relaxed);
    let _a = proxy.next_connection().await;
    sleep(CONNECT_TIMEOUT - DIAL_TAKES * 2).await;
    assert!(!proxy.pool.is_up());
    assert_eq!(proxy.dials(), 1);
    sleep(FIRST_PAUSE + DIAL_TAKES * 4).await;
    assert_eq!(proxy.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn used_connection_that_falls_silent_is_replaced() {
    let mut proxy = Proxy::start(1);
    let stream = proxy.open().await.unwrap();
    let mut a = proxy.next_connection().await;
    let (_request, mut respond) = a.next_stream().await;
    let _answered = respond.send_response(Response::new(()), false).unwrap();
    let mut body = stream.answer.await.unwrap().into_body();
    sleep(DIAL_TAKES).await;
    a.mute.notify_one();
    // An idle connection gets a PING after 30 s.
    let (seconds, began) = (Duration::from_secs(35), Instant::now());
    let ended = timeout(seconds, body.data()).await.unwrap();
    assert!(matches!(ended, None | Some(Err(_))), "{ended:?}");
    // A new dial also resolves the name again.
    let second = timeout(
        seconds - began.elapsed() + DIAL_TAKES,
        proxy.next_connection(),
    );
    let mut b = second.await.unwrap();
    assert_eq!(proxy.dials(), 2);
    let _stream = proxy.open().await.unwrap();
    let _in_b = b.next_stream().await;
}

#[tokio::test(start_paused = true)]
async fn connections_that_recover_from_silence_are_used_again() {
    let mut proxy = Proxy::start(1);
    let _held = proxy.open().await.unwrap();
    let mut first = proxy.next_connection().await;
    let _in_first = first.next_stream().await;
    sleep(DIAL_TAKES).await;
    for _ in 0..5 {
        first.mute.notify_one();
        let unanswered = proxy.open().await.unwrap();
        unanswered.seat.is_silent().await;
        let elsewhere = proxy.open().await.unwrap();
        let second = proxy.next_connection().await;
        first.unmute.notify_one();
        let _unanswered = first.next_stream().await;
        drop((unanswered, elsewhere));
        let works_again = async {
            second.driver.await.unwrap();
            let _stream = proxy.open().await.unwrap();
            first.next_stream().await
        };
        timeout(CONNECT_TIMEOUT, works_again).await.unwrap();
    }
    assert_eq!(proxy.dials(), 6);
}

#[tokio::test(start_paused = true)]
async fn waiting_client_uses_a_connection_that_recovers() {
    let mut proxy = Proxy::start(1);
    let _held = proxy.open().await.unwrap();
    let mut first = proxy.next_connection().await;
    let _in_first = first.next_stream().await;
    sleep(DIAL_TAKES).await;
    first.mute.notify_one();
    let unanswered = proxy.open().await.unwrap();
    unanswered.seat.is_silent().await;
    proxy.script.refuses.store(true, Ordering::Relaxed);
    let recovers = async {
        // A dial has failed, and the pool waits before the next one.
        while proxy.pool.dialed.borrow().is_none() {
            sleep(Duration::from_millis(1)).await;
        }
        first.unmute.notify_one();
    };
    let (opened, ()) = tokio::join!(proxy.open(), recovers);
    assert!(opened.is_ok(), "{:?}", opened.err());
    assert_eq!(proxy.dials(), 2);
}

#[tokio::test(start_paused = true)]
async fn failed_dial_fails_all_waiting_clients_and_is_retried() {
    let mut proxy = Proxy::start(1);
    proxy.script.refuses.store(true, Ordering::Relaxed);
    let started = Instant::now();
    let (one, other) = tokio::join!(proxy.open(), proxy.open());
    for opened in [one, other] {
        let error = opened.err().unwrap().to_string();
        assert!(error.contains("connection refused"), "{error}");
    }
    assert!(
        started.elapsed() < CONNECT_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    sleep(LAST_PAUSE * 20).await;
    let dials = proxy.dials();
    assert!((20..50).contains(&dials), "{dials} dials");
    proxy.script.refuses.store(false, Ordering::Relaxed);
    assert!(proxy.open().await.is_ok());
    proxy.next_connection().await;
    let failed = proxy.dials() - 1;
    let line = format!("cx_connect_fail{{envoy_cluster_name=\"proxy_cluster\"}} {failed}\n");
    assert!(proxy.metrics.registry().render().contains(&line), "{line}");
}

#[tokio::test(start_paused = true)]
async fn open_fails_at_once_if_the_proxy_allows_no_more_streams() {
    let mut proxy = Proxy::start(1);
    proxy.script.max_streams.store(1, Ordering::Relaxed);
    let _far = proxy.next_connection().await;
    sleep(DIAL_TAKES).await;
    let first = proxy.open().await.unwrap();
    let started = Instant::now();
    assert_eq!(proxy.open().await.err(), Some(PoolError::Full));
    assert_eq!(started.elapsed(), Duration::ZERO);
    drop(first);
    assert!(proxy.open().await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn stop_closes_idle_connections_at_once() {
    let mut proxy = Proxy::start(1);
    let mut far = proxy.next_connection().await;
    sleep(DIAL_TAKES).await;
    let started = Instant::now();
    proxy.stop.cancel();
    proxy.runs.await.unwrap();
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert!(far.streams.recv().await.is_none());
}
