//! The operator's tool `culvert`.

/// Prints a line. Ignores a closed output: `println!` would panic.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stdout(), $($text)*);
    }};
}

mod admin;
pub mod dev;
pub mod render;
pub mod status;
pub mod switch;
