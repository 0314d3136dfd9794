//! The operator's tool.

/// Prints a line. A reader that is gone is no reason to stop, nor to panic as `println!` would.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

pub mod admin;
pub mod dev;
pub mod status;
pub mod switch;
