//! Sizes for display.

/// Writes a size as `512`, `4K`, `2M`: with a unit if a power of 1024 divides it.
pub(crate) fn short(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Writes a size as `512 B`, `4 KiB`, `2 MiB`.
pub(crate) fn long(bytes: u64) -> String {
    let text = short(bytes);
    match text.strip_suffix('M') {
        Some(number) => format!("{number} MiB"),
        None => match text.strip_suffix('K') {
            Some(number) => format!("{number} KiB"),
            None => format!("{text} B"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_usual_units() {
        for (bytes, few, many) in [
            (512, "512", "512 B"),
            (1024, "1K", "1 KiB"),
            (44 << 10, "44K", "44 KiB"),
            (1536, "1536", "1536 B"),
            (4 << 20, "4M", "4 MiB"),
        ] {
            assert_eq!((short(bytes).as_str(), long(bytes).as_str()), (few, many));
        }
    }
}
