//! The operator's tool `culvert`.

/// Prints a line. `println!` would panic if the output is closed or full; see [`stdout::finish`].
macro_rules! say {
    ($($text:tt)*) => {
        $crate::stdout::line(format_args!($($text)*))
    };
}

mod admin;
mod description;
pub mod dev;
mod figures;
pub mod render;
pub mod status;
pub mod stdout;
pub mod switch;
mod verdict;
mod web;
