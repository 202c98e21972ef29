//! A worker thread's io_uring. It carries the stores' I/O, watches descriptors, calls guests, and is where
//! the thread sleeps.

pub(crate) mod bell;
mod lap;
pub(crate) mod neighbours;
pub(crate) mod polled;
pub(crate) mod ring;
pub(crate) mod watch;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use cleave_disk::{Backing, Disk, FileKind, Leg};
use io_uring::{opcode, squeue};

use self::bell::{BellFd, Bells};
pub use self::lap::Rest;
use self::neighbours::{Neighbour, Neighbours};
use self::polled::Polled;
use self::ring::{
    ClosedRing, CompletionMode, LEVELS, Level, Purpose, Ring, RingConfig, SHARED_LEVELS, Sleep, tag,
};
use self::watch::{Signal, Watches};
use crate::EngineError;

/// Completions beyond one per op: failed removals, and the few polls that report twice.
const COMPLETION_SLACK: u32 = 64;
/// Submissions beyond one per op: arming watches and writing bells.
const SUBMISSION_SLACK: u32 = 32;

/// Pause of a store if the submission queue accepts nothing.
pub(crate) const FULL_PAUSE: Duration = Duration::from_millis(1);

/// While a store closes: the number of checks of the polled ring before the thread sleeps between checks, and
/// the length of that sleep.
const CLOSE_CHECKS: u32 = 1000;
const CLOSE_SLEEP: Duration = Duration::from_micros(500);

/// A completion for a store: the number under which the store submitted the entry, and the result.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    pub(crate) store: u16,
    pub(crate) index: u16,
    pub(crate) result: i32,
    /// The completion arrived in the polled ring.
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

/// A reactor that another thread will use. Setting up its rings takes memory and time, and a confined thread may not
/// do it.
#[derive(Debug)]
pub struct Prepared(Reactor);

// SAFETY: the rings are not enabled, so nothing was submitted and no thread is registered with them. The reactor is
// owned here alone: `enable` gives it to the thread that calls it, and a `Reactor` never leaves that thread.
unsafe impl Send for Prepared {}

impl Prepared {
    /// Like [`Reactor::new`] (`slots` holds its three numbers), for a thread that waits for several reactors at once, whose disks are
    /// among these `neighbours`.
    pub fn new(
        disks: &[&Disk],
        slots: [u16; 3],
        neighbours: &Arc<Neighbours>,
    ) -> Result<Prepared, EngineError> {
        let submissions = u32::from(slots[0]) + SUBMISSION_SLACK;
        let mut reactor = Reactor::prepared(disks, slots, submissions, &SHARED_LEVELS)?;
        reactor.neighbour = Some(Neighbour::join(neighbours, disks));
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
        reactor.enable()?;
        Ok(reactor)
    }
}

/// Numbers the reactors of this process.
static REACTORS: AtomicU64 = AtomicU64::new(0);

/// Who uses the thread of a reactor.
#[derive(Debug, Clone)]
pub(crate) enum Tenancy {
    /// The disks of this reactor alone.
    Own,
    /// Other reactors too: what takes long here delays their disks.
    Shared(Arc<Neighbours>),
}

/// One thread's io_uring and all that goes through it.
#[derive(Debug)]
pub struct Reactor {
    number: u64,
    /// Present if other reactors use the thread too.
    neighbour: Option<Neighbour>,
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
        reactor.enable()?;
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
        reactor.enable()?;
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
        for (file, slot) in barriers().zip(first_barrier..) {
            ring.set_file(slot, Some(file.as_raw_fd()))?;
        }
        let polled = match disks.iter().any(|disk| disk.is_polled()) {
            true => {
                let slots = files + barriers().count() as u32;
                let polled = Polled::prepare(submissions, slots, levels)?;
                for (file, slot) in barriers().zip(files..) {
                    polled.set_file(slot, &file)?;
                }
                Some(Box::new(polled))
            }
            false => None,
        };
        let mut legs = disks.iter().flat_map(|disk| disk.legs());
        Ok(Reactor {
            number: REACTORS.fetch_add(1, Ordering::Relaxed),
            neighbour: None,
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

    /// Returns true if an `enter` or `reap` would find something, without a system call.
    #[inline]
    pub fn is_signalled(&mut self) -> bool {
        self.ring.is_signalled() || self.has_events()
    }

    /// Who uses its thread.
    pub(crate) fn tenancy(&self) -> Tenancy {
        match &self.neighbour {
            None => Tenancy::Own,
            Some(neighbour) => Tenancy::Shared(neighbour.all().clone()),
        }
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
    /// without O_NONBLOCK, and any on a shared thread, costs the next enter an extra system call.
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

    /// Takes the next completion of a store off the rings, and puts everything before it aside.
    fn next_op(&mut self, id: StoreId) -> Option<Completion> {
        loop {
            match self.next()? {
                Received::Op(completion) if completion.store == id.store => {
                    return Some(completion);
                }
                other => self.deferred.push_back(other),
            }
        }
    }

    /// Waits for the next completion of a store that is closing. `checks` counts the waits, so that a polled
    /// device that hangs is checked less and less often. `Err`: the ring is broken.
    pub(crate) fn next_of(&mut self, id: StoreId, checks: &mut u32) -> io::Result<Completion> {
        loop {
            if let Some(completion) = self.next_op(id) {
                return Ok(completion);
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
            if let Some(completion) = self.next_op(id) {
                return Ok(Some(completion));
            }
            if std::mem::replace(&mut has_slept, true) {
                return Ok(None);
            }
            self.ring.enter(Sleep::For(time), Purpose::Io)?;
        }
    }

    /// Returns true if `reap` may find an event in the rings.
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
