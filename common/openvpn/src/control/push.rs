//! The pushed configuration: comma-separated options from the server, split into as many `PUSH_REPLY` texts
//! as needed.

mod options;
#[cfg(test)]
mod tests;

use std::time::Duration;

pub use options::{Ifconfig, OURS, PushOptions, Topology};

/// Longest text to be sent, in bytes without the NUL. Stock's buffers have 1024 bytes.
const MAX_REPLY_LEN: usize = 1000;

/// Largest accepted configuration over all its texts, in bytes: about 1500 routes.
pub(crate) const MAX_CONFIGURATION_LEN: usize = 64 << 10;

const CONTINUATION: &str = "push-continuation";

/// Option with a secret: the password of later sessions.
const SECRET: &str = "auth-token";

/// Returns pushed options without secrets, separated by commas, for the log.
pub fn for_log<'a>(options: impl Iterator<Item = &'a str>) -> String {
    let shown = options.map(|option| match option.starts_with(SECRET) {
        true => SECRET,
        false => option,
    });
    shown.collect::<Vec<_>>().join(",")
}

/// Reason why a pushed configuration is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The configuration is longer than `MAX_CONFIGURATION_LEN`.
    #[error("pushed configuration is longer than {MAX_CONFIGURATION_LEN} bytes")]
    TooLong,
    /// The data channel would not work without this unsupported option.
    #[error("pushed option {0:?} is not supported")]
    Unsupported(String),
    /// The data channel would not work without this option, and the option cannot be parsed.
    #[error("pushed option {0:?} is malformed")]
    Malformed(String),
}

/// Option that cannot be pushed: empty, too long, or with a comma or a character outside printable ASCII.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("option {0:?} cannot be pushed")]
pub struct NotPushable(pub String);

/// Builds the `PUSH_REPLY` texts for `options`, without NULs. Returns at least one text.
pub fn build<T: AsRef<str>>(
    options: impl IntoIterator<Item = T>,
) -> Result<Vec<String>, NotPushable> {
    const START: &str = "PUSH_REPLY";
    let room = MAX_REPLY_LEN - START.len() - ",push-continuation 2".len();
    let mut texts = Vec::new();
    let mut text = START.to_owned();
    for option in options {
        let option = option.as_ref();
        let pushable = option
            .bytes()
            .all(|byte| matches!(byte, b' '..=b'~') && byte != b',');
        if option.is_empty() || !pushable || option.len() >= room {
            return Err(NotPushable(option.to_owned()));
        }
        if text.len() + 1 + option.len() > START.len() + room {
            text.push_str(",push-continuation 2");
            texts.push(std::mem::replace(&mut text, START.to_owned()));
        }
        text.push(',');
        text.push_str(option);
    }
    if !texts.is_empty() {
        text.push_str(",push-continuation 1");
    }
    texts.push(text);
    Ok(texts)
}

/// Returns the interval of the last `ping` option, where zero disables pings. `None` if no option sets the
/// interval.
pub fn ping(options: &[String]) -> Option<Duration> {
    let is_ping = |option: &&String| option.split_whitespace().next() == Some("ping");
    let option = options.iter().rev().find(is_ping)?;
    PushOptions::parse(option).ok()?.ping
}

/// Joins the texts of one configuration.
#[derive(Debug, Default)]
pub struct Assembler {
    gathered: String,
}

impl Assembler {
    /// Creates an empty assembler.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the options of one text, without `PUSH_REPLY,`. Returns the whole configuration after the last
    /// text, else `None`.
    pub fn push(&mut self, reply: &str) -> Result<Option<PushOptions>, PushError> {
        let mut more = false;
        for option in reply.split(',').filter(|option| !option.is_empty()) {
            if let Some(value) = option.strip_prefix(CONTINUATION) {
                more = value.trim() == "2";
                continue;
            }
            if self.gathered.len() + option.len() + 1 > MAX_CONFIGURATION_LEN {
                self.gathered.clear();
                return Err(PushError::TooLong);
            }
            self.gathered.push_str(option);
            self.gathered.push(',');
        }
        if more {
            return Ok(None);
        }
        PushOptions::parse(&std::mem::take(&mut self.gathered)).map(Some)
    }
}
