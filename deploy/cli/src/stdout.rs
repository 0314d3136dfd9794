//! The standard output of the program.

use std::fmt;
use std::io::{self, Write as _};
use std::sync::OnceLock;

/// First line that could not be written.
static FAILURE: OnceLock<io::Error> = OnceLock::new();

/// Prints a line. A failure is kept for [`finish`].
pub(crate) fn line(text: fmt::Arguments<'_>) {
    keep(writeln!(io::stdout(), "{text}"));
}

/// Flushes the standard output.
///
/// # Errors
/// Returns the first failure since the start of the program. A reader that closes the pipe, such as `head`, is not a
/// failure.
pub fn finish() -> Result<(), &'static io::Error> {
    keep(io::stdout().flush());
    FAILURE.get().map_or(Ok(()), Err)
}

/// Escapes everything but printable ASCII, so that a text of a peer cannot control the terminal.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            ' '..='~' => safe.push(char),
            _ => safe.extend(char.escape_default()),
        }
    }
    safe
}

fn keep(outcome: io::Result<()>) {
    if let Err(error) = outcome
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = FAILURE.set(error);
    }
}
