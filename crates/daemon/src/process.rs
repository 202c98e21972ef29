//! What the process asks of the kernel for itself, once, at start.

use rustix::process::{
    Resource, Rlimit, Signal, getppid, getrlimit, set_parent_process_death_signal, setrlimit,
};

use crate::failure::Failure;

/// Takes as many descriptors as the process may have: each vring brings three, and a memory table up
/// to one per region.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Staying where we are is no reason not to serve.
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::debug!("cannot raise the limit of open files: {error}");
    }
}

/// Asks for SIGTERM when the process that started this one ends.
pub(crate) fn end_with_parent() -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| Failure::run(format!("cannot follow the parent process: {error}")))?;
    // It may have ended before the request: then nobody would ever send the signal.
    match getppid() {
        Some(parent) if !parent.is_init() => Ok(()),
        _ => Err(Failure::run("the parent process has ended")),
    }
}
