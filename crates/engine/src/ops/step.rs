//! Chooses the next step of an op from the op, the store's properties and the methods that the store has
//! refused. It needs no ring and no buffers, so a table test covers it.

use cleave_blk::{Limits, OpKind};
use cleave_disk::{FileKind, Leg};

use super::piece::{self, Piece};
use super::table::{Entry, Gathered, RANGES_AT_ONCE};

/// The step of an op that is in progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Step {
    /// None: the op has not started, or waits for a hold, a buffer or its retry time.
    #[default]
    Idle,
    /// Moves bytes between the store and guest memory.
    Direct,
    /// Reads the window into the buffer.
    Fill,
    /// Writes the window from the buffer.
    Spill,
    /// Writes zeroes to the window from the shared buffer.
    Zeroes,
    /// Runs fallocate or a device command on the window.
    Range(Method),
    /// Fsync.
    Sync,
}

/// How space is given back or a range is zeroed without moving bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// BLOCK_URING_CMD_DISCARD.
    Command,
    /// FALLOC_FL_PUNCH_HOLE.
    Punch,
    /// FALLOC_FL_ZERO_RANGE.
    ZeroRange,
}

/// The range lock that an op holds or needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Hold {
    #[default]
    None,
    Shared,
    Exclusive,
}

/// What a store of files notes about an op.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileOp {
    /// The current step, and the part of the store that it covers.
    pub(crate) step: Step,
    pub(crate) window: Piece,
    /// Bytes of the window that have been moved.
    pub(crate) moved: u64,
    /// Consecutive attempts that moved nothing.
    pub(crate) tries: u16,
    /// For reads and writes: go through a buffer.
    pub(crate) bounced: bool,
    /// Not through the polled ring: it refused the op, or the device would get it in pieces.
    pub(crate) plain: bool,
    /// Threads of the kernel run the step.
    pub(crate) delegated: bool,
    /// For zeroing: write zeroes, because the store refused the other methods for this range.
    pub(crate) written: bool,
    pub(crate) needs: Hold,
    pub(crate) held: Hold,
    pub(crate) buffer: Option<u16>,
}

impl FileOp {
    /// Begins a step that covers this part of the store.
    pub(crate) fn begin(&mut self, step: Step, window: Piece) {
        (self.step, self.window) = (step, window);
        (self.moved, self.tries) = (0, 0);
    }
}

/// The properties of a file or block device that decide how an op is done.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    pub(crate) kind: FileKind,
    /// Unit of offsets and lengths.
    pub(crate) unit: u64,
    /// Alignment of memory addresses.
    pub(crate) memory_align: u64,
    /// Unit to which a discard is rounded inwards.
    pub(crate) discard_unit: u64,
    /// Unit in which a block device is zeroed without moving bytes. Through the page cache this is a page: a write to the rest of a page
    /// does not wait for the device (Linux 5.15 to 6.14), reads the old bytes from it, and has them written over the zeroes.
    pub(crate) zero_unit: u64,
    pub(crate) read_only: bool,
    /// Writes may go through the page cache: the kernel reports a failed write-back once, to one fsync.
    pub(crate) cached: bool,
    /// Bytes of a bounce buffer and of the shared zeroes; multiples of `unit`.
    pub(crate) buffer_bytes: u64,
    pub(crate) zeroes_bytes: u64,
}

impl Facts {
    pub(crate) fn new(leg: &Leg, kind: FileKind, limits: &Limits) -> Facts {
        let unit = u64::from(limits.offset_align_bytes.max(1));
        let discard_unit = u64::from(limits.discard_align_bytes.max(1));
        Facts {
            kind,
            unit,
            memory_align: u64::from(limits.memory_align_bytes.max(1)),
            discard_unit,
            zero_unit: match leg.is_cached() {
                // All are powers of two. The device refuses parts of its own blocks.
                true => discard_unit.max(rustix::param::page_size() as u64),
                false => unit,
            },
            read_only: limits.read_only,
            cached: leg.caches_writes(),
            buffer_bytes: 0,
            zeroes_bytes: 0,
        }
    }

    /// Returns true if an op with these host ranges has to go through a buffer. Each length must be a multiple of the
    /// unit as well: up to Linux 6.17 O_DIRECT requires that of every range, not only of their sum. More
    /// ranges than one system call takes could be cut inside a unit.
    pub(crate) fn must_bounce(&self, offset: u64, memory: Gathered) -> bool {
        (offset | memory.len_bits) & (self.unit - 1) != 0
            || memory.addr_bits & (self.memory_align - 1) != 0
            || memory.count > RANGES_AT_ONCE
    }

    /// Returns true if an op ends with an fsync that makes it durable. A write past the page cache needs none: the
    /// kernel makes it durable and reports its failure to that write. Through the cache, the kernel would
    /// report a failed write-back to only one of several concurrent writes, and the others would appear
    /// durable although their pages may be lost. So they share an fsync and its failure.
    pub(crate) fn ends_with_sync(&self, kind: OpKind) -> bool {
        match kind {
            OpKind::Zero { durable, .. } => durable,
            OpKind::Write { durable } => durable && self.cached,
            OpKind::Read | OpKind::Discard | OpKind::Sync => false,
        }
    }

    /// Returns true if the kernel must make a write durable before it completes.
    pub(crate) fn writes_durably(&self, kind: OpKind) -> bool {
        kind == (OpKind::Write { durable: true }) && !self.cached
    }

    /// Which range lock an op needs. No guest can write less than 512 bytes, so read-modify-write begins
    /// there. While it runs, *every* other writer of the block must be excluded, or the old bytes that were
    /// read would overwrite its data.
    pub(crate) fn needs_hold(&self, kind: OpKind, offset: u64, len: u64) -> Hold {
        match kind {
            OpKind::Read | OpKind::Sync => Hold::None,
            _ if self.unit <= 512 => Hold::None,
            OpKind::Discard => Hold::Shared,
            OpKind::Write { .. } | OpKind::Zero { .. } => {
                if (offset | len) & (self.unit - 1) == 0 {
                    Hold::Shared
                } else {
                    Hold::Exclusive
                }
            }
        }
    }
}

/// The methods that the store has not refused so far. A refusal is permanent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Methods {
    pub(crate) command: bool,
    pub(crate) punch: bool,
    pub(crate) zero_range: bool,
}

impl Methods {
    pub(crate) fn at_first(kind: FileKind) -> Methods {
        Methods {
            command: kind == FileKind::BlockDevice,
            punch: true,
            zero_range: true,
        }
    }

    pub(crate) fn forget(&mut self, method: Method) {
        match method {
            Method::Command => self.command = false,
            Method::Punch => self.punch = false,
            Method::ZeroRange => self.zero_range = false,
        }
    }
}

/// The step to start now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepToStart {
    /// Nothing is left.
    Done,
    /// Move bytes directly between guest memory and store.
    Direct(Piece),
    /// Read the window into the buffer.
    Fill(Piece),
    /// Write the window from the buffer.
    Spill(Piece),
    /// Write the window from the shared zeroes.
    Zeroes(Piece),
    /// Change the range without moving bytes.
    Range(Method, Piece),
    /// Make the op durable.
    Sync,
}

/// The next step of `entry`, whose bytes up to `pos` are finished.
pub(crate) fn next(entry: &Entry<FileOp>, facts: &Facts, methods: Methods) -> StepToStart {
    let (at, left) = entry.rest();
    match entry.kind {
        OpKind::Sync => StepToStart::Sync,
        kind if left == 0 && facts.ends_with_sync(kind) => StepToStart::Sync,
        _ if left == 0 => StepToStart::Done,
        OpKind::Read | OpKind::Write { .. } if !entry.own.bounced => {
            StepToStart::Direct(whole(at, left))
        }
        OpKind::Read => {
            StepToStart::Fill(piece::for_read(at, left, facts.unit, facts.buffer_bytes))
        }
        OpKind::Write { .. } => {
            let piece = piece::for_write(at, left, facts.unit, facts.buffer_bytes);
            if piece.is_whole() {
                StepToStart::Spill(piece)
            } else {
                StepToStart::Fill(piece)
            }
        }
        OpKind::Discard if methods.command => StepToStart::Range(Method::Command, whole(at, left)),
        OpKind::Discard if methods.punch => StepToStart::Range(Method::Punch, whole(at, left)),
        // A hint, which this store does not take.
        OpKind::Discard => StepToStart::Done,
        OpKind::Zero { unmap, .. } => next_zero(entry, unmap, facts, methods),
    }
}

/// Zeroing by deallocating, by marking the range, or by writing: the first of these that the store supports.
/// A block device supports the first two for whole units only; a file system for any range.
fn next_zero(entry: &Entry<FileOp>, unmap: bool, facts: &Facts, methods: Methods) -> StepToStart {
    let (at, left) = entry.rest();
    let method = match (
        entry.own.written,
        unmap && methods.punch,
        methods.zero_range,
    ) {
        (true, _, _) | (false, false, false) => None,
        (false, true, _) => Some(Method::Punch),
        (false, false, true) => Some(Method::ZeroRange),
    };
    let (method, left) = match (method, facts.kind) {
        (Some(method), FileKind::Regular) => return StepToStart::Range(method, whole(at, left)),
        (Some(_), FileKind::BlockDevice) => match piece::inside(at, left, facts.zero_unit) {
            Some((start, len)) if start == at => (method, len),
            Some((start, _)) => (None, start - at),
            None => (None, left),
        },
        (None, _) => (None, left),
    };
    let most = method.map_or(facts.zeroes_bytes, |_| u64::MAX);
    let piece = piece::for_write(at, left, facts.unit, most);
    match method {
        _ if !piece.is_whole() => StepToStart::Fill(piece),
        Some(method) => StepToStart::Range(method, piece),
        None => StepToStart::Zeroes(piece),
    }
}

fn whole(at: u64, left: u64) -> Piece {
    Piece {
        start: at,
        len: left,
        skip: 0,
        take: left,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(kind: FileKind, unit: u64) -> Facts {
        Facts {
            kind,
            unit,
            memory_align: 512,
            discard_unit: unit,
            zero_unit: unit,
            read_only: false,
            cached: false,
            buffer_bytes: 128 << 10,
            zeroes_bytes: 1 << 20,
        }
    }

    const ALL: Methods = Methods {
        command: true,
        punch: true,
        zero_range: true,
    };
    const NOTHING: Methods = Methods {
        command: false,
        punch: false,
        zero_range: false,
    };

    fn entry(kind: OpKind, offset: u64, len: u64) -> Entry<FileOp> {
        Entry::new(0, kind, offset, len, FileOp::default())
    }

    #[test]
    fn zeroing_takes_the_best_way_left() {
        let unmap = entry(
            OpKind::Zero {
                unmap: true,
                durable: false,
            },
            0,
            3 << 20,
        );
        let keep = entry(
            OpKind::Zero {
                unmap: false,
                durable: false,
            },
            0,
            3 << 20,
        );
        let regular = facts(FileKind::Regular, 512);
        let all = whole(0, 3 << 20);
        let no_punch = Methods {
            punch: false,
            ..ALL
        };
        assert_eq!(
            next(&unmap, &regular, ALL),
            StepToStart::Range(Method::Punch, all)
        );
        assert_eq!(
            next(&unmap, &regular, no_punch),
            StepToStart::Range(Method::ZeroRange, all)
        );
        assert_eq!(
            next(&unmap, &regular, NOTHING),
            StepToStart::Zeroes(whole(0, 1 << 20))
        );
        assert_eq!(
            next(&keep, &regular, ALL),
            StepToStart::Range(Method::ZeroRange, all)
        );
        assert_eq!(
            next(&keep, &regular, NOTHING),
            StepToStart::Zeroes(whole(0, 1 << 20))
        );
        let mut refused = unmap.clone();
        refused.own.written = true;
        assert_eq!(
            next(&refused, &regular, ALL),
            StepToStart::Zeroes(whole(0, 1 << 20))
        );
    }

    #[test]
    fn zeroing_parts_of_blocks_reads_them_first_where_the_store_cannot() {
        let zero = entry(
            OpKind::Zero {
                unmap: false,
                durable: false,
            },
            512,
            8192,
        );
        let head = Piece {
            start: 0,
            len: 4096,
            skip: 512,
            take: 3584,
        };
        let device = facts(FileKind::BlockDevice, 4096);
        assert_eq!(next(&zero, &device, ALL), StepToStart::Fill(head));
        let mut middle = zero.clone();
        middle.pos = 3584;
        assert_eq!(
            next(&middle, &device, ALL),
            StepToStart::Range(Method::ZeroRange, whole(4096, 4096))
        );
        let mut tail = zero.clone();
        tail.pos = 7680;
        let block = Piece {
            start: 8192,
            len: 4096,
            skip: 0,
            take: 512,
        };
        assert_eq!(next(&tail, &device, ALL), StepToStart::Fill(block));
        // A file system handles partial blocks by itself, unless zeroes have to be written.
        let regular = facts(FileKind::Regular, 4096);
        assert_eq!(
            next(&zero, &regular, ALL),
            StepToStart::Range(Method::ZeroRange, whole(512, 8192))
        );
        assert_eq!(next(&zero, &regular, NOTHING), StepToStart::Fill(head));
    }

    #[test]
    fn a_device_zeroes_whole_pages_through_the_page_cache_and_zeroes_are_written_to_both_ends() {
        let device = Facts {
            zero_unit: 4096,
            cached: true,
            ..facts(FileKind::BlockDevice, 1)
        };
        let range = |start, len| StepToStart::Range(Method::Punch, whole(start, len));
        let zeroes = |start, len| StepToStart::Zeroes(whole(start, len));
        for (offset, len, steps) in [
            (
                512,
                16_384,
                &[zeroes(512, 3584), range(4096, 12_288), zeroes(16_384, 512)][..],
            ),
            (4096, 8192, &[range(4096, 8192)]),
            (512, 3584, &[zeroes(512, 3584)]),
            (4096, 512, &[zeroes(4096, 512)]),
            // Parts of two pages.
            (3584, 1024, &[zeroes(3584, 1024)]),
        ] {
            let unmap = OpKind::Zero {
                unmap: true,
                durable: false,
            };
            let mut op = entry(unmap, offset, len);
            for step in steps {
                assert_eq!(next(&op, &device, ALL), *step, "{len} at {offset}");
                let (StepToStart::Range(_, piece) | StepToStart::Zeroes(piece)) = step else {
                    unreachable!()
                };
                op.pos += piece.take;
            }
            assert_eq!(next(&op, &device, ALL), StepToStart::Done);
        }
    }

    #[test]
    fn durable_zeroing_ends_with_a_sync() {
        let mut zero = entry(
            OpKind::Zero {
                unmap: false,
                durable: true,
            },
            0,
            4096,
        );
        zero.pos = 4096;
        assert_eq!(
            next(&zero, &facts(FileKind::Regular, 512), ALL),
            StepToStart::Sync
        );
        zero.kind = OpKind::Zero {
            unmap: false,
            durable: false,
        };
        assert_eq!(
            next(&zero, &facts(FileKind::Regular, 512), ALL),
            StepToStart::Done
        );
    }

    #[test]
    fn a_durable_write_ends_with_a_sync_behind_the_page_cache_only() {
        let mut write = entry(OpKind::Write { durable: true }, 0, 4096);
        write.pos = 4096;
        for (cached, durable, then) in [
            (true, true, StepToStart::Sync),
            (false, true, StepToStart::Done),
            (true, false, StepToStart::Done),
        ] {
            write.kind = OpKind::Write { durable };
            let facts = Facts {
                cached,
                ..facts(FileKind::Regular, 512)
            };
            assert_eq!(next(&write, &facts, ALL), then);
            assert_eq!(facts.writes_durably(write.kind), durable && !cached);
        }
    }

    #[test]
    fn discard_goes_from_command_to_hole_to_nothing() {
        let op = entry(OpKind::Discard, 0, 8192);
        let device = facts(FileKind::BlockDevice, 512);
        let range = whole(0, 8192);
        assert_eq!(
            next(&op, &device, ALL),
            StepToStart::Range(Method::Command, range)
        );
        let mut methods = ALL;
        methods.forget(Method::Command);
        assert_eq!(
            next(&op, &device, methods),
            StepToStart::Range(Method::Punch, range)
        );
        methods.forget(Method::Punch);
        assert_eq!(next(&op, &device, methods), StepToStart::Done);
        assert!(!Methods::at_first(FileKind::Regular).command);
    }

    #[test]
    fn bounces_and_range_locks() {
        let facts = facts(FileKind::Regular, 4096);
        let memory = |addr_bits, len_bits, count| Gathered {
            addr_bits,
            len_bits,
            count,
        };
        assert!(!facts.must_bounce(4096, memory(512, 4096, 2)));
        assert!(facts.must_bounce(512, memory(512, 4096, 2)));
        assert!(facts.must_bounce(4096, memory(256, 4096, 2)));
        assert!(facts.must_bounce(4096, memory(512, 4096 | 512, 2)));
        assert!(facts.must_bounce(4096, memory(512, 4096, 1025)));
        let write = OpKind::Write { durable: false };
        assert_eq!(facts.needs_hold(write, 4096, 4096), Hold::Shared);
        assert_eq!(facts.needs_hold(write, 512, 4096), Hold::Exclusive);
        assert_eq!(facts.needs_hold(OpKind::Discard, 0, 4096), Hold::Shared);
        assert_eq!(facts.needs_hold(OpKind::Read, 512, 512), Hold::None);
        assert_eq!(
            Facts { unit: 512, ..facts }.needs_hold(write, 512, 512),
            Hold::None
        );
    }

    #[test]
    fn bounced_ops_fill_or_spill() {
        let facts = facts(FileKind::Regular, 4096);
        let mut op = entry(OpKind::Write { durable: false }, 512, 512);
        op.own.bounced = true;
        let block = Piece {
            start: 0,
            len: 4096,
            skip: 512,
            take: 512,
        };
        assert_eq!(next(&op, &facts, ALL), StepToStart::Fill(block));
        let mut op = entry(OpKind::Write { durable: false }, 4096, 8192);
        assert_eq!(
            next(&op, &facts, ALL),
            StepToStart::Direct(whole(4096, 8192))
        );
        op.own.bounced = true;
        assert_eq!(
            next(&op, &facts, ALL),
            StepToStart::Spill(whole(4096, 8192))
        );
    }
}
