//! The real engine: io_uring.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::Op;
use cleave_disk::{Disk, FileKind, Store};
use cleave_guest::Memory;
use io_uring::opcode;

use crate::bell::Bells;
use crate::files::Files;
use crate::legs::LegStats;
use crate::memory::Bindings;
use crate::onspot::{self, Ram};
use crate::polled::Polled;
use crate::ring::{self, Ends, LEVELS, Level, Plan, Purpose, Ring, Sleep, tag};
use crate::watch::{Signal, Watches};
use crate::{Engine, Event, Wait};

/// Completions beyond one per op: removals that failed, a few polls that report twice.
const COMPLETION_SLACK: u32 = 64;
/// Submissions beyond one per op: watches armed, bells rung.
const SUBMISSION_SLACK: u32 = 32;
/// Pause while a watch or a bell waits for room in the queue.
const ARM_PAUSE: Duration = Duration::from_millis(1);

/// Looks at the polled ring by an engine that goes, before it naps between them; and how long.
const DRAIN_LOOKS: u32 = 1000;
const DRAIN_NAP: Duration = Duration::from_micros(500);

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
    /// A device that states polled queues and does not take a polled read.
    #[error(
        "disk {name} cannot be polled: a polled read of its first block came to nothing ({source}); \
         leave --iopoll away"
    )]
    Iopoll {
        /// The disk, or the leg of a stripe.
        name: String,
        /// What the kernel said.
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

/// What all kinds of store share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) ring: Ring,
    /// Beside it, where the disk is polled for.
    pub(crate) polled: Option<Box<Polled>>,
    pub(crate) bindings: Bindings,
    pub(crate) disk: Arc<Disk>,
    /// Found out and not yet reaped.
    ready: VecDeque<Event>,
}

impl Core {
    #[inline]
    pub(crate) fn done(&mut self, token: u64, result: Result<(), i32>) {
        self.ready.push_back(Event::Done { token, result });
    }

    /// The engine goes and something is in flight: sleeps until there is an end of it or, where that has
    /// to be asked for, asks for the `looks`-th time. A device that hangs is asked ever less often.
    fn wait_to_drain(&mut self, looks: u32) -> io::Result<()> {
        let Some(polled) = self.polled.as_mut().filter(|polled| polled.is_flying()) else {
            return self.ring.enter(Sleep::Forever, Purpose::Io);
        };
        polled.look()?;
        self.ring.enter(Sleep::No, Purpose::Io)?;
        if looks > DRAIN_LOOKS {
            std::thread::sleep(DRAIN_NAP);
        }
        Ok(())
    }

    /// No later fsync of this disk can vouch for what was written before.
    #[cold]
    pub(crate) fn taint_sync(&mut self, errno: i32) {
        if !self.disk.sync_failed() {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(
                disk = self.disk.name(),
                %error,
                "a sync failed and data may be lost; every flush fails until the disk is reopened"
            );
        }
        self.disk.mark_sync_failed();
    }
}

/// How ops are run.
#[derive(Debug)]
enum Runner {
    Files(Box<Files>),
    Ram(Ram),
    Null { zeroes: bool },
}

/// Ops through io_uring for files and block devices; RAM and null disks are done on the spot, with
/// the ring only for waiting.
#[derive(Debug)]
pub struct Uring {
    // The ring goes before the tables that its entries point into; `drop` has emptied it by then.
    core: Core,
    watches: Watches,
    bells: Bells,
    runner: Runner,
    ops: usize,
    in_flight: usize,
    pushed: u64,
}

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
        let submissions = u32::from(ops) + SUBMISSION_SLACK;
        Uring::with_queue(disk, memory, [ops, watches, bells], submissions, &LEVELS)
    }

    /// As `new` (`slots`: its three numbers), with a submission queue of the given size, set up in one
    /// of the given ways.
    fn with_queue(
        disk: Arc<Disk>,
        memory: Arc<Memory>,
        [ops, watches, bells]: [u16; 3],
        submissions: u32,
        levels: &[Level],
    ) -> Result<Uring, EngineError> {
        let runner = runner(&disk, ops).map_err(EngineError::setup)?;
        let legs = files(&disk);
        // A stripe has at most 64.
        let first_watch = ring::FIRST_LEG_SLOT + disk.legs().len() as u32;
        let first_bell = first_watch + u32::from(watches);
        let ring = Ring::new(&Plan {
            submissions: submissions.next_power_of_two(),
            completions: (u32::from(ops) + 2 * u32::from(watches) + COMPLETION_SLACK)
                .max(2 * submissions)
                .next_power_of_two(),
            files: first_bell + u32::from(bells),
            legs: &legs,
            opcodes: opcodes(&disk),
            levels,
            ends: Ends::Told,
        })?;
        drop(legs);
        let polled = Polled::new(&disk, submissions, levels)?.map(Box::new);
        let ready = VecDeque::with_capacity(usize::from(ops) + usize::from(watches));
        Ok(Uring {
            core: Core {
                ring,
                polled,
                bindings: Bindings::new(memory),
                disk,
                ready,
            },
            watches: Watches::new(first_watch, watches),
            bells: Bells::new(first_bell, bells),
            runner,
            ops: usize::from(ops),
            in_flight: 0,
            pushed: 0,
        })
    }

    /// Whether a ring can be made here at all, for a clear error at start.
    pub fn probe() -> Result<(), EngineError> {
        ring::probe()
    }

    /// System calls made so far to enter the rings.
    pub fn enters(&self) -> u64 {
        let polled = self
            .core
            .polled
            .as_ref()
            .map_or(0, |polled| polled.enters());
        self.core.ring.enters() + polled
    }

    /// Ops taken so far.
    pub fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Whether `reap` may have something.
    pub(crate) fn has_events(&mut self) -> bool {
        let polled = self.core.polled.as_deref_mut();
        !self.core.ready.is_empty()
            || self.core.ring.has_completions()
            || polled.is_some_and(Polled::has_completions)
    }

    /// Takes the next completion of the polled ring, whatever comes of it. `false`: there is none.
    #[inline(never)]
    fn reap_polled(&mut self) -> bool {
        let polled = self.core.polled.as_deref_mut();
        let Some(entry) = polled.and_then(Polled::complete) else {
            return false;
        };
        if let Runner::Files(files) = &mut self.runner {
            files.completed_polled(&mut self.core, entry.user_data() as u16, entry.result());
        }
        true
    }

    /// How long an enter sleeps at most.
    #[inline]
    fn sleep(&mut self, wait: Wait, limit: Option<Duration>) -> Sleep {
        let Wait::Until(deadline) = wait else {
            return Sleep::No;
        };
        // What is polled for ends no sleep.
        if (self.polls() && deadline.is_none()) || self.has_events() {
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

    /// Waits until the kernel has ended every op: it writes guest memory until then. `Err`: it cannot
    /// be told any more when that is.
    fn drain(&mut self) -> io::Result<()> {
        self.bells.flush(&mut self.core.ring);
        self.watches.clear_all(&mut self.core.ring);
        // Submits, and has the polls that were forgotten end.
        self.core.ring.enter(Sleep::No, Purpose::Io)?;
        let Runner::Files(files) = &mut self.runner else {
            return self.core.ring.enter(Sleep::No, Purpose::Io);
        };
        files.close(&mut self.core);
        let mut looks = 0_u32;
        while files.flying() > 0 {
            let polled = self.core.polled.as_deref_mut();
            let entry = self.core.ring.complete();
            let entry = entry.or_else(|| polled.and_then(Polled::complete));
            if let Some(entry) = entry {
                if entry.user_data() & tag::MASK == tag::OP {
                    files.completed_closed(
                        &mut self.core,
                        entry.user_data() as u16,
                        entry.result(),
                    );
                }
            } else {
                looks = looks.saturating_add(1);
                self.core.wait_to_drain(looks)?;
            }
        }
        self.core.ring.enter(Sleep::No, Purpose::Io)
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        if let Err(error) = self.drain() {
            let disk = self.core.disk.name();
            tracing::error!(disk, %error, "ring broken; what the kernel may still write stays mapped");
            if let Runner::Files(files) = &mut self.runner {
                files.abandon(&self.core);
            }
            self.core.bindings.leak();
            std::mem::forget(std::mem::replace(
                &mut self.runner,
                Runner::Null { zeroes: true },
            ));
        }
    }
}

/// The legs that are files or devices: all of them, or none.
pub(crate) fn files(disk: &Disk) -> Vec<BorrowedFd<'_>> {
    disk.legs()
        .iter()
        .filter_map(|leg| match leg.store() {
            Store::File { file, .. } => Some(file.as_fd()),
            Store::Ram(_) | Store::Null { .. } | Store::Model { .. } => None,
        })
        .collect()
}

/// The table and buffers of a file or of a stripe's, the bytes of a RAM disk, or nothing.
fn runner(disk: &Arc<Disk>, ops: u16) -> io::Result<Runner> {
    let mut kinds = Vec::with_capacity(disk.legs().len());
    for leg in disk.legs() {
        match leg.store() {
            Store::File { kind, .. } => kinds.push(*kind),
            // No stripe has such a leg. A modelled drive without its times; `Model` has them.
            Store::Ram(region) | Store::Model { ram: region, .. } => {
                return Ok(Runner::Ram(Ram::new(region)));
            }
            Store::Null { zeroes } => return Ok(Runner::Null { zeroes: *zeroes }),
        }
    }
    Ok(Runner::Files(Box::new(Files::new(disk, &kinds, ops)?)))
}

/// The operations that a disk needs, watches and bells included.
fn opcodes(disk: &Disk) -> &'static [u8] {
    const ALL: [u8; 9] = [
        opcode::PollAdd::CODE,
        opcode::PollRemove::CODE,
        opcode::Write::CODE,
        opcode::Read::CODE,
        opcode::Readv::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::UringCmd16::CODE,
    ];
    let needed = disk.legs().iter().map(|leg| match leg.store() {
        Store::Ram(_) | Store::Null { .. } | Store::Model { .. } => 3,
        Store::File {
            kind: FileKind::Regular,
            ..
        } => 8,
        Store::File {
            kind: FileKind::BlockDevice,
            ..
        } => ALL.len(),
    });
    ALL.get(..needed.max().unwrap_or(3)).unwrap_or(&ALL)
}

impl Engine for Uring {
    #[inline]
    fn room(&self) -> usize {
        self.ops.saturating_sub(self.in_flight)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    #[inline]
    fn push(&mut self, op: Op<'_>, token: u64) {
        debug_assert!(self.room() > 0);
        self.in_flight += 1;
        self.pushed += 1;
        let core = &mut self.core;
        let result = match &mut self.runner {
            Runner::Files(files) => return files.push(core, &op, token),
            Runner::Ram(ram) => onspot::ram(*ram, &core.disk, core.bindings.memory(), &op),
            Runner::Null { zeroes } => {
                onspot::null(*zeroes, &core.disk, core.bindings.memory(), &op)
            }
        };
        core.done(token, result);
    }

    #[inline]
    fn at_once(&mut self, op: &Op<'_>) -> bool {
        let (disk, memory) = (&self.core.disk, self.core.bindings.memory());
        // One that fails is pushed, and fails again where errors are told; twice does what once does.
        let done = match &self.runner {
            Runner::Files(_) => return false,
            Runner::Ram(ram) => onspot::ram(*ram, disk, memory, op),
            Runner::Null { zeroes } => onspot::null(*zeroes, disk, memory, op),
        };
        self.pushed += u64::from(done.is_ok());
        done.is_ok()
    }

    #[inline]
    fn reap(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.core.ready.pop_front() {
                if let Event::Done { .. } = event {
                    self.in_flight -= 1;
                }
                return Some(event);
            }
            let Some(entry) = self.core.ring.complete() else {
                if self.core.polled.is_some() && self.reap_polled() {
                    continue;
                }
                return None;
            };
            match entry.user_data() & tag::MASK {
                tag::OP => {
                    if let Runner::Files(files) = &mut self.runner {
                        files.completed(&mut self.core, entry.user_data() as u16, entry.result());
                    }
                }
                tag::WATCH => {
                    if let Signal::Woken(slot) = self.watches.completed(&mut self.core.ring, &entry)
                    {
                        return Some(Event::Woken { slot });
                    }
                }
                _ => {}
            }
        }
    }

    #[inline]
    fn enter(&mut self, wait: Wait) -> io::Result<()> {
        let limit = match &mut self.runner {
            Runner::Files(files) => files.before_enter(&mut self.core),
            Runner::Ram(_) | Runner::Null { .. } => None,
        };
        self.watches.arm_wanted(&mut self.core.ring);
        self.bells.flush(&mut self.core.ring);
        if let (Wait::Until(_), Some(polled)) = (wait, &mut self.core.polled) {
            // What was pushed is not slept on, and what has ended not either.
            polled.look()?;
        }
        let sleep = self.sleep(wait, limit);
        let purpose = match self.in_flight {
            0 => Purpose::Signal,
            _ => Purpose::Io,
        };
        // Before the polled ring, unless it is about to sleep: this one calls the guest.
        let entered = self.core.ring.enter(sleep, purpose);
        if let Runner::Files(files) = &mut self.runner {
            if let Some(polled) = &mut self.core.polled {
                polled.look()?;
            }
            files.tick();
        }
        entered
    }

    #[inline]
    fn polls(&self) -> bool {
        self.core.polled.as_ref().is_some_and(|p| p.is_flying())
    }

    #[inline]
    fn polled(&self) -> u64 {
        self.core.polled.as_ref().map_or(0, |p| p.ended())
    }

    fn watch(&mut self, slot: u16, fd: OwnedFd) {
        if self.watches.set(&mut self.core.ring, slot, &fd).is_err() {
            // Nothing will ever come from it: say so once.
            self.core.ready.push_back(Event::Woken { slot });
        }
    }

    fn unwatch(&mut self, slot: u16) {
        self.watches.clear(&mut self.core.ring, slot);
    }

    fn set_bell(&mut self, slot: u16, fd: Option<OwnedFd>) {
        self.bells.set(&mut self.core.ring, slot, fd);
    }

    #[inline]
    fn ring(&mut self, slot: u16) {
        self.bells.ring(&mut self.core.ring, slot);
    }

    fn bind(&mut self, memory: Arc<Memory>) {
        self.core.bindings.bind(memory);
    }

    fn is_settled(&self) -> bool {
        self.core.bindings.is_settled()
    }

    fn leg_stats(&self) -> Arc<[LegStats]> {
        match &self.runner {
            Runner::Files(files) => files.leg_stats(),
            Runner::Ram(_) | Runner::Null { .. } => Arc::new([]),
        }
    }
}

#[cfg(test)]
pub(crate) mod rig;
#[cfg(test)]
mod tests;
