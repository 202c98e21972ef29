//! Shared parts of this crate's tests: memory from memfds, and a driver that acts like a guest.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cleave_blk::Segment;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::{Memory, RegionSpec, VringLayout};

/// Locks out other tests. Held by each test that cuts memory off or runs loom. Loom's coroutines have their own SIGBUS handler,
/// which runs before ours and waits for the backtrace lock; a model that panics holds that lock and does not run while the
/// handler waits.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A model that panics on purpose poisons it.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a memory file.
pub(crate) fn file(len_bytes: u64) -> File {
    let fd: OwnedFd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len_bytes).unwrap();
    File::from(fd)
}

/// Returns a region with a memory file of its own.
pub(crate) fn region(guest_addr: u64, len_bytes: u64) -> RegionSpec {
    RegionSpec {
        guest_addr,
        user_addr: 0x7f00_0000_0000 + guest_addr,
        len_bytes,
        file_offset: 0,
        file: file(len_bytes),
    }
}

/// Maps a table of one region at 0.
pub(crate) fn memory(len_bytes: u64) -> Arc<Memory> {
    Memory::new(vec![region(0, len_bytes)]).unwrap()
}

pub(crate) fn segment(addr: u64, len: u32) -> Segment {
    Segment { addr, len }
}

pub(crate) fn write(memory: &Memory, addr: u64, bytes: &[u8]) {
    let whole = [segment(addr, bytes.len() as u32)];
    assert_eq!(memory.copy_out(&whole, bytes), Ok(bytes.len()));
}

pub(crate) fn read<const N: usize>(memory: &Memory, addr: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let whole = [segment(addr, N as u32)];
    assert_eq!(memory.copy_in(&whole, &mut bytes), Ok(N));
    bytes
}

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// A descriptor as the driver writes it: address, length, flags, next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Desc(
    pub(crate) u64,
    pub(crate) u32,
    pub(crate) u16,
    pub(crate) u16,
);

impl Desc {
    pub(crate) fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.2.to_le_bytes());
        bytes[14..].copy_from_slice(&self.3.to_le_bytes());
        bytes
    }
}

/// Driver side of a vring. It shares no code with the device side.
pub(crate) struct Driver {
    pub(crate) memory: Arc<Memory>,
    pub(crate) layout: VringLayout,
    /// Next available index.
    pub(crate) avail: u16,
    /// Next used entry to read.
    pub(crate) used: u16,
}

impl Driver {
    /// Rings from address `at` on, with positions at `base`.
    pub(crate) fn new(memory: &Arc<Memory>, at: u64, size: u16, base: u16) -> Driver {
        let avail_addr = at + 16 * u64::from(size);
        let used_addr = (avail_addr + 6 + 2 * u64::from(size)).next_multiple_of(4);
        let layout = VringLayout {
            size,
            desc_addr: at,
            avail_addr,
            used_addr,
        };
        let driver = Driver {
            memory: memory.clone(),
            layout,
            avail: base,
            used: base,
        };
        driver.index(avail_addr + 2).store(base, Ordering::SeqCst);
        driver.index(used_addr + 2).store(base, Ordering::SeqCst);
        driver
    }

    pub(crate) fn index(&self, addr: u64) -> &AtomicU16 {
        let host = self.memory.host_range(addr, 2).unwrap();
        // SAFETY: mapped while `self.memory` lives; even addresses only in these tests.
        unsafe { AtomicU16::from_ptr(host.cast()) }
    }

    pub(crate) fn set(&self, index: u16, desc: Desc) {
        let addr = self.layout.desc_addr + 16 * u64::from(index);
        write(&self.memory, addr, &desc.bytes());
    }

    /// Makes `head` available; the index is stored by `publish`.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail % self.layout.size);
        self.index(self.layout.avail_addr + 4 + 2 * slot)
            .store(head, Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
    }

    pub(crate) fn publish(&self) {
        self.index(self.layout.avail_addr + 2)
            .store(self.avail, Ordering::SeqCst);
    }

    pub(crate) fn avail_flags(&self) -> &AtomicU16 {
        self.index(self.layout.avail_addr)
    }

    pub(crate) fn used_flags(&self) -> &AtomicU16 {
        self.index(self.layout.used_addr)
    }

    pub(crate) fn used_event(&self) -> &AtomicU16 {
        self.index(self.layout.avail_addr + 4 + 2 * u64::from(self.layout.size))
    }

    pub(crate) fn avail_event(&self) -> &AtomicU16 {
        self.index(self.layout.used_addr + 4 + 8 * u64::from(self.layout.size))
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.index(self.layout.used_addr + 2).load(Ordering::SeqCst)
    }

    /// Returns the next used entry: head and length.
    pub(crate) fn reap(&mut self) -> Option<(u32, u32)> {
        if self.used == self.used_index() {
            return None;
        }
        let slot = u64::from(self.used % self.layout.size);
        let entry: [u8; 8] = read(&self.memory, self.layout.used_addr + 4 + 8 * slot);
        self.used = self.used.wrapping_add(1);
        let (head, len) = entry.split_at(4);
        Some((
            u32::from_le_bytes(head.try_into().unwrap()),
            u32::from_le_bytes(len.try_into().unwrap()),
        ))
    }
}

thread_local! {
    /// The number of stores until this thread is stopped.
    static STORES_LEFT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Runs `run` and stops it after `stores` stores to shared memory, as if the process had died then. `false`:
/// it finished before.
pub(crate) fn die_after(stores: u32, run: impl FnOnce()) -> bool {
    STORES_LEFT.set(Some(stores));
    let ended = catch_unwind(AssertUnwindSafe(|| {
        stop_after_stores();
        run();
    }));
    STORES_LEFT.set(None);
    match ended {
        Ok(()) => false,
        Err(thrown) if thrown.is::<Died>() => true,
        Err(thrown) => resume_unwind(thrown),
    }
}

struct Died;

pub(crate) fn stop_after_stores() {
    match STORES_LEFT.get() {
        None => {}
        Some(0) => {
            STORES_LEFT.set(None);
            resume_unwind(Box::new(Died));
        }
        Some(left) => STORES_LEFT.set(Some(left - 1)),
    }
}
