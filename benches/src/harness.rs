//! Panics of the test harness as errors.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::anyhow;
use futures_util::FutureExt as _;

/// Runs work of the harness. A panic becomes an error, so that only one measurement fails.
pub(crate) async fn harness<T>(work: impl Future<Output = T>) -> anyhow::Result<T> {
    AssertUnwindSafe(work)
        .catch_unwind()
        .await
        .map_err(panic_text)
}

/// Reads figures of programs. The harness panics if a program has ended; the panic becomes an error.
pub(crate) fn ask<T>(asking: impl FnOnce() -> T) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(asking)).map_err(panic_text)
}

fn panic_text(panic: Box<dyn Any + Send>) -> anyhow::Error {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    anyhow!("{}", text.unwrap_or("panic without a message"))
}
