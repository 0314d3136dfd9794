//! Comments and documents must not contain phrases that are hard to read.

use std::path::{Path, PathBuf};

use crate::root;

/// Phrases that comments of product code must not contain. `|` separates alternatives of a word, and `*` is
/// any word.
const IN_CODE: [&str; 24] = [
    "is|are none",
    "is|are no *",
    "has|have not the|a|any",
    "anew",
    "for ever",
    "whoever",
    "of which",
    "who sees|asks|knows|waits|reads|has|is|does|calls",
    "as yet",
    "not for",
    "no more",
    "has had its",
    "is|are what",
    "that is all",
    "the like",
    "thereby",
    "thereof",
    "therein",
    "lest",
    "say|says so",
    "by itself",
    "the one of",
    "those of",
    "that of",
];

/// Phrases that documents must not contain. Other phrases of [`IN_CODE`] are correct in longer texts.
const IN_DOCUMENTS: [&str; 16] = [
    "is|are none",
    "has|have not the|a|any",
    "anew",
    "for ever",
    "whoever",
    "who sees|asks|knows|waits|reads|has|is|does|calls",
    "as yet",
    "has had its",
    "is|are what",
    "the like",
    "thereby",
    "thereof",
    "therein",
    "lest",
    "say|says so",
    "the one of",
];

/// Words that must not begin a doc comment.
const OPENERS: [&str; 12] = [
    "what", "who", "whose", "whether", "how", "where", "that", "whoever", "whatever", "of",
    "nobody", "nothing",
];

/// Folders of product code.
const CODE: [&str; 5] = ["agent", "common", "deploy", "proto/src", "server"];

/// Folders and files of test code, generated code and builds.
const NO_CODE: [&str; 6] = [
    "fuzz",
    "generated.rs",
    "sim.rs",
    "target",
    "tests",
    "tests.rs",
];

/// Documents, and the folder of documents.
const DOCUMENTS: [&str; 4] = ["CHANGELOG.md", "CONTRIBUTING.md", "README.md", "docs"];

/// Returns the first phrase of the list that occurs in the text. Code spans and links are ignored.
fn banned(text: &str, phrases: &[&str]) -> Option<String> {
    let text = without_code(text).to_lowercase();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    // A phrase within one sentence has single spaces between its words.
    for run in text.split(|c: char| !is_word(c) && c != ' ') {
        let words: Vec<&str> = run.split(' ').collect();
        for phrase in phrases {
            let pattern: Vec<&str> = phrase.split(' ').collect();
            let found = words.windows(pattern.len()).find(|words| {
                let mut pairs = pattern.iter().zip(*words);
                pairs.all(|(pattern, word)| fits(pattern, word))
            });
            if let Some(found) = found {
                return Some(found.join(" "));
            }
        }
    }
    None
}

fn fits(pattern: &str, word: &str) -> bool {
    match pattern {
        "*" => word.starts_with(|c: char| c.is_ascii_alphabetic()),
        _ => pattern.split('|').any(|known| known == word),
    }
}

/// Returns the text with a mark in place of each code span and each link.
fn without_code(text: &str) -> String {
    let prose: Vec<&str> = text.split('`').step_by(2).collect();
    let mut rest = prose.join("#");
    while let Some(start) = rest.find('[')
        && let Some(length) = rest[start..].find(']')
    {
        rest.replace_range(start..=start + length, "#");
    }
    rest
}

/// Returns the findings in the comments of a source file: line, and description. Ends at the tests.
fn in_comments(source: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut previous = "";
    for (at, line) in source.lines().map(str::trim).enumerate() {
        if line.starts_with("#[cfg(test)]") {
            break;
        }
        let Some(comment) = line.strip_prefix("//") else {
            previous = line;
            continue;
        };
        let text = comment.trim_start_matches(['/', '!']).trim();
        let opens = line.starts_with("///") && !previous.starts_with("///");
        let first = text.split(|c: char| !c.is_alphanumeric()).next();
        let first = first.unwrap_or_default().to_lowercase();
        if opens && OPENERS.contains(&first.as_str()) {
            found.push((at + 1, format!("doc comment begins with \"{first}\"")));
        }
        found.extend(banned(text, &IN_CODE).map(|phrase| (at + 1, phrase)));
        previous = line;
    }
    found
}

/// Returns the findings in a document, without its code blocks.
fn in_document(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_code = false;
    for (at, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
        }
        if !is_code {
            found.extend(banned(line, &IN_DOCUMENTS).map(|phrase| (at + 1, phrase)));
        }
    }
    found
}

/// Adds the files with this ending in a file or folder, without test code.
pub(crate) fn files(path: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    let name = path.file_name().and_then(|name| name.to_str());
    if name.is_none_or(|name| NO_CODE.contains(&name)) {
        return;
    }
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            files(&entry.unwrap().path(), ending, found);
        }
    } else if path.extension().is_some_and(|own| own == ending) {
        found.push(path.to_owned());
    }
}

/// Checks every file with this ending in the files and folders.
fn check(parts: &[&str], ending: &str, findings: fn(&str) -> Vec<(usize, String)>) {
    let mut all = Vec::new();
    for part in parts {
        files(&root().join(part), ending, &mut all);
    }
    assert!(!all.is_empty());
    let mut report = Vec::new();
    for file in all {
        let text = std::fs::read_to_string(&file).unwrap();
        let file = file.strip_prefix(root()).unwrap().display();
        for (line, phrase) in findings(&text) {
            report.push(format!("{file}:{line}: {phrase}"));
        }
    }
    report.sort();
    let count = report.len();
    assert!(
        report.is_empty(),
        "{count} phrases to rewrite:\n{}",
        report.join("\n")
    );
}

#[test]
fn comments_of_product_code_have_no_banned_phrase() {
    check(&CODE, "rs", in_comments);
}

#[test]
fn documents_have_no_banned_phrase() {
    let present: Vec<&str> = DOCUMENTS
        .into_iter()
        .filter(|name| root().join(name).exists())
        .collect();
    check(&present, "md", in_document);
}

#[test]
fn bad_comments_are_found_with_their_lines() {
    let source = "//! The port is\n//! none. Ports are none.\n\n/// Who waits.\n/// Whether here.\nfn f() {}\n\n\
                  // `is none` is NO tunnel, [is none]\nconst TEXT: &str = \"is none\";\n\
                  #[cfg(test)]\nmod tests { // is none\n}";
    let expected = [
        (2, "are none"),
        (4, "doc comment begins with \"who\""),
        (4, "who waits"),
        (8, "is no tunnel"),
    ];
    assert_eq!(
        in_comments(source),
        expected.map(|(line, text)| (line, text.to_owned()))
    );
}

#[test]
fn good_comments_are_not_found() {
    let source = "/// Returns the peer that waits; there is no. One of the peers, that has\n/// Nothing to say. So none is left.\n";
    assert_eq!(in_comments(source), []);
}

#[test]
fn bad_line_of_a_document_is_found() {
    let text = "The server has not the tunnel.\n```\nis none\n```\n| for ever |\nThat of which there is no end\n";
    let expected = [(1, "has not the"), (5, "for ever")];
    assert_eq!(
        in_document(text),
        expected.map(|(line, text)| (line, text.to_owned()))
    );
}
