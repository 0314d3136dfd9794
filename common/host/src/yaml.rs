//! Errors of the YAML library as operators see them.

/// Advice of the library for a key that occurs twice. The advice is for programmers.
const LIBRARY_ADVICE: &str = ", set DuplicateKeyPolicy in Options if acceptable";

/// Advice for operators instead.
const ADVICE: &str = "; delete one of the two keys";

/// Longest quoted part of a line, in characters.
const MAX_QUOTED: usize = 60;

/// Returns one line about an error in `text`: the cause with its line and column, the beginning of the line, which
/// names the field, and the remedy for a key that occurs twice.
#[must_use]
pub fn explain(error: &serde_saphyr::Error, text: &str) -> String {
    let whole = error.without_snippet().to_string();
    let cause = whole.lines().next().unwrap_or_default();
    let line = error.location().and_then(|location| {
        let before = usize::try_from(location.line().checked_sub(1)?).ok()?;
        text.lines().nth(before)
    });
    let line = line.unwrap_or_default().trim();
    let mut quoted: String = line.chars().take(MAX_QUOTED).collect();
    if !quoted.is_empty() {
        quoted = format!(", in {quoted:?}");
    }
    match cause.split_once(LIBRARY_ADVICE) {
        Some((cause, location)) => format!("{cause}{location}{quoted}{ADVICE}"),
        None => format!("{cause}{quoted}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeMap;

    use super::*;

    fn explained(text: &str) -> String {
        let parsed = serde_saphyr::from_str::<BTreeMap<String, u16>>(text);
        explain(&parsed.unwrap_err(), text)
    }

    #[test]
    fn error_names_the_cause_the_position_and_the_line() {
        assert_eq!(
            explained("a: 1\nb: many\n"),
            "invalid u16 at line 2, column 4, in \"b: many\""
        );
    }

    #[test]
    fn key_that_occurs_twice_is_named_with_the_remedy_of_operators() {
        assert_eq!(
            explained("a: 1\nb: 2\na: 3\n"),
            "duplicate mapping key: a at line 3, column 1, in \"a: 3\"; delete one of the two keys"
        );
    }

    #[test]
    fn long_line_is_cut() {
        let long = "ü".repeat(200);
        let why = explained(&format!("a: {long}\n"));
        assert!(why.contains("in \"a: ü"), "{why}");
        assert!(!why.contains(&long), "{why}");
    }
}
