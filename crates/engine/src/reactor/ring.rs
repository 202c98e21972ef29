//! The io_uring itself: set-up, restrictions, the file table, and entering the kernel.
//!
//! Unsafe for two reasons. The queue halves borrow from the `IoUring`, so it lives in a leaked box that
//! `Drop` frees after them. And the kernel follows the pointers of a pushed entry until it completes: `push`
//! passes that obligation to its caller.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::mpsc::Sender;
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{
    CompletionQueue, EnterFlags, IoUring, SubmissionQueue, Submitter, cqueue, opcode, squeue,
    squeue::Flags,
};

use crate::EngineError;

/// io_uring_register opcodes that stay allowed once the ring runs (linux/io_uring.h): to change slots of the
/// file table, and at shutdown to release the table and the ring's own registration.
const UNREGISTER_FILES: u8 = 3;
const REGISTER_FILES_UPDATE: u8 = 6;
const REGISTER_RING_FDS: u8 = 20;
const UNREGISTER_RING_FDS: u8 = 21;

/// User data. The top byte is the kind of the completion; 0 is an op, identified by its store's number and
/// its number in that store.
pub(crate) mod tag {
    pub(crate) const MASK: u64 = 0xff << 56;
    pub(crate) const OP: u64 = 0;
    pub(crate) const WATCH: u64 = 1 << 56;
    pub(crate) const IGNORED: u64 = 2 << 56;
}

/// More kernel threads than the disks of any thread have ops.
const KERNEL_THREADS_MAX: u32 = 1 << 20;

/// Pause if the kernel could accept nothing and there is no completion to collect.
const SHORT_PAUSE: Duration = Duration::from_micros(200);

/// Pauses between attempts if the kernel has no memory for a ring. It needs blocks of many pages, which can be
/// missing for moments while the page cache fills memory; and the memory of closed rings is freed with a delay.
const MEMORY_PAUSES_MS: [u64; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

/// Parameters of a ring.
#[derive(Debug)]
pub(crate) struct RingConfig<'a> {
    /// Submission entries. More entries than this in one lap cost another system call but no error.
    pub(crate) submissions: u32,
    /// Completion entries: one for each op and watch, and some slack.
    pub(crate) completions: u32,
    /// Slots of the file table.
    pub(crate) files: u32,
    /// The only opcodes that the ring accepts, even from an attacker who can write its queue (seccomp does
    /// not see them).
    pub(crate) opcodes: &'a [u8],
    /// Set-up levels to try, best first.
    pub(crate) levels: &'a [Level],
    /// How completions are delivered.
    pub(crate) completion_mode: CompletionMode,
}

/// How the completions of a ring are delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompletionMode {
    /// By an interrupt of the device.
    Interrupt,
    /// By polling the device when the kernel is entered. Such a ring accepts only reads and writes past the
    /// page cache (IORING_SETUP_IOPOLL).
    Polled,
}

/// How long `enter` may sleep, if at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sleep {
    No,
    For(Duration),
    Forever,
}

/// The event that a sleep waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The completion of an op.
    Io,
    /// Only a signal. The kernel is told so (6.15), because an idle disk would otherwise count as a CPU that
    /// waits for I/O.
    Signal,
}

/// An io_uring that one thread uses.
pub(crate) struct Ring {
    submitter: ManuallyDrop<Submitter<'static>>,
    sq: ManuallyDrop<SubmissionQueue<'static>>,
    cq: ManuallyDrop<CompletionQueue<'static>>,
    uring: NonNull<IoUring>,
    /// The kernel supports NO_IOWAIT.
    can_idle: bool,
    enters: u64,
    /// Closes the ring instead of the thread that drops it.
    heir: Option<Sender<ClosedRing>>,
    /// How often `set_file` has yet to fail as if the kernel were short of memory.
    #[cfg(test)]
    pub(crate) shortages: std::cell::Cell<u32>,
}

/// A ring that is used no more. Dropping it closes it, which can take a millisecond; any thread may do so.
pub struct ClosedRing(#[expect(dead_code, reason = "it is only dropped")] Box<IoUring>);

impl std::fmt::Debug for ClosedRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClosedRing").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("enters", &self.enters)
            .finish_non_exhaustive()
    }
}

/// Set-up levels, best first. With DEFER_TASKRUN (6.1) the kernel processes completions when this thread
/// enters, not in the middle of its work; a flag in the queue shows a polling loop that entering is
/// worthwhile. On older kernels COOP_TASKRUN (5.19) at least avoids the interrupts.
pub(crate) const LEVELS: [Level; 3] = [
    Level::Deferred,
    Level::CooperativeSingle,
    Level::Cooperative,
];

/// The levels for a thread that waits for several rings at once. With DEFER_TASKRUN the descriptor of a ring does not
/// become readable before its thread enters it (seen with 6.18), and a registered eventfd is written late: a kick is
/// itself the write of an eventfd, and the kernel puts off what that write causes until an RCU grace period has
/// passed, which took 17 ms.
pub(crate) const SHARED_LEVELS: [Level; 2] = [Level::CooperativeSingle, Level::Cooperative];

/// The flags that a ring is set up with.
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
    /// Sets up a restricted ring that is not enabled yet. No thread owns it.
    pub(crate) fn prepare(config: &RingConfig<'_>) -> Result<Ring, EngineError> {
        let uring = while_short_of_memory(|| build(config), std::thread::sleep)?;
        let can_idle = uring.params().is_feature_no_iowait();
        let uring = NonNull::from(Box::leak(Box::new(uring)));
        // SAFETY: the box is leaked and nothing else refers to it; `Drop` frees it only after the three parts
        // are gone.
        let (submitter, sq, cq) = unsafe { (*uring.as_ptr()).split() };
        let mut ring = Ring {
            submitter: ManuallyDrop::new(submitter),
            sq: ManuallyDrop::new(sq),
            cq: ManuallyDrop::new(cq),
            uring,
            can_idle,
            enters: 0,
            heir: None,
            #[cfg(test)]
            shortages: std::cell::Cell::new(0),
        };
        ring.configure(config)?;
        Ok(ring)
    }

    /// Removes the limit of the kernel threads that work for the calling thread; see [`share_thread`]. Possible until the ring
    /// is enabled.
    pub(crate) fn lift_thread_limit(&self) -> io::Result<()> {
        lift_thread_limit(&self.submitter)
    }

    /// Enables the ring for the calling thread, which from now on is the only one that may use it.
    pub(crate) fn enable(&mut self) -> io::Result<()> {
        self.submitter.register_enable_rings()?;
        // Saves the descriptor look-up in each enter. It is optional: the table of registered rings may be full.
        let _ = self.submitter.register_ring_fd();
        Ok(())
    }

    /// Has the receiver close the ring when it is dropped; `None`: the thread that drops it does.
    pub(crate) fn leave_to(&mut self, heir: Option<Sender<ClosedRing>>) {
        self.heir = heir;
    }

    /// Restrictions can only be set before the ring is enabled.
    fn configure(&mut self, config: &RingConfig<'_>) -> io::Result<()> {
        self.submitter.register_files_sparse(config.files)?;
        let mut allowed: Vec<_> = config
            .opcodes
            .iter()
            .map(|op| Restriction::sqe_op(*op))
            .collect();
        allowed.push(Restriction::sqe_flags_required(Flags::FIXED_FILE.bits()));
        allowed.push(Restriction::sqe_flags_allowed(
            (Flags::FIXED_FILE | Flags::SKIP_SUCCESS | Flags::ASYNC).bits(),
        ));
        for register in [
            UNREGISTER_FILES,
            REGISTER_FILES_UPDATE,
            REGISTER_RING_FDS,
            UNREGISTER_RING_FDS,
        ] {
            allowed.push(Restriction::register_op(register));
        }
        self.submitter.register_restrictions(&mut allowed)
    }

    /// Puts a file into the table, or empties the slot. I/O in flight continues on the old file.
    pub(crate) fn set_file(&self, slot: u32, fd: Option<RawFd>) -> io::Result<()> {
        #[cfg(test)]
        if let Some(left) = self.shortages.get().checked_sub(1) {
            self.shortages.set(left);
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        self.submitter
            .register_files_update(slot, &[fd.unwrap_or(-1)])
            .map(drop)
    }

    /// Queues an entry. A full queue is submitted first. `false`: the queue is full, the kernel accepts none
    /// now (out of memory), and nothing was queued.
    ///
    /// # Safety
    ///
    /// Everything that the entry points to must stay valid until its completion has been seen.
    #[inline]
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        if unsafe { self.sq.push(entry) }.is_ok() {
            return true;
        }
        // An error recurs at the next enter, which reports it.
        let _ = self.submit();
        // SAFETY: the caller's promise.
        unsafe { self.sq.push(entry) }.is_ok()
    }

    /// Submits the queued entries without checking for completions, except that a polled ring does check.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.sq.sync();
        self.enters += 1;
        let result = self.submitter.submit();
        self.sq.sync();
        tolerate(result).map(drop)
    }

    /// Submits the queued entries, lets the kernel post deferred completions, and sleeps as `sleep` says
    /// until there is a completion. Makes no system call if there is nothing to do and no sleep.
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
            // The kernel did not sleep either, so the owner would spin until memory is available.
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
        // SAFETY: the flags say that `args` is the extended argument, which it is, and the kernel reads it
        // only during the call.
        unsafe { self.submitter.enter(queued, 1, flags.bits(), Some(args)) }
    }

    /// The next completion, without a system call.
    #[inline]
    pub(crate) fn complete(&mut self) -> Option<cqueue::Entry> {
        if let Some(entry) = self.cq.next() {
            return Some(entry);
        }
        // Returns the entries that were read to the kernel, and checks for new ones.
        self.cq.sync();
        self.cq.next()
    }

    /// Returns true if `complete` would return an entry.
    #[inline]
    pub(crate) fn has_completions(&mut self) -> bool {
        if self.cq.is_empty() {
            self.cq.sync();
        }
        !self.cq.is_empty()
    }

    /// Returns true if the kernel has something for this thread that only an `enter` delivers.
    #[inline]
    pub(crate) fn is_signalled(&self) -> bool {
        self.sq.taskrun() || self.sq.cq_overflow()
    }

    /// Returns how many completions can be taken.
    #[cfg(test)]
    pub(crate) fn completions(&mut self) -> usize {
        self.cq.sync();
        self.cq.len()
    }

    /// Returns true if entries are queued that the kernel has not accepted yet.
    #[inline]
    pub(crate) fn has_queued(&mut self) -> bool {
        self.sq.sync();
        !self.sq.is_empty()
    }

    /// How often the kernel was entered.
    pub(crate) fn enters(&self) -> u64 {
        self.enters
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is freed in `drop` only, so its descriptor is open for as long as `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_ref().as_raw_fd()) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel dismantles a ring some time after it is closed. The files are released now; otherwise
        // the disk would stay locked for the next program that opens it.
        let _ = self.submitter.unregister_files();
        // The registration would keep the ring alive until the thread exits.
        let _ = self.submitter.unregister_ring_fd();
        // SAFETY: each part is dropped once, here, before the ring that it borrows from; the box was leaked
        // in `new` and is freed once.
        let uring = unsafe {
            ManuallyDrop::drop(&mut self.submitter);
            ManuallyDrop::drop(&mut self.sq);
            ManuallyDrop::drop(&mut self.cq);
            Box::from_raw(self.uring.as_ptr())
        };
        if let Some(heir) = &self.heir {
            // Without a receiver it is dropped here.
            let _ = heir.send(ClosedRing(uring));
        }
    }
}

/// Filters out results of an enter that are not errors: a time-out, a signal, and a kernel that accepts no
/// more until completions are read or memory is available. Entries that it did not accept stay queued.
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

/// Retries `attempt` after a pause if it failed for lack of memory, a limited number of times.
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

fn build(config: &RingConfig<'_>) -> io::Result<IoUring> {
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for level in config.levels {
        match build_at(*level, config) {
            Ok(uring) => return Ok(uring),
            // EINVAL is also the answer of a kernel that does not know a flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn build_at(level: Level, config: &RingConfig<'_>) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder
        .dontfork()
        .setup_clamp()
        .setup_submit_all()
        .setup_r_disabled()
        .setup_taskrun_flag();
    builder.setup_cqsize(config.completions);
    match level {
        Level::Deferred => builder.setup_single_issuer().setup_defer_taskrun(),
        Level::CooperativeSingle => builder.setup_single_issuer().setup_coop_taskrun(),
        Level::Cooperative => builder.setup_coop_taskrun(),
    };
    if config.completion_mode == CompletionMode::Polled {
        builder.setup_iopoll();
    }
    builder.build(config.submissions)
}

/// Prepares the calling thread for the rings of many disks, before its first one. A read, write or flush that would block
/// is run by threads of the kernel (io-wq). They belong to the thread that submits, not to a ring, and by default there are
/// at most four for each CPU: as many ops of one disk that hang would stop those of all others. Without this limit the ops
/// in flight are the bound.
///
/// `cpus` are those on which these threads may run; empty: the kernel decides. A copy of theirs is not interrupted for
/// others on a kernel without preemption, so they should stay off the CPU of the thread itself.
pub fn share_thread(cpus: &[usize]) -> Result<(), EngineError> {
    let ring = IoUring::new(1)?;
    let submitter = ring.submitter();
    lift_thread_limit(&submitter)?;
    if cpus.is_empty() {
        return Ok(());
    }
    // SAFETY: all zeroes are the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in cpus {
        // SAFETY: a number beyond the set is ignored.
        unsafe { libc::CPU_SET(*cpu, &mut set) };
    }
    Ok(submitter.register_iowq_aff(&set)?)
}

fn lift_thread_limit(submitter: &Submitter<'_>) -> io::Result<()> {
    // 0: those for sockets stay as they are.
    submitter.register_iowq_max_workers(&mut [KERNEL_THREADS_MAX, 0])
}

/// Checks whether a ring with everything that the engine needs can be created.
pub(crate) fn probe() -> Result<(), EngineError> {
    let opcodes = [opcode::Read::CODE];
    let config = RingConfig {
        submissions: 8,
        completions: 16,
        files: 4,
        opcodes: &opcodes,
        levels: &LEVELS,
        completion_mode: CompletionMode::Interrupt,
    };
    let mut ring = Ring::prepare(&config)?;
    Ok(ring.enable()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lack_of_memory_is_retried_and_not_for_ever() {
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
