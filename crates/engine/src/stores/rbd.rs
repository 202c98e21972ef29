//! Ops on an image of a Ceph cluster, or on a stripe of several, through librbd.
//!
//! librbd copies between the cluster and guest memory directly, and completes on threads of its own. Completions wait in an inbox,
//! which a busy worker looks into each lap; for a worker that sleeps, its eventfd is watched by the ring.
//!
//! Unsafe because librbd is given the queue's ranges, which point to guest memory. The epoch in an op's entry keeps that memory
//! mapped until `OpQueue::finish`, which runs only when the op's completion was taken, or never came to be. `close` waits for the rest; if
//! that did not happen, `drop` leaks the queue's table.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use cleave_blk::{Op, OpKind};
use cleave_disk::{Backing, Disk, Leg};
use cleave_guest::Epoch;
use cleave_rbd::{Image, Inbox, Thickness};
use io_uring::opcode;
use io_uring::types::Fixed;

use crate::ops::lap::LapBudget;
use crate::ops::memory::remote_range;
use crate::ops::queue::{self, OpQueue, from_ops};
use crate::reactor::{FULL_PAUSE, StoreId};
use crate::{Completion, Done, Reactor, Store, Wait};

/// Longest sleep between two looks while the store closes.
const CLOSE_SLEEP: Duration = Duration::from_millis(100);
/// Most bytes of one discard, or of zeroes, and most objects: librbd makes a request for each object of it, and has memory for each
/// of them, about 2 KiB. An image may have objects of 4 KiB.
const RANGE_MAX: u64 = 128 << 20;
const RANGE_OBJECTS: u64 = 64;
/// librbd has a buffer for every byte that it reads or writes, while a guest may name the same page of its memory in any number of
/// requests. These bound what a store has under way, and one read or write of it.
const MOVED_MAX: u64 = 64 << 20;
const MOVE_MAX: u64 = 16 << 20;
/// Most bytes of one write on a thread that other disks share, because librbd copies them there. Guests make no longer ones by
/// themselves.
const COPY_MAX: u64 = 4 << 20;
/// Before librbd changes an object that a clone still shares with its parent, it reads all of it, and needs about twice that memory.
/// Whether it has to is not known here. So each change of a clone counts as this part of the objects that it touches, which lets 64
/// objects of 4 MiB be changed at once.
const COPIED_PART: u64 = 4;
/// librbd begins the request for each object on the thread that gives it an op, with locks and a look into the object map. That counts
/// as a copy of so many bytes, which is an estimate.
const OBJECT_BYTES_COPIED: u64 = 8 << 10;
/// librbd's EBLOCKLISTED: the cluster refuses this client for good.
const BLOCKLISTED: i32 = libc::ESHUTDOWN;
/// Such an op fails with this error. `--on-error` cannot repeat it, so it is always reported.
const FENCED: i32 = libc::ENOTRECOVERABLE;

/// The part of an op that librbd has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SentPart {
    Nothing,
    /// So many of its bytes.
    Bytes(u64),
    Flush,
}

/// Ops on the images of a disk.
#[derive(Debug)]
pub struct Rbd {
    disk: Arc<Disk>,
    id: StoreId,
    ops: OpQueue<SentPart>,
    /// Ops that librbd has.
    sent_count: usize,
    /// Bytes that it reads and writes for them, or counts for that (`weight`).
    moved_bytes: u64,
    /// Ops that wait until that is less, or for the next lap.
    waiting: VecDeque<u16>,
    /// For what librbd does while it is given an op, and for look-ups of guest memory.
    lap: LapBudget,
    /// For the completions of all legs.
    inbox: Inbox,
    /// The ring watches the inbox's eventfd.
    is_listening: bool,
    is_closing: bool,
}

/// The image that is a leg of the disk.
#[inline]
fn image(disk: &Disk, leg: u16) -> Result<&Image, i32> {
    match disk.legs().get(usize::from(leg)).map(Leg::backing) {
        Some(Backing::Rbd(image)) => Ok(image),
        _ => Err(libc::EBADF),
    }
}

/// Bytes of the next part of a discard or of zeroes, of which `left` bytes remain. The part ends where an object ends, so that
/// objects are given back as a whole.
fn range_part(object_bytes: u64, offset: u64, left: u64) -> u64 {
    let most = RANGE_MAX.min(object_bytes.saturating_mul(RANGE_OBJECTS));
    left.min(most - offset % object_bytes)
}

/// Objects of which this range has a byte.
fn objects(object_bytes: u64, offset: u64, len: u64) -> u64 {
    (offset % object_bytes + len).div_ceil(object_bytes)
}

/// The weight of a change of this range, for which librbd may have to read whole objects from the parent.
fn copied(object_bytes: u64, offset: u64, len: u64) -> u64 {
    (objects(object_bytes, offset, len) * object_bytes / COPIED_PART).min(MOVED_MAX)
}

impl Rbd {
    /// For a disk whose legs are images, on a reactor that was created for it.
    pub(crate) fn new(reactor: &mut Reactor, disk: Arc<Disk>, ops: u16) -> io::Result<Rbd> {
        let inbox = Inbox::new(ops)?;
        let id = reactor.attach(&[inbox.bell()], false)?;
        Ok(Rbd {
            id,
            ops: OpQueue::new(&disk, ops, 0, SentPart::Nothing)?,
            disk,
            sent_count: 0,
            moved_bytes: 0,
            waiting: VecDeque::with_capacity(usize::from(ops)),
            lap: LapBudget::of(&reactor.tenancy()),
            inbox,
            is_listening: false,
            is_closing: false,
        })
    }

    /// Checks an op and adds it to the queue. `Err` is the result of an op that ends here.
    fn admit(&mut self, epoch: &Epoch, op: &Op<'_>, token: u64) -> Result<u16, Result<(), i32>> {
        if image(&self.disk, op.leg).map_err(Err)?.is_fenced() {
            return Err(Err(FENCED));
        }
        let range = remote_range(&self.disk, op, 1)?;
        let lap = &mut self.lap;
        let index = self
            .ops
            .admit(lap, epoch, op, token, range, |_memory| SentPart::Nothing);
        index.map_err(Err)
    }

    /// The part of an op that librbd gets next. `None`: the op is done.
    fn next_part(&self, index: u16) -> Option<SentPart> {
        let entry = self.ops.get(index);
        let (kind, leg, (offset, left)) = (entry.kind, entry.leg, entry.rest());
        match kind {
            OpKind::Sync => (self.ops.get(index).own != SentPart::Flush).then_some(SentPart::Flush),
            _ if left > 0 && matches!(kind, OpKind::Discard | OpKind::Zero { .. }) => {
                let object_bytes = self.object_bytes(leg);
                Some(SentPart::Bytes(range_part(object_bytes, offset, left)))
            }
            OpKind::Write { .. } if left > 0 && self.lap.is_bounded() => {
                Some(SentPart::Bytes(left.min(COPY_MAX)))
            }
            _ if left > 0 => Some(SentPart::Bytes(left.min(MOVE_MAX))),
            // A completed write is in the cluster, so a durable one needs no flush, which would wait for all other I/O of the image.
            _ => None,
        }
    }

    /// Gives librbd the next part of an op, or ends the op.
    fn proceed(&mut self, index: u16) {
        let (offset, left) = self.ops.get(index).rest();
        match self.next_part(index) {
            None => self.ops.finish(index, Ok(())),
            // Nobody waits for an op of a store that closes.
            Some(_) if self.is_closing => self.ops.finish(index, Err(libc::ECANCELED)),
            Some(part) => {
                let weight = self.weight(index, part);
                let cost = self.cost(index, part);
                if self.moved_bytes + weight > MOVED_MAX || cost > 0 && self.lap.is_used_up() {
                    return self.wait(index);
                }
                let moved = self.moved(index, part);
                if moved > 0 && moved < left {
                    self.ops.show_first(index, moved);
                }
                self.ops.get_mut(index).own = part;
                self.lap.spend(cost);
                match self.submit(index, part, offset) {
                    Ok(()) => {
                        self.sent_count += 1;
                        self.moved_bytes += weight;
                    }
                    Err(errno) => self.fail(index, errno),
                }
            }
        }
    }

    /// Bytes that a part moves.
    fn moved(&self, index: u16, part: SentPart) -> u64 {
        match (part, self.ops.get(index).kind) {
            (SentPart::Bytes(len), OpKind::Read | OpKind::Write { .. }) => len,
            _ => 0,
        }
    }

    /// The share of the lap that librbd uses up for a part before it returns, in bytes copied. Its own threads copy the data of reads.
    fn cost(&self, index: u16, part: SentPart) -> u64 {
        let (true, SentPart::Bytes(len)) = (self.lap.is_bounded(), part) else {
            return 0;
        };
        let entry = self.ops.get(index);
        let object_bytes = self.object_bytes(entry.leg);
        let begun = objects(object_bytes, entry.rest().0, len) * OBJECT_BYTES_COPIED;
        match entry.kind {
            OpKind::Write { .. } => begun.max(len),
            _ => begun,
        }
    }

    /// Bytes of the objects of a leg.
    fn object_bytes(&self, leg: u16) -> u64 {
        image(&self.disk, leg).map_or(RANGE_MAX, Image::object_bytes)
    }

    /// Bytes that librbd may need for a part.
    fn weight(&self, index: u16, part: SentPart) -> u64 {
        let (entry, moved) = (self.ops.get(index), self.moved(index, part));
        let SentPart::Bytes(len) = part else {
            return moved;
        };
        match image(&self.disk, entry.leg) {
            Ok(image) if image.is_clone() && entry.kind != OpKind::Read => {
                moved.max(copied(image.object_bytes(), entry.rest().0, len))
            }
            _ => moved,
        }
    }

    /// Returns true if an op has to go after those that wait: the room that a large one needs would always be taken by smaller ones.
    #[inline]
    fn queues(&self, index: u16) -> bool {
        let weighs = |part| self.weight(index, part) > 0 || self.cost(index, part) > 0;
        !self.waiting.is_empty() && self.next_part(index).is_some_and(weighs)
    }

    /// Has an op wait for room, or for the next lap.
    fn wait(&mut self, index: u16) {
        self.ops.get_mut(index).own = SentPart::Nothing;
        self.waiting.push_back(index);
    }

    /// Proceeds with the ops that wait, as far as there is room for their bytes.
    #[cold]
    fn proceed_waiting(&mut self) {
        while let Some(index) = self.waiting.front().copied() {
            let part = self.next_part(index).unwrap_or(SentPart::Nothing);
            let has_room = self.moved_bytes + self.weight(index, part) <= MOVED_MAX;
            if !has_room || self.cost(index, part) > 0 && self.lap.is_used_up() {
                break;
            }
            self.waiting.pop_front();
            self.proceed(index);
        }
    }

    fn submit(&self, index: u16, part: SentPart, offset: u64) -> Result<(), i32> {
        let entry = self.ops.get(index);
        let image = image(&self.disk, entry.leg)?;
        let SentPart::Bytes(len) = part else {
            return image.flush(&self.inbox, index);
        };
        match entry.kind {
            OpKind::Discard => image.discard(&self.inbox, index, offset, len),
            OpKind::Zero { unmap, .. } => {
                let thickness = match unmap {
                    true => Thickness::Thin,
                    false => Thickness::Thick,
                };
                image.zero(&self.inbox, index, offset, len, thickness)
            }
            // SAFETY: see the module's documentation.
            OpKind::Read => unsafe {
                image.read(&self.inbox, index, self.ops.host_ranges(index), offset)
            },
            // SAFETY: as above.
            OpKind::Write { .. } => unsafe {
                image.write(&self.inbox, index, self.ops.host_ranges(index), offset)
            },
            OpKind::Sync => Err(libc::EINVAL),
        }
    }

    /// librbd has completed what an op had under way.
    fn settle(&mut self, index: u16, result: i64) {
        self.sent_count -= 1;
        let moved = self.moved(index, self.ops.get(index).own);
        self.moved_bytes -= self.weight(index, self.ops.get(index).own);
        if let Ok(errno) = u32::try_from(result.saturating_neg())
            && errno > 0
        {
            return self.fail(index, i32::try_from(errno).unwrap_or(libc::EIO));
        }
        let SentPart::Bytes(len) = self.ops.get(index).own else {
            return self.proceed(index);
        };
        let is_read = self.ops.get(index).kind == OpKind::Read;
        if is_read && u64::try_from(result) != Ok(len) {
            // The image has become smaller.
            return self.ops.finish(index, Err(libc::EIO));
        }
        self.ops.get_mut(index).pos += len;
        if moved > 0 && self.ops.get(index).rest().1 > 0 {
            self.ops.show_all(index);
            self.ops.consume(index, moved, |_, _| ());
        }
        // In a lap that is bounded long ops would take all of it with one part after the other.
        match self.lap.is_bounded() && self.queues(index) {
            true => self.wait(index),
            false => self.proceed(index),
        }
    }

    fn fail(&mut self, index: u16, mut errno: i32) {
        let leg = self.ops.get(index).leg;
        if errno == BLOCKLISTED {
            self.note_fence(leg);
            errno = FENCED;
        }
        if self.ops.get(index).own == SentPart::Flush {
            let failed = "the cluster failed a flush";
            queue::taint_sync(&self.disk, self.leg_name(leg), failed, errno);
        }
        self.ops.finish(index, Err(errno));
    }

    #[cold]
    fn note_fence(&self, leg: u16) {
        if image(&self.disk, leg).is_ok_and(Image::mark_fenced) {
            tracing::error!(
                disk = self.leg_name(leg),
                "another client has taken the exclusive lock of this image, and the cluster refuses this daemon (blocklisted); \
                 every request for it fails until the daemon is started again"
            );
        }
    }

    /// The name of a leg; a disk of one leg has the same.
    fn leg_name(&self, leg: u16) -> &str {
        let leg = self.disk.legs().get(usize::from(leg));
        leg.map_or(self.disk.name(), Leg::name)
    }

    /// Handles what waits in the inbox.
    #[inline]
    fn collect(&mut self) {
        // Not when the ring was entered: the thread of a pool sleeps somewhere else after that.
        self.inbox.awake();
        while let Some((index, result)) = self.inbox.take() {
            self.settle(index, result);
        }
        if !self.waiting.is_empty() {
            self.proceed_waiting();
        }
    }

    /// Has the ring watch the inbox's eventfd. `false`: there is no room now.
    fn listen(&mut self, reactor: &mut Reactor) -> bool {
        if !self.is_listening {
            let bell = Fixed(self.id.first_file);
            let poll = opcode::PollAdd::new(bell, libc::POLLIN as u32).build();
            // SAFETY: a poll points to no memory.
            self.is_listening =
                unsafe { reactor.submit(self.id, &poll.user_data(self.id.user_data(0)), false) };
        }
        self.is_listening
    }

    /// Waits until librbd has nothing of this store, and the ring no watch. `Err`: the ring is broken.
    fn await_all(&mut self, reactor: &mut Reactor) -> io::Result<()> {
        self.is_closing = true;
        while let Some(index) = self.waiting.pop_front() {
            self.proceed(index);
        }
        loop {
            self.collect();
            if self.sent_count == 0 {
                break;
            }
            let time = match self.listen(reactor) && self.inbox.sleep() {
                true => CLOSE_SLEEP,
                false => FULL_PAUSE,
            };
            let completion = reactor.next_of_within(self.id, time)?;
            self.inbox.awake();
            if let Some(completion) = completion {
                self.completed(reactor, completion);
            }
        }
        while self.is_listening {
            self.inbox.ring();
            if let Some(completion) = reactor.next_of_within(self.id, CLOSE_SLEEP)? {
                self.completed(reactor, completion);
            }
        }
        Ok(())
    }
}

impl Store for Rbd {
    from_ops!(room, in_flight, leg_stats);

    fn push(&mut self, _reactor: &mut Reactor, epoch: &Epoch, op: Op<'_>, token: u64) {
        match self.admit(epoch, &op, token) {
            Ok(index) if self.queues(index) => self.wait(index),
            Ok(index) => self.proceed(index),
            Err(result) => self.ops.end(token, result),
        }
    }

    fn completed(&mut self, _reactor: &mut Reactor, completion: Completion) {
        self.id.assert_own(completion);
        self.is_listening = false;
        self.inbox.hush();
        self.collect();
    }

    #[inline]
    fn reap(&mut self) -> Option<Done> {
        if !self.ops.is_ready() {
            self.collect();
        }
        self.ops.reap()
    }

    #[inline]
    fn is_ready(&self) -> bool {
        self.ops.is_ready() || self.inbox.has_any()
    }

    #[inline]
    fn before_enter(&mut self, reactor: &mut Reactor, wait: Wait) -> Option<Duration> {
        if !self.waiting.is_empty() && self.lap.is_used_up() {
            return Some(Duration::ZERO);
        }
        if wait == Wait::No || self.sent_count == 0 {
            return None;
        }
        if !self.listen(reactor) {
            return Some(FULL_PAUSE);
        }
        match self.inbox.sleep() {
            true => None,
            false => Some(Duration::ZERO),
        }
    }

    #[inline]
    fn after_enter(&mut self) {
        self.lap.renew();
        self.ops.tick();
    }

    #[inline]
    fn is_sated(&self) -> bool {
        self.lap.is_used_up()
    }

    fn close(&mut self, reactor: &mut Reactor) -> bool {
        let waited = self.await_all(reactor);
        queue::has_closed(&self.disk, waited)
    }
}

impl Drop for Rbd {
    /// librbd may still write to the memory of what it did not complete, so that is never unmapped.
    fn drop(&mut self) {
        if self.sent_count > 0 {
            tracing::error!(
                disk = self.disk.name(),
                "I/Os never completed; the memory that they may write to is kept"
            );
            self.ops.leak();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::table::Entry;

    #[test]
    fn a_part_of_a_range_ends_with_an_object() {
        for (object_bytes, offset, left, wanted) in [
            (4 << 20, 0, 1 << 30, 128 << 20),
            (4 << 20, 1 << 20, 1 << 30, 127 << 20),
            (4 << 20, 1 << 20, 5 << 20, 5 << 20),
            (4096, 0, 1 << 30, 64 * 4096),
            (4096, 4096 * 3 + 512, 1 << 30, 64 * 4096 - 512),
            (4096, 4095, 1, 1),
            (32 << 20, (32 << 20) - 512, 1 << 30, (96 << 20) + 512),
        ] {
            let part = range_part(object_bytes, offset, left);
            assert_eq!(part, wanted, "{object_bytes} {offset} {left}");
        }
    }

    #[test]
    fn a_change_of_a_clone_counts_the_objects_that_it_touches() {
        for (object_bytes, offset, len, wanted) in [
            (4 << 20, 0, 512, 1 << 20),
            (4 << 20, (4 << 20) - 512, 1024, 2 << 20),
            (4096, 4096 * 3 + 512, 8192, 3 * 1024),
            // The longest part of a range still fits.
            (4 << 20, 512, (128 << 20) - 512, 32 << 20),
            (32 << 20, 512, (128 << 20) - 512, 32 << 20),
        ] {
            let counted = copied(object_bytes, offset, len);
            assert_eq!(counted, wanted, "{object_bytes} {offset} {len}");
        }
    }

    /// A store on a thread that other disks share. Its disk is not an image, so what is submitted fails at once.
    fn shared_store(ops: u16) -> (Reactor, Rbd) {
        let spec: cleave_disk::DiskSpec = "null:2T".parse().unwrap();
        let disk = Arc::new(Disk::open(&spec, &cleave_disk::OpenOptions::default()).unwrap());
        let (heir, _closed) = std::sync::mpsc::channel();
        let prepared = crate::Prepared::new(&[&disk], [ops, 0, 0], &Arc::default()).unwrap();
        let mut reactor = prepared.enable(&heir).unwrap();
        let rbd = Rbd::new(&mut reactor, disk, ops).unwrap();
        (reactor, rbd)
    }

    fn begin(rbd: &mut Rbd, kind: OpKind, len: u64) -> u16 {
        let entry = Entry::new(0, kind, 0, len, SentPart::Nothing);
        let index = rbd.ops.take(entry).unwrap();
        rbd.proceed(index);
        index
    }

    /// Has librbd complete the first part of a long op.
    fn complete_part(rbd: &mut Rbd, kind: OpKind) -> u16 {
        let entry = Entry::new(0, kind, 0, 1 << 30, SentPart::Bytes(RANGE_MAX));
        let index = rbd.ops.take(entry).unwrap();
        rbd.sent_count += 1;
        rbd.settle(index, 0);
        index
    }

    /// librbd begins a request for each object of an op on the thread that other disks share.
    #[test]
    fn ops_wait_for_the_next_lap_if_many_were_begun_in_this_one() {
        let zero = OpKind::Zero {
            unmap: true,
            durable: false,
        };
        for kind in [OpKind::Discard, zero, OpKind::Read] {
            let (mut reactor, mut rbd) = shared_store(64);
            let mut begun = 0;
            while !rbd.is_sated() {
                begin(&mut rbd, kind, 512);
                begun += 1;
                assert!(begun < 64, "{kind:?}");
            }
            assert!(begun > 8 && rbd.waiting.is_empty(), "{kind:?}: {begun}");
            let next = match kind {
                OpKind::Read => begin(&mut rbd, kind, 512),
                // Not even the part that follows when librbd has completed one.
                _ => complete_part(&mut rbd, kind),
            };
            assert_eq!(rbd.waiting, [next], "{kind:?}");
            rbd.proceed_waiting();
            assert_eq!(rbd.waiting, [next], "the lap goes on");
            let wait = Wait::Until(None);
            assert_eq!(rbd.before_enter(&mut reactor, wait), Some(Duration::ZERO));
            rbd.after_enter();
            rbd.collect();
            assert!(rbd.waiting.is_empty(), "{kind:?}");
        }
    }

    /// Otherwise a read would wait until all discards of the disk are done.
    #[test]
    fn the_next_part_of_a_long_op_goes_after_those_that_wait() {
        let (_reactor, mut rbd) = shared_store(4);
        rbd.lap.exhaust();
        let read = begin(&mut rbd, OpKind::Read, 512);
        rbd.after_enter();
        let long = complete_part(&mut rbd, OpKind::Discard);
        assert_eq!(rbd.waiting, [read, long]);
    }

    /// librbd copies a write while it takes it, on the thread that other disks share.
    #[test]
    fn a_write_waits_for_the_next_lap_if_much_was_copied_in_this_one() {
        const LEN: u64 = 8 << 20;
        let (mut reactor, mut rbd) = shared_store(4);
        let write = OpKind::Write { durable: false };
        begin(&mut rbd, write, LEN);
        assert!(rbd.waiting.is_empty() && rbd.is_sated());
        let second = begin(&mut rbd, write, LEN);
        let third = begin(&mut rbd, OpKind::Read, LEN);
        begin(&mut rbd, OpKind::Sync, LEN);
        assert_eq!(rbd.waiting, [second, third]);
        rbd.proceed_waiting();
        assert_eq!(rbd.waiting, [second, third], "the lap goes on");
        let wait = Wait::Until(None);
        assert_eq!(rbd.before_enter(&mut reactor, wait), Some(Duration::ZERO));
        rbd.after_enter();
        rbd.proceed_waiting();
        assert!(rbd.waiting == [third] && rbd.is_sated());
    }

    #[test]
    fn only_a_flush_of_the_guest_becomes_a_flush() {
        let spec: cleave_disk::DiskSpec = "null:1M".parse().unwrap();
        let disk = Arc::new(Disk::open(&spec, &cleave_disk::OpenOptions::default()).unwrap());
        let mut reactor = Reactor::new(&[&disk], 4, 0, 0).unwrap();
        let mut rbd = Rbd::new(&mut reactor, disk, 4).unwrap();
        for (kind, len, parts) in [
            (
                OpKind::Write { durable: true },
                4096,
                &[SentPart::Bytes(4096)][..],
            ),
            (
                OpKind::Write { durable: false },
                4096,
                &[SentPart::Bytes(4096)],
            ),
            (
                OpKind::Zero {
                    unmap: true,
                    durable: true,
                },
                4096,
                &[SentPart::Bytes(4096)],
            ),
            (OpKind::Sync, 0, &[SentPart::Flush]),
        ] {
            let index = rbd
                .ops
                .take(Entry::new(0, kind, 0, len, SentPart::Nothing))
                .unwrap();
            let mut seen = Vec::new();
            while let Some(part) = rbd.next_part(index) {
                seen.push(part);
                let entry = rbd.ops.get_mut(index);
                entry.own = part;
                if let SentPart::Bytes(len) = part {
                    entry.pos += len;
                }
            }
            assert_eq!(seen, parts, "{kind:?}");
            rbd.ops.free(index);
        }
    }
}
