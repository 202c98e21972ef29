//! Signals that end a command.

use std::future::poll_fn;
use std::task::Poll;

use cleave_host::Failure;
use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end a program of the foreground in order: Ctrl-C, a service manager's request, a terminal that
/// closes, Ctrl-\\.
#[derive(Debug)]
pub(crate) struct QuitSignals {
    quit: [Signal; 4],
    /// Never read: a handler that exists turns "kill the process" into EFBIG on the write that went past the file size limit.
    _file_size: Signal,
}

impl QuitSignals {
    /// Catches them: from here on none of them kills the process.
    pub(crate) fn catch() -> Result<QuitSignals, Failure> {
        let caught = |kind| {
            signal(kind).map_err(|error| Failure::run(format!("cannot catch signals: {error}")))
        };
        Ok(QuitSignals {
            quit: [
                caught(SignalKind::interrupt())?,
                caught(SignalKind::terminate())?,
                caught(SignalKind::hangup())?,
                caught(SignalKind::quit())?,
            ],
            _file_size: caught(SignalKind::from_raw(Number::XFSZ.as_raw()))?,
        })
    }

    /// Waits for one.
    pub(crate) async fn received(&mut self) {
        poll_fn(|context| {
            let mut each = self.quit.iter_mut();
            match each.any(|signal| signal.poll_recv(context).is_ready()) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}
