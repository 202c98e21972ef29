//! A terminal that is drawn on, and given back as it was.

use std::io::{self, IsTerminal as _};
use std::thread;

use rustix::fs::FileType;
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use tokio::sync::mpsc;

use super::keys::{self, Key};
use super::painter::Painter;

/// The terminal, or the pipe, for output and keys.
#[derive(Debug)]
pub(super) struct Terminal {
    /// Standard output is a terminal: the picture is drawn over and over in one place.
    draws: bool,
    /// How standard input was, where it is a terminal.
    before: Option<Termios>,
    keys: Option<mpsc::Receiver<Key>>,
    painter: Painter,
}

/// Keys that may wait.
const KEYS_MAX: usize = 64;

/// Another screen, without a cursor, whose lines end at its edge: characters that are two columns wide would
/// make them go on in the next. And back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

impl Terminal {
    /// Takes it over, as far as there is one.
    pub(super) fn take() -> io::Result<Terminal> {
        let draws = io::stdout().is_terminal();
        let before = match draws && io::stdin().is_terminal() {
            true => tcgetattr(io::stdin()).ok(),
            false => None,
        };
        if let Some(before) = &before {
            let mut raw = before.clone();
            // Ctrl-C and Ctrl-D come as bytes then, and nothing is echoed into the picture.
            raw.local_modes
                .remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
            // No key stops the output, which could then be neither drawn on nor given back.
            raw.input_modes.remove(InputModes::IXON);
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &raw);
        }
        let (first, last) = if draws { (ENTER, LEAVE) } else { ("", "") };
        Ok(Terminal {
            draws,
            before,
            keys: keys(),
            painter: Painter::start(first, last)?,
        })
    }

    /// How many lines and columns there are to draw on.
    pub(super) fn size(&self) -> (usize, usize) {
        match tcgetwinsize(io::stdout()) {
            Ok(size) if self.draws && size.ws_row > 0 && size.ws_col > 0 => {
                (usize::from(size.ws_row), usize::from(size.ws_col))
            }
            _ => (usize::MAX, 80),
        }
    }

    /// Shows a picture: over the last one, or below it where nobody can draw.
    pub(super) fn show(&self, lines: &[String]) -> io::Result<()> {
        self.painter.show(match self.draws {
            true => frame(lines),
            false => format!("{}\n\n", lines.join("\n")),
        })
    }

    /// Returns true if the picture is drawn in one place, and keys are read.
    pub(super) fn is_interactive(&self) -> bool {
        self.before.is_some()
    }

    /// Waits for a key. The end of the input quits.
    pub(super) async fn key(&mut self) -> Key {
        match &mut self.keys {
            Some(keys) => keys.recv().await.unwrap_or(Key::Quit),
            None => std::future::pending().await,
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The painter, which is dropped after this, gives the screen back.
        if let Some(before) = &self.before {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// The bytes that draw a picture. The screen is cleared first: behind a line that fills the screen's width the cursor
/// stands on the last character, and clearing from there would remove it. No line feed follows the last line, which
/// would scroll the picture.
fn frame(lines: &[String]) -> String {
    format!("\x1b[H\x1b[J{}", lines.join("\r\n"))
}

/// Standard input, where something may come from it: a terminal or a pipe. Anything else (the
/// null device of a service, a file) is not read: its end means nothing.
///
/// Read on a thread, which the end of the process ends: tokio registers descriptors of others only with
/// unsafe code.
fn keys() -> Option<mpsc::Receiver<Key>> {
    let stdin = io::stdin();
    let found = rustix::fs::fstat(&stdin).ok()?;
    let kind = FileType::from_raw_mode(found.st_mode);
    if !stdin.is_terminal() && !matches!(kind, FileType::Fifo | FileType::Socket) {
        return None;
    }
    let (typed, keys) = mpsc::channel(KEYS_MAX);
    let reader = thread::Builder::new().name("keys".to_owned());
    let reading = reader.spawn(move || read_keys(&typed));
    reading.ok().map(|_| keys)
}

/// To the end of the input, or of the program.
fn read_keys(typed: &mpsc::Sender<Key>) {
    let mut bytes = [0; 64];
    loop {
        match rustix::io::read(io::stdin(), &mut bytes) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) | Err(_) => return,
            Ok(n) => {
                let read = keys::keys(bytes.get(..n).unwrap_or_default());
                if read.contains(&Key::Quit) {
                    return;
                }
                for key in read {
                    if typed.blocking_send(key).is_err() {
                        return;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_cleared_behind_a_line_as_wide_as_the_screen() {
        let frame = frame(&["x".repeat(80), "y".repeat(80)]);
        let text = frame.trim_start_matches("\x1b[H\x1b[J");
        assert_eq!(text, ["x".repeat(80), "y".repeat(80)].join("\r\n"));
    }
}
