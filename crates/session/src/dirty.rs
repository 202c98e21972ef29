//! The dirty log, while the guest moves to another host: which of its vrings mark what, and when that changes (vhost-user
//! "Migration").
//!
//! Bit 26 of the features has everything marked that requests write, and a flag of SET_VRING_ADDR has writes to that vring's used
//! ring marked. QEMU sets and clears the feature first, Cloud Hypervisor clears it last. No message takes a log away: when the
//! guest stays here after all, nothing is marked in it any more. Cloud Hypervisor replaces the log for each pass over the
//! guest's memory.

use std::fs::File;
use std::sync::Arc;

use cleave_guest::{Allowance, DirtyLog, Memory, VringLog};

use crate::MessageRefusal;
use crate::vrings::{UserAddrs, Vrings};

/// The log of a device.
#[derive(Debug, Default)]
pub(crate) struct SessionLog {
    /// QEMU starts vrings again without one if the guest's move fails at its end, and a guest may acknowledge bit 26 by itself: then
    /// nothing is marked.
    log: Option<(Arc<DirtyLog>, LogSource)>,
    /// The frontend set bit 26.
    pub(crate) marks_all: bool,
}

/// Where a log lies, as the frontend said.
#[derive(Debug)]
pub(crate) struct LogSource {
    pub(crate) file: File,
    pub(crate) file_offset: u64,
    pub(crate) len_bytes: u64,
}

impl SessionLog {
    /// Returns the log if everything that requests write is marked there, which means that the guest moves.
    pub(crate) fn in_force(&self) -> Option<&DirtyLog> {
        let (log, _) = self.log.as_ref()?;
        self.marks_all.then_some(&**log)
    }

    /// Maps a log and takes it in place of the one that was there, which is returned.
    pub(crate) fn replace(
        &mut self,
        file: File,
        file_offset: u64,
        len_bytes: u64,
        memory: &Memory,
        allowance: Allowance,
    ) -> Result<SessionLog, MessageRefusal> {
        let copy = file
            .try_clone()
            .map_err(|error| MessageRefusal::not_copied(&error))?;
        let log = DirtyLog::map_in(file, file_offset, len_bytes, allowance);
        let log = log.map_err(|error| MessageRefusal::message(format!("a dirty log: {error}")))?;
        if !log.covers(memory) {
            return Err(MessageRefusal::message(format!(
                "a dirty log of {len_bytes} bytes, which has no bits for the end of the guest's memory"
            )));
        }
        let next = SessionLog {
            log: Some((
                log,
                LogSource {
                    file: copy,
                    file_offset,
                    len_bytes,
                },
            )),
            marks_all: self.marks_all,
        };
        Ok(std::mem::replace(self, next))
    }

    /// Returns where the log lies.
    pub(crate) fn source(&self) -> Option<&LogSource> {
        self.log.as_ref().map(|(_, source)| source)
    }

    /// Forgets the log. Bit 26 stays with the other features.
    pub(crate) fn forget(&mut self) {
        self.log = None;
    }

    /// Returns what a vring marks.
    pub(crate) fn of_vring(&self, addrs: UserAddrs) -> Option<Box<VringLog>> {
        let (log, _) = self.log.as_ref()?;
        let marks = self.marks_all || addrs.used_log.is_some();
        marks.then(|| Box::new(VringLog::new(log.clone(), addrs.used_log, self.marks_all)))
    }

    /// Refuses that pages of this memory have no bit in the log in force: writes to them would be missing on the other host. While no
    /// vring runs it may be that of an earlier move, after which the guest got more memory. It is forgotten then, because QEMU
    /// starts the vrings before it sends the next one.
    pub(crate) fn fit(&mut self, memory: &Memory, vrings: &Vrings) -> Result<(), MessageRefusal> {
        if self.in_force().is_none_or(|log| log.covers(memory)) {
            return Ok(());
        }
        if vrings.any_running() {
            return Err(MessageRefusal::message(
                "memory beyond the end of the dirty log",
            ));
        }
        self.forget();
        Ok(())
    }

    /// Refuses to go on if marks were lost, because the guest would continue elsewhere without what was written here.
    pub(crate) fn check_kept(&self) -> Result<(), MessageRefusal> {
        match self.log.as_ref().is_some_and(|(log, _)| log.is_lost()) {
            false => Ok(()),
            true => Err(MessageRefusal::connection(
                "the file of the dirty log was cut, or its file system is full",
            )),
        }
    }
}
