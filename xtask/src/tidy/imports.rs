//! The modules and types that a source file declares, and the names that it imports and uses, without those of its tests.

use itertools::Itertools;

/// A source file.
pub(super) struct File<'a> {
    /// All but the imports, and what only tests have.
    tokens: Vec<Token<'a>>,
    pub(super) imports: Vec<Import<'a>>,
}

/// One name of a `use` declaration.
pub(super) struct Import<'a> {
    line: usize,
    pub(super) path: Vec<&'a str>,
    /// Its name in the file that imports it.
    pub(super) name: &'a str,
    is_public: bool,
}

impl<'a> File<'a> {
    /// Reads the text of a file.
    pub(super) fn parse(text: &'a str) -> File<'a> {
        let mut file = File {
            tokens: Vec::new(),
            imports: Vec::new(),
        };
        let all = tokens(text);
        let mut rest = &all[..];
        while let [first, after @ ..] = rest {
            if is_for_tests(rest) {
                rest = &rest[item_length(rest)..];
            } else if first.text == "use" && after.first().is_some_and(|next| next.text != "<") {
                let is_public = file
                    .tokens
                    .last()
                    .is_some_and(|last| ["pub", ")"].contains(&last.text));
                rest = file.import(after, &[], is_public);
            } else {
                file.tokens.push(*first);
                rest = after;
            }
        }
        file
    }

    /// Takes in an import, or one branch of it after `stem`. Returns the tokens that follow it.
    fn import<'t>(
        &mut self,
        tokens: &'t [Token<'a>],
        stem: &[&'a str],
        is_public: bool,
    ) -> &'t [Token<'a>] {
        let (mut path, mut name) = (stem.to_vec(), "");
        let mut rest = tokens;
        while let [first, after @ ..] = rest {
            match first.text {
                "::" => rest = after,
                "as" => {
                    name = after.first().map_or("", |name| name.text);
                    rest = after.get(1..).unwrap_or_default();
                }
                "{" => {
                    rest = after;
                    while rest
                        .first()
                        .is_some_and(|next| !["}", ";"].contains(&next.text))
                    {
                        rest = self.import(rest, &path, is_public);
                        rest = without_sign(rest, ",");
                    }
                    return without_sign(rest, "}");
                }
                "," | "}" | ";" => break,
                word => {
                    if word != "self" || path.is_empty() {
                        path.push(word);
                    }
                    name = path.last().copied().unwrap_or_default();
                    rest = after;
                }
            }
        }
        let line = tokens.first().map_or(0, |first| first.line);
        self.imports.push(Import {
            line,
            path,
            name,
            is_public,
        });
        rest
    }

    /// Names of the modules that it declares as files.
    pub(super) fn modules(&self) -> impl Iterator<Item = &'a str> {
        let triples = self.tokens.iter().tuple_windows();
        let is_module = |(keyword, _, end): &(&Token<'_>, _, &Token<'_>)| {
            keyword.text == "mod" && end.text == ";"
        };
        triples.filter(is_module).map(|(_, name, _)| name.text)
    }

    /// Types that it declares outside of functions, macros and implementations: the line and name of each, and true if it is public.
    pub(super) fn types(&self) -> Vec<(usize, &'a str, bool)> {
        let (mut found, mut depth) = (Vec::new(), 0_usize);
        for (at, token) in self.tokens.iter().enumerate() {
            match token.text {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                "struct" | "enum" | "union" | "trait" | "type" if depth == 0 => {
                    let before = self.tokens[..at].iter().rev().map(|token| token.text);
                    let mut before = before.skip_while(|word| *word == "unsafe");
                    let is_public = before
                        .next()
                        .is_some_and(|word| ["pub", ")"].contains(&word));
                    let name = self.tokens.get(at + 1);
                    // `union` is a keyword only here, and a method elsewhere.
                    let name = name.filter(|name| name.text.starts_with(char::is_uppercase));
                    found.extend(name.map(|name| (name.line, name.text, is_public)));
                }
                _ => {}
            }
        }
        found
    }

    /// Paths that the file needs, each with its line. A re-export is needed if the file itself uses the name.
    pub(super) fn needed(&self) -> impl Iterator<Item = (usize, Vec<&'a str>)> {
        let is_used = |import: &&Import<'_>| {
            !import.is_public || self.tokens.iter().any(|token| token.text == import.name)
        };
        let imports = self.imports.iter().filter(is_used);
        let imports = imports.map(|import| (import.line, import.path.clone()));
        let is_joint = |at: usize| self.tokens.get(at).is_some_and(|sign| sign.text == "::");
        let is_start = move |at: &usize| is_joint(at + 1) && (*at == 0 || !is_joint(at - 1));
        let paths = (0..self.tokens.len()).filter(is_start).map(move |at| {
            let words = (at..).step_by(2);
            let words = words.take_while(|word| *word == at || is_joint(word - 1));
            let words = words.filter_map(|word| self.tokens.get(word));
            (self.tokens[at].line, words.map(|word| word.text).collect())
        });
        imports.chain(paths)
    }
}

/// Returns what follows a sign, or everything if the first token is another.
fn without_sign<'t, 'a>(tokens: &'t [Token<'a>], sign: &str) -> &'t [Token<'a>] {
    match tokens {
        [first, rest @ ..] if first.text == sign => rest,
        all => all,
    }
}

/// Returns true if the tokens begin with an attribute that keeps an item from what is shipped.
fn is_for_tests(tokens: &[Token<'_>]) -> bool {
    let mut words = tokens.iter().map(|token| token.text);
    let is_cfg = ["#", "[", "cfg", "("]
        .iter()
        .all(|sign| words.next() == Some(sign));
    let condition = words.take_while(|word| *word != "]").collect_vec();
    is_cfg && condition.contains(&"test") && !condition.contains(&"not")
}

/// Returns the number of tokens of an item and its attributes.
fn item_length(tokens: &[Token<'_>]) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate() {
        match (token.text, depth) {
            (";", 0) | ("}", 1) => return at + 1,
            // The item is the last one of a list.
            (")" | "]" | "}", 0) => return at,
            ("(" | "[" | "{", _) => depth += 1,
            (")" | "]" | "}", _) => depth -= 1,
            _ => {}
        }
    }
    tokens.len()
}

/// A word, `::`, or another sign.
#[derive(Clone, Copy)]
struct Token<'a> {
    line: usize,
    text: &'a str,
}

/// Splits a source, and leaves out comments, literals and spaces.
fn tokens(source: &str) -> Vec<Token<'_>> {
    let (mut tokens, mut rest, mut line) = (Vec::new(), source, 1);
    while !rest.is_empty() {
        let (length, is_code) = first_token(rest);
        let (text, after) = rest.split_at(length.min(rest.len()));
        if is_code {
            tokens.push(Token { line, text });
        }
        line += text.matches('\n').count();
        rest = after;
    }
    tokens
}

/// Returns the length of the first token, comment, literal or space, and true for a token.
fn first_token(rest: &str) -> (usize, bool) {
    let end = |mark: &str, from: usize| {
        let found = rest.get(from..).and_then(|rest| rest.find(mark));
        found.map_or(rest.len(), |at| from + at + mark.len())
    };
    let word = rest
        .find(|c: char| !c.is_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    let marks = rest[word..].len() - rest[word..].trim_start_matches('#').len();
    let is_raw =
        ["r", "br", "cr"].contains(&&rest[..word]) && rest[word + marks..].starts_with('"');
    let mut chars = rest.chars();
    match (chars.next(), chars.next(), chars.next()) {
        (Some('/'), Some('/'), _) => (end("\n", 0), false),
        (Some('/'), Some('*'), _) => (end("*/", 2), false),
        _ if is_raw => (
            end(&format!("\"{}", "#".repeat(marks)), word + marks + 1),
            false,
        ),
        _ if word > 0 => (word, true),
        (Some('"'), ..) => (string_length(rest), false),
        (Some('\''), Some('\\'), _) => (end("'", 3), false),
        (Some('\''), Some(c), Some('\'')) => (c.len_utf8() + 2, false),
        (Some(':'), Some(':'), _) => (2, true),
        (Some(c), ..) => (c.len_utf8(), !c.is_whitespace()),
        (None, ..) => (0, false),
    }
}

/// Returns the length of a string literal with its quotation marks.
fn string_length(rest: &str) -> usize {
    let mut is_escaped = true;
    let end = rest.find(|c| {
        let is_end = c == '"' && !is_escaped;
        is_escaped = !is_escaped && c == '\\';
        is_end
    });
    end.map_or(rest.len(), |at| at + 1)
}
