//! Turns at a limited resource, shared fairly between hosts: a host that requests many turns delays only itself.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use culvert_host::net::admission::host_key;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The turns that are in use, and the requests that wait for one.
pub(crate) struct Turns {
    state: Mutex<State>,
}

struct State {
    /// Number of unused turns; 0 while a request waits.
    free: usize,
    /// Number of turns in use, by host. Hosts without a turn are left out.
    used: HashMap<u64, usize>,
    /// Requests from oldest to newest.
    waiting: VecDeque<Request>,
}

struct Request {
    host: u64,
    granted: oneshot::Sender<Turn>,
}

/// A turn of a host. Dropping the value ends the turn.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    host: u64,
}

impl Turns {
    /// Creates `count` turns.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let state = State {
            free: count,
            used: HashMap::new(),
            waiting: VecDeque::new(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
        })
    }

    /// Waits for a turn. A turn that ends goes to the host with the fewest turns in use, and among equal hosts to
    /// the oldest request.
    pub(crate) async fn take(self: &Arc<Self>, from: IpAddr) -> Turn {
        let host = host_key(from);
        let requested = {
            let mut state = self.state.lock();
            if state.free > 0 {
                state.free -= 1;
                return self.turn(&mut state, host);
            }
            let (granted, requested) = oneshot::channel();
            state.waiting.push_back(Request { host, granted });
            requested
        };
        match requested.await {
            Ok(turn) => turn,
            // The sender stays in the queue until it is used.
            Err(_) => std::future::pending().await,
        }
    }

    fn turn(self: &Arc<Self>, state: &mut State, host: u64) -> Turn {
        *state.used.entry(host).or_default() += 1;
        Turn {
            turns: self.clone(),
            host,
        }
    }
}

impl State {
    /// Removes the request for the next turn from the queue.
    fn next(&mut self) -> Option<Request> {
        self.waiting.retain(|request| !request.granted.is_closed());
        let used = |request: &Request| self.used.get(&request.host).copied().unwrap_or(0);
        let waiting = self.waiting.iter().enumerate();
        let (index, _) = waiting.min_by_key(|(_, request)| used(request))?;
        self.waiting.remove(index)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let granted = {
            let mut state = self.turns.state.lock();
            if let Some(used) = state.used.get_mut(&self.host) {
                *used -= 1;
                if *used == 0 {
                    state.used.remove(&self.host);
                }
            }
            match state.next() {
                Some(request) => {
                    let turn = self.turns.turn(&mut state, request.host);
                    Some((request.granted, turn))
                }
                None => {
                    state.free += 1;
                    None
                }
            }
        };
        if let Some((granted, turn)) = granted {
            // If the request was dropped meanwhile, its turn is dropped here and goes to the next request.
            drop(granted.send(turn));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures_util::FutureExt as _;

    use super::*;

    fn host(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    #[tokio::test]
    async fn host_with_many_requests_does_not_delay_other_hosts() {
        let turns = Turns::new(3);
        let mut first = Vec::new();
        for _ in 0..3 {
            first.push(turns.take(host(1)).await);
        }
        let mut crowd: Vec<_> = (0..20).map(|_| Box::pin(turns.take(host(1)))).collect();
        assert!(
            crowd
                .iter_mut()
                .all(|request| request.now_or_never().is_none())
        );
        let mut other = Box::pin(turns.take(host(2)));
        let mut third = Box::pin(turns.take(host(3)));
        assert!((&mut other).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        drop(first.pop());
        let other = (&mut other).now_or_never().unwrap();
        drop(first.pop());
        let third = (&mut third).now_or_never().unwrap();
        // Without other hosts, one host gets all turns.
        drop((other, third));
        let granted = crowd
            .iter_mut()
            .filter_map(|request| request.now_or_never());
        assert_eq!(granted.collect::<Vec<_>>().len(), 2);
    }

    #[tokio::test]
    async fn abandoned_requests_keep_no_turn() {
        let turns = Turns::new(1);
        let turn = turns.take(host(1)).await;
        let mut granted = Box::pin(turns.take(host(2)));
        let mut waiting = Box::pin(turns.take(host(3)));
        assert!((&mut granted).now_or_never().is_none());
        assert!((&mut waiting).now_or_never().is_none());
        drop(turn);
        // The turn of the dropped request goes on, also if it was granted before.
        drop(granted);
        let turn = (&mut waiting).now_or_never().unwrap();
        let mut left = Box::pin(turns.take(host(4)));
        assert!((&mut left).now_or_never().is_none());
        drop(left);
        drop(turn);
        assert!(turns.take(host(5)).now_or_never().is_some());
        let state = turns.state.lock();
        assert!(state.used.is_empty() && state.waiting.is_empty() && state.free == 1);
    }
}
