//! Progress on stderr while a command runs: plain lines, or one line that is redrawn where stderr is a terminal.
//! Nothing is said where stderr is closed.

use std::io::{IsTerminal as _, Write as _, stderr};

/// Writes a line.
pub(crate) fn note(line: &str) {
    let _ = writeln!(stderr(), "{line}");
}

/// Draws the moving line over the one before it. Returns false if stderr is not a terminal.
pub(crate) fn draw(line: &str) -> bool {
    let mut stderr = stderr();
    let is_terminal = stderr.is_terminal();
    if is_terminal {
        let _ = write!(stderr, "\r\x1b[K{line}");
        let _ = stderr.flush();
    }
    is_terminal
}

/// Removes the moving line.
pub(crate) fn clear() {
    draw("");
}

/// A bar of so many cells, of which a share is full.
pub(crate) fn bar(full: usize, cells: usize) -> String {
    "#".repeat(full) + &".".repeat(cells.saturating_sub(full))
}
