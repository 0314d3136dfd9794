//! Command lines as the stock programs read them: pflag's values, cobra's outcomes, klog's flag group.
//!
//! Operators switch a container image and keep its arguments, so whatever pflag accepts is accepted here, what it
//! refuses is refused with the same exit code, and texts that scripts or people may know are kept.
//!
//! | module | what it holds |
//! |---|---|
//! | [`mod@parse`] | runs a clap command the way pflag and cobra would |
//! | [`values`] | bools, integers, durations and string lists in Go's syntax |
//! | [`address`] | host and port of a listener |
//! | [`klog`] | the logging flags |
//! | [`labels`] | Kubernetes labels and label selectors |
//! | [`problems`] | collects everything that is wrong with a command line |

pub mod address;
pub mod klog;
pub mod labels;
pub mod parse;
pub mod problems;
pub mod values;

pub use address::HostPort;
pub use klog::KlogFlags;
pub use parse::{Exit, Parsed, parse};
pub use problems::Problems;
pub use values::{GoDuration, StringSlice};
