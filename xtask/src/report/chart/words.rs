//! Text within a picture: how wide, how broken into lines, how a number is said shortly.

/// About the width of a character of DejaVu Sans, by its height.
const CHAR_WIDTH: f64 = 0.6;

/// How wide a text of this size will be, about.
pub(super) fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHAR_WIDTH
}

/// Lines no wider than `room`, broken at blanks, and a word that is wider alone after its hyphens; what has neither
/// stays whole.
pub(super) fn wrapped(text: &str, size: f64, room: f64) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let is_wide = width(word, size) > room;
        let parts = word.split_inclusive(if is_wide { '-' } else { ' ' });
        for (number, part) in parts.enumerate() {
            let blank = if number == 0 { " " } else { "" };
            match lines.last_mut() {
                Some(line) if width(&format!("{line}{blank}{part}"), size) <= room => {
                    line.push_str(blank);
                    line.push_str(part);
                }
                _ => lines.push(part.to_owned()),
            }
        }
    }
    lines
}

/// Three digits and a power: 0.052, 7.5, 950, 12k, 1.2M.
pub(super) fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        size if size >= 999.5e6 => (value / 1e9, "G"),
        size if size >= 999.5e3 => (value / 1e6, "M"),
        size if size >= 9_999.5 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        size if size >= 99.5 => 0,
        size if size >= 9.95 => 1,
        size if size >= 0.995 => 2,
        size if size >= 0.0995 => 3,
        0.0 => 0,
        _ => 4,
    };
    let text = format!("{scaled:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{unit}")
}

/// A size: 512, 4K, 1M.
pub(super) fn bytes(value: f64) -> String {
    match value {
        size if size >= 1_048_576.0 => format!("{}M", short(size / 1_048_576.0)),
        size if size >= 1024.0 => format!("{}K", short(size / 1024.0)),
        size => short(size),
    }
}

/// Text within XML; what XML cannot hold at all becomes a question mark.
pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if (c.is_control() && c != '\n') || matches!(c, '\u{fffe}' | '\u{ffff}') => {
                out.push('?');
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_said_shortly() {
        let table = [
            (0.0, "0"),
            (0.052, "0.052"),
            (0.5, "0.5"),
            (7.5, "7.5"),
            (10.0, "10"),
            (950.0, "950"),
            (1234.0, "1234"),
            (12_000.0, "12k"),
            (999_900.0, "1M"),
            (2_742_000.0, "2.74M"),
            (-3.0, "-3"),
        ];
        for (value, said) in table {
            assert_eq!(short(value), said);
        }
        for (value, said) in [(512.0, "512"), (4096.0, "4K"), (1_048_576.0, "1M")] {
            assert_eq!(bytes(value), said);
        }
    }

    #[test]
    fn lines_break_at_blanks_and_wide_words_at_hyphens() {
        assert_eq!(wrapped("aa bb cc", 10.0, 40.0), ["aa bb", "cc"]);
        assert_eq!(wrapped("aa-bbb-cc d", 10.0, 40.0), ["aa-", "bbb-cc", "d"]);
        assert_eq!(wrapped("aaaaaaaaaaaa b", 10.0, 12.0), ["aaaaaaaaaaaa", "b"]);
        assert!(wrapped("", 10.0, 40.0).is_empty());
    }
}
