//! The names of disks and of groups of disks.

/// Most characters of an id.
pub const ID_CHARS_MAX: usize = 64;

/// Returns true if a disk may be called so: an id is the name of a folder and a part of a path.
pub fn is_id(id: &str) -> bool {
    id.len() <= ID_CHARS_MAX
        && id.starts_with(|first: char| first.is_ascii_alphanumeric())
        && id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::is_id;

    #[test]
    fn an_id_is_the_name_of_a_file() {
        let longest = "a".repeat(64);
        for id in ["d1", "0", "A_b.c-d", &longest] {
            assert!(is_id(id), "{id}");
        }
        for id in [
            "",
            ".",
            "..",
            "-a",
            "_a",
            "a/b",
            "a b",
            "é",
            &(longest + "a"),
        ] {
            assert!(!is_id(id), "{id}");
        }
    }
}
