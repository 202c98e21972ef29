//! Signals as events of the control loop.

use std::io;

use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that mean something to us.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// Never read: a handler that exists turns "kill the process" into EFBIG on the write that went
    /// past the file size limit, which is then that request's error.
    _file_size: Signal,
}

/// What the operator wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    /// SIGTERM or SIGINT.
    End,
    /// SIGHUP.
    LookAgain,
}

impl Signals {
    /// From here on none of them kills the process. SIGPIPE is ignored by Rust's own start-up.
    pub(crate) fn catch() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(Number::XFSZ.as_raw()))?,
        })
    }

    /// The next one. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> Wish {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => Wish::End,
            _ = self.interrupt.recv() => Wish::End,
            _ = self.hang_up.recv() => Wish::LookAgain,
        }
    }
}
