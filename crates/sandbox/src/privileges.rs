//! Capabilities, and programs that would give some back.

use std::io;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// Privileges that stay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// None.
    Nothing,
    /// CAP_IPC_LOCK, if the process has it: its memory is not counted against the limit of locked memory.
    LockedMemory,
}

/// Empties every set of capabilities of the calling thread but for what is kept. No program that it executes can get one back.
pub(crate) fn drop_all(keep: Keep) -> io::Result<()> {
    set_no_new_privs(true)?;
    // Fails on kernels without ambient capabilities, where there are none to clear.
    let _ = clear_ambient_capability_set();
    empty_bounding_set()?;
    let kept = match keep {
        Keep::Nothing => CapabilitySet::empty(),
        Keep::LockedMemory => capabilities(None)?.permitted & CapabilitySet::IPC_LOCK,
    };
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, sets)?;
    Ok(())
}

/// Which a user without privileges cannot do.
pub(crate) fn empty_bounding_set() -> io::Result<()> {
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // A process without CAP_SETPCAP cannot change the bounding set, and with no_new_privs it needs not: nothing can be
            // gained from it. INVAL: this kernel does not have that capability yet.
            Ok(()) | Err(Errno::PERM | Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
