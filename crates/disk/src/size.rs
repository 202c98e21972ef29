//! Sizes as text.

/// Suffixes of sizes, largest first, with their shifts.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Parses `4K`, `1M`, `2G`, `1T` (binary) or plain bytes; refuses overflow and anything else.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let refuse = || format!("`{text}` is not a size such as 512, 4K, 1M, 2G or 1T");
    let upper = text.to_ascii_uppercase();
    let (digits, shift) = UNITS
        .iter()
        .find_map(|&(unit, shift)| {
            let head = upper.strip_suffix("IB").unwrap_or(&upper);
            head.strip_suffix(unit).map(|digits| (digits, shift))
        })
        .unwrap_or((&upper, 0));
    // `u64::from_str` would accept a leading `+`.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(refuse());
    }
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("`{text}` is more than 2^64 bytes"))
}

/// Returns the shortest text that `parse_size` parses as `bytes`.
pub fn format_size(bytes: u64) -> String {
    UNITS
        .iter()
        .find(|&&(_, shift)| bytes != 0 && bytes.trailing_zeros() >= shift)
        .map_or_else(
            || bytes.to_string(),
            |&(unit, shift)| format!("{}{unit}", bytes >> shift),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_as_they_are_formatted() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4K", 4096),
            ("4k", 4096),
            ("4KiB", 4096),
            ("1m", 1 << 20),
            ("2G", 2 << 30),
            ("2gib", 2 << 30),
            ("1T", 1 << 40),
            ("1tib", 1 << 40),
            ("18446744073709551615", u64::MAX),
            ("16777215T", 16_777_215 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_not_a_size() {
        for text in [
            "",
            "K",
            "iB",
            "KiB",
            "-1",
            "+1",
            "1.5G",
            "1 G",
            " 1",
            "1KB",
            "1B",
            "10iB",
            "0x10",
            "1P",
            "1KK",
            "K1",
            "1e3",
            "١",
            "1\u{212a}",
        ] {
            let why = parse_size(text).unwrap_err();
            assert!(why.contains("is not a size"), "{text}: {why}");
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999K"] {
            let why = parse_size(text).unwrap_err();
            assert!(why.contains("more than 2^64"), "{text}: {why}");
        }
    }
}
