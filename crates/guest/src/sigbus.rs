//! A frontend may cut the file behind guest memory while we access it; the CPU then raises SIGBUS. The handler
//! replaces the page with anonymous zeroes, marks the mapping lost and returns, so that the access completes (with
//! zeroes) and the owner finds out by [`crate::Memory::is_lost`]. A SIGBUS anywhere else goes to the handler that was
//! installed before (the standard library's stack guard, and finally the default action, which ends the process).
//!
//! How the handler stays safe while other threads map and unmap:
//!
//! - It uses only [`TABLE`], a static array of atomics that is never freed, and makes one or two `mmap`
//!   calls; it neither takes a lock nor allocates.
//! - The faulting thread holds its mapping (by `Arc<Memory>`) during the access, and so during the handler:
//!   its table entry is complete and does not change. An entry that changes meanwhile belongs to another
//!   mapping and is skipped; a sequence number shows the change.
//! - So no thread unmaps the range in which the handler maps with `MAP_FIXED`. An address that was unmapped
//!   and reused is in no entry, because an entry is removed before its mapping is.
//! - Two threads that fault on one page both replace it. The later one discards the other's stores, but that
//!   memory is lost anyway.
//! - The kernel's own accesses (io_uring) never reach the handler: they fail with EFAULT.

use std::io;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};
use std::sync::{Mutex, OnceLock, PoisonError};

use libc::{c_int, c_void, siginfo_t};

use crate::room::MAPPINGS_MAX;

/// Most mappings at a time.
const ENTRIES: usize = MAPPINGS_MAX;

/// One mapping in the handler's table.
struct Entry {
    /// Odd while the entry changes.
    sequence: AtomicU32,
    lost: AtomicBool,
    start: AtomicUsize,
    /// Equal to `start` in a free entry.
    end: AtomicUsize,
    /// Bytes that are replaced at once.
    page_bytes: AtomicUsize,
}

impl Entry {
    const fn free() -> Entry {
        Entry {
            sequence: AtomicU32::new(0),
            lost: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(0),
        }
    }

    /// Changes the entry; callers hold the lock of [`SLOTS`].
    fn set(&self, start: usize, end: usize, page_bytes: usize) {
        let sequence = self.sequence.load(Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Relaxed);
        // The odd number must be visible before any of the new fields.
        fence(Release);
        self.lost.store(false, Relaxed);
        self.start.store(start, Relaxed);
        self.end.store(end, Relaxed);
        self.page_bytes.store(page_bytes, Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Release);
    }

    /// Returns the mapping's range and page size, if it contains `addr` and did not change meanwhile.
    fn holding(&self, addr: usize) -> Option<(usize, usize, usize)> {
        let before = self.sequence.load(Acquire);
        let start = self.start.load(Relaxed);
        let end = self.end.load(Relaxed);
        let page_bytes = self.page_bytes.load(Relaxed);
        // The fields must be read before the number is read again.
        fence(Acquire);
        let stable = before.is_multiple_of(2) && before == self.sequence.load(Relaxed);
        (stable && start <= addr && addr < end).then_some((start, end, page_bytes))
    }
}

static TABLE: [Entry; ENTRIES] = [const { Entry::free() }; ENTRIES];
/// The number of entries that were ever used; the handler searches no further.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Free entries below `USED`. The handler never takes this lock.
static SLOTS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// The number of watched mappings that lost a page; briefly too high, never too low. While it is 0, no thread
/// has to check its own entries. Mappings that are gone do not count: otherwise one bad frontend would slow
/// down all later ones.
static LOST: AtomicUsize = AtomicUsize::new(0);
/// How often a mapping was marked, twice for each mark.
static MARKS: AtomicUsize = AtomicUsize::new(0);
/// The handler that was installed before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A watched mapping. It must be dropped before the mapping is unmapped.
#[derive(Debug)]
pub(crate) struct MappingWatch {
    slot: usize,
}

impl MappingWatch {
    /// Watches `len_bytes` bytes at `start`, of which a fault replaces `page_bytes`: a page, or all.
    pub(crate) fn new(
        start: usize,
        len_bytes: usize,
        page_bytes: usize,
    ) -> io::Result<MappingWatch> {
        install()?;
        let mut free = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        let used = USED.load(Relaxed);
        let slot = match free.pop() {
            Some(slot) => slot,
            None if used < ENTRIES => used,
            None => return Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        };
        TABLE[slot].set(start, start.saturating_add(len_bytes), page_bytes);
        USED.store(used.max(slot + 1), Release);
        Ok(MappingWatch { slot })
    }

    /// Returns true if a page of the mapping was replaced.
    pub(crate) fn is_lost(&self) -> bool {
        TABLE[self.slot].lost.load(Acquire)
    }
}

impl Drop for MappingWatch {
    fn drop(&mut self) {
        let mut free = SLOTS.lock().unwrap_or_else(PoisonError::into_inner);
        // No thread touches the mapping any more, so the mark cannot change.
        if self.is_lost() {
            LOST.fetch_sub(1, SeqCst);
        }
        TABLE[self.slot].set(0, 0, 0);
        free.push(self.slot);
    }
}

/// Returns true if any mapping of the process has lost a page.
#[inline]
pub(crate) fn any_lost() -> bool {
    LOST.load(Acquire) != 0
}

/// Returns a number that changes before a mapping is marked lost, and again afterwards. So mappings that are found sound after it
/// was read are sound as long as it stays.
#[inline]
pub(crate) fn marks() -> usize {
    MARKS.load(Acquire)
}

/// Installs the handler once for the process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = INSTALLED.get_or_init(|| {
        try_install().map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    done.map_err(io::Error::from_raw_os_error)
}

fn try_install() -> io::Result<()> {
    // SAFETY: an all-zero `sigaction` is a valid value: default action, empty mask, no flags.
    let mut previous: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: a null action only queries; `previous` is ours to be written.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Stored before the handler can run, because the handler may need it at once.
    let _ = PREVIOUS.set(previous);
    // SAFETY: as above.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
    // ONSTACK: the previous handler reports stack overflows and needs the alternative stack.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO requires and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // The interrupted code may be between a system call and reading errno.
    // SAFETY: errno of the running thread always exists.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid siginfo; `si_addr` is set for the codes that `handle_fault` checks, which
    // only the kernel can send (not `kill`).
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if !handle_fault(code, addr) {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Handles the fault if it is in guest memory. Returns whether it did.
fn handle_fault(code: c_int, addr: usize) -> bool {
    match code {
        // The access cannot continue: its page is missing (a cut or full file) or broken.
        libc::BUS_ADRERR | libc::BUS_OBJERR | libc::BUS_MCEERR_AR => replace(addr),
        // A report of a broken page that no thread is touching. The interrupted thread need not hold the
        // mapping, so nothing may be mapped here; a thread that touches the page gets the other code.
        libc::BUS_MCEERR_AO => find(addr).is_some(),
        _ => false,
    }
}

/// Finds the entry that contains `addr`, with its range and page size.
fn find(addr: usize) -> Option<(&'static Entry, (usize, usize, usize))> {
    let used = USED.load(Acquire).min(ENTRIES);
    TABLE[..used]
        .iter()
        .find_map(|entry| Some((entry, entry.holding(addr)?)))
}

/// Replaces the page of `addr` with zeroes. `false`: it is not guest memory, or the kernel refused.
fn replace(addr: usize) -> bool {
    let Some((entry, (start, end, page_bytes))) = find(addr) else {
        return false;
    };
    // Marked before the zeroes can be seen: a thread that reads them without a fault of its own and then
    // checks the mark must find it. Counted before it is marked, so that a thread that finds the mark set
    // (two threads may fault at once) can rely on the count.
    if !entry.lost.load(SeqCst) {
        LOST.fetch_add(1, SeqCst);
        MARKS.fetch_add(1, SeqCst);
        if entry.lost.swap(true, SeqCst) {
            LOST.fetch_sub(1, SeqCst);
        }
        // Again, for a thread that has read the first number and found no mark yet.
        MARKS.fetch_add(1, SeqCst);
    }
    let page = addr - (addr - start) % page_bytes;
    // Not all, unless the owner has said so, because its neighbours may be sound (a poisoned page, a full tmpfs). Each replacement
    // may cost two mappings, and a process has only about 65 thousand. When they are used up, zeroes over the
    // whole range need none.
    zero_pages(page, page_bytes.min(end - page)) || zero_pages(start, end - start)
}

fn zero_pages(addr: usize, len_bytes: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range lies in a mapping of guest memory that the interrupted thread keeps alive (see this
    // module's documentation). There are no references into it, only raw pointers, which stay valid. `mmap`
    // is a plain system call and safe in a handler.
    let mapped = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(addr as *mut c_void, len_bytes, protection, flags, -1, 0)
    };
    mapped != libc::MAP_FAILED
}

/// Passes a SIGBUS outside guest memory to the previous handler, or ends the process by it.
fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get().filter(|previous| {
        previous.sa_sigaction != libc::SIG_DFL && previous.sa_sigaction != libc::SIG_IGN
    });
    let Some(previous) = previous else {
        // SAFETY: back to the default action. The signal is blocked during our handler; it is delivered again
        // on return, by `raise` or by the repeated access, and ends the process.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::raise(signal);
        }
        return;
    };
    if previous.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: installed by `sigaction` with SA_SIGINFO, so it is a function of this signature.
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
            unsafe { std::mem::transmute(previous.sa_sigaction) };
        handler(signal, info, context);
    } else {
        // SAFETY: installed without SA_SIGINFO, so it is a function of this signature.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(previous.sa_sigaction) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use cleave_blk::Segment;

    use super::*;
    use crate::{Memory, RegionSpec};

    const NAME: &str = "sigbus::tests::later_mappings_pay_nothing_for_a_loss";

    /// Runs in a process of its own, where no other test loses memory.
    #[test]
    fn later_mappings_pay_nothing_for_a_loss() {
        if std::env::var_os(NAME).is_none() {
            let test = std::env::current_exe().unwrap();
            let status = Command::new(test)
                .args(["--exact", NAME])
                .env(NAME, "1")
                .status();
            assert!(status.unwrap().success());
            return;
        }
        for pages in 1..4 {
            let file = tempfile::tempfile().unwrap();
            file.set_len(pages * 0x1000).unwrap();
            let memory = Memory::new(vec![RegionSpec {
                guest_addr: 0,
                user_addr: 0,
                len_bytes: pages * 0x1000,
                file_offset: 0,
                file: file.try_clone().unwrap(),
            }])
            .unwrap();
            assert!(!any_lost());
            file.set_len(0).unwrap();
            let whole = [Segment {
                addr: 0,
                len: pages as u32 * 0x1000,
            }];
            let mut bytes = vec![0; pages as usize * 0x1000];
            assert!(memory.copy_in(&whole, &mut bytes).is_err());
            assert!(any_lost() && memory.is_lost());
            drop(memory);
            assert!(!any_lost());
        }
    }
}
