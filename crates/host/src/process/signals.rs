//! Signals as events of the control loop.

use std::io;

use nix::sys::signal::{SIGHUP, SIGINT, SIGTERM, SigSet, SigmaskHow};
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

/// Blocks the signals in this thread while it exists; those that came meanwhile arrive at its end. A thread that is started meanwhile
/// never gets them.
///
/// A handler is in force some microseconds before it knows where to note a signal. A signal at that moment would be lost.
#[derive(Debug)]
pub(crate) struct HeldSignals(SigSet);

impl HeldSignals {
    pub(crate) fn hold() -> io::Result<HeldSignals> {
        let held = [SIGTERM, SIGINT, SIGHUP];
        let held: SigSet = held.into_iter().collect();
        Ok(HeldSignals(held.thread_swap_mask(SigmaskHow::SIG_BLOCK)?))
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        // Fails for no mask that was in force.
        let _ = self.0.thread_set_mask();
    }
}

impl Signals {
    /// From here on none of them kills the process. SIGPIPE is ignored by Rust's own start-up. To be called inside the runtime.
    pub(crate) fn catch() -> Result<Signals, Failure> {
        let refused = |error| Failure::run(format!("cannot catch signals: {error}"));
        let _held = HeldSignals::hold().map_err(refused)?;
        let caught = |kind| signal(kind).map_err(refused);
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
