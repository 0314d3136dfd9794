//! The command line, compatible with the stock programs: pflag's value syntax, cobra's exit codes and klog's
//! flag group.
//!
//! Operators replace a container image and keep its arguments. These modules therefore accept every argument
//! that pflag accepts, refuse other arguments with the same exit code, and keep the texts that scripts or
//! people may know.
//!
//! | module | contents |
//! |---|---|
//! | [`mod@parse`] | runs a clap command the way pflag and cobra would |
//! | [`values`] | bools, integers, durations and string lists in Go's syntax |
//! | `address` | host and port of a listener |
//! | `klog` | the logging flags |
//! | [`labels`] | Kubernetes labels and label selectors |
//! | `problems` | collects all errors and warnings about a command line |

pub(crate) mod address;
pub(crate) mod klog;
pub mod labels;
pub mod parse;
pub(crate) mod problems;
pub mod values;

pub use address::HostPort;
pub use klog::KlogFlags;
pub use parse::{Exit, Parsed, parse};
pub use problems::Problems;
pub use values::{GoDuration, StringSlice};
