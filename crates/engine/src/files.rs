//! Ops on files and block devices: from push through holds, buffers, the ring and short transfers to
//! the one result.
//!
//! Unsafe because entries handed to the ring point to guest memory, to bounce buffers and to blocks
//! of host ranges. Who keeps them: guest memory, the generation that the op counts in until `finish`;
//! the others, the areas of `table` and `pool`, which outlive the ring's last completion (`drain`).
//!
//! The order of acquisition is hold, then buffer: who waits for a buffer may have a hold, but who has
//! a buffer waits for nothing but the kernel, so that all waiting ends.

mod ledger;
mod submission;
mod sync;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cleave_blk::{Op, OpKind};
use cleave_disk::{Disk, FileKind, Leg, RangeLocks, Store};

use self::sync::Syncs;
use crate::buffer::Pool;
use crate::legs::{LegStats, Tally};
use crate::memory::walk;
use crate::piece;
use crate::polled::Verdict as Judged;
use crate::progress::{self, Retry, Transfer, Verdict, Way};
use crate::ring::tag;
use crate::step::{self, Able, Facts, Next};
use crate::table::{Entry, Hold, Method, Step, Table};
use crate::uring::Core;

/// Longest sleep while an op waits for other engines: they give a hold back, or end an fsync, without
/// a signal.
const HOLD_PAUSE: Duration = Duration::from_micros(200);
/// Attempts to get a hold per enter, so that a long queue costs each lap little.
const HOLDS_PER_ENTER: usize = 32;
/// Pause when the submission queue took nothing.
const FULL_PAUSE: Duration = Duration::from_millis(1);

/// All ops of one engine on one file.
#[derive(Debug)]
pub(crate) struct Files {
    /// Never empty. Alignments are the disk's, hence the same on all of them.
    legs: Box<[LegState]>,
    unit: u64,
    table: Table,
    pool: Pool,
    /// Entries that the ring has and has not completed.
    flying: usize,
    hold_waiters: VecDeque<u16>,
    buffer_waiters: VecDeque<u16>,
    /// Waiting for their time to try again.
    delayed: VecDeque<(Instant, u16)>,
    tally: Tally,
    #[cfg(test)]
    mangle: Option<(Mangle, u64)>,
}

/// What is known of one leg, and its syncs.
#[derive(Debug)]
struct LegState {
    facts: Facts,
    able: Able,
    syncs: Syncs,
}

/// Puts another result in place of the kernel's: given a running number and the op.
#[cfg(test)]
pub(crate) type Mangle = fn(u64, &Entry, i32) -> i32;

impl Files {
    /// `kinds`: of the disk's legs, in order.
    pub(crate) fn new(disk: &Arc<Disk>, kinds: &[FileKind], ops: u16) -> io::Result<Files> {
        let limits = disk.limits();
        let pool = Pool::new(
            limits.offset_align_bytes.max(1) as usize,
            limits
                .memory_align_bytes
                .max(limits.offset_align_bytes)
                .max(4096) as usize,
        )?;
        let room = usize::from(ops);
        let leg = |(kind, leg): (&FileKind, u16)| LegState {
            facts: Facts {
                buffer_bytes: pool.buffer_bytes(),
                zeroes_bytes: pool.zeroes_bytes(),
                cached: is_cached(disk, leg),
                ..Facts::new(*kind, limits)
            },
            able: Able::at_first(*kind),
            syncs: Syncs::new(disk, leg, room),
        };
        Ok(Files {
            legs: kinds.iter().zip(0..).map(leg).collect(),
            unit: u64::from(limits.offset_align_bytes.max(1)),
            table: Table::new(ops)?,
            pool,
            flying: 0,
            hold_waiters: VecDeque::with_capacity(room),
            buffer_waiters: VecDeque::with_capacity(room),
            delayed: VecDeque::with_capacity(room),
            tally: Tally::new(kinds.len()),
            #[cfg(test)]
            mangle: None,
        })
    }

    /// `admit` lets in only what names a leg that there is.
    #[inline]
    fn leg(&self, leg: u16) -> &LegState {
        &self.legs[usize::from(leg)]
    }

    #[inline]
    fn leg_mut(&mut self, leg: u16) -> &mut LegState {
        &mut self.legs[usize::from(leg)]
    }

    /// Counters of the legs; this engine alone writes them.
    pub(crate) fn leg_stats(&self) -> Arc<[LegStats]> {
        self.tally.stats()
    }

    /// Looks at the clock, where ops are timed: once a lap.
    #[inline]
    pub(crate) fn tick(&mut self) {
        self.tally.tick();
    }

    /// Takes an op.
    #[inline]
    pub(crate) fn push(&mut self, core: &mut Core, op: &Op<'_>, token: u64) {
        match self.admit(core, op, token) {
            Ok(index) => self.begin(core, index),
            Err(result) => core.done(token, result),
        }
    }

    /// Checks, enters into the table, translates. `Err` is the result of an op that ends here.
    fn admit(&mut self, core: &mut Core, op: &Op<'_>, token: u64) -> Result<u16, Result<(), i32>> {
        let Some(LegState { facts, .. }) = self.legs.get(usize::from(op.leg)) else {
            return Err(Err(libc::EIO));
        };
        let facts = *facts;
        let (offset, len) = range(core, &facts, op)?;
        // The owner pushes only while there is room.
        let entry = Entry::new(token, op.kind, offset, len);
        let index = self.table.take(entry).ok_or(Err(libc::EBUSY))?;
        let (mut bounced, mut plain) = (false, false);
        if matches!(op.kind, OpKind::Read | OpKind::Write { .. }) {
            let mut gather = self.table.gather(index);
            let walked = walk(core.bindings.memory(), op, |start, len| {
                gather.add(start, len)
            });
            match walked.and_then(|()| self.table.gathered(index, gather)) {
                Ok(memory) => {
                    bounced = facts.must_bounce(offset, memory);
                    plain = !bounced && memory.has_gaps();
                }
                Err(errno) => {
                    self.table.free(index);
                    return Err(Err(errno));
                }
            }
        }
        let begun_ns = self.tally.now_ns();
        let entry = self.table.get_mut(index);
        entry.leg = op.leg;
        entry.begun_ns = begun_ns;
        entry.bounced = bounced;
        entry.plain = plain;
        entry.needs = facts.needs_hold(op.kind, offset, len);
        entry.generation = core.bindings.acquire();
        Ok(index)
    }

    #[inline]
    fn begin(&mut self, core: &mut Core, index: u16) {
        if self.try_hold(core, index) {
            self.proceed(core, index);
        } else {
            self.hold_waiters.push_back(index);
        }
    }

    #[inline]
    fn try_hold(&mut self, core: &Core, index: u16) -> bool {
        let entry = self.table.get_mut(index);
        let (start, len) = piece::around(entry.offset, entry.len, self.unit);
        let got = match entry.needs {
            Hold::None => return true,
            Hold::Shared => locks(core, entry.leg).is_some_and(|l| l.try_shared(start, len)),
            Hold::Exclusive => locks(core, entry.leg).is_some_and(|l| l.try_exclusive(start, len)),
        };
        if got {
            entry.held = entry.needs;
        }
        got
    }

    fn release_hold(&mut self, core: &Core, index: u16) {
        let entry = self.table.get_mut(index);
        let (start, len) = piece::around(entry.offset, entry.len, self.unit);
        let held = std::mem::replace(&mut entry.held, Hold::None);
        let Some(locks) = locks(core, entry.leg) else {
            return;
        };
        match held {
            Hold::None => {}
            Hold::Shared => locks.release_shared(start, len),
            Hold::Exclusive => locks.release_exclusive(start, len),
        }
    }

    /// Starts the next step of an op that has its hold.
    fn proceed(&mut self, core: &mut Core, index: u16) {
        let entry = self.table.get(index);
        let leg = self.leg(entry.leg);
        let next = step::next(entry, &leg.facts, leg.able);
        let (step, window) = match next {
            Next::Done => return self.finish(core, index, Ok(())),
            Next::Unsupported => return self.finish(core, index, Err(libc::EOPNOTSUPP)),
            Next::Sync => return self.begin_sync(core, index),
            Next::Direct(piece) => (Step::Direct, piece),
            Next::Fill(piece) => (Step::Fill, piece),
            Next::Spill(piece) => (Step::Spill, piece),
            Next::Zeroes(piece) => (Step::Zeroes, piece),
            Next::Range(method, piece) => (Step::Range(method), piece),
        };
        if matches!(step, Step::Fill | Step::Spill) && !self.has_buffer(index) {
            return self.buffer_waiters.push_back(index);
        }
        let entry = self.table.get_mut(index);
        entry.step = step;
        entry.window = window;
        entry.moved = 0;
        entry.tries = 0;
        if step == Step::Spill {
            self.copy(index, Way::Out);
        }
        self.issue_copied(core, index);
    }

    /// Issues, unless what was copied out of guest memory may be zeroes in place of a lost page.
    fn issue_copied(&mut self, core: &mut Core, index: u16) {
        let entry = self.table.get(index);
        if entry.bounced && core.bindings.is_lost(entry.generation) {
            self.finish(core, index, Err(libc::EFAULT));
        } else {
            self.issue(core, index);
        }
    }

    /// Whether the op has a buffer now; who waits already comes first.
    fn has_buffer(&mut self, index: u16) -> bool {
        if self.table.get(index).buffer.is_none() && self.buffer_waiters.is_empty() {
            self.table.get_mut(index).buffer = self.pool.take();
        }
        self.table.get(index).buffer.is_some()
    }

    /// Copies the op's part of the window: out of guest memory into the buffer, or the other way.
    fn copy(&mut self, index: u16, way: Way) {
        let entry = self.table.get(index);
        let (skip, take) = (entry.window.skip, entry.window.take);
        let Some(buffer) = entry.buffer else { return };
        let mut at = self.pool.at(buffer, skip);
        self.table.consume(index, take, |start, len| {
            // SAFETY: the guest range is mapped while the op counts in its generation; the buffer is
            // this op's alone, the kernel has ended with it, and `skip` + `take` is inside it. Guest
            // and daemon memory do not overlap. The guest may write meanwhile: it gets what it wrote.
            unsafe {
                match way {
                    Way::In => std::ptr::copy_nonoverlapping(at, start, len),
                    Way::Out => std::ptr::copy_nonoverlapping(start, at, len),
                }
                at = at.add(len);
            }
        });
    }

    /// Hands the current step, or what is left of it, to its ring.
    fn issue(&mut self, core: &mut Core, index: u16) {
        let entry = self.submission(index).user_data(tag::OP | u64::from(index));
        // SAFETY: see the module's head: whatever `entry` points to lives until `completed` or, when
        // the engine goes, `drain`.
        let pushed = unsafe {
            match &mut core.polled {
                Some(polled) if may_poll(&core.disk, self.table.get(index)) => polled.push(&entry),
                _ => core.ring.push(&entry),
            }
        };
        if pushed {
            self.flying += 1;
        } else {
            self.delayed.push_back((Instant::now() + FULL_PAUSE, index));
        }
    }

    /// The ring has completed a step of op `index`.
    #[inline]
    pub(crate) fn completed(&mut self, core: &mut Core, index: u16, result: i32) {
        self.flying = self.flying.saturating_sub(1);
        #[cfg(test)]
        let result = self.mangled(index, result);
        match self.judge(core, index, result) {
            Verdict::Whole => self.step_done(core, index, result),
            Verdict::Part(moved) => self.step_on(core, index, moved),
            Verdict::Again => self.again(core, index),
            Verdict::Failed(errno) => self.step_failed(core, index, errno),
        }
        self.serve_buffer_waiters(core);
    }

    /// The polled ring has: what it refuses the plain one does.
    #[inline]
    pub(crate) fn completed_polled(&mut self, core: &mut Core, index: u16, result: i32) {
        let Some(polled) = &mut core.polled else {
            return;
        };
        #[cfg(test)]
        let result = polled.mangled(result);
        let entry = self.table.get_mut(index);
        match polled.judge(&core.disk, entry.leg, result) {
            Judged::Taken => self.completed(core, index, result),
            Judged::Refused => {
                entry.plain = true;
                self.flying = self.flying.saturating_sub(1);
                self.issue(core, index);
            }
        }
    }

    fn judge(&self, core: &Core, index: u16, result: i32) -> Verdict {
        let entry = self.table.get(index);
        let left = entry.window.len - entry.moved;
        let (way, enough) = match entry.step {
            Step::Direct if entry.kind == OpKind::Read => (Way::In, left),
            Step::Direct | Step::Spill | Step::Zeroes => (Way::Out, left),
            Step::Fill => (
                Way::In,
                self.wanted(core, entry).saturating_sub(entry.moved).max(1),
            ),
            Step::Range(_) => return progress::judge_range(result),
            Step::Sync | Step::Idle => return progress::judge_whole(result),
        };
        progress::judge(
            Transfer {
                way,
                enough,
                unit: self.unit,
            },
            result,
        )
    }

    /// How much of a window has to be there: for a read what the guest asked for; for a
    /// read-modify-write all of the disk, since the rest is written back. A disk may end inside its
    /// last block; the file behind it may end there too.
    fn wanted(&self, core: &Core, entry: &Entry) -> u64 {
        let window = entry.window;
        let asked = window.skip + window.take;
        match entry.kind {
            OpKind::Read => asked,
            _ => core
                .disk
                .leg_bytes()
                .saturating_sub(window.start)
                .clamp(asked, window.len),
        }
    }

    /// A short transfer: goes on behind what was moved.
    fn step_on(&mut self, core: &mut Core, index: u16, moved: u64) {
        let entry = self.table.get_mut(index);
        entry.moved += moved;
        entry.tries = 0;
        // What is left may have gaps.
        entry.plain = true;
        if entry.step == Step::Direct {
            self.table.consume(index, moved, |_, _| ());
        }
        self.issue(core, index);
    }

    fn step_done(&mut self, core: &mut Core, index: u16, result: i32) {
        let entry = self.table.get_mut(index);
        match entry.step {
            Step::Direct => {
                let (kind, leg) = (entry.kind, entry.leg);
                return match self.leg(leg).facts.ends_with_sync(kind) {
                    true => self.begin_sync(core, index),
                    false => self.finish(core, index, Ok(())),
                };
            }
            Step::Sync | Step::Idle => return self.sync_ended(core, index),
            Step::Fill => {
                let got = entry
                    .moved
                    .saturating_add(u64::try_from(result).unwrap_or(0));
                return self.filled(core, index, got);
            }
            Step::Spill | Step::Zeroes | Step::Range(_) => entry.pos += entry.window.take,
        }
        self.proceed(core, index);
    }

    /// The window is in the buffer, `got` bytes of it: hands a read its part, or puts the new bytes
    /// between the old ones and writes the window back.
    fn filled(&mut self, core: &mut Core, index: u16, got: u64) {
        let entry = self.table.get_mut(index);
        let (kind, window) = (entry.kind, entry.window);
        if kind == OpKind::Read {
            entry.pos += window.take;
            self.copy(index, Way::In);
            return self.proceed(core, index);
        }
        entry.step = Step::Spill;
        entry.moved = 0;
        entry.tries = 0;
        let Some(buffer) = entry.buffer else { return };
        // Behind the end of the file: zeroes, not what an earlier op left in the buffer.
        self.fill_with_zeroes(buffer, got.min(window.len), window.len);
        match kind {
            OpKind::Write { .. } => self.copy(index, Way::Out),
            _ => self.fill_with_zeroes(buffer, window.skip, window.skip + window.take),
        }
        self.issue_copied(core, index);
    }

    fn fill_with_zeroes(&self, buffer: u16, from: u64, to: u64) {
        let len = to.saturating_sub(from) as usize;
        // SAFETY: `to` ≤ the window's length ≤ the buffer's; the buffer belongs to the op at hand and
        // the kernel has ended with it.
        unsafe { self.pool.at(buffer, from).write_bytes(0, len) };
    }

    /// Nothing moved: repeats the step, at once or later, but not for ever.
    fn again(&mut self, core: &mut Core, index: u16) {
        let entry = self.table.get_mut(index);
        entry.tries = entry.tries.saturating_add(1);
        match progress::retry(entry.tries) {
            Retry::Now => self.issue(core, index),
            Retry::After(pause) => self.delayed.push_back((Instant::now() + pause, index)),
            Retry::Never => self.step_failed(core, index, libc::EIO),
        }
    }

    fn step_failed(&mut self, core: &mut Core, index: u16, errno: i32) {
        let entry = self.table.get(index);
        match (entry.step, entry.kind) {
            (Step::Range(method), _) if is_refusal(errno) => {
                return self.refused(core, index, method, errno);
            }
            // The store is pickier about memory or ranges than it said: from here on through a buffer.
            (Step::Direct, _) if errno == libc::EINVAL => {
                let entry = self.table.get_mut(index);
                entry.bounced = true;
                entry.pos += entry.moved;
                return self.proceed(core, index);
            }
            (Step::Sync | Step::Idle, _) => {
                return self.sync_failed(core, index, errno);
            }
            (Step::Direct | Step::Spill, kind)
                if self.leg(entry.leg).facts.writes_durably(kind)
                    && progress::taints_sync(errno) =>
            {
                core.taint_sync(errno);
            }
            _ => {}
        }
        self.finish(core, index, Err(errno));
    }

    /// The store does not do this, or (EINVAL) not for this range: takes the next best way.
    fn refused(&mut self, core: &mut Core, index: u16, method: Method, errno: i32) {
        let entry = self.table.get_mut(index);
        let leg = entry.leg;
        match (errno, entry.kind) {
            (libc::EINVAL, OpKind::Zero { .. }) => entry.written = true,
            // Advice not taken for this range.
            (libc::EINVAL, _) if method != Method::Command => {
                return self.finish(core, index, Err(libc::EOPNOTSUPP));
            }
            _ => self.leg_mut(leg).able.forget(method),
        }
        self.proceed(core, index);
    }

    /// The op is over: gives back everything and reports.
    #[inline]
    fn finish(&mut self, core: &mut Core, index: u16, result: Result<(), i32>) {
        if self.table.get(index).held != Hold::None {
            self.release_hold(core, index);
        }
        let entry = self.table.get_mut(index);
        if let Some(buffer) = entry.buffer.take() {
            self.pool.give(buffer);
        }
        let (token, generation) = (entry.token, entry.generation);
        self.tally.ended(entry, result);
        core.bindings.release(generation);
        self.table.free(index);
        core.done(token, result);
    }

    #[inline]
    fn serve_buffer_waiters(&mut self, core: &mut Core) {
        while self.pool.has_free() {
            let Some(index) = self.buffer_waiters.pop_front() else {
                return;
            };
            self.table.get_mut(index).buffer = self.pool.take();
            self.proceed(core, index);
        }
    }

    /// Before an enter: tries again what waits for time or a hold. How long a sleep may be.
    #[inline]
    pub(crate) fn before_enter(&mut self, core: &mut Core) -> Option<Duration> {
        let is_quiet = self.delayed.is_empty() && self.hold_waiters.is_empty();
        if is_quiet && !self.is_unsettled() {
            return None;
        }
        self.settle_syncs(core);
        self.retry_holds(core);
        let pause = self.retry_delayed(core);
        self.serve_buffer_waiters(core);
        let waits = !self.hold_waiters.is_empty() || self.is_unsettled();
        let hold = waits.then_some(HOLD_PAUSE);
        hold.into_iter().chain(pause).min()
    }

    fn retry_holds(&mut self, core: &mut Core) {
        for _ in 0..self.hold_waiters.len().min(HOLDS_PER_ENTER) {
            let Some(index) = self.hold_waiters.pop_front() else {
                return;
            };
            self.begin(core, index);
        }
    }

    /// Issues what is due; how long until the next.
    fn retry_delayed(&mut self, core: &mut Core) -> Option<Duration> {
        let now = Instant::now();
        let mut pause: Option<Duration> = None;
        for _ in 0..self.delayed.len() {
            let (due, index) = self.delayed.pop_front()?;
            if due <= now {
                self.issue(core, index);
            } else {
                let left = due - now;
                pause = Some(pause.map_or(left, |pause| pause.min(left)));
                self.delayed.push_back((due, index));
            }
        }
        pause
    }

    /// The engine goes: nothing more is started. What waits lets go of its holds.
    pub(crate) fn close(&mut self, core: &mut Core) {
        let delayed = std::mem::take(&mut self.delayed)
            .into_iter()
            .map(|(_, index)| index);
        let mut waiting: Vec<u16> = delayed.collect();
        for queue in [&mut self.hold_waiters, &mut self.buffer_waiters] {
            waiting.extend(queue.drain(..));
        }
        for leg in &mut self.legs {
            waiting.extend(leg.syncs.waiting.drain(..));
            waiting.extend(leg.syncs.followers.drain(..));
            waiting.extend(leg.syncs.take_unsettled());
        }
        for index in waiting {
            self.release_hold(core, index);
        }
    }

    /// After `close`: a completion ends its op, whatever it says. But a failure that nobody else will be
    /// told of is noted.
    pub(crate) fn completed_closed(&mut self, core: &mut Core, index: u16, result: i32) {
        self.flying = self.flying.saturating_sub(1);
        let verdict = self.judge(core, index, result);
        let entry = self.table.get(index);
        let is_durable = self.leg(entry.leg).facts.writes_durably(entry.kind);
        match (entry.step, verdict) {
            (Step::Sync, Verdict::Failed(errno)) => core.taint_sync(errno),
            (Step::Direct | Step::Spill, Verdict::Failed(errno))
                if is_durable && progress::taints_sync(errno) =>
            {
                core.taint_sync(errno);
            }
            _ => {}
        }
        self.release_hold(core, index);
    }

    /// As if the store had refused everything but reads and writes.
    #[cfg(test)]
    pub(crate) fn forget_methods(&mut self) {
        self.leg_mut(0).able = Able {
            command: false,
            punch: false,
            zero_range: false,
        };
    }

    #[cfg(test)]
    pub(crate) fn mangle(&mut self, mangle: Mangle) {
        self.mangle = Some((mangle, 0));
    }

    #[cfg(test)]
    fn mangled(&mut self, index: u16, result: i32) -> i32 {
        let Some((mangle, number)) = &mut self.mangle else {
            return result;
        };
        *number += 1;
        mangle(*number, self.table.get(index), result)
    }

    /// As on a kernel without the discard command.
    #[cfg(test)]
    pub(crate) fn forget_command(&mut self) {
        self.leg_mut(0).able.forget(Method::Command);
    }

    /// Entries that the kernel may still work on.
    pub(crate) fn flying(&self) -> usize {
        self.flying
    }
}

/// The range of the leg that the op is about. The request was checked against capacity and
/// mode long before; this is the second guard.
fn range(core: &Core, facts: &Facts, op: &Op<'_>) -> Result<(u64, u64), Result<(), i32>> {
    if op.kind == OpKind::Sync {
        return Ok((0, 0));
    }
    if op.kind != OpKind::Read && facts.read_only {
        return Err(Err(libc::EROFS));
    }
    match op.offset_bytes.checked_add(op.len_bytes) {
        Some(end) if end <= core.disk.leg_bytes() && i64::try_from(end).is_ok() => {}
        _ => return Err(Err(libc::EIO)),
    }
    match op.kind {
        _ if op.len_bytes == 0 => Err(Ok(())),
        // Discarding is advice: parts of blocks stay as they are.
        OpKind::Discard => {
            piece::inside(op.offset_bytes, op.len_bytes, facts.discard_unit).ok_or(Ok(()))
        }
        _ => Ok((op.offset_bytes, op.len_bytes)),
    }
}

/// Whether the polled ring is asked for an op's current step: it moves few bytes past the page cache, and
/// they need not be durable when it ends. A write that has to be may bring a flush along, and the kernel
/// waits for that by an interrupt.
#[inline]
fn may_poll(disk: &Disk, entry: &Entry) -> bool {
    let moves = matches!(
        entry.step,
        Step::Direct | Step::Fill | Step::Spill | Step::Zeroes
    );
    let durable = entry.kind == OpKind::Write { durable: true };
    if !moves || durable || entry.plain {
        return false;
    }
    let leg = disk.legs().get(usize::from(entry.leg));
    leg.is_some_and(|leg| leg.polls(entry.window.start, entry.window.len))
}

/// Locks of a leg. `admit` lets in only what names a leg that there is.
fn locks(core: &Core, leg: u16) -> Option<&RangeLocks> {
    core.disk.legs().get(usize::from(leg)).map(Leg::locks)
}

fn is_cached(disk: &Disk, leg: u16) -> bool {
    let store = disk.legs().get(usize::from(leg)).map(Leg::store);
    matches!(store, Some(Store::File { direct: false, .. }))
}

fn is_refusal(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY | libc::EINVAL
    )
}
