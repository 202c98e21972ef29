//! Sizes that keep the code legible, as a ratchet: what is over the limit stands in a list, and the
//! list may only shrink. A line counts where code stands in it; comments and tests are free.

use super::source::{Source, body, line_at};

const FILE_LINES_MAX: usize = 700;
const FUNCTION_LINES_MAX: usize = 70;

/// A file or function over its limit.
pub(super) struct Oversized {
    /// `path` for a file, `path::function` for a function; this is what the list names.
    name: String,
    lines: usize,
    line_at: usize,
}

/// What in this file is over a limit.
pub(super) fn oversized(source: &Source<'_>) -> Vec<Oversized> {
    let code = &source.production;
    let mut found = Vec::new();
    let lines = count(code);
    if lines > FILE_LINES_MAX {
        found.push(Oversized {
            name: source.path.to_owned(),
            lines,
            line_at: 1,
        });
    }
    for (offset, name) in functions(code) {
        let item = &code[offset..];
        let Some((open, end)) = body(item) else {
            continue;
        };
        let lines = count(&item[open..end]);
        if lines > FUNCTION_LINES_MAX {
            let name = format!("{}::{name}", source.path);
            found.push(Oversized {
                name,
                lines,
                line_at: line_at(code, offset),
            });
        }
    }
    found
}

/// Faults: what is oversized and not on the list, and what is on the list and not oversized.
pub(super) fn judge(oversized: &[Oversized], list: &str, list_path: &str) -> Vec<String> {
    let allowed: Vec<&str> = list
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .filter(|entry| !entry.is_empty())
        .collect();
    let new = oversized
        .iter()
        .filter(|big| !allowed.contains(&big.name.as_str()))
        .map(|big| {
            let (name, lines, at) = (&big.name, big.lines, big.line_at);
            format!("{name} (line {at}): {lines} lines of code, split it by noun")
        });
    let stale = allowed
        .iter()
        .filter(|entry| oversized.iter().all(|big| big.name != **entry))
        .map(|entry| format!("{list_path}: {entry} is within the limit now, strike it out"));
    new.chain(stale).collect()
}

fn count(code: &str) -> usize {
    code.lines().filter(|line| !line.trim().is_empty()).count()
}

/// Offsets and names of the functions, nested ones too.
fn functions(code: &str) -> Vec<(usize, &str)> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices("fn ")
        .filter(|(at, _)| !code[..*at].ends_with(is_word))
        .filter_map(|(at, _)| {
            let name = code[at + 3..].split(|c| !is_word(c)).next()?;
            // `fn (` is the type of a pointer, not a function.
            (!name.is_empty()).then_some((at, name))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &str, text: &str) -> Vec<String> {
        oversized(&Source::new(path, text))
            .into_iter()
            .map(|big| big.name)
            .collect()
    }

    fn function(name: &str, lines: usize) -> String {
        // The two lines with the braces count.
        format!("fn {name}() {{\n{}}}\n", "a();\n".repeat(lines - 2))
    }

    #[test]
    fn a_function_of_71_lines_is_over_and_one_of_70_is_not() {
        let text = format!("{}{}", function("long", 71), function("just", 70));
        assert_eq!(names("a.rs", &text), ["a.rs::long"]);
    }

    #[test]
    fn comments_blank_lines_and_tests_are_free() {
        let commented = "// why\n\n".repeat(100);
        let text = format!(
            "fn a() {{\n{commented}}}\n#[cfg(test)]\nmod tests {{\n{}}}",
            function("long", 200)
        );
        assert!(names("a.rs", &text).is_empty());
        assert!(names("tests/tests/a.rs", &function("long", 900)).is_empty());
    }

    #[test]
    fn a_file_of_701_lines_is_over_and_one_of_700_is_not() {
        assert_eq!(names("a.rs", &"use a;\n".repeat(701)), ["a.rs"]);
        assert!(names("a.rs", &"use a;\n".repeat(700)).is_empty());
    }

    #[test]
    fn the_list_excuses_and_its_stale_entries_are_faults() {
        let big = oversized(&Source::new("a.rs", &function("long", 80)));
        assert_eq!(judge(&big, "", "list").len(), 1);
        assert!(judge(&big, "# head\na.rs::long # a table\n", "list").is_empty());
        assert_eq!(judge(&[], "a.rs::long", "list").len(), 1);
    }
}
