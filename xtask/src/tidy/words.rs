//! The voice of comments and messages.

use itertools::Itertools;

/// First words of a doc comment that leave its subject to another line.
const OPENERS: &[&str] = &["Whether", "The same", "It", "Of", "That"];

/// Verbs that are negated with "not", and not by the noun after them.
const VERBS: &[&str] = &["is", "takes"];

/// Words after "no" that make an adverb of it.
const ADVERBS: &[&str] = &["longer", "more"];

/// Returns the faults of a Rust file.
pub(super) fn faults(path: &str, text: &str) -> Vec<String> {
    let openers = riddles(text).map(|(line, opener)| {
        format!("{path}:{line}: the comment begins with \"{opener}\"; say what the function returns or does, or what the value is")
    });
    let negations = negations(text).map(|(line, verb)| {
        format!("{path}:{line}: \"{verb} no\" as a predicate; write \"not a\" or \"does not\"")
    });
    openers.chain(negations).collect()
}

/// Returns the first line of each doc comment that begins with one of [`OPENERS`].
fn riddles(text: &str) -> impl Iterator<Item = (usize, &'static str)> {
    let doc = |line: &'_ str| {
        let line = line.trim_start();
        let rest = line
            .strip_prefix("///")
            .or_else(|| line.strip_prefix("//!"));
        rest.map(|rest| rest.trim_start().to_owned())
    };
    let lines = std::iter::once("").chain(text.lines());
    lines
        .tuple_windows()
        .enumerate()
        .filter_map(move |(index, (before, line))| {
            let first = doc(line).filter(|_| doc(before).is_none())?;
            let opens = |opener: &&&str| {
                let rest = first.strip_prefix(**opener);
                rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
            };
            Some((index + 1, *OPENERS.iter().find(opens)?))
        })
}

/// Returns the places of one of [`VERBS`] before "no", but for "there is no".
fn negations(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate();
    let words = lines.flat_map(|(index, line)| {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        words
            .filter(|word| !word.is_empty())
            .map(move |word| (index + 1, word))
    });
    words
        .tuple_windows()
        .filter_map(|((_, before), (line, verb), (_, no), (_, after))| {
            let is_predicate =
                VERBS.contains(&verb) && no == "no" && !before.eq_ignore_ascii_case("there");
            (is_predicate && !ADVERBS.contains(&after)).then_some((line, verb))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doc_comment_says_what_it_is_about() {
        for (text, found) in [
            ("    /// Whether it is on.", true),
            ("//! The same for a node.", true),
            ("/// It.", true),
            ("/// Of these, the last.", true),
            ("/// Returns true if it is on.\n/// It costs a load.", false),
            ("/// Its length.", false),
            ("/// The samest.", false),
            ("// It is on.", false),
            ("let it = 1; /// Whether", false),
        ] {
            assert_eq!(
                !faults("crates/blk/src/a.rs", text).is_empty(),
                found,
                "{text}"
            );
        }
    }

    #[test]
    fn a_predicate_is_negated_by_not() {
        // Spelt so that this file passes.
        for (text, found) in [
            ("// a file that is NO text", true),
            ("\"{name} takes NO number\"", true),
            ("// one that is\n    // NO text", true),
            ("// There is NO text.", false),
            ("// which is NO longer served", false),
            ("// this is NO more than that", false),
            ("// it has NO text", false),
            ("fn what_is_NO_text()", false),
        ] {
            let text = text.replace("NO", "no");
            assert_eq!(!faults("tests/a.rs", &text).is_empty(), found, "{text}");
        }
    }
}
