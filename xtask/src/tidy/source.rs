//! A Rust file with comments, literals and tests told apart from the code that ships. No parser: a
//! scan that knows where strings and comments end is all that the rules need.

const TEST_MARK: &str = "#[cfg(test)]";

/// A Rust file as the rules see it. Lines are numbered alike in `text` and `code`.
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    pub(super) text: &'a str,
    /// `text` with the insides of comments and literals blanked.
    pub(super) code: String,
    /// `code` with the items under `#[cfg(test)]` blanked too; empty in a file of tests.
    pub(super) production: String,
}

impl<'a> Source<'a> {
    pub(super) fn new(path: &'a str, text: &'a str) -> Source<'a> {
        let code = blank_literals(text);
        let production = if is_test_file(path) {
            String::new()
        } else {
            blank_tests(&code)
        };
        Source {
            path,
            text,
            code,
            production,
        }
    }
}

/// Files that this one declares as `#[cfg(test)] mod name;`: tests, wherever they lie.
pub(super) fn declared_tests(path: &str, code: &str) -> Vec<String> {
    let folder = match path.rsplit_once('/') {
        Some((folder, "lib.rs" | "main.rs" | "mod.rs")) => folder,
        _ => path.trim_end_matches(".rs"),
    };
    let mut found = Vec::new();
    for (at, _) in code.match_indices(TEST_MARK) {
        let item = code[at + TEST_MARK.len()..].trim_start();
        let item = item.strip_prefix("pub(crate) ").unwrap_or(item);
        let name = item
            .strip_prefix("mod ")
            .and_then(|rest| rest.split_once(';'));
        // A `mod tests { … }` has its semicolons behind the brace.
        if let Some((name, _)) = name.filter(|(name, _)| !name.contains('{')) {
            found.push(format!("{folder}/{name}.rs"));
            found.push(format!("{folder}/{name}/mod.rs"));
        }
    }
    found
}

/// Number of the line, from 1, in which a byte offset lies.
pub(super) fn line_at(text: &str, offset: usize) -> usize {
    1 + text
        .bytes()
        .take(offset)
        .filter(|byte| *byte == b'\n')
        .count()
}

fn is_test_file(path: &str) -> bool {
    path.ends_with("/tests.rs") || path.contains("/tests/") || path.starts_with("tests/")
}

/// What the scan is inside of.
enum Inside {
    Code,
    LineComment,
    BlockComment { depth: u32 },
    Text,
    RawText { hashes: usize },
}

fn blank_literals(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut inside = Inside::Code;
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let (length, next) = advance(&inside, rest, at.checked_sub(1).map(|before| bytes[before]));
        let stays = matches!((&inside, &next), (Inside::Code, Inside::Code));
        for byte in &rest[..length] {
            let keep = *byte == b'\n' || (stays && length == 1);
            code.push(if keep { *byte } else { b' ' });
        }
        inside = next;
        at += length;
    }
    // Blanking is bytewise; a character outside ASCII in code (only in identifiers) becomes a blank.
    code.iter()
        .map(|byte| {
            if byte.is_ascii() {
                char::from(*byte)
            } else {
                ' '
            }
        })
        .collect()
}

/// How many bytes belong together here (never 0), and what the scan is inside of after them.
fn advance(inside: &Inside, rest: &[u8], before: Option<u8>) -> (usize, Inside) {
    match inside {
        Inside::Code => advance_code(rest, before),
        Inside::LineComment if rest[0] == b'\n' => (1, Inside::Code),
        Inside::LineComment => (1, Inside::LineComment),
        Inside::BlockComment { depth } if rest.starts_with(b"/*") => {
            (2, Inside::BlockComment { depth: depth + 1 })
        }
        Inside::BlockComment { depth: 1 } if rest.starts_with(b"*/") => (2, Inside::Code),
        Inside::BlockComment { depth } if rest.starts_with(b"*/") => {
            (2, Inside::BlockComment { depth: depth - 1 })
        }
        Inside::BlockComment { depth } => (1, Inside::BlockComment { depth: *depth }),
        Inside::Text if rest[0] == b'\\' => (rest.len().min(2), Inside::Text),
        Inside::Text if rest[0] == b'"' => (1, Inside::Code),
        Inside::Text => (1, Inside::Text),
        Inside::RawText { hashes } => {
            let ends = rest[0] == b'"' && count_hashes(&rest[1..]) >= *hashes;
            if ends {
                (1 + hashes, Inside::Code)
            } else {
                (1, Inside::RawText { hashes: *hashes })
            }
        }
    }
}

fn advance_code(rest: &[u8], before: Option<u8>) -> (usize, Inside) {
    if rest.starts_with(b"//") {
        return (2, Inside::LineComment);
    }
    if rest.starts_with(b"/*") {
        return (2, Inside::BlockComment { depth: 1 });
    }
    let in_word = before.is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    match rest[0] {
        b'"' => (1, Inside::Text),
        b'r' if !in_word || before == Some(b'b') => {
            let hashes = count_hashes(&rest[1..]);
            match rest.get(1 + hashes) {
                Some(b'"') => (2 + hashes, Inside::RawText { hashes }),
                _ => (1, Inside::Code),
            }
        }
        b'\'' => (quoted_char(rest), Inside::Code),
        _ => (1, Inside::Code),
    }
}

fn count_hashes(rest: &[u8]) -> usize {
    rest.iter().take_while(|byte| **byte == b'#').count()
}

/// Length of a character literal; 1 where the quote begins a lifetime.
fn quoted_char(rest: &[u8]) -> usize {
    let end_from = if rest.get(1) == Some(&b'\\') { 3 } else { 2 };
    // The longest literal is '\u{10FFFF}'; a lifetime has no closing quote that near, save in `<'a, 'b>`,
    // where what lies between is no single character.
    let end = (end_from..rest.len().min(13)).find(|at| rest[*at] == b'\'');
    match end {
        Some(end) if end_from == 3 => end + 1,
        Some(end) if std::str::from_utf8(&rest[1..end]).is_ok_and(|s| s.chars().count() == 1) => {
            end + 1
        }
        _ => 1,
    }
}

fn blank_tests(code: &str) -> String {
    let mut kept = String::with_capacity(code.len());
    let mut rest = code;
    while let Some(at) = rest.find(TEST_MARK) {
        let (before, item) = rest.split_at(at);
        let (tests, after) = item.split_at(item_end(item));
        kept.push_str(before);
        kept.extend(tests.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        rest = after;
    }
    kept.push_str(rest);
    kept
}

/// Where the item that starts here ends: behind its closing brace, or its semicolon.
pub(super) fn item_end(code: &str) -> usize {
    body(code).map_or(code.len(), |(_, end)| end)
}

/// Where the braces of the first item open and how far they reach; equal ends for an item without.
pub(super) fn body(code: &str) -> Option<(usize, usize)> {
    let mut nesting = 0_usize;
    let mut open = None;
    for (at, byte) in code.bytes().enumerate() {
        match byte {
            b'(' | b'[' => nesting += 1,
            b')' | b']' => nesting = nesting.saturating_sub(1),
            b'{' => {
                if nesting == 0 && open.is_none() {
                    open = Some(at);
                }
                nesting += 1;
            }
            b'}' => {
                nesting = nesting.saturating_sub(1);
                if let (0, Some(open)) = (nesting, open) {
                    return Some((open, at + 1));
                }
            }
            b';' if nesting == 0 => return Some((at + 1, at + 1)),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_are_blank_and_code_stays() {
        let table = [
            ("let a = \"{ todo }\"; b", "let a = ; b"),
            ("a // {\nb", "a b"),
            ("a /* { /* } */ { */ b", "a b"),
            ("r#\"} \" }\"# {", "{"),
            ("br\"}\" {", "b {"),
            ("'{' 'a '\\'' '\\n' b'\"' {", "'a b {"),
            ("<'a, 'b>", "<'a, 'b>"),
            ("\"\\\"{\" }", "}"),
            ("for_r\"{\" }", "for_r }"),
        ];
        for (text, kept) in table {
            let code = blank_literals(text);
            assert_eq!(
                code.split_whitespace().collect::<Vec<_>>().join(" "),
                kept,
                "{text}"
            );
            assert_eq!(code.len(), text.len(), "{text}: offsets stay");
        }
    }

    #[test]
    fn items_under_cfg_test_are_not_production() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() { {} }\n}\nfn c() {}\n#[cfg(test)]\nmod d;\nfn e() {}";
        let source = Source::new("crates/x/src/lib.rs", text);
        assert!(source.production.contains("fn a"));
        assert!(!source.production.contains("fn b"));
        assert!(source.production.contains("fn c"));
        assert!(!source.production.contains("mod d"));
        assert!(source.production.contains("fn e"));
        assert_eq!(source.production.lines().count(), text.lines().count());
    }

    #[test]
    fn files_of_tests_have_no_production_lines() {
        for path in [
            "tests/tests/a.rs",
            "crates/x/tests/a.rs",
            "crates/x/src/tests.rs",
        ] {
            assert_eq!(Source::new(path, "fn a() {}").production, "", "{path}");
        }
    }

    #[test]
    fn files_declared_under_cfg_test_are_tests() {
        let code = "#[cfg(test)]\nmod rig;\nmod real;\n#[cfg(test)]\nmod tests { use a; }";
        let beside = ["crates/x/src/a/rig.rs", "crates/x/src/a/rig/mod.rs"];
        assert_eq!(declared_tests("crates/x/src/a.rs", code), beside);
        assert_eq!(declared_tests("crates/x/src/a/mod.rs", code), beside);
        assert_eq!(
            declared_tests("crates/x/src/lib.rs", code)[0],
            "crates/x/src/rig.rs"
        );
    }

    #[test]
    fn a_body_is_the_first_braces_outside_of_parentheses() {
        assert_eq!(
            body("fn a(x: [u8; 3]) -> u8 { { } } fn b() {}"),
            Some((23, 30))
        );
        assert_eq!(body("fn a();"), Some((7, 7)));
        assert_eq!(body("fn a("), None);
    }
}
