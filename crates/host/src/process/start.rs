//! Limits and settings that the process requests from the kernel once, at start.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime};

use rustix::process::{
    Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};

use tokio::runtime::{Builder, Runtime};

use crate::failure::Failure;

/// Fewest open files that a disk can be served with. A worker's io_uring has a table for the eventfds
/// of as many vrings as a device may have, and the kernel holds the table's size, not its use, against
/// this limit.
pub const DESCRIPTORS_MIN: u64 = 1024;

/// Takes as many descriptors as the process may have. Fewer than `needed` are an error now rather than with the first
/// guest that uses all its vrings. How many there are.
pub(crate) fn raise_descriptor_limit(needed: u64) -> Result<u64, Failure> {
    let needed = needed.max(DESCRIPTORS_MIN);
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Staying where we are may be enough.
    let reached = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => raised.current,
        Err(_) => limit.current,
    };
    match reached {
        Some(most) if most < needed => {
            let fewer = match needed > DESCRIPTORS_MIN {
                true => ", or lower --queues or --workers",
                false => "",
            };
            Err(Failure::input(format!(
                "at most {most} files may be open here and {needed} are needed: raise the limit (ulimit -n, \
                 LimitNOFILE=){fewer}"
            )))
        }
        reached => Ok(reached.unwrap_or(u64::MAX)),
    }
}

/// Lets the rings take as much memory as they need. Returns whether this process may do so. Root has no limit while it has its
/// capabilities; without them the rings of all daemons of a user share one limit.
pub(crate) fn lift_locked_memory_limit() -> bool {
    let unlimited = Rlimit {
        current: None,
        maximum: None,
    };
    setrlimit(Resource::Memlock, unlimited).is_ok()
}

/// Asks for SIGTERM when process `parent`, which started this one, ends.
pub(crate) fn end_with_parent(parent: u32) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| Failure::run(format!("cannot follow the parent process: {error}")))?;
    // If the parent ended before the request, the signal never arrives. The check compares process ids: an orphan's new
    // parent may be process 1, but so may the parent itself, in a container.
    let now = getppid().map(|now| now.as_raw_nonzero().get().cast_unsigned());
    match now == Some(parent) {
        true => Ok(()),
        false => Err(Failure::run("the parent process has ended")),
    }
}

/// Builds the runtime that waits for sockets, signals and timers on the calling thread.
pub fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::run(format!("cannot start: {error}")))
}

/// When the process started, on the clock that never jumps and on that of the day.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessStart {
    pub(crate) instant: Instant,
    pub(crate) time: SystemTime,
}

/// Returns when the process started: at the first call, with which serving begins.
pub(crate) fn started() -> ProcessStart {
    static STARTED: OnceLock<ProcessStart> = OnceLock::new();
    *STARTED.get_or_init(|| ProcessStart {
        instant: Instant::now(),
        time: SystemTime::now(),
    })
}
