//! The io_uring itself: set-up, restrictions, the file table, and entering the kernel.
//!
//! Unsafe for two reasons. The queue halves borrow from the `IoUring`, which therefore lives in a
//! leaked box that `Drop` takes back after them. And an entry pushed makes the kernel follow its
//! pointers until its completion: `push` passes that duty on to its caller.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{
    CompletionQueue, EnterFlags, IoUring, SubmissionQueue, Submitter, cqueue, opcode, squeue,
    squeue::Flags,
};

use crate::EngineError;

/// io_uring_register opcodes that stay allowed once the ring runs (linux/io_uring.h): changing slots
/// of the file table, and letting go of the table and of the ring's own registration at the end.
const UNREGISTER_FILES: u8 = 3;
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_RING_FDS: u8 = 20;
const UNREGISTER_RING_FDS: u8 = 21;

/// User data: the top byte says what a completion is of; 0 is an op, by the numbers of its store and in it.
pub(crate) mod tag {
    pub(crate) const MASK: u64 = 0xff << 56;
    pub(crate) const OP: u64 = 0;
    pub(crate) const WATCH: u64 = 1 << 56;
    pub(crate) const IGNORED: u64 = 2 << 56;
}

/// Pause where the kernel could take nothing although there is nothing to reap.
const SHORT_PAUSE: Duration = Duration::from_micros(200);

/// Pauses before a ring is given up for which the kernel has no memory. It wants blocks of many pages, which a machine
/// full of cached files lacks for moments and then has again; and what rings that have ended held comes back later.
const MEMORY_PAUSES_MS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// How a ring is set up.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// Submission entries; more than that in one lap cost another system call, never an error.
    pub(crate) submissions: u32,
    /// Completion entries: every op, every watch, and slack.
    pub(crate) completions: u32,
    /// Slots of the file table.
    pub(crate) files: u32,
    /// The only operations that the ring will take, whoever gets to write its queue (seccomp does not
    /// see them).
    pub(crate) opcodes: &'a [u8],
    /// Ways to set it up, best first.
    pub(crate) levels: &'a [Level],
    /// How it hears of an op's end.
    pub(crate) ends: Ends,
}

/// How a ring hears that a device has ended an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ends {
    /// The device interrupts.
    Told,
    /// It has to be asked, by entering the kernel; it takes reads and writes past the page cache only
    /// (IORING_SETUP_IOPOLL).
    Asked,
}

/// Whether and how long `enter` may sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sleep {
    No,
    For(Duration),
    Forever,
}

/// The purpose of a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// An op.
    Io,
    /// A signal only: the kernel is told (6.15), or an idle disk would count as a CPU waiting for I/O.
    Signal,
}

/// A ring of one thread.
pub(crate) struct Ring {
    submitter: ManuallyDrop<Submitter<'static>>,
    sq: ManuallyDrop<SubmissionQueue<'static>>,
    cq: ManuallyDrop<CompletionQueue<'static>>,
    uring: NonNull<IoUring>,
    /// The kernel knows NO_IOWAIT.
    can_idle: bool,
    enters: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("enters", &self.enters)
            .finish_non_exhaustive()
    }
}

/// Ways to set a ring up, best first. DEFER_TASKRUN (6.1): completions are processed when this thread
/// enters, not in the middle of its work; its flag in the queue tells a polling loop that entering
/// pays. Before that, COOP_TASKRUN (5.19) at least spares the interrupts.
pub(crate) const LEVELS: [Level; 3] = [
    Level::Deferred,
    Level::CooperativeSingle,
    Level::Cooperative,
];

/// One way to set a ring up.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Level {
    /// SINGLE_ISSUER and DEFER_TASKRUN.
    Deferred,
    /// SINGLE_ISSUER (6.0) and COOP_TASKRUN.
    CooperativeSingle,
    /// COOP_TASKRUN.
    Cooperative,
}

impl Ring {
    /// Sets a ring up on the thread that will use it: restricted, enabled, and registered.
    pub(crate) fn new(plan: &Plan<'_>) -> Result<Ring, EngineError> {
        let uring = while_short_of_memory(|| build(plan), std::thread::sleep);
        let uring = uring.map_err(EngineError::setup)?;
        let can_idle = uring.params().is_feature_no_iowait();
        let uring = NonNull::from(Box::leak(Box::new(uring)));
        // SAFETY: the box is leaked and nothing else refers to it; `Drop` takes it back only after
        // the three parts are gone.
        let (submitter, sq, cq) = unsafe { (*uring.as_ptr()).split() };
        let mut ring = Ring {
            submitter: ManuallyDrop::new(submitter),
            sq: ManuallyDrop::new(sq),
            cq: ManuallyDrop::new(cq),
            uring,
            can_idle,
            enters: 0,
        };
        ring.furnish(plan).map_err(EngineError::setup)?;
        // Spares the descriptor look-up of each enter; a full table of those is no reason to fail.
        let _ = ring.submitter.register_ring_fd();
        Ok(ring)
    }

    /// File table, restrictions, then on. Restrictions can only be set while the ring is off.
    fn furnish(&mut self, plan: &Plan<'_>) -> io::Result<()> {
        self.submitter.register_files_sparse(plan.files)?;
        let mut allowed: Vec<_> = plan
            .opcodes
            .iter()
            .map(|op| Restriction::sqe_op(*op))
            .collect();
        allowed.push(Restriction::sqe_flags_required(Flags::FIXED_FILE.bits()));
        allowed.push(Restriction::sqe_flags_allowed(
            (Flags::FIXED_FILE | Flags::SKIP_SUCCESS).bits(),
        ));
        for register in [
            UNREGISTER_FILES,
            REGISTER_FILES_UPDATE,
            REGISTER_RING_FDS,
            UNREGISTER_RING_FDS,
        ] {
            allowed.push(Restriction::register_op(register));
        }
        self.submitter.register_restrictions(&mut allowed)?;
        self.submitter.register_enable_rings()
    }

    /// Puts a file into the table, or empties the slot. I/O in flight on the old file continues on it.
    pub(crate) fn set_file(&self, slot: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.submitter
            .register_files_update(slot, &[fd.unwrap_or(-1)])
            .map(drop)
    }

    /// Queues an entry; a full queue is submitted first. `false`: it is full and the kernel takes
    /// none now (out of memory); nothing was queued.
    ///
    /// # Safety
    ///
    /// Everything that the entry points to stays valid until its completion was seen.
    #[inline]
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        if unsafe { self.sq.push(entry) }.is_ok() {
            return true;
        }
        // An error shows again at the next enter, where it is reported.
        let _ = self.submit();
        // SAFETY: the caller's promise.
        unsafe { self.sq.push(entry) }.is_ok()
    }

    /// Submits what is queued, without looking for completions; a ring that has to ask for them looks.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.sq.sync();
        self.enters += 1;
        let result = self.submitter.submit();
        self.sq.sync();
        tolerate(result).map(drop)
    }

    /// Submits what is queued, has the kernel hand over what it holds back, and sleeps as told until
    /// there is a completion. No system call where there is nothing to do and no sleep.
    #[inline]
    pub(crate) fn enter(&mut self, sleep: Sleep, purpose: Purpose) -> io::Result<()> {
        self.sq.sync();
        if sleep == Sleep::No && self.sq.is_empty() && !self.sq.taskrun() && !self.sq.cq_overflow()
        {
            return Ok(());
        }
        self.enters += 1;
        let result = match sleep {
            Sleep::No => self.submitter.submit(),
            Sleep::Forever => self.wait(&SubmitArgs::new(), purpose),
            Sleep::For(time) => {
                let time = Timespec::from(time);
                self.wait(&SubmitArgs::new().timespec(&time), purpose)
            }
        };
        self.sq.sync();
        if tolerate(result)? == Entered::Short && sleep != Sleep::No && !self.has_completions() {
            // It did not sleep either, and the owner's loop would spin until there is memory.
            std::thread::sleep(SHORT_PAUSE);
        }
        Ok(())
    }

    fn wait(&self, args: &SubmitArgs<'_, '_>, purpose: Purpose) -> io::Result<usize> {
        if purpose == Purpose::Io || !self.can_idle {
            return self.submitter.submit_with_args(1, args);
        }
        let flags = EnterFlags::EXT_ARG | EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
        // At most the queue's size, which is a u32.
        let queued = self.sq.len() as u32;
        // SAFETY: the flags say that `args` is the extended argument, which it is, and the kernel
        // reads it during the call only.
        unsafe { self.submitter.enter(queued, 1, flags.bits(), Some(args)) }
    }

    /// The next completion, without a system call.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<cqueue::Entry> {
        if let Some(entry) = self.cq.next() {
            return Some(entry);
        }
        // Gives the entries read back to the kernel, and looks for new ones.
        self.cq.sync();
        self.cq.next()
    }

    /// Whether `complete` has something.
    #[inline]
    pub(crate) fn has_completions(&mut self) -> bool {
        if self.cq.is_empty() {
            self.cq.sync();
        }
        !self.cq.is_empty()
    }

    /// How often the kernel was entered.
    pub(crate) fn enters(&self) -> u64 {
        self.enters
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel takes a ring apart some time after it was closed. The files are let go now, or the
        // disk would stay locked for whoever opens it next.
        let _ = self.submitter.unregister_files();
        // The registration holds the ring alive until the thread ends.
        let _ = self.submitter.unregister_ring_fd();
        // SAFETY: each part is dropped once, here, before the ring that it borrows from; the box was
        // leaked in `new` and is taken back once.
        unsafe {
            ManuallyDrop::drop(&mut self.submitter);
            ManuallyDrop::drop(&mut self.sq);
            ManuallyDrop::drop(&mut self.cq);
            drop(Box::from_raw(self.uring.as_ptr()));
        }
    }
}

/// Filters out results of an enter that are no errors: a time-out, a signal, and a kernel that cannot take more before
/// completions are read or memory is there; what was not taken stays queued.
fn tolerate(result: io::Result<usize>) -> io::Result<Entered> {
    match result {
        Ok(_) => Ok(Entered::Done),
        Err(error) => match error.raw_os_error() {
            Some(libc::ETIME | libc::EINTR) => Ok(Entered::Done),
            Some(libc::EBUSY | libc::EAGAIN) => Ok(Entered::Short),
            _ => Err(error),
        },
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entered {
    Done,
    /// The kernel is short of memory or of room for completions.
    Short,
}

/// Attempts it again, after a pause, where there was no memory for it: at first, and then not for ever.
pub(crate) fn while_short_of_memory<T>(
    mut attempt: impl FnMut() -> io::Result<T>,
    mut pause: impl FnMut(Duration),
) -> io::Result<T> {
    for ms in MEMORY_PAUSES_MS {
        match attempt() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                pause(Duration::from_millis(ms));
            }
            outcome => return outcome,
        }
    }
    attempt()
}

fn build(plan: &Plan<'_>) -> io::Result<IoUring> {
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for level in plan.levels {
        match build_at(*level, plan) {
            Ok(uring) => return Ok(uring),
            // EINVAL is how a kernel says that it does not know a flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn build_at(level: Level, plan: &Plan<'_>) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder
        .dontfork()
        .setup_clamp()
        .setup_submit_all()
        .setup_r_disabled()
        .setup_taskrun_flag();
    builder.setup_cqsize(plan.completions);
    match level {
        Level::Deferred => builder.setup_single_issuer().setup_defer_taskrun(),
        Level::CooperativeSingle => builder.setup_single_issuer().setup_coop_taskrun(),
        Level::Cooperative => builder.setup_coop_taskrun(),
    };
    if plan.ends == Ends::Asked {
        builder.setup_iopoll();
    }
    builder.build(plan.submissions)
}

/// Whether a ring can be made here with all that the engine needs.
pub(crate) fn probe() -> Result<(), EngineError> {
    let opcodes = [opcode::Read::CODE];
    let plan = Plan {
        submissions: 8,
        completions: 16,
        files: 4,
        opcodes: &opcodes,
        levels: &LEVELS,
        ends: Ends::Told,
    };
    Ring::new(&plan).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_waited_for_a_little_and_nothing_else_is() {
        let attempts = |errors: &[i32]| {
            let (mut made, mut waited) = (0, Duration::ZERO);
            let attempt = || {
                made += 1;
                match errors.get(made - 1) {
                    Some(errno) => Err(io::Error::from_raw_os_error(*errno)),
                    None => Ok(made),
                }
            };
            let outcome = while_short_of_memory(attempt, |pause| waited += pause);
            let outcome = outcome.map_err(|error| error.raw_os_error().unwrap());
            (outcome, waited)
        };
        let ms = Duration::from_millis(1);
        assert_eq!(attempts(&[]), (Ok(1), Duration::ZERO));
        assert_eq!(attempts(&[libc::ENOMEM; 3]), (Ok(4), 7 * ms));
        assert_eq!(attempts(&[libc::ENOMEM; 8]), (Ok(9), 255 * ms));
        assert_eq!(attempts(&[libc::ENOMEM; 9]), (Err(libc::ENOMEM), 255 * ms));
        assert_eq!(
            attempts(&[libc::ENOMEM, libc::EINVAL]),
            (Err(libc::EINVAL), ms)
        );
    }
}
