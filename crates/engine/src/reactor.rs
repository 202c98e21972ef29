//! A worker thread's io_uring. It carries the stores' I/O, watches descriptors, calls guests, and is where
//! the thread sleeps.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use cleave_disk::{Backing, Disk, FileKind, Leg};
use io_uring::{opcode, squeue};

use crate::bell::{BellFd, Bells};
use crate::polled::Polled;
use crate::ring::{
    self, ClosedRing, CompletionMode, LEVELS, Level, Purpose, Ring, RingConfig, SHARED_LEVELS,
    Sleep, tag,
};
use crate::watch::{Signal, Watches};
use crate::{Event, Store, Wait};

/// Completions beyond one per op: failed removals, and the few polls that report twice.
const COMPLETION_SLACK: u32 = 64;
/// Submissions beyond one per op: arming watches and writing bells.
const SUBMISSION_SLACK: u32 = 32;
/// Longest sleep while a watch or a bell waits for room in the queue.
const ARM_PAUSE: Duration = Duration::from_millis(1);

/// While a store closes: the number of checks of the polled ring before the thread sleeps between checks, and
/// the length of that sleep.
const CLOSE_CHECKS: u32 = 1000;
const CLOSE_SLEEP: Duration = Duration::from_micros(500);

/// Why no engine could be created.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Set-up failed. The message names the sysctl, limit or kernel version that prevents it.
    #[error("{remedy}: {source}")]
    Setup {
        /// The remedy, for an operator.
        remedy: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The device claims to have polled queues but does not accept a polled read.
    #[error(
        "disk {name} cannot be polled: a polled read of its first block failed ({source}); \
         remove --iopoll"
    )]
    Iopoll {
        /// The disk, or the leg of a stripe.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
}

impl EngineError {
    /// Finds the remedy for an error while a ring is set up.
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
                "this kernel's io_uring lacks required features; Linux 5.19 or later is needed"
            }
            _ => "cannot set up an io_uring",
        };
        EngineError::Setup { remedy, source }
    }
}

/// A completion for a store: the number under which the store submitted the entry, and the result.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    pub(crate) store: u16,
    pub(crate) index: u16,
    pub(crate) result: i32,
    /// Whether it arrived in the polled ring.
    pub(crate) is_polled: bool,
}

/// A completion of the rings, sorted by its receiver.
#[derive(Debug, Clone, Copy)]
enum Received {
    /// An entry that a store submitted has completed.
    Op(Completion),
    /// A watched descriptor was signalled.
    Signal(u16),
    /// A completion that needs no action.
    Nothing,
}

/// A store's registration with a reactor: it identifies the store's completions and its files in the rings' tables.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreId {
    /// The number of the reactor in this process.
    reactor: u64,
    pub(crate) store: u16,
    pub(crate) first_file: u32,
}

impl StoreId {
    /// User data of the store's entry number `index`.
    #[inline]
    pub(crate) fn user_data(self, index: u16) -> u64 {
        tag::OP | u64::from(self.store) << 16 | u64::from(index)
    }

    /// A completion of another store would end an op that the kernel still works on.
    #[inline]
    pub(crate) fn assert_own(self, completion: Completion) {
        assert_eq!(
            completion.store, self.store,
            "a completion of another store"
        );
    }
}

/// How long a thread with several reactors may leave one alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Not at all: there is an event, or something to poll.
    None,
    /// Until its descriptor becomes readable, or until then.
    Until(Option<Instant>),
}

/// A reactor that another thread will use. Setting up its rings takes memory and time, and a confined thread may not
/// do it.
#[derive(Debug)]
pub struct Prepared(Reactor);

// SAFETY: the rings are not enabled, so nothing was submitted and no thread is registered with them. The reactor is
// owned here alone: `enable` gives it to the thread that calls it, and a `Reactor` never leaves that thread.
unsafe impl Send for Prepared {}

impl Prepared {
    /// Like [`Reactor::new`], for a thread that waits for several reactors at once.
    pub fn new(
        disks: &[&Disk],
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Prepared, EngineError> {
        let submissions = u32::from(ops) + SUBMISSION_SLACK;
        let slots = [ops, watches, bells];
        let mut reactor = Reactor::prepared(disks, slots, submissions, &SHARED_LEVELS)?;
        reactor.tenancy = Tenancy::Shared;
        reactor.needs_threads = false;
        Ok(Prepared(reactor))
    }

    /// Enables the rings for the calling thread. `heir` receives them when the reactor is dropped, so that closing them
    /// does not hold up this thread.
    pub fn enable(self, heir: &Sender<ClosedRing>) -> Result<Reactor, EngineError> {
        let Prepared(mut reactor) = self;
        reactor.ring.leave_to(Some(heir.clone()));
        if let Some(polled) = &mut reactor.polled {
            polled.leave_to(Some(heir.clone()));
        }
        reactor.enable().map_err(EngineError::setup)?;
        Ok(reactor)
    }
}

/// Numbers the reactors of this process.
static REACTORS: AtomicU64 = AtomicU64::new(0);

/// Who uses the thread of a reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tenancy {
    /// The disks of this reactor alone.
    Own,
    /// Other reactors too: what takes long here delays their disks.
    Shared,
}

/// One thread's io_uring and all that goes through it.
#[derive(Debug)]
pub struct Reactor {
    number: u64,
    tenancy: Tenancy,
    /// Its ops occupy many threads of the kernel, and nobody has seen to it that there may be many.
    needs_threads: bool,
    ring: Ring,
    /// Present if a disk is polled.
    polled: Option<Box<Polled>>,
    watches: Watches,
    bells: Bells,
    /// The number of stores attached so far, and the first free slot of the file table.
    stores: u16,
    free_file: u32,
    files: u32,
    /// Received but not yet reported: completions that arrived while a store was closing, and watches that
    /// failed at once.
    deferred: VecDeque<Received>,
}

impl Reactor {
    /// Creates the rings for stores of these disks; call it on the thread that will use them. `ops` is the
    /// most ops in flight on all of them together. `watches` and `bells` are the numbers of slots (a worker
    /// asks for 257 and 512, most of which stay unused).
    pub fn new(
        disks: &[&Disk],
        ops: u16,
        watches: u16,
        bells: u16,
    ) -> Result<Reactor, EngineError> {
        let submissions = u32::from(ops) + SUBMISSION_SLACK;
        let mut reactor = Reactor::prepared(disks, [ops, watches, bells], submissions, &LEVELS)?;
        reactor.enable().map_err(EngineError::setup)?;
        Ok(reactor)
    }

    /// Like `new` (`slots` holds its three numbers), with a given submission queue size and given set-up levels.
    #[cfg(test)]
    pub(crate) fn with_queue(
        disks: &[&Disk],
        slots: [u16; 3],
        submissions: u32,
        levels: &[Level],
    ) -> Result<Reactor, EngineError> {
        let mut reactor = Reactor::prepared(disks, slots, submissions, levels)?;
        reactor.enable().map_err(EngineError::setup)?;
        Ok(reactor)
    }

    /// Creates the rings without enabling them.
    fn prepared(
        disks: &[&Disk],
        [ops, watches, bells]: [u16; 3],
        submissions: u32,
        levels: &[Level],
    ) -> Result<Reactor, EngineError> {
        let files: u32 = disks.iter().map(|disk| file_slots(disk)).sum();
        let first_bell = files + u32::from(watches);
        let barriers = || disks.iter().flat_map(|disk| disk.barriers());
        let first_barrier = first_bell + u32::from(bells);
        let ring = Ring::prepare(&RingConfig {
            submissions: submissions.next_power_of_two(),
            completions: (u32::from(ops) + 2 * u32::from(watches) + COMPLETION_SLACK)
                .max(2 * submissions)
                .next_power_of_two(),
            files: first_barrier + barriers().count() as u32,
            opcodes: &opcodes(disks),
            levels,
            completion_mode: CompletionMode::Interrupt,
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
                let polled = Polled::prepare(submissions, slots, levels)?;
                for (file, slot) in barriers().zip(files..) {
                    polled.set_file(slot, &file).map_err(EngineError::setup)?;
                }
                Some(Box::new(polled))
            }
            false => None,
        };
        let mut legs = disks.iter().flat_map(|disk| disk.legs());
        Ok(Reactor {
            number: REACTORS.fetch_add(1, Ordering::Relaxed),
            tenancy: Tenancy::Own,
            needs_threads: legs.any(Leg::has_server),
            ring,
            polled,
            watches: Watches::new(files, watches),
            bells: Bells::new(first_bell, bells),
            stores: 0,
            free_file: 0,
            files,
            deferred: VecDeque::new(),
        })
    }

    /// Enables the rings for the calling thread.
    fn enable(&mut self) -> io::Result<()> {
        if self.needs_threads {
            self.ring.lift_thread_limit()?;
        }
        self.ring.enable()?;
        self.polled
            .as_mut()
            .map_or(Ok(()), |polled| polled.enable())
    }

    /// Takes back what [`Prepared::enable`] promised: nobody receives the rings.
    pub fn disinherit(&mut self) {
        self.ring.leave_to(None);
        if let Some(polled) = &mut self.polled {
            polled.leave_to(None);
        }
    }

    /// Checks at start-up whether a ring can be created at all, so that the error is clear.
    pub fn probe() -> Result<(), EngineError> {
        ring::probe()
    }

    /// System calls made so far to enter the rings.
    pub fn enters(&self) -> u64 {
        let polled = self.polled.as_ref().map_or(0, |polled| polled.enters());
        self.ring.enters() + polled
    }

    /// Takes the next event of the reactor or of one of its stores, without a system call. `None`: there is
    /// none until the next `enter`.
    #[inline]
    pub fn reap<S: Store>(&mut self, stores: &mut [S]) -> Option<Event> {
        loop {
            for (store, one) in stores.iter_mut().enumerate() {
                if let Some(done) = one.reap() {
                    return Some(Event::Done { store, done });
                }
            }
            let received = match self.deferred.is_empty() {
                true => self.next()?,
                false => self.deferred.pop_front()?,
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

    /// Submits everything pushed, writes the bells that were rung, and waits as `wait` says. Makes at most
    /// one system call, or two while ops are polled; none if there is nothing to submit, nothing to collect
    /// from the kernel and no wait. Returns at once if events are ready, and while ops are polled unless the
    /// wait has a deadline. `Err` is our own fault (a broken ring), not the disk's.
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
        // The plain ring first, because it calls the guest; the polled ring first only before a sleep.
        let entered = match wait {
            Wait::No => self.ring.enter(Sleep::No, Purpose::Io),
            Wait::Until(deadline) => self.enter_to_wait(stores, deadline, limit),
        };
        if let Some(polled) = &mut self.polled {
            polled.poll()?;
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
            // Polled ops must be submitted before the sleep, and completed ones must prevent it.
            polled.poll()?;
        }
        let sleep = self.sleep(stores, deadline, limit);
        let purpose = match stores.iter().all(|store| store.in_flight() == 0) {
            true => Purpose::Signal,
            false => Purpose::Io,
        };
        self.ring.enter(sleep, purpose)
    }

    /// Like `enter` with a wait, for a thread that has several reactors and sleeps elsewhere: submits everything
    /// pushed, does not wait, and returns until when the thread may leave this reactor alone. The descriptor of the
    /// reactor becomes readable when an event arrives, if the reactor was prepared for that ([`Prepared`]).
    pub fn settle<S: Store>(
        &mut self,
        stores: &mut [S],
        deadline: Option<Instant>,
    ) -> io::Result<Rest> {
        let mut limit = None;
        for store in &mut *stores {
            let of_store = store.before_enter(self, Wait::Until(deadline));
            limit = limit.into_iter().chain(of_store).min();
        }
        self.watches.arm_wanted(&mut self.ring);
        self.bells.flush(&mut self.ring);
        let entered = self.ring.enter(Sleep::No, Purpose::Io);
        if let Some(polled) = &mut self.polled {
            polled.poll()?;
        }
        stores.iter_mut().for_each(Store::after_enter);
        entered?;
        if self.ring.has_queued() {
            // The kernel is short of memory or of room for completions.
            limit = limit.into_iter().chain([ARM_PAUSE]).min();
        }
        Ok(match self.sleep(stores, deadline, limit) {
            _ if self.ring.is_signalled() => Rest::None,
            Sleep::No => Rest::None,
            Sleep::For(time) => Rest::Until(Some(Instant::now() + time)),
            Sleep::Forever => Rest::Until(None),
        })
    }

    /// Whether an `enter` or `reap` would find something, without a system call.
    #[inline]
    pub fn is_signalled(&mut self) -> bool {
        self.ring.is_signalled() || self.has_events()
    }

    /// Closes the stores in order. Bells that were rung are written first. Returns false if one of them still has ops in
    /// flight.
    pub fn close<S: Store>(&mut self, stores: &mut [S]) -> bool {
        let _ = self.submit_and_sleep(Duration::ZERO);
        let ended = stores.iter_mut().map(|store| store.close(self));
        ended.fold(true, |all, ended| all & ended)
    }

    /// How long an enter may sleep.
    #[inline]
    fn sleep<S: Store>(
        &mut self,
        stores: &[S],
        deadline: Option<Instant>,
        limit: Option<Duration>,
    ) -> Sleep {
        // The completion of a polled op does not end a sleep.
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

    /// Who uses its thread.
    pub(crate) fn tenancy(&self) -> Tenancy {
        self.tenancy
    }

    #[inline]
    pub(crate) fn has_polled_ring(&self) -> bool {
        self.polled.is_some()
    }

    /// The number of polled reads and writes that have succeeded so far.
    pub fn polled(&self) -> u64 {
        self.polled.as_ref().map_or(0, |p| p.successes())
    }

    // Signals.

    /// Watches an eventfd (kick or command): each signal wakes `enter` and yields an `Event::Woken`. A
    /// descriptor that cannot be watched wakes it once (a file of the wrong kind: a few times) and then never
    /// again. Replaces the slot's previous watch. The descriptor's flags and counter are not changed.
    pub fn watch(&mut self, slot: u16, fd: OwnedFd) {
        if self.watches.set(&mut self.ring, slot, &fd).is_err() {
            // The descriptor will never report anything, so wake its owner once.
            self.deferred.push_back(Received::Signal(slot));
        }
    }

    /// Removes a watch. An event that is already queued may still be reported.
    pub fn unwatch(&mut self, slot: u16) {
        self.watches.clear(&mut self.ring, slot);
    }

    /// Sets or removes the eventfd that `ring` writes.
    pub fn set_bell(&mut self, slot: u16, made: Option<BellFd>) {
        self.bells.set(&mut self.ring, slot, made);
    }

    /// Adds one to the slot's eventfd, at the latest in the next `enter`; several calls before that count as
    /// one. Does nothing if the slot has no eventfd. A full or broken descriptor is ignored. A descriptor
    /// without O_NONBLOCK costs the next enter an extra system call.
    #[inline]
    pub fn ring(&mut self, slot: u16) {
        self.bells.ring(&mut self.ring, slot);
    }

    // For stores.

    /// Registers a store and puts its files into the plain ring's table, and if `is_polled` into the polled
    /// ring's too.
    pub(crate) fn attach(
        &mut self,
        files: &[BorrowedFd<'_>],
        is_polled: bool,
    ) -> io::Result<StoreId> {
        let id = StoreId {
            reactor: self.number,
            store: self.stores,
            first_file: self.free_file,
        };
        // The reactor was created for these disks; a file beyond them is our own fault.
        let behind = id.first_file + files.len() as u32;
        if behind > self.files {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        for (slot, file) in (id.first_file..).zip(files) {
            self.ring.set_file(slot, Some(file.as_raw_fd()))?;
            if let (true, Some(polled)) = (is_polled, &self.polled) {
                polled.set_file(slot, file)?;
            }
        }
        self.free_file = behind;
        self.stores += 1;
        Ok(id)
    }

    /// Puts a file into a slot of the plain ring's table that belongs to a store, or empties it. I/O in flight continues on the
    /// old file.
    pub(crate) fn set_file(&self, slot: u32, fd: Option<RawFd>) -> io::Result<()> {
        self.ring.set_file(slot, fd)
    }

    /// Queues an entry of a store in the plain or the polled ring. `false`: the kernel accepts none now. It
    /// is our own fault if the store belongs to another reactor: its files have other slots here, and its
    /// completion would be lost.
    ///
    /// # Safety
    ///
    /// Everything that the entry points to must stay valid until its completion has been seen.
    #[inline]
    pub(crate) unsafe fn submit(
        &mut self,
        id: StoreId,
        entry: &squeue::Entry,
        is_polled: bool,
    ) -> bool {
        assert_eq!(id.reactor, self.number, "a store on another reactor");
        // SAFETY: the caller's promise.
        unsafe {
            match &mut self.polled {
                Some(polled) if is_polled => polled.push(entry),
                _ => self.ring.push(entry),
            }
        }
    }

    /// Counts a polled read or write that succeeded.
    #[inline]
    pub(crate) fn count_polled(&mut self) {
        if let Some(polled) = &mut self.polled {
            polled.count_success();
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

    /// Waits for the next completion of a store that is closing. `checks` counts the waits, so that a polled
    /// device that hangs is checked less and less often. `Err`: the ring is broken.
    pub(crate) fn next_of(&mut self, id: StoreId, checks: &mut u32) -> io::Result<Completion> {
        loop {
            while let Some(received) = self.next() {
                match received {
                    Received::Op(completion) if completion.store == id.store => {
                        return Ok(completion);
                    }
                    other => self.deferred.push_back(other),
                }
            }
            *checks = checks.saturating_add(1);
            let Some(polled) = self.polled.as_mut().filter(|polled| polled.is_busy()) else {
                self.ring.enter(Sleep::Forever, Purpose::Io)?;
                continue;
            };
            polled.poll()?;
            self.ring.enter(Sleep::No, Purpose::Io)?;
            if *checks > CLOSE_CHECKS {
                std::thread::sleep(CLOSE_SLEEP);
            }
        }
    }

    /// For a store that closes: waits at most `time` for its next completion. `Err`: the ring is broken.
    pub(crate) fn next_of_within(
        &mut self,
        id: StoreId,
        time: Duration,
    ) -> io::Result<Option<Completion>> {
        let mut has_slept = false;
        loop {
            while let Some(received) = self.next() {
                match received {
                    Received::Op(completion) if completion.store == id.store => {
                        return Ok(Some(completion));
                    }
                    other => self.deferred.push_back(other),
                }
            }
            if std::mem::replace(&mut has_slept, true) {
                return Ok(None);
            }
            self.ring.enter(Sleep::For(time), Purpose::Io)?;
        }
    }

    /// Whether `reap` may find an event in the rings.
    pub(crate) fn has_events(&mut self) -> bool {
        !self.deferred.is_empty()
            || self.ring.has_completions()
            || self
                .polled
                .as_deref_mut()
                .is_some_and(Polled::has_completions)
    }

    /// For a store that waits on its own: submits the queued entries and sleeps for at most `time`.
    pub(crate) fn submit_and_sleep(&mut self, time: Duration) -> io::Result<()> {
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

impl AsFd for Reactor {
    /// For `epoll`; see [`Reactor::settle`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Linux 6.1 waits for every poll on a registered file before the ring releases its files, and nothing
        // else would end a watch.
        self.bells.flush(&mut self.ring);
        self.watches.clear_all(&mut self.ring);
        let _ = self.ring.enter(Sleep::No, Purpose::Io);
    }
}

/// The opcodes that the disks, watches and bells need.
fn opcodes(disks: &[&Disk]) -> Vec<u8> {
    const SOCKET: [u8; 3] = [
        opcode::SendMsg::CODE,
        opcode::RecvMsg::CODE,
        opcode::Shutdown::CODE,
    ];
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
    let is_remote = legs
        .clone()
        .any(|leg| matches!(leg.backing(), Backing::Nbd(_)));
    let needed = legs.map(|leg| match leg.backing() {
        Backing::Ram(_)
        | Backing::Null { .. }
        | Backing::Model { .. }
        | Backing::Nbd(_)
        | Backing::Rbd(_) => 3,
        Backing::File {
            kind: FileKind::Regular,
            ..
        } => 8,
        Backing::File {
            kind: FileKind::BlockDevice,
            ..
        } => ALL.len(),
    });
    let mut needed = ALL
        .get(..needed.max().unwrap_or(3))
        .unwrap_or(&ALL)
        .to_vec();
    if is_remote {
        needed.extend(SOCKET);
    }
    let is_tcp =
        |leg: &cleave_disk::Leg| matches!(leg.backing(), Backing::Nbd(nbd) if nbd.is_tcp());
    if disks.iter().flat_map(|disk| disk.legs()).any(is_tcp) {
        needed.push(opcode::SetSockOpt::CODE);
    }
    needed
}

/// The number of files that a disk's store registers.
fn file_slots(disk: &Disk) -> u32 {
    match disk.backing() {
        // A socket and its bell for each connection.
        Backing::Nbd(nbd) => 2 * u32::from(nbd.connections()),
        // The bell of the inbox.
        Backing::Rbd(_) => 1,
        // A stripe has at most 64 legs.
        _ => disk.legs().len() as u32,
    }
}
