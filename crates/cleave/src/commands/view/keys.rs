//! The keys that somebody types, from bytes.

/// A key that means something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Key {
    Quit,
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    First,
    Last,
    /// One disk in detail.
    Open,
    /// Back from there.
    Close,
    /// The other way round.
    Reverse,
}

/// Escape sequences of the keys that have one.
const SEQUENCES: &[(&[u8], Key)] = &[
    (b"\x1b[A", Key::Up),
    (b"\x1b[B", Key::Down),
    (b"\x1b[C", Key::Right),
    (b"\x1b[D", Key::Left),
    (b"\x1bOA", Key::Up),
    (b"\x1bOB", Key::Down),
    (b"\x1bOC", Key::Right),
    (b"\x1bOD", Key::Left),
    (b"\x1b[5~", Key::PageUp),
    (b"\x1b[6~", Key::PageDown),
    (b"\x1b[H", Key::First),
    (b"\x1b[F", Key::Last),
    (b"\x1b[1~", Key::First),
    (b"\x1b[4~", Key::Last),
];

/// The keys of what was read at once. A terminal sends a sequence whole; Escape alone is the end of what was read.
pub(super) fn keys(mut typed: &[u8]) -> Vec<Key> {
    let mut keys = Vec::new();
    while let Some((first, rest)) = typed.split_first() {
        let sequence = SEQUENCES
            .iter()
            .find_map(|(bytes, key)| Some((typed.strip_prefix(*bytes)?, *key)));
        if let Some((rest, key)) = sequence {
            keys.push(key);
            typed = rest;
            continue;
        }
        if *first == 0x1b && !rest.is_empty() {
            // A sequence that means nothing here: none of its letters is a key.
            typed = behind_sequence(rest);
            continue;
        }
        keys.extend(key(*first));
        typed = rest;
    }
    keys
}

fn key(byte: u8) -> Option<Key> {
    Some(match byte {
        // Ctrl-C and Ctrl-D.
        b'q' | b'Q' | 3 | 4 => Key::Quit,
        b'k' => Key::Up,
        b'j' => Key::Down,
        b'h' | b'<' => Key::Left,
        b'l' | b'>' => Key::Right,
        b'g' => Key::First,
        b'G' => Key::Last,
        b'r' => Key::Reverse,
        b'\r' | b'\n' => Key::Open,
        // Escape, and Backspace.
        0x1b | 0x7f | 8 => Key::Close,
        _ => return None,
    })
}

/// The bytes that follow an escape sequence, which is `[` or `O`, digits and marks, and one letter or `~`.
fn behind_sequence(rest: &[u8]) -> &[u8] {
    let body = match rest.first() {
        Some(b'[' | b'O') => rest.get(1..).unwrap_or_default(),
        _ => rest,
    };
    let last = body.iter().position(|byte| (0x40..=0x7e).contains(byte));
    body.get(last.map_or(body.len(), |last| last + 1)..)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_keys() {
        let rows: [(&[u8], &[Key]); 9] = [
            (b"q", &[Key::Quit]),
            (b"\x03", &[Key::Quit]),
            (b"\x1b[A\x1b[Bj", &[Key::Up, Key::Down, Key::Down]),
            (b"\x1bOC\r", &[Key::Right, Key::Open]),
            (b"\x1b", &[Key::Close]),
            (b"xyz1", &[]),
            // F5, and an arrow with Shift: their letters mean nothing.
            (b"\x1b[15~r", &[Key::Reverse]),
            (b"\x1b[1;2Dq", &[Key::Quit]),
            (b"\x1b[5~\x1b[6~", &[Key::PageUp, Key::PageDown]),
        ];
        for (typed, expected) in rows {
            assert_eq!(keys(typed), expected, "{typed:?}");
        }
    }
}
