//! The syntax of Kubernetes labels: `k=v` lists and label selectors. The Kubernetes API matches selectors, so
//! this module only checks them.

use std::collections::BTreeMap;

use thiserror::Error;

/// Maximum length of a key's name part and of a value (Kubernetes API conventions).
const MAX_NAME: usize = 63;

/// Maximum length of a key's DNS prefix (RFC 1123 subdomain).
const MAX_PREFIX: usize = 253;

/// An invalid label list or selector.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LabelError {
    /// A list item without exactly one `=`.
    #[error("invalid label format: {0:?}, expected key=value")]
    Format(String),
    /// A key that Kubernetes would refuse.
    #[error(
        "invalid label key {0:?}: expected [dns.prefix/]name, the name at most 63 of [A-Za-z0-9._-] with a letter or digit at both ends"
    )]
    Key(String),
    /// A value that Kubernetes would refuse.
    #[error(
        "invalid label value {0:?}: at most 63 of [A-Za-z0-9._-] with a letter or digit at both ends"
    )]
    Value(String),
    /// A requirement of unknown form.
    #[error("unable to parse requirement: {0:?}")]
    Requirement(String),
    /// A `>` or `<` requirement whose value is not an integer.
    #[error("for 'Gt', 'Lt' operators, the value must be an integer, got {0:?}")]
    Integer(String),
}

/// Parses a list `k=v[,k=v]`. The last value of a repeated key wins, as in upstream. An empty list is an error:
/// the labels mark a server's Lease objects, and a Lease without a label would never be found again.
///
/// # Errors
/// Returns [`LabelError::Format`], [`LabelError::Key`] or [`LabelError::Value`] for the first invalid item.
pub fn parse_labels(text: &str) -> Result<BTreeMap<String, String>, LabelError> {
    let mut labels = BTreeMap::new();
    for item in text.split(',') {
        let (key, value) = item
            .split_once('=')
            .filter(|(_, value)| !value.contains('='))
            .ok_or_else(|| LabelError::Format(item.to_owned()))?;
        let (key, value) = (key.trim(), value.trim());
        check_key(key)?;
        check_value(value)?;
        labels.insert(key.to_owned(), value.to_owned());
    }
    Ok(labels)
}

/// Checks a label selector: comma-separated `k`, `!k`, `k=v`, `k==v`, `k!=v`, `k in (a,b)`, `k notin (a,b)`,
/// `k>1`, `k<1`. An empty selector selects everything.
///
/// # Errors
/// Returns a [`LabelError`] for the first invalid requirement.
pub fn check_selector(text: &str) -> Result<(), LabelError> {
    if text.trim().is_empty() {
        return Ok(());
    }
    requirements(text)?
        .into_iter()
        .try_for_each(|requirement| check_requirement(requirement.trim()))
}

/// Splits a selector at the commas outside parentheses.
fn requirements(text: &str) -> Result<Vec<&str>, LabelError> {
    let (mut open, mut unbalanced) = (false, false);
    let parts = text.split(|c| {
        if matches!(c, '(' | ')') {
            unbalanced |= open == (c == '(');
            open = c == '(';
        }
        c == ',' && !open
    });
    let parts = parts.collect();
    match open || unbalanced {
        true => Err(LabelError::Requirement(text.to_owned())),
        false => Ok(parts),
    }
}

fn check_requirement(text: &str) -> Result<(), LabelError> {
    if let Some(key) = text.strip_prefix('!')
        && !text.contains('=')
    {
        return check_key(key.trim());
    }
    if let Some(members) = text.strip_suffix(')') {
        return check_membership(text, members);
    }
    // Longer operators come first, because `!=` and `==` contain `=`.
    for operator in ["!=", "==", "="] {
        if let Some((key, value)) = text.split_once(operator) {
            check_key(key.trim())?;
            return check_value(value.trim());
        }
    }
    if let Some((key, value)) = text.split_once(['>', '<']) {
        check_key(key.trim())?;
        let value = value.trim();
        return match value.parse::<i64>() {
            Ok(_) => Ok(()),
            Err(_) => Err(LabelError::Integer(value.to_owned())),
        };
    }
    check_key(text)
}

/// Checks `key in (a,b` or `key notin (a,b`, without the closing parenthesis.
fn check_membership(text: &str, members: &str) -> Result<(), LabelError> {
    let malformed = || LabelError::Requirement(text.to_owned());
    let (head, values) = members.split_once('(').ok_or_else(malformed)?;
    let mut words = head.split_whitespace();
    let (Some(key), Some("in" | "notin"), None) = (words.next(), words.next(), words.next()) else {
        return Err(malformed());
    };
    check_key(key)?;
    values
        .split(',')
        .try_for_each(|value| check_value(value.trim()))
}

fn check_key(key: &str) -> Result<(), LabelError> {
    let valid = match key.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_name(name),
        None => is_name(key),
    };
    valid
        .then_some(())
        .ok_or_else(|| LabelError::Key(key.to_owned()))
}

fn check_value(value: &str) -> Result<(), LabelError> {
    (value.is_empty() || is_name(value))
        .then_some(())
        .ok_or_else(|| LabelError::Value(value.to_owned()))
}

fn is_name(text: &str) -> bool {
    let alphanumeric_ends = text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric());
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    text.len() <= MAX_NAME && alphanumeric_ends && text.bytes().all(allowed)
}

/// Returns true for a DNS subdomain (RFC 1123), as required in the prefix of a key and in most names of objects.
pub fn is_dns_subdomain(text: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= MAX_PREFIX
        && text.split('.').all(|label| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| alphanumeric(b) || b == b'-')
        })
}

#[cfg(test)]
mod tests {
    use super::{check_selector, parse_labels};

    #[test]
    fn label_lists_are_checked_and_parsed() {
        let valid = [
            "k8s-app=konnectivity-server",
            "a=b,c=d",
            "example.com/a=b",
            "a=",
        ];
        let long = format!("a={}", "x".repeat(64));
        let invalid = [
            "",
            "a",
            "a=b,",
            "=b",
            "a=b=c",
            "-a=b",
            "a=b-",
            "A.com/a=b",
            "/a=b",
            "a/b/c=d",
            &long,
        ];
        for text in valid {
            assert!(parse_labels(text).is_ok(), "{text:?}");
        }
        for text in invalid {
            assert!(parse_labels(text).is_err(), "{text:?}");
        }
        let labels = parse_labels("b= 2, a =1,b=3").unwrap_or_default();
        let labels: Vec<(&str, &str)> = labels.iter().map(|(k, v)| (&**k, &**v)).collect();
        assert_eq!(labels, [("a", "1"), ("b", "3")]);
    }

    #[test]
    fn selectors_are_validated() {
        let valid = [
            "",
            " ",
            "k8s-app=konnectivity-server",
            "a==b",
            "a!=b",
            "a",
            "!a",
            "a in (b, c),d notin (e)",
            "a in ()",
            "n>5",
            "n < 7",
            "x=,y=z",
            "example.com/a,!b",
        ];
        let invalid = [
            ",",
            "a,",
            "a=b=c",
            "a in b",
            "a in (b",
            "a in b)",
            "a of (b)",
            "in (b)",
            "a in ((b))",
            "n>x",
            "a b",
            "!a=b",
            "-a",
            "a in (-b)",
        ];
        for text in valid {
            assert_eq!(check_selector(text), Ok(()), "{text:?}");
        }
        for text in invalid {
            assert!(check_selector(text).is_err(), "{text:?}");
        }
    }
}
