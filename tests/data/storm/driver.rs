//! The guest's driver of one vring: it compares its reads with a model, and rests while the storm changes its vring.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use cleave_blk::spec::request_type as kind;
use cleave_client::{Buffer, Queue};
use cleave_tests::{Random, TIMEOUT, header, range};

/// A vring's share of the disk. Parts start at odd sectors, so that adjacent ones share blocks.
const PART: u64 = 4 << 20;
/// Requests in flight on each vring, and guest memory for each request.
pub(super) const DEPTH: u64 = 12;
pub(super) const SLOT: u64 = (3 << 20) + 8192;
const LONGEST: u64 = 2 << 20;
/// Start of the guest's RAM and the size of its first region, which holds the rings. A region of data follows, then a
/// spare one that is added and removed.
pub(super) const RAM: u64 = 0x1_0000_0000;
pub(super) const RINGS: u64 = 2 << 20;
pub(super) const SPARE: u64 = RAM << 4;
/// A request's share of the spare region.
const SPARE_SLOT: u64 = 16 << 10;

/// Permitted results of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Expected {
    Well,
    Fails,
    /// The request reads into memory that may have been removed when the daemon takes it.
    Either,
}

/// A request in flight.
struct InFlight {
    kind: u32,
    fate: Expected,
    /// Its range in the vring's part; empty if it lies elsewhere.
    range: Range<usize>,
    pieces: Vec<(u64, usize)>,
    bytes: Vec<u8>,
    status_at: u64,
    slot: u64,
    used_bytes: u32,
}

/// The driver of one vring.
pub(super) struct Driver<'a> {
    queue: &'a mut Queue,
    random: Random,
    area: u64,
    free: Vec<u64>,
    flying: Vec<Option<InFlight>>,
    offset: u64,
    model: Vec<u8>,
    /// Discarded: a byte keeps its value or reads as zero.
    discarded: Vec<bool>,
    indirect: bool,
    /// Reads that end beyond this byte of the disk fail.
    lost_from: u64,
    served: usize,
    failed: usize,
}

/// The states of a driver: it runs, is asked to pause, has paused.
pub(super) const RUN: u8 = 0;
pub(super) const REST: u8 = 1;
pub(super) const RESTS: u8 = 2;

impl<'a> Driver<'a> {
    pub(super) fn new(
        queue: &'a mut Queue,
        seed: u64,
        indirect: bool,
        lost_from: u64,
    ) -> Driver<'a> {
        let number = u64::from(queue.index());
        let size = queue.ring().size();
        Driver {
            queue,
            random: Random::new(seed),
            area: RAM + RINGS + number * SLOT * DEPTH,
            free: (0..DEPTH).collect(),
            flying: (0..size).map(|_| None).collect(),
            offset: number * PART + 3 * 512,
            model: vec![0; PART as usize],
            discarded: vec![false; PART as usize],
            indirect,
            lost_from,
            served: 0,
            failed: 0,
        }
    }

    /// Drives its vring until `stop`; returns how many requests succeeded and how many failed as expected.
    pub(super) fn run(&mut self, stop: &AtomicBool, rest: &AtomicU8) -> (usize, usize) {
        loop {
            let stopped = stop.load(Ordering::Relaxed);
            let going = !stopped && rest.load(Ordering::Acquire) == RUN;
            let burst = if going {
                self.random.below(DEPTH + 1)
            } else {
                0
            };
            for _ in 0..burst {
                self.submit();
            }
            if self.queue.ring().publish() {
                self.queue.ring_kick();
            }
            let mut any = false;
            while let Some(used) = self.queue.ring().reap() {
                self.ended(used.head, used.len);
                any = true;
            }
            match self.free.len() as u64 == DEPTH {
                true if stopped => return (self.served, self.failed),
                true if !going => {
                    rest.store(RESTS, Ordering::Release);
                    // Only if it is unchanged: the driver may be asked to pause again before it has seen RUN.
                    while rest.load(Ordering::Acquire) == RESTS && !stop.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
                true => std::thread::sleep(Duration::from_micros(self.random.below(200))),
                false if !any && !self.queue.ring().arm() => {
                    assert!(self.queue.called(TIMEOUT), "no call arrived");
                }
                false => {}
            }
        }
    }

    /// Sends a request for sectors that no request in flight touches.
    fn submit(&mut self) {
        let Some(&slot) = self.free.last() else {
            return;
        };
        let mut range = self.draw();
        let what = match self.random.below(32) {
            0..=12 => kind::OUT,
            13..=26 => kind::IN,
            27..=28 => kind::WRITE_ZEROES,
            29 => kind::DISCARD,
            30 => kind::GET_ID,
            _ => kind::FLUSH,
        };
        let apart = |one: &InFlight| one.range.end <= range.start || range.end <= one.range.start;
        if !self.flying.iter().flatten().all(apart) {
            return;
        }
        let len = range.len();
        let mut place = self.offset + range.start as u64;
        let mut fate = Expected::Well;
        if what == kind::IN && self.random.below(6) == 0 {
            fate = Expected::Fails;
            let end = self.lost_from + 512 * (1 + self.random.below(8192));
            place = end - len as u64;
            range = 0..0;
        }
        let mut at = self.area + slot * SLOT + 1024;
        let (mut buffers, moved) = self.head(what, place, len, &mut at);
        let bytes = match what {
            kind::OUT => self.random.bytes(moved),
            _ => vec![0xa5; moved],
        };
        let number = u64::from(self.queue.index()) * DEPTH + slot;
        let spare = SPARE + number * SPARE_SLOT;
        let spare = (what == kind::IN && self.random.below(4) == 0).then_some(spare);
        let pieces = self.data(&bytes, &mut at, spare);
        if fate == Expected::Well && pieces.last().is_some_and(|&(addr, _)| addr >= SPARE) {
            fate = Expected::Either;
        }
        let writable = what != kind::OUT;
        buffers.extend(pieces.iter().map(|&(addr, len)| Buffer {
            addr,
            len: len as u32,
            writable,
        }));
        let status_at = at + self.random.below(3);
        self.queue.memory().fill(status_at, 1, 0xff);
        buffers.push(Buffer::writable(status_at, 1));
        let table = self.area + slot * SLOT;
        let ring = self.queue.ring();
        let head = match self.indirect {
            true => ring.add_indirect(table, &buffers),
            false => ring.add(&buffers),
        };
        let Some(head) = head else { return };
        self.free.pop();
        self.flying[usize::from(head)] = Some(InFlight {
            kind: what,
            fate,
            range,
            pieces,
            bytes,
            status_at,
            slot,
            used_bytes: 1 + if writable { moved as u32 } else { 0 },
        });
    }

    /// A range of the part: every third one on blocks of 4 KiB, every other one directly after a request in flight.
    fn draw(&mut self) -> Range<usize> {
        let unit = if self.random.below(3) == 0 { 4096 } else { 512 };
        let longest = match self.random.below(8) {
            0 => LONGEST,
            1..=3 => 64 << 10,
            _ => 8192,
        };
        let len = unit * (1 + self.random.below(longest / unit));
        let pick = self.random.below(2 * DEPTH) as usize;
        let ends = self.flying.iter().flatten().map(|one| one.range.end as u64);
        let from = match ends.filter(|end| end + len <= PART).nth(pick) {
            Some(end) => end,
            None => unit * self.random.below((PART - len) / unit + 1),
        };
        from as usize..(from + len) as usize
    }

    /// Writes the header, in one piece or several; returns how many bytes of data follow.
    fn head(&mut self, what: u32, place: u64, len: usize, at: &mut u64) -> (Vec<Buffer>, usize) {
        let sector = place / 512;
        let (bytes, moved) = match what {
            kind::OUT | kind::IN => (header(what, sector).to_vec(), len),
            kind::GET_ID => (header(what, 0).to_vec(), 20),
            kind::FLUSH => (header(what, 0).to_vec(), 0),
            _ => {
                let unmap = what == kind::WRITE_ZEROES && self.random.below(2) == 0;
                let range = range(sector, (len / 512) as u32, unmap.into());
                ([header(what, 0), range].concat(), 0)
            }
        };
        let most = if self.random.below(4) == 0 { 5 } else { 32 };
        let mut buffers = Vec::new();
        for piece in bytes.chunks(most) {
            self.queue.memory().write(*at, piece);
            buffers.push(Buffer::readable(*at, piece.len() as u32));
            *at += piece.len() as u64 + self.random.below(9);
        }
        (buffers, moved)
    }

    /// Puts data into guest memory, in pieces with good, poor or no alignment; the last piece goes into `spare` if it
    /// fits.
    fn data(&mut self, bytes: &[u8], at: &mut u64, spare: Option<u64>) -> Vec<(u64, usize)> {
        let unit = [4096, 512, 256, 1][self.random.below(4) as usize];
        let most = if self.indirect { 30 } else { 3 };
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < bytes.len() {
            let left = bytes.len() - done;
            let some = (self.random.below(left as u64) as usize + 1).next_multiple_of(unit);
            let take = if pieces.len() == most {
                left
            } else {
                some.min(left)
            };
            *at = (*at + self.random.below(40)).next_multiple_of(unit as u64);
            let addr = match spare {
                Some(spare) if take == left && take as u64 <= SPARE_SLOT => spare,
                _ => *at,
            };
            self.queue.memory().write(addr, &bytes[done..done + take]);
            pieces.push((addr, take));
            *at += take as u64;
            done += take;
        }
        pieces
    }

    fn ended(&mut self, head: u32, used_bytes: u32) {
        let one = self.flying[head as usize].take();
        let one = one.unwrap_or_else(|| panic!("head {head} ended twice"));
        let memory = self.queue.memory();
        let what = (one.kind, one.fate, one.range.clone(), one.bytes.len());
        let result = (memory.bytes(one.status_at, 1)[0], used_bytes);
        let is_well = result == (0, one.used_bytes);
        let is_failed = result == (1, 1);
        let is_right = match one.fate {
            Expected::Well => is_well,
            Expected::Fails => is_failed,
            Expected::Either => is_well || is_failed,
        };
        assert!(is_right, "status, used length {result:?} of {what:?}");
        self.free.push(one.slot);
        self.served += usize::from(is_well);
        self.failed += usize::from(is_failed);
        if is_failed {
            return;
        }
        let (model, discarded) = (
            &mut self.model[one.range.clone()],
            &mut self.discarded[one.range.clone()],
        );
        match one.kind {
            kind::OUT => {
                model.copy_from_slice(&one.bytes);
                discarded.fill(false);
            }
            kind::WRITE_ZEROES => {
                model.fill(0);
                discarded.fill(false);
            }
            kind::DISCARD => discarded.fill(true),
            kind::IN => {
                let found = one.pieces.iter();
                let found = found.flat_map(|&(addr, len)| memory.bytes(addr, len));
                for (at, byte) in found.enumerate() {
                    let is_right = byte == model[at] || discarded[at] && byte == 0;
                    assert!(is_right, "byte {at} of {what:?}: {byte}, not {}", model[at]);
                }
            }
            _ => {}
        }
    }
}
