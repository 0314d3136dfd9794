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

/// Largest number of different pages in answers that are not sent yet, beside the last page. Clients that read slowly then
/// get the last page, of any age: a page of thousands of upstreams has megabytes.
const MOST_UNSENT: usize = 3;

/// A page that answers share for up to [`MAX_AGE`]: while an earlier answer with the page is not sent yet, and while
/// rendering exceeds its budget. With [`MOST_UNSENT`] unsent pages, answers share the last one until an answer is sent or
/// its connection ends.
pub(super) struct SharedPage<R> {
    render: R,
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    last: Option<Rendered>,
    /// Earlier pages in answers that are not sent yet.
    unsent: Vec<Bytes>,
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
            pages: Mutex::default(),
        }
    }

    /// Returns the last page, or renders the page.
    pub(super) fn get(&self) -> Bytes {
        let mut pages = self.pages.lock();
        let Pages { last, unsent } = &mut *pages;
        let at = Instant::now();
        unsent.retain(|page| !page.is_unique());
        if let Some(last) = last {
            let is_unsent = !last.page.is_unique();
            let is_new = at - last.at < MAX_AGE;
            let is_over_budget = last.covered > at + BURST;
            if is_new && (is_unsent || is_over_budget) || is_unsent && unsent.len() >= MOST_UNSENT {
                return last.page.clone();
            }
        }
        let page = Bytes::from((self.render)());
        let covered = last.as_ref().map_or(at, |last| last.covered.max(at));
        let earlier = last.take().map(|last| last.page);
        unsent.extend(earlier.filter(|page| !page.is_unique()));
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
    async fn slow_readers_keep_few_different_pages() {
        let renders = Cell::new(0);
        let page = SharedPage::new(|| {
            renders.set(renders.get() + 1);
            format!("page {}", renders.get())
        });
        let mut unsent = Vec::new();
        for _ in 0..20 {
            unsent.push(page.get());
            advance(MAX_AGE).await;
        }
        assert_eq!(renders.get(), MOST_UNSENT + 1);
        unsent.remove(0);
        assert_eq!(page.get(), format!("page {}", MOST_UNSENT + 2));
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
