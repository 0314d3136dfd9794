#![allow(clippy::unwrap_used)]

use metrics::Gauge;
use tokio::time::sleep;

use super::*;

const BUDGET: usize = 10;
const WITHIN: Duration = Duration::from_secs(10);

fn pool(limit: usize) -> Arc<OverflowBudget> {
    OverflowBudget::new(limit, Gauge::noop(), Gauge::noop())
}

fn open(pool: &Arc<OverflowBudget>) -> (Sender<&'static str>, Receiver<&'static str>) {
    inbox(BUDGET, pool, &Arc::default())
}

/// Returns true if the connection is evicted by now.
async fn evicted<T>(receiver: &Receiver<T>) -> bool {
    let watch = receiver.watch();
    tokio::select! {
        biased;
        reason = watch.overdue(WITHIN) => reason == CloseReason::BufferExceeded,
        () = std::future::ready(()) => false,
    }
}

#[tokio::test]
async fn items_come_out_in_order_and_every_borrowed_byte_is_returned() {
    let pool = pool(100);
    let (tx, mut rx) = open(&pool);
    for (item, weight, used) in [("a", 6, 0), ("b", 6, 2), ("c", 50, 52), ("d", 1, 53)] {
        let _ = tx.push(item, weight);
        assert_eq!(pool.used(), used);
    }
    tx.end("end");
    let _ = tx.push("late", 1);
    for (item, used) in [("a", 47), ("b", 41), ("c", 0), ("d", 0), ("end", 0)] {
        assert_eq!(rx.recv().await, Some(item));
        assert_eq!(pool.used(), used);
    }
    drop(tx);
    assert_eq!(rx.recv().await, None);
}

#[tokio::test]
async fn held_bytes_of_all_inboxes_are_counted_until_they_are_read_or_freed() {
    let (pool, held) = (pool(100), Arc::new(AtomicUsize::new(0)));
    let (first, mut first_rx) = inbox(BUDGET, &pool, &held);
    let (second, second_rx) = inbox(BUDGET, &pool, &held);
    let _ = first.push("a", 6);
    let _ = first.push("b", 30);
    let _ = second.push("c", 50);
    let count = || held.load(Ordering::Relaxed);
    assert_eq!(count(), 86);
    assert_eq!(first_rx.recv().await, Some("a"));
    assert_eq!(count(), 80);
    drop(second_rx);
    assert_eq!(count(), 30);
    let _ = second.push("nobody's", 7);
    assert_eq!(count(), 30);
    // The largest borrower is evicted.
    let (third, mut third_rx) = inbox(BUDGET, &pool, &held);
    let _ = first.push("d", 60);
    let _ = third.push("e", 40);
    assert_eq!(count(), 40);
    assert_eq!(third_rx.recv().await, Some("e"));
    drop((first, first_rx, third_rx));
    assert_eq!(count(), 0);
}

#[tokio::test]
async fn a_dropped_receiver_returns_its_loan() {
    let pool = pool(100);
    let (tx, rx) = open(&pool);
    let (other, _other) = open(&pool);
    let _ = tx.push("a", 60);
    let _ = other.push("b", 30);
    assert_eq!(pool.used(), 70);
    drop(rx);
    assert_eq!(pool.used(), 20);
    let _ = tx.push("nobody's", 60);
    tx.end("nobody's");
    assert_eq!(pool.used(), 20);
}

#[tokio::test]
async fn a_waiting_receiver_wakes_for_an_item_and_for_the_end() {
    let pool = pool(0);
    let (tx, mut rx) = open(&pool);
    let (heard, ()) = tokio::join!(rx.recv(), async { assert!(!tx.push("a", 1)) });
    assert_eq!(heard, Some("a"));
    let (heard, ()) = tokio::join!(rx.recv(), async { drop(tx) });
    assert_eq!(heard, None);
}

#[tokio::test]
async fn the_largest_borrower_is_evicted_to_make_room() {
    let pool = pool(100);
    let (greedy, greedy_rx) = open(&pool);
    let (modest, modest_rx) = open(&pool);
    let (innocent, mut innocent_rx) = open(&pool);
    let _ = greedy.push("g", BUDGET + 60);
    let _ = modest.push("m", BUDGET + 30);
    let _ = innocent.push("i", BUDGET + 20);
    assert_eq!(pool.used(), 50);
    assert!(evicted(&greedy_rx).await);
    assert!(!evicted(&modest_rx).await);
    assert!(!evicted(&innocent_rx).await);
    // Bytes for an evicted connection are dropped.
    let _ = greedy.push("more", 1);
    assert_eq!(pool.used(), 50);
    assert_eq!(innocent_rx.recv().await, Some("i"));
    assert_eq!(pool.used(), 30);
}

#[tokio::test]
async fn the_new_borrower_is_evicted_if_its_loan_would_be_the_largest() {
    let pool = pool(100);
    let (small, small_rx) = open(&pool);
    let (large, large_rx) = open(&pool);
    let _ = small.push("s", BUDGET + 40);
    let _ = large.push("l", BUDGET + 50);
    let _ = large.push("l", 11);
    assert!(evicted(&large_rx).await);
    assert!(!evicted(&small_rx).await);
    assert_eq!(pool.used(), 40);
}

#[tokio::test]
async fn no_more_connections_are_evicted_than_necessary() {
    let pool = pool(100);
    let others: Vec<_> = (0..5).map(|_| open(&pool)).collect();
    for (tx, _) in &others {
        let _ = tx.push("x", BUDGET + 20);
    }
    let (tx, rx) = open(&pool);
    let _ = tx.push("y", BUDGET + 15);
    assert!(!evicted(&rx).await);
    let mut gone = 0;
    for (_, rx) in &others {
        gone += usize::from(evicted(rx).await);
    }
    assert_eq!((gone, pool.used()), (1, 95));
}

#[tokio::test]
async fn without_a_pool_the_budget_is_the_limit() {
    let pool = pool(0);
    let (tx, rx) = open(&pool);
    let _ = tx.push("a", BUDGET);
    assert!(!evicted(&rx).await);
    let _ = tx.push("b", 1);
    assert!(evicted(&rx).await);
}

#[tokio::test(start_paused = true)]
async fn a_receiver_that_reads_nothing_is_stalled_after_the_deadline() {
    let pool = pool(100);
    let (tx, rx) = open(&pool);
    let watch = rx.watch();
    let started = Instant::now();
    let fill = async {
        sleep(WITHIN * 3).await;
        // At the budget, not over it: this may last.
        let _ = tx.push("a", BUDGET);
        sleep(WITHIN * 3).await;
        let _ = tx.push("b", 1);
    };
    let (reason, ()) = tokio::join!(watch.overdue(WITHIN), fill);
    assert_eq!(reason, CloseReason::Stalled);
    assert_eq!(started.elapsed(), WITHIN * 7);
}

#[tokio::test(start_paused = true)]
async fn a_slow_receiver_must_get_below_its_budget_in_time() {
    let pool = pool(100);
    let (tx, mut rx) = open(&pool);
    let watch = rx.watch();
    let started = Instant::now();
    let slow = async {
        for _ in 0..4 {
            // Each pause restarts the deadline.
            let _ = tx.push("a", BUDGET);
            let _ = tx.push("b", BUDGET);
            sleep(WITHIN * 2 / 3).await;
            assert_eq!(rx.recv().await, Some("a"));
            assert_eq!(rx.recv().await, Some("b"));
        }
        for _ in 0..5 {
            let _ = tx.push("a", BUDGET);
        }
        loop {
            sleep(WITHIN / 4).await;
            let _ = tx.push("a", BUDGET);
            rx.recv().await;
        }
    };
    let reason = tokio::select! {
        reason = watch.overdue(WITHIN) => reason,
        () = slow => unreachable!(),
    };
    assert_eq!(reason, CloseReason::BufferExceeded);
    assert_eq!(started.elapsed().as_secs(), (WITHIN * 11 / 3).as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_slow_receiver_may_read_slowly_after_the_last_byte() {
    let pool = pool(100);
    let (tx, mut rx) = open(&pool);
    let watch = rx.watch();
    for _ in 0..6 {
        let _ = tx.push("a", BUDGET);
    }
    tx.end("end");
    let started = Instant::now();
    let slow = async {
        for _ in 0..3 {
            sleep(WITHIN / 2).await;
            assert_eq!(rx.recv().await, Some("a"));
        }
        std::future::pending::<()>().await;
    };
    let reason = tokio::select! {
        reason = watch.overdue(WITHIN) => reason,
        () = slow => unreachable!(),
    };
    assert_eq!(reason, CloseReason::Stalled);
    assert_eq!(started.elapsed(), WITHIN * 5 / 2);
}

#[tokio::test(start_paused = true)]
async fn a_stall_counts_from_the_call() {
    let pool = pool(100);
    let (tx, mut rx) = open(&pool);
    sleep(WITHIN * 5).await;
    let watch = rx.watch();
    let started = Instant::now();
    let slow = async {
        let _ = tx.push("a", 1);
        sleep(WITHIN / 2).await;
        rx.recv().await.unwrap();
    };
    tokio::join!(watch.stalled(WITHIN), slow);
    assert_eq!(started.elapsed(), WITHIN * 3 / 2);
}

#[tokio::test]
async fn small_chunks_do_not_keep_their_receive_buffer_alive() {
    let buffer = Bytes::from(vec![7; 64 * 1024]);
    let (tx, _rx) = open(&pool(100));
    let is_copy = |len| tx.weighed(buffer.slice(..len)).0.as_ptr() != buffer.as_ptr();
    assert_eq!(tx.weighed(buffer.slice(..1)).1, 1 + ITEM_BYTES);
    assert!(is_copy(COPY_BYTES) && !is_copy(COPY_BYTES + 1));
    // Larger chunks are copied only if they have to wait.
    for _ in 0..BACKLOG_ITEMS {
        let _ = tx.push("a", 1);
    }
    assert!(is_copy(COPY_BEHIND_BYTES) && !is_copy(COPY_BEHIND_BYTES + 1));
}

#[tokio::test(start_paused = true)]
async fn a_slow_receiver_slows_the_reader_down_and_a_stalled_receiver_does_not() {
    const ITEMS: usize = 1000;
    let pool = pool(100);
    let (tx, mut rx) = open(&pool);
    let watch = rx.watch();
    let push = async {
        let mut most = 0;
        for _ in 0..ITEMS {
            if tx.push("a", 6) {
                tx.pace().await;
            }
            most = most.max(pool.used());
        }
        most
    };
    let take = async {
        for _ in 0..ITEMS {
            assert_eq!(rx.recv().await, Some("a"));
            sleep(PACE / 2).await;
        }
    };
    let passed = async { tokio::join!(push, take).0 };
    tokio::select! {
        most = passed => assert!(most <= BUDGET, "{most}"),
        reason = watch.overdue(WITHIN) => panic!("{reason:?}"),
    }
    let started = Instant::now();
    for _ in 0..10 {
        if tx.push("a", 6) {
            tx.pace().await;
        }
    }
    assert_eq!(started.elapsed(), PACE);
}
