//! Ops on files and block devices: from push through range locks, buffers, the ring and short transfers to
//! one result.
//!
//! Unsafe because entries handed to the ring point to guest memory, to bounce buffers and to blocks of host
//! ranges. The epoch in the op's entry keeps guest memory mapped until `finish`. Buffers and ranges are in
//! the areas of `ops` and `pool`, which live until the last completion has been seen (`close`; if that did
//! not happen, `drop` leaks them).
//!
//! An op takes its range lock first and its buffer second. An op that waits for a buffer may hold a lock, but
//! an op with a buffer waits only for the kernel, perhaps until others have completed there, so there is no deadlock.

mod delegated;
mod portion;
mod range;
#[cfg(test)]
pub(crate) mod rig;
mod submission;
mod sync;
mod syncs;
mod waiting;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind};
use cleave_disk::{Backing, Disk, FileKind, Leg, RangeLocks};
use cleave_guest::Epoch;

use self::portion::{Delegated, Delegation, Postponed};
use self::range::range;
use self::syncs::Syncs;
use crate::ops::buffer::BufferPool;
use crate::ops::lap::LapBudget;
use crate::ops::piece;
use crate::ops::progress::{self, Direction, Progress, Retry, Transfer};
use crate::ops::queue::{self, OpQueue, from_ops};
use crate::ops::step::{self, Facts, FileOp, Hold, Method, Methods, Step, StepToStart};
use crate::ops::table::Entry;
use crate::reactor::{StoreId, Tenancy};
use crate::{Completion, Reactor, Store, Wait};

/// Consecutive EOPNOTSUPP results after which a leg is no longer polled. A single one may concern only that op.
const REFUSALS_MAX: u32 = 8;

/// Ops on the files or block devices of a disk.
#[derive(Debug)]
pub struct Files {
    disk: Arc<Disk>,
    id: StoreId,
    ops: OpQueue<FileOp>,
    /// Never empty. The alignments are the disk's, so they are the same on all legs.
    legs: Box<[LegState]>,
    unit: u64,
    pool: BufferPool,
    /// Entries that the rings have not completed; `polled` counts those in the polled ring.
    submitted: usize,
    polled: usize,
    delegated: Delegated,
    tenancy: Tenancy,
    /// For copies between guest memory and buffers, or through the page cache, for look-ups of guest memory, and for what is submitted
    /// to a file system. Each lap of it begins with the next enter.
    lap: LapBudget,
    /// Ops that go on in the next lap, because this one has done enough.
    put_off: VecDeque<(u16, Postponed)>,
    hold_waiters: VecDeque<u16>,
    buffer_waiters: VecDeque<u16>,
    /// Ops that wait for their retry time.
    delayed: VecDeque<(Instant, u16)>,
    #[cfg(test)]
    rig: rig::Rig,
}

/// One leg's properties and syncs.
#[derive(Debug)]
struct LegState {
    facts: Facts,
    delegation: Delegation,
    methods: Methods,
    syncs: Syncs,
    /// Consecutive EOPNOTSUPP results of the polled ring.
    refusals: u32,
}

impl Files {
    /// For a disk whose legs are files, on a reactor that was created for it; see [`crate::AnyStore::open`].
    pub(crate) fn new(
        reactor: &mut Reactor,
        disk: Arc<Disk>,
        worker: usize,
        ops: u16,
    ) -> io::Result<Files> {
        let mut kinds = Vec::with_capacity(disk.legs().len());
        let mut files = Vec::with_capacity(disk.legs().len());
        for leg in disk.legs() {
            let (Backing::File { kind, .. }, Some(file)) = (leg.backing(), leg.file_for(worker))
            else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            kinds.push(*kind);
            files.push(file);
        }
        let id = reactor.attach(&files, disk.is_polled())?;
        let tenancy = reactor.tenancy();
        let limits = disk.limits();
        let pool = BufferPool::new(
            limits.offset_align_bytes.max(1) as usize,
            limits
                .memory_align_bytes
                .max(limits.offset_align_bytes)
                .max(4096) as usize,
        )?;
        let room = usize::from(ops);
        let leg = |(kind, leg): (&FileKind, &Leg)| LegState {
            facts: Facts {
                buffer_bytes: pool.buffer_bytes(),
                zeroes_bytes: pool.zeroes_bytes(),
                ..Facts::new(leg, *kind, limits)
            },
            delegation: Delegation::of(leg, *kind, &tenancy),
            methods: Methods::at_first(*kind),
            syncs: Syncs::new(room),
            refusals: 0,
        };
        Ok(Files {
            legs: kinds.iter().zip(disk.legs()).map(leg).collect(),
            unit: u64::from(limits.offset_align_bytes.max(1)),
            ops: OpQueue::new(&disk, ops, 0, FileOp::default())?,
            pool,
            submitted: 0,
            polled: 0,
            delegated: Delegated::new(room),
            lap: LapBudget::of(&tenancy),
            tenancy,
            put_off: VecDeque::with_capacity(room),
            hold_waiters: VecDeque::with_capacity(room),
            buffer_waiters: VecDeque::with_capacity(room),
            delayed: VecDeque::with_capacity(room),
            disk,
            id,
            #[cfg(test)]
            rig: rig::Rig::default(),
        })
    }

    /// `admit` accepts only existing legs.
    #[inline]
    fn leg(&self, leg: u16) -> &LegState {
        &self.legs[usize::from(leg)]
    }

    #[inline]
    fn leg_mut(&mut self, leg: u16) -> &mut LegState {
        &mut self.legs[usize::from(leg)]
    }

    /// Checks an op and adds it to the queue. `Err` is the result of an op that ends here.
    fn admit(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<u16, Result<(), i32>> {
        let Some(LegState { facts, .. }) = self.legs.get(usize::from(op.leg)) else {
            return Err(Err(libc::EIO));
        };
        let (offset, len) = range(&self.disk, facts, op)?;
        let range = (offset, len);
        let lap = &mut self.lap;
        let index = self.ops.admit(lap, epoch, op, token, range, |memory| {
            let bounced = memory.is_some_and(|memory| facts.must_bounce(offset, memory));
            FileOp {
                bounced,
                plain: !bounced && memory.is_some_and(|memory| memory.has_gaps()),
                needs: facts.needs_hold(op.kind, offset, len),
                ..FileOp::default()
            }
        });
        index.map_err(Err)
    }

    #[inline]
    fn begin(&mut self, reactor: &mut Reactor, index: u16) {
        if self.try_hold(index) {
            self.proceed(reactor, index);
        } else if self.is_hold_lost(index) {
            self.finish(index, Err(libc::EIO));
        } else {
            self.hold_waiters.push_back(index);
        }
    }

    /// Returns true if nobody will release what the op waits for, because its holder was left behind.
    #[cold]
    fn is_hold_lost(&self, index: u16) -> bool {
        let entry = self.ops.get(index);
        let (start, len) = piece::around(entry.offset, entry.len, self.unit);
        locks(&self.disk, entry.leg).is_some_and(|locks| match entry.own.needs {
            Hold::None => false,
            Hold::Shared => locks.is_lost_to_shared(start, len),
            Hold::Exclusive => locks.is_lost_to_exclusive(start, len),
        })
    }

    #[inline]
    fn try_hold(&mut self, index: u16) -> bool {
        let entry = self.ops.get_mut(index);
        let (start, len) = piece::around(entry.offset, entry.len, self.unit);
        let got = match entry.own.needs {
            Hold::None => return true,
            Hold::Shared => locks(&self.disk, entry.leg).is_some_and(|l| l.try_shared(start, len)),
            Hold::Exclusive => {
                locks(&self.disk, entry.leg).is_some_and(|l| l.try_exclusive(start, len))
            }
        };
        if got {
            entry.own.held = entry.own.needs;
        }
        got
    }

    fn release_hold(&mut self, index: u16) {
        let entry = self.ops.get_mut(index);
        let (start, len) = piece::around(entry.offset, entry.len, self.unit);
        let held = std::mem::replace(&mut entry.own.held, Hold::None);
        let Some(locks) = locks(&self.disk, entry.leg) else {
            return;
        };
        match held {
            Hold::None => {}
            Hold::Shared => locks.release_shared(start, len),
            Hold::Exclusive => locks.release_exclusive(start, len),
        }
    }

    /// Starts the next step of an op that has its range lock.
    fn proceed(&mut self, reactor: &mut Reactor, index: u16) {
        let entry = self.ops.get(index);
        let leg = self.leg(entry.leg);
        let next = step::next(entry, &leg.facts, leg.methods);
        let (step, window) = match next {
            StepToStart::Done => return self.finish(index, Ok(())),
            StepToStart::Sync => return self.begin_sync(reactor, index),
            StepToStart::Direct(piece) => (Step::Direct, piece),
            StepToStart::Fill(piece) => (Step::Fill, piece),
            StepToStart::Spill(piece) => (Step::Spill, piece),
            StepToStart::Zeroes(piece) => (Step::Zeroes, piece),
            StepToStart::Range(method, piece) => (Step::Range(method), piece),
        };
        if step == Step::Spill && self.lap.is_used_up() {
            return self.put_off.push_back((index, Postponed::Proceed));
        }
        if matches!(step, Step::Fill | Step::Spill) && !self.has_buffer(index) {
            return self.buffer_waiters.push_back(index);
        }
        self.ops.get_mut(index).own.begin(step, window);
        if step == Step::Spill {
            self.copy(index, Direction::FromGuest);
        }
        self.issue_copied(reactor, index);
    }

    /// Issues the step, unless guest memory was lost during the copy: the buffer may then hold zeroes instead
    /// of the data.
    fn issue_copied(&mut self, reactor: &mut Reactor, index: u16) {
        let entry = self.ops.get(index);
        if entry.own.bounced && entry.epoch.as_ref().is_some_and(|epoch| epoch.is_lost()) {
            self.finish(index, Err(libc::EFAULT));
        } else {
            self.issue(reactor, index);
        }
    }

    /// Returns true if the op has a buffer now. Ops that already wait for one go first.
    fn has_buffer(&mut self, index: u16) -> bool {
        if self.ops.get(index).own.buffer.is_none() && self.buffer_waiters.is_empty() {
            self.ops.get_mut(index).own.buffer = self.pool.take();
        }
        self.ops.get(index).own.buffer.is_some()
    }

    /// Copies the op's part of the window from guest memory to the buffer or back.
    fn copy(&mut self, index: u16, direction: Direction) {
        let entry = self.ops.get(index);
        let (skip, take) = (entry.own.window.skip, entry.own.window.take);
        let Some(buffer) = entry.own.buffer else {
            return;
        };
        self.lap.spend(take);
        #[cfg(test)]
        self.rig.count_copied(take);
        let mut at = self.pool.at(buffer, skip);
        self.ops.consume(index, take, |start, len| {
            // SAFETY: the op's epoch keeps the guest range mapped. The buffer belongs to this op alone, the
            // kernel has finished with it, and `skip` + `take` is inside it. Guest and daemon memory do not
            // overlap. If the guest writes meanwhile, the copy has either its old or its new bytes.
            unsafe {
                match direction {
                    Direction::ToGuest => std::ptr::copy_nonoverlapping(at, start, len),
                    Direction::FromGuest => std::ptr::copy_nonoverlapping(start, at, len),
                }
                at = at.add(len);
            }
        });
    }

    /// Handles the completion of a step in the plain ring.
    #[inline]
    fn step_completed(&mut self, reactor: &mut Reactor, index: u16, result: i32) {
        self.submitted = self.submitted.saturating_sub(1);
        self.portion_completed(index);
        #[cfg(test)]
        let result = self.mangled(index, result);
        // Any number of buffers may be filled at the same time.
        match self.lap.is_used_up() && self.ops.get(index).own.step == Step::Fill {
            true => self.put_off.push_back((index, Postponed::Take(result))),
            false => self.take_result(reactor, index, result),
        }
        self.serve_delegated(reactor);
        self.serve_buffer_waiters(reactor);
    }

    #[inline]
    fn take_result(&mut self, reactor: &mut Reactor, index: u16, result: i32) {
        match self.step_progress(index, result) {
            Progress::Whole => self.step_done(reactor, index, result),
            Progress::Part(moved) => self.continue_transfer(reactor, index, moved),
            Progress::Again => self.retry_step(reactor, index),
            Progress::Failed(errno) => self.step_failed(reactor, index, errno),
        }
    }

    /// Handles the completion of a step in the polled ring. A step that it refused goes to the plain ring.
    #[inline(never)]
    fn polled_completed(&mut self, reactor: &mut Reactor, index: u16, result: i32) {
        #[cfg(test)]
        let result = self.polled_mangled(result);
        let leg = self.ops.get(index).leg;
        match result.checked_neg() {
            Some(errno @ (libc::EOPNOTSUPP | libc::EAGAIN | libc::EINVAL)) => {
                if errno == libc::EOPNOTSUPP {
                    self.polling_refused(leg);
                }
                self.ops.get_mut(index).own.plain = true;
                self.submitted = self.submitted.saturating_sub(1);
                self.issue(reactor, index);
            }
            errno => {
                if errno.is_none_or(|errno| errno <= 0) {
                    self.leg_mut(leg).refusals = 0;
                    reactor.count_polled();
                }
                self.step_completed(reactor, index, result);
            }
        }
    }

    /// Counts a refusal to poll. After several in a row, the leg is served by interrupts.
    fn polling_refused(&mut self, leg: u16) {
        let state = self.leg_mut(leg);
        state.refusals += 1;
        if state.refusals < REFUSALS_MAX {
            return;
        }
        if let Some(leg) = self.disk.legs().get(usize::from(leg))
            && leg.stop_polling()
        {
            tracing::warn!(
                disk = leg.name(),
                "the device refuses polled I/O; this disk is served by interrupts from now on"
            );
        }
    }

    fn step_progress(&self, index: u16, result: i32) -> Progress {
        let entry = self.ops.get(index);
        let left = entry.own.window.len - entry.own.moved;
        let (direction, enough) = match entry.own.step {
            Step::Direct if entry.kind == OpKind::Read => (Direction::ToGuest, left),
            Step::Direct | Step::Spill | Step::Zeroes => (Direction::FromGuest, left),
            Step::Fill => (
                Direction::ToGuest,
                self.wanted(entry).saturating_sub(entry.own.moved).max(1),
            ),
            Step::Range(_) => return progress::range_progress(result),
            Step::Sync | Step::Idle => return progress::sync_progress(result),
        };
        progress::transfer_progress(
            Transfer {
                direction,
                enough,
                unit: self.unit,
            },
            result,
        )
    }

    /// How much of a window must be present: for a read the bytes that the guest asked for; for a
    /// read-modify-write everything that is on the disk, because the rest is written back. A disk, and the
    /// file that it is on, may end inside its last block.
    fn wanted(&self, entry: &Entry<FileOp>) -> u64 {
        let window = entry.own.window;
        let asked = window.skip + window.take;
        match entry.kind {
            OpKind::Read => asked,
            _ => self
                .disk
                .leg_bytes(entry.leg)
                .saturating_sub(window.start)
                .clamp(asked, window.len),
        }
    }

    /// Continues a short transfer after the bytes that were moved.
    fn continue_transfer(&mut self, reactor: &mut Reactor, index: u16, moved: u64) {
        let entry = self.ops.get_mut(index);
        entry.own.moved += moved;
        entry.own.tries = 0;
        // The rest may have gaps between its ranges.
        entry.own.plain = true;
        if entry.own.step == Step::Direct {
            self.ops.consume(index, moved, |_, _| ());
        }
        self.issue(reactor, index);
    }

    fn step_done(&mut self, reactor: &mut Reactor, index: u16, result: i32) {
        let entry = self.ops.get_mut(index);
        match entry.own.step {
            Step::Direct => {
                let (kind, leg) = (entry.kind, entry.leg);
                return match self.leg(leg).facts.ends_with_sync(kind) {
                    true => self.begin_sync(reactor, index),
                    false => self.finish(index, Ok(())),
                };
            }
            Step::Sync | Step::Idle => return self.sync_done(reactor, index, Ok(())),
            Step::Fill => {
                let moved = entry.own.moved;
                let got = moved.saturating_add(u64::try_from(result).unwrap_or(0));
                return self.buffer_filled(reactor, index, got);
            }
            Step::Spill | Step::Zeroes | Step::Range(_) => entry.pos += entry.own.window.take,
        }
        self.proceed(reactor, index);
    }

    /// Handles a filled buffer: `got` bytes of the window are in it. A read gets its part; a write puts its
    /// bytes between the old ones and writes the window back.
    fn buffer_filled(&mut self, reactor: &mut Reactor, index: u16, got: u64) {
        let entry = self.ops.get_mut(index);
        let (kind, window) = (entry.kind, entry.own.window);
        if kind == OpKind::Read {
            entry.pos += window.take;
            self.copy(index, Direction::ToGuest);
            return self.proceed(reactor, index);
        }
        entry.own.begin(Step::Spill, window);
        let Some(buffer) = entry.own.buffer else {
            return;
        };
        // Behind the end of the file there are zeroes, not the data that an earlier op left in the buffer.
        self.fill_with_zeroes(buffer, got.min(window.len), window.len);
        match kind {
            OpKind::Write { .. } => self.copy(index, Direction::FromGuest),
            _ => self.fill_with_zeroes(buffer, window.skip, window.skip + window.take),
        }
        self.issue_copied(reactor, index);
    }

    fn fill_with_zeroes(&self, buffer: u16, from: u64, to: u64) {
        let len = to.saturating_sub(from) as usize;
        // SAFETY: `to` ≤ the window's length ≤ the buffer's; the buffer belongs to this op and the kernel has
        // finished with it.
        unsafe { self.pool.at(buffer, from).write_bytes(0, len) };
    }

    /// Repeats a step that moved nothing, now or later, up to a limit.
    fn retry_step(&mut self, reactor: &mut Reactor, index: u16) {
        let entry = self.ops.get_mut(index);
        entry.own.tries = entry.own.tries.saturating_add(1);
        match progress::retry(entry.own.tries) {
            Retry::Now => self.issue(reactor, index),
            Retry::After(pause) => self.delayed.push_back((Instant::now() + pause, index)),
            Retry::Never => self.step_failed(reactor, index, libc::EIO),
        }
    }

    fn step_failed(&mut self, reactor: &mut Reactor, index: u16, errno: i32) {
        let entry = self.ops.get(index);
        match (entry.own.step, entry.kind) {
            (Step::Range(method), _) if is_refusal(errno) => {
                return self.refused(reactor, index, method, errno);
            }
            // The store has stricter alignment rules than it reported: use a buffer from here on.
            (Step::Direct, _) if errno == libc::EINVAL => {
                let entry = self.ops.get_mut(index);
                entry.own.bounced = true;
                entry.pos += entry.own.moved;
                return self.proceed(reactor, index);
            }
            (Step::Sync | Step::Idle, _) => {
                return self.sync_failed(reactor, index, errno);
            }
            _ => self.judge_failed_write(index, errno),
        }
        self.finish(index, Err(errno));
    }

    /// The store does not support `method`, or (EINVAL) not for this range: use the next best one.
    fn refused(&mut self, reactor: &mut Reactor, index: u16, method: Method, errno: i32) {
        let entry = self.ops.get_mut(index);
        let leg = entry.leg;
        match (errno, entry.kind) {
            (libc::EINVAL, OpKind::Zero { .. }) => entry.own.written = true,
            // A hint that the store does not take for this range.
            (libc::EINVAL, _) if method != Method::Command => {
                return self.finish(index, Ok(()));
            }
            _ => self.leg_mut(leg).methods.forget(method),
        }
        self.proceed(reactor, index);
    }

    /// Ends the op: releases everything that it holds, and reports its result.
    #[inline]
    fn finish(&mut self, index: u16, result: Result<(), i32>) {
        let FileOp { held, buffer, .. } = self.ops.get(index).own;
        if held != Hold::None {
            self.release_hold(index);
        }
        self.ops.finish(index, result);
        if let Some(buffer) = buffer {
            self.pool.give(buffer);
        }
    }

    /// Handles a completion while the store closes: the op ends with any result. A failed write-back is still
    /// recorded, because the kernel reports it to nobody else.
    fn completed_closing(&mut self, index: u16, result: i32) {
        self.submitted = self.submitted.saturating_sub(1);
        if let Progress::Failed(errno) = self.step_progress(index, result) {
            match self.ops.get(index).own.step {
                Step::Sync => self.taint_sync(errno),
                _ => self.judge_failed_write(index, errno),
            }
        }
        self.release_hold(index);
        self.ops.get_mut(index).epoch = None;
    }

    /// Has every later fsync fail if the op's failed step was a durable write that may have dropped earlier ones.
    fn judge_failed_write(&self, index: u16, errno: i32) {
        let entry = self.ops.get(index);
        let is_durable = self.leg(entry.leg).facts.writes_durably(entry.kind);
        let is_write = matches!(entry.own.step, Step::Direct | Step::Spill);
        if is_durable && is_write && progress::taints_sync(errno) {
            self.taint_sync(errno);
        }
    }

    fn taint_sync(&self, errno: i32) {
        queue::taint_sync(&self.disk, self.disk.name(), "a sync failed", errno);
    }

    /// Waits until the rings have nothing of this store. `Err`: they are broken.
    fn await_all(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        let mut checks = 0;
        while self.submitted > 0 {
            let completion = reactor.next_of(self.id, &mut checks)?;
            self.completed_closing(completion.index, completion.result);
        }
        Ok(())
    }
}

impl Store for Files {
    from_ops!(room, in_flight, reap, is_ready, leg_stats);

    #[inline]
    fn push(&mut self, reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        match self.admit(epoch, &op, token) {
            Ok(index) => self.begin(reactor, index),
            Err(result) => self.ops.end(token, result),
        }
    }

    #[inline]
    fn completed(&mut self, reactor: &mut Reactor, completion: Completion) {
        self.id.assert_own(completion);
        let Completion { index, result, .. } = completion;
        match completion.is_polled {
            false => self.step_completed(reactor, index, result),
            true => {
                self.polled -= 1;
                self.polled_completed(reactor, index, result);
            }
        }
    }

    #[inline]
    fn polls(&self) -> bool {
        self.polled > 0
    }

    #[inline]
    fn before_enter(&mut self, reactor: &mut Reactor, _wait: Wait) -> Option<Duration> {
        // Before the others: what was put off comes first, and if that is much, new requests wait.
        self.lap.renew();
        if !self.put_off.is_empty() {
            self.resume_put_off(reactor);
        }
        let pause = match self.delayed.is_empty() && self.hold_waiters.is_empty() {
            true => None,
            false => self.retry_waiting(reactor),
        };
        match self.put_off.is_empty() {
            true => pause,
            false => Some(Duration::ZERO),
        }
    }

    #[inline]
    fn after_enter(&mut self) {
        self.ops.tick();
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.lap.is_used_up()
    }

    fn close(&mut self, reactor: &mut Reactor) -> bool {
        self.drop_waiting();
        let waited = self.await_all(reactor);
        queue::has_closed(&self.disk, waited)
    }

    fn release_shared(&mut self) {
        for (_, entry) in self.ops.entries() {
            if entry.own.held != Hold::None
                && let Some(locks) = locks(&self.disk, entry.leg)
            {
                let (start, len) = piece::around(entry.offset, entry.len, self.unit);
                locks.lose(start, len);
            }
        }
    }
}

impl Drop for Files {
    /// Without the completions it is unknown when the kernel stops writing, so nothing that it may write
    /// to is ever unmapped, guest memory included.
    fn drop(&mut self) {
        if self.submitted == 0 {
            return;
        }
        self.release_shared();
        if self.legs.iter().any(|leg| leg.syncs.leader.is_some()) {
            self.disk.mark_sync_failed();
        }
        tracing::error!(
            disk = self.disk.name(),
            "{} I/Os never completed; the memory that they may write to is kept",
            self.submitted
        );
        self.ops.leak();
        self.pool.leak();
    }
}

/// The range locks of a leg. `admit` accepts only existing legs.
fn locks(disk: &Disk, leg: u16) -> Option<&RangeLocks> {
    disk.legs().get(usize::from(leg)).map(Leg::locks)
}

fn is_refusal(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY | libc::EINVAL
    )
}
