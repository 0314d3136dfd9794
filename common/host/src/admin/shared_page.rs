//! A page that is expensive to render and that everybody may request.

use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::time::Instant;

/// Largest age of a page in an answer.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Part of the time of a thread for rendering, as a fraction.
const BUDGET: u32 = 4;

/// Rendering may be ahead of its budget by this time. Clients that send few requests thus always get new pages.
const BURST: Duration = Duration::from_secs(2);

/// A page that answers share for up to [`MAX_AGE`]: while an earlier answer with the page is not sent yet, which limits
/// the memory, and while rendering exceeds its budget.
pub(super) struct SharedPage<R> {
    render: R,
    last: Mutex<Option<Rendered>>,
}

struct Rendered {
    page: Bytes,
    at: Instant,
    /// Time at which the budget covers all pages so far.
    covered: Instant,
}

impl<R: Fn() -> String> SharedPage<R> {
    pub(super) fn new(render: R) -> Self {
        Self {
            render,
            last: Mutex::new(None),
        }
    }

    /// Returns the last page, or renders the page.
    pub(super) fn get(&self) -> Bytes {
        let mut last = self.last.lock();
        let at = Instant::now();
        if let Some(last) = &*last
            && at - last.at < MAX_AGE
            && (!last.page.is_unique() || last.covered > at + BURST)
        {
            return last.page.clone();
        }
        let page = Bytes::from((self.render)());
        let covered = last.as_ref().map_or(at, |last| last.covered.max(at));
        *last = Some(Rendered {
            page: page.clone(),
            at,
            covered: covered + at.elapsed() * BUDGET,
        });
        page
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn page_is_shared_only_while_an_answer_is_unsent() {
        let renders = Cell::new(0);
        let page = SharedPage::new(|| {
            renders.set(renders.get() + 1);
            format!("page {}", renders.get())
        });
        for number in 1..=100 {
            assert_eq!(page.get(), format!("page {number}"));
        }
        let unsent: Vec<_> = (0..256).map(|_| page.get()).collect();
        assert!(unsent.iter().all(|page| page == "page 101"));
        advance(MAX_AGE).await;
        assert_eq!(page.get(), "page 102");
        // The unsent page is not the last page.
        assert_eq!(page.get(), "page 103");
    }

    #[tokio::test(start_paused = true)]
    async fn rendering_has_a_budget() {
        let renders = Cell::new(0);
        let page = SharedPage::new(|| {
            renders.set(renders.get() + 1);
            advance(Duration::from_millis(300)).now_or_never();
            String::from("page")
        });
        for expected in [1, 2, 3, 3, 3] {
            page.get();
            assert_eq!(renders.get(), expected);
        }
        advance(MAX_AGE).await;
        page.get();
        assert_eq!(renders.get(), 4);
    }
}
