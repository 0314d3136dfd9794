//! A reader of Rust source text that finds modules and paths.

/// An identifier, `::`, or one character of punctuation.
struct Token {
    text: String,
    line: usize,
}

/// The modules and paths of one source file. Test code is left out.
#[derive(Default)]
pub(crate) struct Outline {
    /// Modules of the file, as absolute paths.
    pub(crate) modules: Vec<Declared>,
    /// Paths of `use` lines, and paths elsewhere that begin with `crate`, `self` or `super`.
    pub(crate) paths: Vec<Named>,
}

/// A declared module.
pub(crate) struct Declared {
    pub(crate) path: Vec<String>,
    /// True for `mod name;`, false for `mod name { ... }`.
    pub(crate) has_file: bool,
}

/// A path as written.
pub(crate) struct Named {
    /// Module that contains the path.
    pub(crate) module: Vec<String>,
    pub(crate) path: Vec<String>,
    /// Name that a `use` line brings into the module; `None` outside of `use` lines.
    pub(crate) alias: Option<String>,
    pub(crate) line: usize,
}

/// Reads a file that contains the code of `module`.
pub(crate) fn read(source: &str, module: &[String]) -> Outline {
    let mut reader = Reader {
        tokens: tokens(source),
        next: 0,
        module: module.to_vec(),
        outline: Outline::default(),
    };
    reader.items();
    reader.outline
}

struct Reader {
    tokens: Vec<Token>,
    next: usize,
    module: Vec<String>,
    outline: Outline,
}

impl Reader {
    /// Returns the text of the token `ahead` places after the next token, or an empty text at the end.
    fn peek(&self, ahead: usize) -> &str {
        self.tokens
            .get(self.next + ahead)
            .map_or("", |token| &token.text)
    }

    fn take(&mut self) -> String {
        let text = self.peek(0).to_owned();
        self.next += 1;
        text
    }

    fn line(&self) -> usize {
        self.tokens.get(self.next).map_or(0, |token| token.line)
    }

    /// Reads to the end of the file.
    fn items(&mut self) {
        // One entry for each open brace: true if the brace belongs to a module.
        let mut braces = Vec::new();
        while self.next < self.tokens.len() {
            let follows_path = self.next > 0 && self.tokens[self.next - 1].text == "::";
            match self.peek(0) {
                "#" => self.attribute(),
                "use" if self.peek(1) != "<" => self.import(),
                "mod" => braces.extend(self.declaration()),
                "crate" | "self" | "super" if self.peek(1) == "::" && !follows_path => self.path(),
                "{" => {
                    braces.push(false);
                    self.next += 1;
                }
                "}" => {
                    if braces.pop() == Some(true) {
                        self.module.pop();
                    }
                    self.next += 1;
                }
                _ => self.next += 1,
            }
        }
    }

    /// Reads an attribute, and skips the item after `#[cfg(test)]`.
    fn attribute(&mut self) {
        let mut words = Vec::new();
        self.next += 1;
        if self.peek(0) == "!" {
            self.next += 1;
        }
        if self.peek(0) != "[" {
            return;
        }
        let mut depth = 0;
        loop {
            let word = self.take();
            depth += nesting(&word);
            words.push(word);
            if depth == 0 || self.next >= self.tokens.len() {
                break;
            }
        }
        let has = |text: &str| words.iter().any(|word| word == text);
        if words.get(1).is_some_and(|word| word == "cfg") && has("test") && !has("not") {
            self.skip_item();
        }
    }

    /// Skips an item with its attributes: to a semicolon, or to the end of a block. A field or a match arm
    /// ends at a comma, or before the brace that encloses it.
    fn skip_item(&mut self) {
        const ITEMS: [&str; 13] = [
            "pub", "use", "mod", "fn", "struct", "enum", "impl", "const", "static", "type",
            "trait", "async", "unsafe",
        ];
        while self.peek(0) == "#" {
            self.attribute();
        }
        let is_item = ITEMS.contains(&self.peek(0));
        let is_use = self.peek(0) == "use" || (self.peek(0) == "pub" && self.peek(1) == "use");
        let mut depth = 0;
        while self.next < self.tokens.len() {
            if depth == 0 && self.peek(0) == "}" {
                return;
            }
            let word = self.take();
            depth += nesting(&word);
            let ends = match word.as_str() {
                ";" => true,
                "}" => !is_use,
                "," => !is_item,
                _ => false,
            };
            if depth == 0 && ends {
                return;
            }
        }
    }

    /// Reads `mod name;` or `mod name {`. Returns the entry of the opened brace.
    fn declaration(&mut self) -> Option<bool> {
        self.next += 1;
        let mut path = self.module.clone();
        path.push(self.take());
        let opened = self.take();
        if opened == "{" {
            self.module.clone_from(&path);
        }
        let has_file = opened == ";";
        self.outline.modules.push(Declared { path, has_file });
        (!has_file).then_some(true)
    }

    /// Reads a `use` line.
    fn import(&mut self) {
        self.next += 1;
        self.tree(&[]);
    }

    /// Reads one tree of a `use` line after `prefix`.
    fn tree(&mut self, prefix: &[String]) {
        let line = self.line();
        let mut path = prefix.to_vec();
        loop {
            match self.peek(0) {
                "{" => {
                    self.next += 1;
                    while !matches!(self.peek(0), "}" | "") {
                        self.tree(&path);
                        if self.peek(0) == "," {
                            self.next += 1;
                        }
                    }
                    self.next += 1;
                    return;
                }
                "self" if !path.is_empty() => self.next += 1,
                "::" => {
                    // A path that begins with `::` names another crate.
                    if path.is_empty() {
                        path.push(String::new());
                    }
                    self.next += 1;
                    continue;
                }
                _ => {
                    let segment = self.take();
                    path.push(segment);
                }
            }
            if self.peek(0) != "::" {
                break;
            }
        }
        let mut alias = path.last().cloned();
        if self.peek(0) == "as" {
            self.next += 1;
            alias = Some(self.take());
        }
        self.name(path, alias, line);
    }

    /// Reads a path outside of `use` lines.
    fn path(&mut self) {
        let line = self.line();
        let mut path = vec![self.take()];
        while self.peek(0) == "::" && self.peek(1).starts_with(is_word) {
            self.next += 1;
            let segment = self.take();
            path.push(segment);
        }
        self.name(path, None, line);
    }

    fn name(&mut self, path: Vec<String>, alias: Option<String>, line: usize) {
        self.outline.paths.push(Named {
            module: self.module.clone(),
            path,
            alias,
            line,
        });
    }
}

/// Returns the change of the depth of brackets.
fn nesting(word: &str) -> i32 {
    match word {
        "(" | "[" | "{" => 1,
        ")" | "]" | "}" => -1,
        _ => 0,
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Splits source text into tokens, without comments, literals of text, and lifetimes.
fn tokens(source: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let (mut rest, mut line) = (source, 1);
    while let Some(first) = rest.chars().next() {
        let (length, is_token) = token(rest, first);
        let (text, after) = rest.split_at(length);
        if is_token {
            let text = text.trim_start_matches("r#").to_owned();
            tokens.push(Token { text, line });
        }
        line += text.matches('\n').count();
        rest = after;
    }
    tokens
}

/// Returns the length of the token at the start of `rest`, and false for text to leave out.
fn token(rest: &str, first: char) -> (usize, bool) {
    if let Some(length) = comment(rest).or_else(|| text(rest)) {
        return (length, false);
    }
    if first == '\'' {
        return (quote(rest), false);
    }
    if is_word(first) {
        let raw = if rest.starts_with("r#") { 2 } else { 0 };
        let word = rest[raw..].find(|c| !is_word(c));
        return (word.map_or(rest.len(), |end| raw + end), true);
    }
    if rest.starts_with("::") {
        return (2, true);
    }
    (first.len_utf8(), !first.is_whitespace())
}

/// Returns the length of a comment.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match &rest.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    Some(at)
}

/// Returns the length of a string literal, raw or not.
fn text(rest: &str) -> Option<usize> {
    let body = rest.trim_start_matches(['b', 'c']);
    let prefix = rest.len() - body.len();
    if prefix > 1 {
        return None;
    }
    if let Some(raw) = body.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        let inner = raw[hashes..].strip_prefix('"')?;
        let close = format!("\"{}", "#".repeat(hashes));
        let end = inner
            .find(&close)
            .map_or(inner.len(), |at| at + close.len());
        return Some(rest.len() - inner.len() + end);
    }
    let inner = body.strip_prefix('"')?;
    Some(prefix + 1 + closing(inner, '"'))
}

/// Returns the length of a character literal or a lifetime.
fn quote(rest: &str) -> usize {
    let inner = &rest[1..];
    let mut chars = inner.chars();
    let (first, second) = (chars.next(), chars.next());
    if first == Some('\\') || second == Some('\'') {
        return 1 + closing(inner, '\'');
    }
    1 + inner.find(|c| !is_word(c)).unwrap_or(inner.len())
}

/// Returns the length up to and with the closing mark, past escaped characters.
fn closing(inner: &str, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in inner.char_indices() {
        if c == mark && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    inner.len()
}

#[test]
fn comments_and_literals_are_left_out() {
    let source = r####"a /* x /* y */ z */ b "c\"d" e r#"f"g"# h '\'' i '"' j<'k> r#type b"l" // m
        n::o"####;
    let texts: Vec<String> = tokens(source).into_iter().map(|token| token.text).collect();
    let words = "a b e h i j < > type n :: o";
    assert_eq!(texts.join(" "), words);
    assert_eq!(tokens(source).last().map(|token| token.line), Some(2));
}
