//! The allocator of a program: jemalloc, with settings for programs that carry connections.
//!
//! glibc's allocator maps, faults in and unmaps the buffers of bulk transfers again and again, which costs
//! more than their encryption (docs/decisions/). Only a program chooses its allocator, never a library:
//! `main.rs` calls [`jemalloc!`](crate::jemalloc).

#[doc(hidden)]
pub use tikv_jemallocator::Jemalloc;

/// Settings of jemalloc, as a C string. A thread of jemalloc returns the memory of a past peak to the system within seconds:
/// an idle program makes no calls that would return the memory. Each arena keeps some unused memory, so the number of arenas
/// is small; a small number is enough because a connection stays on one thread. jemalloc uses no huge pages, even if the
/// system gives huge pages to every program: the HTTP/2 buffers of an idle connection use only their first pages.
pub const SETTINGS: &[u8; 145] = b"background_thread:true,max_background_threads:1,narenas:4,\
dirty_decay_ms:2000,muzzy_decay_ms:0,tcache_max:524288,tcache_nslots_large:4,thp:never\0";

/// Makes jemalloc the allocator of a program. Call once, in `main.rs`.
#[macro_export]
macro_rules! jemalloc {
    () => {
        #[global_allocator]
        static ALLOCATOR: $crate::allocator::Jemalloc = $crate::allocator::Jemalloc;

        // SAFETY: jemalloc declares this symbol as a pointer to a C string, and reads it once. A reference
        // to an array is such a pointer, and no other part of the program defines the symbol.
        #[allow(
            unsafe_code,
            reason = "jemalloc reads its settings from an exported symbol"
        )]
        #[unsafe(export_name = "_rjem_malloc_conf")]
        #[used]
        static MALLOC_CONF: &[u8; $crate::allocator::SETTINGS.len()] = $crate::allocator::SETTINGS;
    };
}
