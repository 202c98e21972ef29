//! Ids of disks in paths and lists.

/// Writes a name as a part of a path.
pub(crate) fn encoded(name: &str) -> String {
    name.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                char::from(byte).to_string()
            }
            byte => format!("%{byte:02X}"),
        })
        .collect()
}

/// Returns a key that sorts numbers in a name by their value: `d2` before `d10`. The name itself decides between `d1` and `d01`.
pub fn natural(name: &str) -> (Vec<(String, u128)>, String) {
    let is_digit = |c: char| c.is_ascii_digit();
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(is_digit).unwrap_or(rest.len()));
        let end = after.find(|c| !is_digit(c)).unwrap_or(after.len());
        let (number, after) = after.split_at(end);
        // An id has at most 64 characters; all numbers that are too long for this count as equal.
        parts.push((word.to_owned(), number.parse().unwrap_or(u128::MAX)));
        rest = after;
    }
    (parts, name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_fits_into_a_path() {
        assert_eq!(encoded("a.img"), "a.img");
        assert_eq!(encoded("null:1G /é?#%"), "null%3A1G%20%2F%C3%A9%3F%23%25");
    }
}
