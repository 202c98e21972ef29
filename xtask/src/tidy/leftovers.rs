//! What must not stay behind: unfinished code, tests that do not run, notes to oneself, and paths of
//! somebody's own machine.

use super::source::{Source, line_at};

/// Spelt in halves, so that this file passes its own rule.
const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "#[ignore"];
const NOTES: &[&str] = &[concat!("FIX", "ME"), concat!("X", "XX")];
const OWN_PATHS: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
];

/// Faults in a Rust file, tests included.
pub(super) fn in_rust(source: &Source<'_>) -> Vec<String> {
    let finish = |word: &str| format!("`{word}` stands here: finish it");
    // Words in code only: this very file names them in its strings.
    find(source.path, &source.code, UNFINISHED, finish)
}

/// Faults in any text file.
pub(super) fn anywhere(path: &str, text: &str) -> Vec<String> {
    // Lock files and licences are not written by us.
    if path == "Cargo.lock" || path.starts_with("LICENSE") {
        return Vec::new();
    }
    let mut faults = find(path, text, NOTES, |word| {
        format!("`{word}` stands here: do it, or say in the code what is so and why")
    });
    faults.extend(find(path, text, OWN_PATHS, |word| {
        format!("a path below `{word}` exists on one machine only")
    }));
    faults
}

fn find(path: &str, text: &str, words: &[&str], say: impl Fn(&str) -> String) -> Vec<String> {
    let mut faults = Vec::new();
    for word in words {
        for (at, _) in text.match_indices(word) {
            let inside_a_word = text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            if !inside_a_word {
                faults.push(format!("{path}:{}: {}", line_at(text, at), say(word)));
            }
        }
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust_faults(text: &str) -> usize {
        in_rust(&Source::new("a.rs", text)).len()
    }

    #[test]
    fn unfinished_code_is_found_and_its_name_in_a_string_is_not() {
        assert_eq!(rust_faults("fn a() { todo!() }"), 1);
        assert_eq!(rust_faults("fn a() { unimplemented!(\"later\") }"), 1);
        assert_eq!(rust_faults("#[test]\n#[ignore = \"slow\"]\nfn a() {}"), 1);
        assert_eq!(
            rust_faults("// todo! is refused\nconst A: &str = \"todo!\";"),
            0
        );
        assert_eq!(rust_faults("not_todo!()"), 0);
    }

    #[test]
    fn notes_to_oneself_are_found_in_comments_with_their_line() {
        let text = format!("a\n// {}: later", NOTES[0]);
        assert_eq!(anywhere("a.rs", &text).len(), 1);
        assert!(anywhere("a.rs", &text)[0].starts_with("a.rs:2: "));
        assert!(anywhere("Cargo.lock", &text).is_empty());
    }

    #[test]
    fn paths_of_a_developers_machine_are_found_and_relative_ones_are_not() {
        for path in OWN_PATHS {
            assert_eq!(anywhere("a.md", &format!("see {path}x")).len(), 1, "{path}");
            assert!(
                anywhere("a.md", &format!("see a{path}x")).is_empty(),
                "{path}"
            );
        }
    }
}
