//! Flag values in Go's syntax. The parsers accept the same values as pflag and `strconv`, and return Go's
//! error texts where people may know them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// A value that Go would refuse, with Go's error text.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ValueError {
    /// Not a word that `strconv.ParseBool` accepts.
    #[error("strconv.ParseBool: parsing {0:?}: invalid syntax")]
    Bool(String),
    /// Not an integer.
    #[error("strconv.ParseInt: parsing {0:?}: invalid syntax")]
    Int(String),
    /// An integer that does not fit into 64 bits.
    #[error("strconv.ParseInt: parsing {0:?}: value out of range")]
    IntRange(String),
    /// Not a duration, or a duration beyond 292 years.
    #[error("time: invalid duration {0:?}")]
    Duration(String),
    /// A number without a unit.
    #[error("time: missing unit in duration {0:?}")]
    DurationNoUnit(String),
    /// A unit that Go does not accept. Go has no unit for days.
    #[error("time: unknown unit {unit:?} in duration {text:?}")]
    DurationUnit {
        /// Text found where the unit should be.
        unit: String,
        /// The whole value.
        text: String,
    },
    /// Unbalanced quotes in a comma-separated list.
    #[error("parse error: extraneous or missing \" in quoted-field in {0:?}")]
    Csv(String),
}

/// Parses a bool like `strconv.ParseBool`: `1 t T true TRUE True` and `0 f F false FALSE False`.
///
/// # Errors
/// Returns [`ValueError::Bool`] for any other text, including the empty string.
pub fn go_bool(text: &str) -> Result<bool, ValueError> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(ValueError::Bool(text.to_owned())),
    }
}

/// Parses an integer like `strconv.ParseInt(text, 0, 64)`, the call in pflag: a sign, then decimal, `0x`,
/// `0b`, `0o` or octal with a leading zero. Underscores are allowed between digits.
///
/// # Errors
/// Returns [`ValueError::Int`] or [`ValueError::IntRange`].
pub fn go_int(text: &str) -> Result<i64, ValueError> {
    let invalid = || ValueError::Int(text.to_owned());
    let (negative, magnitude) = split_sign(text);
    let lower = magnitude.to_ascii_lowercase();
    let radixes = [("0x", 16), ("0b", 2), ("0o", 8), ("0", 8)].into_iter();
    let prefixed = radixes
        .filter(|(prefix, _)| lower.len() > prefix.len())
        .find_map(|(prefix, radix)| Some((radix, lower.strip_prefix(prefix)?)));
    // Go also allows an underscore after a base prefix.
    let (radix, digits) = match prefixed {
        Some((radix, digits)) => (radix, digits.strip_prefix('_').unwrap_or(digits)),
        None => (10, lower.as_str()),
    };
    let well_placed = digits
        .split('_')
        .all(|group| !group.is_empty() && group.chars().all(|c| c.is_digit(radix)));
    if !well_placed {
        return Err(invalid());
    }
    let sign = if negative { "-" } else { "" };
    let plain = format!("{sign}{}", digits.replace('_', ""));
    i64::from_str_radix(&plain, radix).map_err(|_| ValueError::IntRange(text.to_owned()))
}

/// Splits off a sign. Returns true for a minus, and the text after the sign.
fn split_sign(text: &str) -> (bool, &str) {
    match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    }
}

/// A signed duration in nanoseconds, parsed and printed like Go's `time.Duration`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(i64);

const NANOSECOND: i64 = 1;
const MICROSECOND: i64 = 1_000;
const MILLISECOND: i64 = 1_000_000;
const SECOND: i64 = 1_000_000_000;
const MINUTE: i64 = 60 * SECOND;
const HOUR: i64 = 60 * MINUTE;

// === impl GoDuration ===

impl GoDuration {
    /// Returns the nanoseconds, which may be negative.
    pub fn nanos(self) -> i64 {
        self.0
    }

    /// Returns the duration; a negative duration becomes zero.
    pub fn saturating(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }
}

impl From<Duration> for GoDuration {
    /// Converts a duration. A duration beyond 292 years becomes the largest duration in Go.
    fn from(value: Duration) -> Self {
        Self(i64::try_from(value.as_nanos()).unwrap_or(i64::MAX))
    }
}

impl FromStr for GoDuration {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let (negative, magnitude) = split_sign(text);
        if magnitude == "0" {
            return Ok(Self(0));
        }
        let invalid = || ValueError::Duration(text.to_owned());
        if magnitude.is_empty() {
            return Err(invalid());
        }
        let mut total: i64 = 0;
        let mut rest = magnitude;
        while !rest.is_empty() {
            let (part, after) = duration_part(rest, text)?;
            total = total.checked_add(part).ok_or_else(invalid)?;
            rest = after;
        }
        Ok(Self(if negative { -total } else { total }))
    }
}

/// Parses one number with its unit at the start of `rest`. Returns the nanoseconds and the remaining text.
fn duration_part<'a>(rest: &'a str, text: &str) -> Result<(i64, &'a str), ValueError> {
    let invalid = || ValueError::Duration(text.to_owned());
    let (whole, rest) = split_digits(rest);
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(after) => split_digits(after),
        None => ("", rest),
    };
    if whole.is_empty() && fraction.is_empty() {
        return Err(invalid());
    }
    let end = rest.find(|c: char| c == '.' || c.is_ascii_digit());
    let (unit, rest) = rest.split_at(end.unwrap_or(rest.len()));
    let scale = match unit {
        "" => return Err(ValueError::DurationNoUnit(text.to_owned())),
        "ns" => NANOSECOND,
        // Unicode has two micro signs.
        "us" | "\u{b5}s" | "\u{3bc}s" => MICROSECOND,
        "ms" => MILLISECOND,
        "s" => SECOND,
        "m" => MINUTE,
        "h" => HOUR,
        _ => {
            return Err(ValueError::DurationUnit {
                unit: unit.to_owned(),
                text: text.to_owned(),
            });
        }
    };
    let whole: i64 = if whole.is_empty() {
        0
    } else {
        whole.parse().map_err(|_| invalid())?
    };
    let part = whole
        .checked_mul(scale)
        .and_then(|nanos| nanos.checked_add(fraction_of(fraction, scale)))
        .ok_or_else(invalid)?;
    Ok((part, rest))
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit());
    text.split_at(end.unwrap_or(text.len()))
}

/// Returns the decimal fraction `0.digits` multiplied by `scale`, truncated to whole nanoseconds. Digits
/// after the 18th are ignored, because each of them is worth far less than a nanosecond even in hours.
fn fraction_of(digits: &str, scale: i64) -> i64 {
    let mut nanos: i128 = 0;
    let mut base: i128 = 1;
    for digit in digits.chars().take(18).filter_map(|c| c.to_digit(10)) {
        nanos = nanos * 10 + i128::from(digit);
        base *= 10;
    }
    i64::try_from(nanos * i128::from(scale) / base).unwrap_or(0)
}

impl fmt::Display for GoDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let nanos = self.0.unsigned_abs();
        let (hour, minute, second) = (
            HOUR.unsigned_abs(),
            MINUTE.unsigned_abs(),
            SECOND.unsigned_abs(),
        );
        if nanos == 0 {
            return f.write_str("0s");
        }
        if nanos < second {
            let (unit, scale) = match nanos {
                1_000_000.. => ("ms", 1_000_000),
                1_000.. => ("µs", 1_000),
                _ => ("ns", 1),
            };
            return write!(f, "{sign}{}{unit}", decimal(nanos, scale));
        }
        let (hours, minutes) = (nanos / hour, nanos % hour / minute);
        let seconds = decimal(nanos % minute, second);
        f.write_str(sign)?;
        if hours > 0 {
            write!(f, "{hours}h")?;
        }
        if hours > 0 || minutes > 0 {
            write!(f, "{minutes}m")?;
        }
        write!(f, "{seconds}s")
    }
}

/// Formats `nanos / scale` as a decimal without trailing zeros.
fn decimal(nanos: u64, scale: u64) -> String {
    let (whole, part) = (nanos / scale, nanos % scale);
    if part == 0 {
        return whole.to_string();
    }
    let width = scale.ilog10() as usize;
    let digits = format!("{part:0width$}");
    format!("{whole}.{}", digits.trim_end_matches('0'))
}

/// Values of one use of a pflag stringSlice flag: comma-separated, with `"` around values that contain
/// commas.
///
/// A flag's field has the type `Vec<StringSlice>`, one element per use, because pflag appends repeated uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StringSlice(Vec<String>);

impl StringSlice {
    /// Returns the values of all uses of a flag, in order.
    pub fn concat(uses: &[Self]) -> Vec<String> {
        uses.iter().flat_map(|one| one.0.iter().cloned()).collect()
    }
}

impl FromStr for StringSlice {
    type Err = ValueError;

    /// Parses the first line of `text`, as pflag's CSV reader does.
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let line = text.lines().next().unwrap_or_default();
        if line.is_empty() {
            return Ok(Self::default());
        }
        let invalid = || ValueError::Csv(text.to_owned());
        let mut fields = vec![String::new()];
        let mut chars = line.chars().peekable();
        let mut at_start = true;
        while let Some(c) = chars.next() {
            let Some(field) = fields.last_mut() else {
                return Err(invalid());
            };
            match c {
                ',' => {
                    fields.push(String::new());
                    at_start = true;
                    continue;
                }
                '"' if at_start => {
                    *field = quoted_field(&mut chars).ok_or_else(invalid)?;
                    if chars.peek().is_some_and(|next| *next != ',') {
                        return Err(invalid());
                    }
                }
                '"' => return Err(invalid()),
                other => field.push(other),
            }
            at_start = false;
        }
        Ok(Self(fields))
    }
}

/// Parses a field after its opening quote, up to the closing quote; `""` means a quote inside the field.
fn quoted_field(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Option<String> {
    let mut field = String::new();
    loop {
        match chars.next()? {
            '"' if chars.peek() == Some(&'"') => {
                chars.next();
                field.push('"');
            }
            '"' => return Some(field),
            other => field.push(other),
        }
    }
}

#[cfg(test)]
mod tests;
