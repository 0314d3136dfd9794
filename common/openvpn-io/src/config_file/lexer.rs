//! The syntax of OpenVPN's configuration files: one directive per line, quoted words, comments, and blocks of
//! text between `<ca>` and `</ca>`.

use std::str::Chars;

/// One directive and its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directive {
    /// Line in the file, starting at 1.
    pub line: usize,
    /// Name without leading dashes.
    pub name: String,
    /// Words after the name.
    pub arguments: Vec<String>,
    /// Text of a block; `None` without a block.
    pub block: Option<String>,
}

impl Directive {
    /// Returns the argument at `index`, starting at 0.
    pub fn argument(&self, index: usize) -> Option<&str> {
        self.arguments.get(index).map(String::as_str)
    }
}

/// Line of a problem, starting at 1, and its description.
pub type Problem = (usize, String);

/// Parses a file into its directives, in order, and its syntax errors.
pub fn directives(text: &str) -> (Vec<Directive>, Vec<Problem>) {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (mut read, mut errors) = (Vec::new(), Vec::new());
    let mut lines = text.lines().zip(1..);
    while let Some((content, line)) = lines.next() {
        let mut words = match words(content) {
            Ok(words) => words.into_iter(),
            Err(problem) => {
                errors.push((line, problem.to_owned()));
                continue;
            }
        };
        let Some(first) = words.next() else {
            continue;
        };
        let tag = first
            .strip_prefix('<')
            .and_then(|rest| rest.strip_suffix('>'));
        let (name, block) = match tag {
            Some(tag) => {
                let end = format!("</{tag}>");
                let mut block = String::new();
                let closed = lines.by_ref().any(|(content, _)| {
                    let is_end = content.trim_start().starts_with(&end);
                    if !is_end {
                        block.push_str(content);
                        block.push('\n');
                    }
                    is_end
                });
                if !closed {
                    errors.push((line, format!("<{tag}> has no {end}")));
                    continue;
                }
                (tag.to_owned(), Some(block))
            }
            None => (first.strip_prefix("--").unwrap_or(&first).to_owned(), None),
        };
        read.push(Directive {
            line,
            name,
            arguments: words.collect(),
            block,
        });
    }
    (read, errors)
}

/// Splits a line by OpenVPN's rules. A backslash escapes the next character, except between single quotes. A
/// closing quote ends its word. `#` and `;` at the start of a word begin a comment.
pub fn words(line: &str) -> Result<Vec<String>, &'static str> {
    let mut words = Vec::new();
    let mut chars = line.chars();
    while let Some(first) = chars.next() {
        match first {
            '#' | ';' => break,
            '\0' => return Err("a NUL character"),
            c if c.is_whitespace() => {}
            '"' => words.push(word(&mut chars, None, Some('"'))?),
            '\'' => words.push(single_quoted(&mut chars)?),
            c => words.push(word(&mut chars, Some(c), None)?),
        }
    }
    Ok(words)
}

fn single_quoted(chars: &mut Chars<'_>) -> Result<String, &'static str> {
    let mut word = String::new();
    for c in chars {
        match c {
            '\'' => return Ok(word),
            c => word.push(c),
        }
    }
    Err("no closing quotation mark (')")
}

/// Parses the rest of a word that ends with `quote`, or with whitespace if `quote` is `None`.
fn word(
    chars: &mut Chars<'_>,
    first: Option<char>,
    quote: Option<char>,
) -> Result<String, &'static str> {
    let mut word = String::new();
    let mut next = first.or_else(|| chars.next());
    while let Some(c) = next {
        match c {
            '\0' => return Err("a NUL character"),
            '\\' => word.push(chars.next().ok_or("a backslash at the end of the line")?),
            c if Some(c) == quote => return Ok(word),
            c if quote.is_none() && c.is_whitespace() => return Ok(word),
            c => word.push(c),
        }
        next = chars.next();
    }
    match quote {
        Some(_) => Err("no closing quotation mark (\")"),
        None => Ok(word),
    }
}
