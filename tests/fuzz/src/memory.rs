//! The memory that the code under test holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed.
    static HELD: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, with a count for each thread. A target with a [`Meter`] sets it as its global
/// allocator.
pub struct Counting;

/// Counts the bytes that the code under test has allocated and not freed.
#[derive(Default)]
pub struct Meter {
    held: isize,
}

impl Meter {
    /// Runs code under test. The result must not own memory, because the meter would count it forever.
    pub fn run<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let before = HELD.get();
        let result = act();
        self.held += HELD.get() - before;
        result
    }

    /// Returns the number of bytes.
    pub fn held(&self) -> isize {
        self.held
    }
}

/// Runs a part of the target's own code inside of [`Meter::run`], without a count.
pub fn uncounted<T>(act: impl FnOnce() -> T) -> T {
    let before = HELD.get();
    let result = act();
    HELD.set(before);
    result
}

fn count(bytes: usize, sign: isize) {
    HELD.set(HELD.get() + sign * bytes as isize);
}

// SAFETY: every call goes to the system's allocator with the caller's arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), -1);
        count(size, 1);
        unsafe { System.realloc(memory, layout, size) }
    }
}
