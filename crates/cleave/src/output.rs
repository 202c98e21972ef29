//! What the program prints to stdout.

use std::io::Write as _;

use cleave_host::Failure;

/// Prints `text` to stdout.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_more(text).map(drop)
}

/// Prints `text` to stdout. Returns false once the reader of stdout has gone.
pub(crate) fn print_more(text: &str) -> Result<bool, Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // `cleave --help | head` closes early; nothing is lost by it.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::run(format!("cannot write to stdout: {error}"))),
        Ok(()) => Ok(true),
    }
}

/// Returns a size in the largest unit that leaves at least one whole, to a tenth: `1 GiB`, `255.9 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => match bytes % (1 << shift) {
            0 => format!("{} {unit}", bytes >> shift),
            _ => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        },
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_for_people() {
        for (bytes, text) in [
            (512, "512 B"),
            (1 << 30, "1 GiB"),
            (1536 << 20, "1.5 GiB"),
            (262_016 << 10, "255.9 MiB"),
            (1_000_448, "977 KiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
