//! Text in a figure: its width, its lines, short forms of numbers.

/// Height of the numbers along an axis.
pub(crate) const TICK: f64 = 12.0;
/// Height of captions and legends.
pub(crate) const CAPTION: f64 = 13.0;
/// Letters of a bold text are wider by this.
const BOLD: f64 = 1.1;

/// Returns the width of a text of this size, in pixels.
pub(crate) fn width(text: &str, size: f64) -> f64 {
    size * text.chars().map(advance).sum::<f64>()
}

/// Returns the width of a bold text.
pub(crate) fn bold_width(text: &str, size: f64) -> f64 {
    width(text, size * BOLD)
}

/// Returns the width of a letter as a share of its height: that of DejaVu Sans, or a little more.
fn advance(letter: char) -> f64 {
    match letter {
        'i' | 'j' | 'l' | '\'' | '|' => 0.3,
        ' ' | '.' | ',' | ':' | ';' | '·' | 'I' | 'J' | '/' | '!' | '-' => 0.36,
        'f' | 'r' | 't' | '(' | ')' | '[' | ']' => 0.42,
        'c' | 's' | 'z' | '–' => 0.55,
        'm' | 'W' | '%' | '—' => 0.99,
        'w' | 'M' | '×' | '÷' | '+' | '=' | '±' | '<' | '>' | '≤' | '≥' | '≈' => 0.86,
        _ if letter.is_uppercase() => 0.77,
        _ => 0.64,
    }
}

/// Returns lines of bold text no wider than `room`.
pub(crate) fn bold_wrapped(text: &str, size: f64, room: i32) -> Vec<String> {
    wrapped(text, size * BOLD, room)
}

/// Returns lines no wider than `room`, broken at blanks and, within a word that is too wide, after hyphens.
pub(crate) fn wrapped(text: &str, size: f64, room: i32) -> Vec<String> {
    let room = f64::from(room);
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let hyphen = if width(word, size) > room { '-' } else { ' ' };
        for (number, part) in word.split_inclusive(hyphen).enumerate() {
            let blank = if number == 0 { " " } else { "" };
            match lines.last_mut() {
                Some(line) if width(&format!("{line}{blank}{part}"), size) <= room => {
                    *line += &format!("{blank}{part}");
                }
                _ => lines.push(part.to_owned()),
            }
        }
    }
    lines
}

/// Returns three digits and a unit: 0.052, 7.5, 950, 12k, 1.2M.
pub(crate) fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        size if size >= 999.5e6 => (value / 1e9, "G"),
        size if size >= 999.5e3 => (value / 1e6, "M"),
        size if size >= 9_999.5 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match scaled.abs() {
        0.0 => 0,
        size => (2.0 - (size * 1.005).log10().floor()).clamp(0.0, 4.0) as usize,
    };
    let text = format!("{scaled:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned() + unit,
        false => text + unit,
    }
}

/// Returns a size: 512, 4K, 1M.
pub(crate) fn bytes(value: f64) -> String {
    match value {
        size if size >= 1_048_576.0 => format!("{}M", short(size / 1_048_576.0)),
        size if size >= 1024.0 => format!("{}K", short(size / 1024.0)),
        size => short(size),
    }
}

/// Characters that XML cannot hold become question marks.
pub(crate) fn printable(text: &str) -> String {
    text.replace(
        |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}'),
        "?",
    )
}

/// Escapes a text for XML and HTML.
pub fn escaped(text: &str) -> String {
    let text = printable(text).replace('&', "&amp;").replace('<', "&lt;");
    text.replace('>', "&gt;").replace('"', "&quot;")
}
