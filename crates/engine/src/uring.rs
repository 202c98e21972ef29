//! The real engine: io_uring.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cleave_blk::Op;
use cleave_disk::Disk;
use cleave_guest::Memory;

use crate::{Engine, Event, Wait};

/// Why no engine could be made.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Set-up failed; the message names the sysctl, limit or kernel that is in the way.
    #[error("{remedy}: {source}")]
    Setup {
        /// What to do.
        remedy: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Ops through io_uring for files and block devices; RAM and null disks are done on the spot, with
/// the ring only for waiting.
#[derive(Debug)]
pub struct Uring {}

impl Uring {
    /// Makes the ring, on the thread that will use it. `ops`: most ops in flight;
    /// `watches`, `bells`: how many slots of each (a worker asks for 257 and 512, most never used).
    pub fn new(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Uring, EngineError> {
        let _ = (disk, memory, ops, watches, bells);
        todo!()
    }

    /// Whether a ring can be made here at all, for a clear error at start.
    pub fn probe() -> Result<(), EngineError> {
        todo!()
    }
}

impl Engine for Uring {
    fn room(&self) -> usize {
        todo!()
    }
    fn in_flight(&self) -> usize {
        todo!()
    }
    fn push(&mut self, _op: Op<'_>, _token: u64) {
        todo!()
    }
    fn reap(&mut self) -> Option<Event> {
        todo!()
    }
    fn enter(&mut self, _wait: Wait) -> io::Result<()> {
        todo!()
    }
    fn watch(&mut self, _slot: u16, _fd: OwnedFd) {
        todo!()
    }
    fn unwatch(&mut self, _slot: u16) {
        todo!()
    }
    fn set_bell(&mut self, _slot: u16, _fd: Option<OwnedFd>) {
        todo!()
    }
    fn ring(&mut self, _slot: u16) {
        todo!()
    }
    fn bind(&mut self, _memory: Arc<Memory>) {
        todo!()
    }
    fn is_settled(&self) -> bool {
        todo!()
    }
}
