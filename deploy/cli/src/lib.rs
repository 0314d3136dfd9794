//! The operator's tool, and the lab that it shares with the tests and the benchmarks.

/// Prints a line. A reader that is gone is no reason to stop, nor to panic as `println!` would.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

pub mod admin;
pub mod dev;
pub mod lab;
pub mod status;
pub mod switch;
