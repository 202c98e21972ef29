//! The dirty log as a frontend keeps it: a bit for each page that the daemon has written (vhost-user "Migration").

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::memory::PAGE_BYTES;
use crate::{Error, GuestMemory, RegionOptions};

/// A log, shared with the daemon.
#[derive(Debug)]
pub struct WriteLog {
    bits: Arc<GuestMemory>,
    len_bytes: u64,
}

impl WriteLog {
    /// Makes a log for all pages of a memory, in as many bytes as needed: a multiple of nothing.
    pub fn new(memory: &GuestMemory) -> Result<WriteLog, Error> {
        let len_bytes = memory.end().div_ceil(PAGE_BYTES).div_ceil(8);
        let file_bytes = len_bytes.next_multiple_of(PAGE_BYTES);
        let bits = GuestMemory::new(&[RegionOptions::new(0, file_bytes)])?;
        Ok(WriteLog { bits, len_bytes })
    }

    /// Returns its length in bytes. It begins at the start of its file.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns its file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bits.fd(0)
    }

    /// Returns the pages that are marked.
    pub fn pages(&self) -> BTreeSet<u64> {
        pages_of(&self.bits.bytes(0, self.len_bytes as usize))
    }

    /// Returns the pages that are marked and clears their marks, while the daemon goes on to mark pages.
    pub fn take_pages(&self) -> BTreeSet<u64> {
        pages_of(&self.bits.take_bytes(0, self.len_bytes as usize))
    }
}

fn pages_of(bits: &[u8]) -> BTreeSet<u64> {
    let bytes = (0..).zip(bits).filter(|(_, byte)| **byte != 0);
    let pages = bytes.flat_map(|(at, byte)| {
        let marked = (0..8).filter(move |bit| byte & 1 << bit != 0);
        marked.map(move |bit| 8 * at + bit)
    });
    pages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_has_a_bit_for_the_last_page_and_loses_its_marks_once() {
        let memory = GuestMemory::new(&[RegionOptions::new(0x1_0000, 0x9000)]).unwrap();
        let log = WriteLog::new(&memory).unwrap();
        // Pages 16 to 24.
        assert_eq!(log.len_bytes(), 4);
        log.bits.write(2, &[0b1000_0001, 1]);
        let marked = BTreeSet::from([16, 23, 24]);
        assert_eq!(log.pages(), marked);
        assert_eq!(log.take_pages(), marked);
        assert_eq!(log.pages(), BTreeSet::new());
    }

    #[test]
    fn pages_that_differ_from_a_copy_are_found() {
        let plans = [
            RegionOptions::new(0, 0x2000),
            RegionOptions::new(0x10_0000, 0x2000),
        ];
        let memory = GuestMemory::new(&plans).unwrap();
        let before = memory.copy();
        assert_eq!(memory.changed_pages(&before), BTreeSet::new());
        memory.write(0xfff, &[1]);
        memory.write(0x10_1fff, &[1]);
        assert_eq!(memory.changed_pages(&before), BTreeSet::from([0, 0x101]));
    }
}
