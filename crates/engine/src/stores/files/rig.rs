//! Test hooks of a file store: disable its methods, and replace results of the kernel.

use super::Files;
use crate::ops::step::{FileOp, Method, Methods};
use crate::ops::table::Entry;

/// Replaces the kernel's result, given a running number and the op.
pub(crate) type Mangle = fn(u64, &Entry<FileOp>, i32) -> i32;
/// Like `Mangle`, for results of the polled ring.
pub(crate) type PolledMangle = fn(u64, i32) -> i32;

/// The active replacements, and how many results each has seen.
#[derive(Debug, Default)]
pub(super) struct Rig {
    mangle: Option<(Mangle, u64)>,
    polled_mangle: Option<(PolledMangle, u64)>,
    refusals: u32,
    /// How many steps this thread has submitted itself, and their bytes.
    submitted: (u32, u64),
    /// Bytes that it has copied between buffers and guest memory.
    copied: u64,
}

impl Rig {
    pub(super) fn count_copied(&mut self, bytes: u64) {
        self.copied += bytes;
    }

    pub(super) fn count(&mut self, steps: u32, bytes: u64) {
        self.submitted.0 += steps;
        self.submitted.1 += u64::from(steps) * bytes;
    }

    /// Returns true if the ring is to refuse this entry.
    pub(super) fn refuses(&mut self) -> bool {
        let refuses = self.refusals > 0;
        self.refusals = self.refusals.saturating_sub(1);
        refuses
    }
}

impl Files {
    /// Acts as if the store had refused everything but reads and writes.
    pub(crate) fn forget_methods(&mut self) {
        self.leg_mut(0).methods = Methods {
            command: false,
            punch: false,
            zero_range: false,
        };
    }

    /// Acts like a kernel without the discard command.
    pub(crate) fn forget_command(&mut self) {
        self.leg_mut(0).methods.forget(Method::Command);
    }

    /// Acts like a ring that takes none of the next `count` entries.
    pub(crate) fn refuse_entries(&mut self, count: u32) {
        self.rig.refusals = count;
    }

    /// Returns how many steps this thread has submitted itself since the last call, and their bytes.
    pub(crate) fn take_submitted(&mut self) -> (u32, u64) {
        std::mem::take(&mut self.rig.submitted)
    }

    /// Returns how many bytes this thread has copied since the last call.
    pub(crate) fn take_copied(&mut self) -> u64 {
        std::mem::take(&mut self.rig.copied)
    }

    /// Acts as if each copy were the first access to a page of guest memory, which takes long.
    pub(crate) fn hurry(&mut self) {
        self.lap.hurry();
    }

    pub(crate) fn is_syncing(&self) -> bool {
        self.legs.iter().any(|leg| leg.syncs.leader.is_some())
    }

    /// Returns true if threads of the kernel have reads or writes to run.
    pub(crate) fn delegates(&self) -> bool {
        !self.delegated.is_idle()
    }

    pub(crate) fn has_all_buffers(&self) -> bool {
        self.pool.has_all()
    }

    pub(crate) fn mangle(&mut self, mangle: Mangle) {
        self.rig.mangle = Some((mangle, 0));
    }

    pub(super) fn mangled(&mut self, index: u16, result: i32) -> i32 {
        let Some((mangle, number)) = &mut self.rig.mangle else {
            return result;
        };
        *number += 1;
        mangle(*number, self.ops.get(index), result)
    }

    pub(crate) fn mangle_polled(&mut self, mangle: PolledMangle) {
        self.rig.polled_mangle = Some((mangle, 0));
    }

    pub(super) fn polled_mangled(&mut self, result: i32) -> i32 {
        let Some((mangle, number)) = &mut self.rig.polled_mangle else {
            return result;
        };
        *number += 1;
        mangle(*number, result)
    }

    /// Completions of the polled ring since the replacement was set, refusals included.
    pub(crate) fn polled_seen(&self) -> u64 {
        self.rig.polled_mangle.map_or(0, |(_, number)| number)
    }
}
