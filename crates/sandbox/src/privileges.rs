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

/// Root's rights that opening disks and making sockets for others takes: to change the group of a socket, and to open files of
/// other users. Landlock confines them to the folders within reach.
const OPENING: CapabilitySet = CapabilitySet::CHOWN.union(CapabilitySet::DAC_OVERRIDE);

/// Those for the threads of a library, which read configuration and keys of other users.
const READING: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;

/// Those for becoming another user. libc ends a process of which one thread cannot.
const BECOMING: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// Empties every set of capabilities of the calling thread but for what is kept. No program that it executes can get one back.
pub(crate) fn drop_all(keep: Keep) -> io::Result<()> {
    seal()?;
    keep_only(kept(keep)?)
}

/// Empties the capabilities of a thread that opens disks but for what that needs and what is kept.
pub(crate) fn drop_for_opening(keep: Keep) -> io::Result<()> {
    seal()?;
    let permitted = capabilities(None)?.permitted;
    keep_only(kept(keep)? | (permitted & OPENING))
}

/// Empties the capabilities of the threads of a library but for what they need.
pub(crate) fn drop_for_library(becomes_another: bool) -> io::Result<()> {
    seal()?;
    let wanted = match becomes_another {
        true => READING | BECOMING,
        false => READING,
    };
    keep_only(capabilities(None)?.permitted & wanted)
}

/// Narrows a thread that inherited [`drop_for_opening`].
pub(crate) fn drop_opening(keep: Keep) -> io::Result<()> {
    keep_only(kept(keep)?)
}

/// Makes sure that no program gives a capability back.
fn seal() -> io::Result<()> {
    set_no_new_privs(true)?;
    // Fails on kernels without ambient capabilities, where there are none to clear.
    let _ = clear_ambient_capability_set();
    empty_bounding_set()
}

fn kept(keep: Keep) -> io::Result<CapabilitySet> {
    Ok(match keep {
        Keep::Nothing => CapabilitySet::empty(),
        Keep::LockedMemory => capabilities(None)?.permitted & CapabilitySet::IPC_LOCK,
    })
}

fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// Empties the bounding set, which a user without privileges cannot do.
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
