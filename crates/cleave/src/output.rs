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
