//! Signals as events of the control loop.

use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::failure::Failure;

/// The signals that a process handles that serves disks.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// Never read: a handler that exists turns "kill the process" into EFBIG on the write that went
    /// past the file size limit, which is then that request's error.
    _file_size: Signal,
}

/// The request that a signal stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalRequest {
    /// Shut down; the name of the signal.
    Stop(&'static str),
    /// SIGHUP: check the size of the disk.
    CheckSize,
}

impl Signals {
    /// From here on none of them kills the process. SIGPIPE is ignored by Rust's own start-up. To be called inside the runtime.
    pub(crate) fn catch() -> Result<Signals, Failure> {
        let caught = |kind| {
            signal(kind).map_err(|error| Failure::run(format!("cannot catch signals: {error}")))
        };
        Ok(Signals {
            terminate: caught(SignalKind::terminate())?,
            interrupt: caught(SignalKind::interrupt())?,
            hang_up: caught(SignalKind::hangup())?,
            _file_size: caught(SignalKind::from_raw(Number::XFSZ.as_raw()))?,
        })
    }

    /// The next one. Nothing is lost when the future is dropped.
    pub(crate) async fn next(&mut self) -> SignalRequest {
        tokio::select! {
            biased;
            _ = self.terminate.recv() => SignalRequest::Stop("SIGTERM"),
            _ = self.interrupt.recv() => SignalRequest::Stop("SIGINT"),
            _ = self.hang_up.recv() => SignalRequest::CheckSize,
        }
    }
}
