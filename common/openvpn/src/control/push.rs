//! The configuration that a server pushes: options between commas, in as many `PUSH_REPLY` texts as they
//! need.

mod options;
#[cfg(test)]
mod tests;

pub use options::{Ifconfig, OURS, PushOptions, Route, Topology};

/// The longest text that is sent. Stock's buffers take 1024 bytes.
const MAX_REPLY_LEN: usize = 1000;

/// The most that is gathered of a configuration in several texts: about 1500 routes.
pub const MAX_CONFIGURATION_LEN: usize = 64 << 10;

const CONTINUATION: &str = "push-continuation";

/// Why a pushed configuration is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// More than [`MAX_CONFIGURATION_LEN`].
    #[error("pushed configuration is longer than {MAX_CONFIGURATION_LEN} bytes")]
    TooLong,
    /// The data channel would not work without it.
    #[error("pushed option {0:?} is not supported")]
    Unsupported(String),
    /// The data channel would not work without it.
    #[error("pushed option {0:?} can not be understood")]
    Malformed(String),
}

/// An option that can not be pushed: too long, or with a character that ends it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("option {0:?} can not be pushed")]
pub struct NotPushable(pub String);

/// Writes a configuration as texts, without their NULs. There is at least one.
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

/// Puts the texts of one configuration together.
#[derive(Debug, Default)]
pub struct Assembler {
    gathered: String,
}

impl Assembler {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes what followed `PUSH_REPLY,` in one text; the options once all are there.
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
