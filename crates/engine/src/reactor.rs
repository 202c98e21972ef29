//! A worker thread's io_uring: it carries the I/O of the stores, watches descriptors, calls guests, and is
//! where the thread sleeps.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cleave_disk::{Backing, Disk, FileKind};
use io_uring::{opcode, squeue};

use crate::bell::Bells;
use crate::polled::Polled;
use crate::ring::{self, Ends, LEVELS, Level, Plan, Purpose, Ring, Sleep, tag};
use crate::watch::{Signal, Watches};
use crate::{Event, Store, Wait};

/// Completions beyond one per op: removals that failed, a few polls that report twice.
const COMPLETION_SLACK: u32 = 64;
/// Submissions beyond one per op: watches armed, bells rung.
const SUBMISSION_SLACK: u32 = 32;
/// Pause while a watch or a bell waits for room in the queue.
const ARM_PAUSE: Duration = Duration::from_millis(1);

/// While a store closes: how often the polled ring is checked before the thread sleeps between checks, and
/// for how long.
const CLOSE_CHECKS: u32 = 1000;
const CLOSE_NAP: Duration = Duration::from_micros(500);

/// Why no engine could be made.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Set-up failed; the message names the sysctl, limit or kernel that is in the way.
    #[error("{remedy}: {source}")]
    Setup {
        /// The remedy, for an operator.
        remedy: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// A device that states polled queues and does not take a polled read.
    #[error(
        "disk {name} cannot be polled: a polled read of its first block came to nothing ({source}); \
         leave --iopoll away"
    )]
    Iopoll {
        /// The disk, or the leg of a stripe.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl EngineError {
    /// Names what is in the way of a ring.
    pub(crate) fn setup(source: io::Error) -> EngineError {
        let remedy = match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => {
                "io_uring is forbidden here; set the sysctl kernel.io_uring_disabled to 0 \
                 (or add this user to kernel.io_uring_group), and let seccomp pass it"
            }
            Some(libc::ENOSYS) => {
                "this kernel has no io_uring, or a seccomp filter hides it; Linux 5.19 or later is \
                 needed, with the sysctl kernel.io_uring_disabled at 0"
            }
            Some(libc::ENOMEM) => {
                "not enough memory for an io_uring; raise RLIMIT_MEMLOCK (ulimit -l) or the memory \
                 limit of the cgroup"
            }
            Some(libc::EMFILE) => {
                "too many open files for an io_uring; raise RLIMIT_NOFILE (ulimit -n)"
            }
            Some(libc::ENFILE) => {
                "too many open files on this machine for an io_uring; raise the sysctl fs.file-max"
            }
            Some(libc::EINVAL) => {
                "this kernel's io_uring lacks what is needed; Linux 5.19 or later is"
            }
            _ => "cannot set up an io_uring",
        };
        EngineError::Setup { remedy, source }
    }
}

/// A completion for a store: the number that the store submitted it with, and the result.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    pub(crate) store: u16,
    pub(crate) index: u16,
    pub(crate) result: i32,
    /// By the polled ring.
    pub(crate) is_polled: bool,
}

/// A completion of the rings, sorted by its receiver.
#[derive(Debug, Clone, Copy)]
enum Received {
    /// The end of something that a store submitted.
    Op(Completion),
    /// A watched descriptor was signalled.
    Signal(u16),
    /// Of no interest to anybody.
    Nothing,
}

/// A store's place on a reactor: which completions are the store's, and where its files stand in the rings' tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seat {
    /// Number of the reactor in this process.
    reactor: u64,
    pub(crate) store: u16,
    pub(crate) first_file: u32,
}

impl Seat {
    /// User data that marks an entry as the store's `index`-th.
    #[inline]
    pub(crate) fn user_data(self, index: u16) -> u64 {
        tag::OP | u64::from(self.store) << 16 | u64::from(index)
    }
}

/// Numbers the reactors of this process.
static REACTORS: AtomicU64 = AtomicU64::new(0);

/// One thread's io_uring and all that goes through it.
#[derive(Debug)]
pub struct Reactor {
    number: u64,
    ring: Ring,
    /// Beside it, where a disk is polled.
    polled: Option<Box<Polled>>,
    watches: Watches,
    bells: Bells,
    /// Stores attached so far, and the first slot of the file table that none of them has.
    stores: u16,
    free_file: u32,
    files: u32,
    /// Received and not yet told: what came while a store was closing, and watches that failed at once.
    set_aside: VecDeque<Received>,
}

impl Reactor {
    /// Makes the rings for stores of these disks, on the thread that will use them. `ops`: most ops in
    /// flight on all of them together; `watches`, `bells`: how many slots of each (a worker asks for 257
    /// and 512, most never used).
    pub fn new(
        disks: &[&Disk],
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Reactor, EngineError> {
        let submissions = u32::from(ops) + SUBMISSION_SLACK;
        Reactor::with_queue(disks, [ops, watches, bells], submissions, &LEVELS)
    }

    /// As `new` (`slots`: its three numbers), with a submission queue of the given size, set up in one
    /// of the given ways.
    pub(crate) fn with_queue(
        disks: &[&Disk],
        [ops, watches, bells]: [u16; 3],
        submissions: u32,
        levels: &[Level],
    ) -> Result<Reactor, EngineError> {
        // A stripe has at most 64 legs.
        let files: u32 = disks.iter().map(|disk| disk.legs().len() as u32).sum();
        let first_bell = files + u32::from(watches);
        let barriers = || disks.iter().flat_map(|disk| disk.barriers());
        let first_barrier = first_bell + u32::from(bells);
        let ring = Ring::new(&Plan {
            submissions: submissions.next_power_of_two(),
            completions: (u32::from(ops) + 2 * u32::from(watches) + COMPLETION_SLACK)
                .max(2 * submissions)
                .next_power_of_two(),
            files: first_barrier + barriers().count() as u32,
            opcodes: opcodes(disks),
            levels,
            ends: Ends::Told,
        })?;
        let hold = |slot, file: BorrowedFd<'_>| {
            let held = ring.set_file(slot, Some(file.as_raw_fd()));
            held.map_err(EngineError::setup)
        };
        for (file, slot) in barriers().zip(first_barrier..) {
            hold(slot, file)?;
        }
        let polled = match disks.iter().any(|disk| disk.is_polled()) {
            true => {
                let slots = files + barriers().count() as u32;
                let polled = Polled::new(submissions, slots, levels)?;
                for (file, slot) in barriers().zip(files..) {
                    polled.set_file(slot, &file).map_err(EngineError::setup)?;
                }
                Some(Box::new(polled))
            }
            false => None,
        };
        Ok(Reactor {
            number: REACTORS.fetch_add(1, Ordering::Relaxed),
            ring,
            polled,
            watches: Watches::new(files, watches),
            bells: Bells::new(first_bell, bells),
            stores: 0,
            free_file: 0,
            files,
            set_aside: VecDeque::new(),
        })
    }

    /// Whether a ring can be made here at all, for a clear error at start.
    pub fn probe() -> Result<(), EngineError> {
        ring::probe()
    }

    /// System calls made so far to enter the rings.
    pub fn enters(&self) -> u64 {
        let polled = self.polled.as_ref().map_or(0, |polled| polled.enters());
        self.ring.enters() + polled
    }

    /// The next event of the reactor or of one of its stores, without a system call. `None`: nothing
    /// until the next `enter`.
    #[inline]
    pub fn reap<S: Store>(&mut self, stores: &mut [S]) -> Option<Event> {
        loop {
            for (store, one) in stores.iter_mut().enumerate() {
                if let Some(done) = one.reap() {
                    return Some(Event::Done { store, done });
                }
            }
            let received = match self.set_aside.is_empty() {
                true => self.next()?,
                false => self.set_aside.pop_front()?,
            };
            match received {
                Received::Op(completion) => {
                    stores[usize::from(completion.store)].completed(self, completion);
                }
                Received::Signal(slot) => return Some(Event::Woken { slot }),
                Received::Nothing => {}
            }
        }
    }

    /// Submits what was pushed, rings what was belled, and waits as told: at most one system call,
    /// none where there is nothing to submit, nothing to collect from the kernel and no wait; one more
    /// where ops are polled. Returns at once when events are ready, and while ops are polled unless the
    /// wait has an end. `Err` is our own fault (a broken ring), not the disk's.
    #[inline]
    pub fn enter<S: Store>(&mut self, stores: &mut [S], wait: Wait) -> io::Result<()> {
        let mut limit = None;
        for store in &mut *stores {
            if let Some(of_store) = store.before_enter(self, wait) {
                limit = Some(limit.map_or(of_store, |limit: Duration| limit.min(of_store)));
            }
        }
        self.watches.arm_wanted(&mut self.ring);
        self.bells.flush(&mut self.ring);
        // The plain ring before the polled one, unless it is about to sleep: it calls the guest.
        let entered = match wait {
            Wait::No => self.ring.enter(Sleep::No, Purpose::Io),
            Wait::Until(deadline) => self.enter_to_wait(stores, deadline, limit),
        };
        if let Some(polled) = &mut self.polled {
            polled.look()?;
        }
        for store in stores {
            store.after_enter();
        }
        entered
    }

    fn enter_to_wait<S: Store>(
        &mut self,
        stores: &[S],
        deadline: Option<Instant>,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        if let Some(polled) = &mut self.polled {
            // Polled ops must be submitted before a sleep, and those that have ended must prevent it.
            polled.look()?;
        }
        let sleep = self.sleep(stores, deadline, limit);
        let purpose = match stores.iter().all(|store| store.in_flight() == 0) {
            true => Purpose::Signal,
            false => Purpose::Io,
        };
        self.ring.enter(sleep, purpose)
    }

    /// Closes the stores one after the other. Calls that were promised go out before that.
    pub fn close<S: Store>(&mut self, stores: &mut [S]) {
        let _ = self.nap(Duration::ZERO);
        stores.iter_mut().for_each(|store| store.close(self));
    }

    /// How long an enter sleeps at most.
    #[inline]
    fn sleep<S: Store>(
        &mut self,
        stores: &[S],
        deadline: Option<Instant>,
        limit: Option<Duration>,
    ) -> Sleep {
        // The completion of a polled op ends no sleep.
        let is_ready = stores.iter().any(Store::is_ready) || self.has_events();
        if is_ready || (deadline.is_none() && stores.iter().any(Store::polls)) {
            return Sleep::No;
        }
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let waiting = self.watches.is_waiting() || self.bells.is_waiting();
        let arm = waiting.then_some(ARM_PAUSE);
        match left.into_iter().chain(limit).chain(arm).min() {
            None => Sleep::Forever,
            Some(Duration::ZERO) => Sleep::No,
            Some(time) => Sleep::For(time),
        }
    }

    /// Whether there is a polled ring.
    #[inline]
    pub(crate) fn has_polled_ring(&self) -> bool {
        self.polled.is_some()
    }

    /// Reads and writes that were polled and went well, so far.
    pub fn polled(&self) -> u64 {
        self.polled.as_ref().map_or(0, |p| p.ended())
    }

    // Signals.

    /// Watches an eventfd (kick or command); each signal wakes `enter` and is an `Event::Woken`.
    /// A descriptor that cannot be watched wakes once (a file of the wrong kind: a few times), then never.
    /// Replaces what the slot watched. The descriptor's flags and counter are left as they are.
    pub fn watch(&mut self, slot: u16, fd: OwnedFd) {
        if self.watches.set(&mut self.ring, slot, &fd).is_err() {
            // Nothing will ever come from it: say so once.
            self.set_aside.push_back(Received::Signal(slot));
        }
    }

    /// Forgets a watch; an event already under way may still come.
    pub fn unwatch(&mut self, slot: u16) {
        self.watches.clear(&mut self.ring, slot);
    }

    /// Sets or removes the eventfd that `ring` writes.
    pub fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>) {
        self.bells.set(&mut self.ring, slot, fd);
    }

    /// Adds one to the slot's eventfd, at the latest with the next `enter`; several calls before that
    /// count as one. Nothing where the slot has no eventfd. A full or broken descriptor is ignored.
    /// One without O_NONBLOCK costs the next enter a system call of its own.
    #[inline]
    pub fn ring(&mut self, slot: u16) {
        self.bells.ring(&mut self.ring, slot);
    }

    // For stores.

    /// Makes room for a store and puts its files into the tables; `is_polled`: into the polled ring's too.
    pub(crate) fn attach(&mut self, files: &[BorrowedFd<'_>], is_polled: bool) -> io::Result<Seat> {
        let seat = Seat {
            reactor: self.number,
            store: self.stores,
            first_file: self.free_file,
        };
        // The reactor was made for these disks; more of them are our own fault.
        let behind = seat.first_file + files.len() as u32;
        if behind > self.files {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        for (slot, file) in (seat.first_file..).zip(files) {
            self.ring.set_file(slot, Some(file.as_raw_fd()))?;
            if let (true, Some(polled)) = (is_polled, &self.polled) {
                polled.set_file(slot, file)?;
            }
        }
        self.free_file = behind;
        self.stores += 1;
        Ok(seat)
    }

    /// Queues an entry of a store in the plain or in the polled ring. `false`: the kernel takes none now. A
    /// store of another reactor is our own fault: its files stand elsewhere here, and nobody would hand it the
    /// completion.
    ///
    /// # Safety
    ///
    /// Everything that the entry points to stays valid until its completion was seen.
    #[inline]
    pub(crate) unsafe fn submit(
        &mut self,
        seat: Seat,
        entry: &squeue::Entry,
        is_polled: bool,
    ) -> bool {
        assert_eq!(seat.reactor, self.number, "a store on another reactor");
        // SAFETY: the caller's promise.
        unsafe {
            match &mut self.polled {
                Some(polled) if is_polled => polled.push(entry),
                _ => self.ring.push(entry),
            }
        }
    }

    /// A polled read or write went well.
    #[inline]
    pub(crate) fn count_polled(&mut self) {
        if let Some(polled) = &mut self.polled {
            polled.count_ended();
        }
    }

    /// Takes one completion off the rings.
    #[inline]
    fn next(&mut self) -> Option<Received> {
        let (entry, is_polled) = match self.ring.complete() {
            Some(entry) => (entry, false),
            None => (self.polled.as_deref_mut()?.complete()?, true),
        };
        Some(match entry.user_data() & tag::MASK {
            tag::OP => Received::Op(Completion {
                store: (entry.user_data() >> 16) as u16,
                index: entry.user_data() as u16,
                result: entry.result(),
                is_polled,
            }),
            tag::WATCH => match self.watches.completed(&mut self.ring, &entry) {
                Signal::Woken(slot) => Received::Signal(slot),
                Signal::Stale => Received::Nothing,
            },
            _ => Received::Nothing,
        })
    }

    /// While a store closes: its next completion, waiting for it. `checks` counts the waits, so that a
    /// polled device that hangs is asked ever less often. `Err`: the ring is broken.
    pub(crate) fn next_of(&mut self, seat: Seat, checks: &mut u32) -> io::Result<Completion> {
        loop {
            while let Some(received) = self.next() {
                match received {
                    Received::Op(completion) if completion.store == seat.store => {
                        return Ok(completion);
                    }
                    other => self.set_aside.push_back(other),
                }
            }
            *checks = checks.saturating_add(1);
            let Some(polled) = self.polled.as_mut().filter(|polled| polled.is_flying()) else {
                self.ring.enter(Sleep::Forever, Purpose::Io)?;
                continue;
            };
            polled.look()?;
            self.ring.enter(Sleep::No, Purpose::Io)?;
            if *checks > CLOSE_CHECKS {
                std::thread::sleep(CLOSE_NAP);
            }
        }
    }

    /// Whether `reap` may have something of the rings.
    pub(crate) fn has_events(&mut self) -> bool {
        !self.set_aside.is_empty()
            || self.ring.has_completions()
            || self
                .polled
                .as_deref_mut()
                .is_some_and(Polled::has_completions)
    }

    /// For a store that waits by itself: sends what is queued, and sleeps for so long at most.
    pub(crate) fn nap(&mut self, time: Duration) -> io::Result<()> {
        self.watches.arm_wanted(&mut self.ring);
        self.bells.flush(&mut self.ring);
        let sleep = match time {
            Duration::ZERO => Sleep::No,
            time => Sleep::For(time),
        };
        self.ring.enter(sleep, Purpose::Io)
    }

    #[cfg(test)]
    pub(crate) fn plain_ring(&mut self) -> &mut Ring {
        &mut self.ring
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Linux 6.1 waits for every poll on a registered file when the ring lets go of its files, and
        // nothing would end a watch.
        self.bells.flush(&mut self.ring);
        self.watches.clear_all(&mut self.ring);
        let _ = self.ring.enter(Sleep::No, Purpose::Io);
    }
}

/// The operations that the disks need, watches and bells included.
fn opcodes(disks: &[&Disk]) -> &'static [u8] {
    const ALL: [u8; 9] = [
        opcode::PollAdd::CODE,
        opcode::AsyncCancel::CODE,
        opcode::Write::CODE,
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::UringCmd16::CODE,
    ];
    let legs = disks.iter().flat_map(|disk| disk.legs());
    let needed = legs.map(|leg| match leg.backing() {
        Backing::Ram(_) | Backing::Null { .. } | Backing::Model { .. } => 3,
        Backing::File {
            kind: FileKind::Regular,
            ..
        } => 8,
        Backing::File {
            kind: FileKind::BlockDevice,
            ..
        } => ALL.len(),
    });
    ALL.get(..needed.max().unwrap_or(3)).unwrap_or(&ALL)
}
