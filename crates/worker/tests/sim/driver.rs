//! A guest's driver for one vring, written for these tests only. It accesses shared memory with `pread` and
//! `pwrite` on the memory file, so it shares no code with the code under test.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use cleave_blk::spec::request_type;
use cleave_guest::{Memory, RegionSpec, VringLayout};
use rustix::fs::{MemfdFlags, memfd_create};

/// Entries of the ring.
pub(crate) const SIZE: u16 = 32;
/// Guest-physical address of the memory.
pub(crate) const BASE: u64 = 0x4000_0000;
const MEMORY_BYTES: u64 = 16 << 20;
const DESC: u64 = 0;
const AVAIL: u64 = 0x4000;
pub(crate) const USED: u64 = 0x5000;
/// Each head has its own area: header, status, indirect table, data.
const AREAS: u64 = 0x10000;
const AREA_BYTES: u64 = 0x40000;
const STATUS_OFF: u64 = 64;
const TABLE_OFF: u64 = 0x1000;
const DATA_OFF: u64 = 0x8000;
/// Bytes for data in an area.
pub(crate) const DATA_MAX: u64 = 0x20000;

/// Entries of the longest indirect table.
const TABLE_ENTRIES: usize = 32768;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A request as the driver submits it.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) kind: u32,
    pub(crate) sector: u64,
    /// Bytes to write, or the range of a discard.
    pub(crate) out: Vec<u8>,
    /// Size of the buffer for a read.
    pub(crate) room: u32,
    /// Length of the descriptors that the data is cut into.
    pub(crate) cut: u32,
    pub(crate) indirect: bool,
}

/// A part of the guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Rings,
    Requests,
}

pub(crate) struct Driver {
    file: File,
    /// Guest-physical address of its memory.
    base: u64,
    avail: u16,
    seen: u16,
    free: Vec<u16>,
    /// Descriptors of each head's chain.
    chains: Vec<Vec<u16>>,
    free_desc: Vec<u16>,
}

/// A used entry, and the request's status and data.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) head: u16,
    pub(crate) used_bytes: u32,
    pub(crate) status: u8,
    pub(crate) data: Vec<u8>,
}

impl Driver {
    pub(crate) fn new() -> Driver {
        Driver::at(BASE)
    }

    /// A driver with its memory at another address.
    pub(crate) fn at(base: u64) -> Driver {
        let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(MEMORY_BYTES).unwrap();
        Driver {
            file,
            base,
            avail: 0,
            seen: 0,
            free: (0..SIZE).rev().collect(),
            chains: vec![Vec::new(); usize::from(SIZE)],
            free_desc: (0..SIZE).rev().collect(),
        }
    }

    pub(crate) fn memory(&self) -> Arc<Memory> {
        let file = self.file.try_clone().unwrap();
        let region = RegionSpec {
            guest_addr: self.base,
            user_addr: 0x7000_0000_0000 + self.base,
            len_bytes: MEMORY_BYTES,
            file_offset: 0,
            file,
        };
        Memory::new(vec![region]).unwrap()
    }

    /// One part of the memory: the rings, or everything that requests use.
    pub(crate) fn region(&self, part: Part) -> RegionSpec {
        let (start, len_bytes) = match part {
            Part::Rings => (0, AREAS),
            Part::Requests => (AREAS, MEMORY_BYTES - AREAS),
        };
        RegionSpec {
            guest_addr: self.base + start,
            user_addr: 0x7000_0000_0000 + self.base + start,
            len_bytes,
            file_offset: start,
            file: self.file.try_clone().unwrap(),
        }
    }

    /// Cuts its memory, so that the pages of this part and of what follows are not there.
    pub(crate) fn lose(&self, part: Part) {
        let left_bytes = match part {
            Part::Rings => 0,
            Part::Requests => AREAS,
        };
        self.file.set_len(left_bytes).unwrap();
    }

    /// Returns a copy of its memory.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES as usize];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Moves to a copy of the memory. Returns the old file.
    pub(crate) fn move_to_a_copy(&mut self) -> File {
        let bytes = self.bytes();
        let copy = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
        copy.write_all_at(&bytes, 0).unwrap();
        std::mem::replace(&mut self.file, copy)
    }

    /// The used index in an old memory file.
    pub(crate) fn used_index_in(file: &File) -> u16 {
        let mut bytes = [0; 2];
        file.read_exact_at(&mut bytes, USED + 2).unwrap();
        u16::from_le_bytes(bytes)
    }

    pub(crate) fn layout() -> VringLayout {
        Driver::layout_at(BASE)
    }

    pub(crate) fn layout_at(base: u64) -> VringLayout {
        VringLayout {
            size: SIZE,
            desc_addr: base + DESC,
            avail_addr: base + AVAIL,
            used_addr: base + USED,
        }
    }

    /// Turns a chain in flight into an endless one.
    pub(crate) fn break_chain(&self, head: u16) {
        self.desc(DESC, head, AREAS, 16, NEXT, head);
    }

    pub(crate) fn in_flight(&self) -> usize {
        usize::from(SIZE) - self.free.len()
    }

    /// Makes a request available. `None`: there are not enough descriptors. Returns its area number.
    pub(crate) fn submit(&mut self, ask: &Ask) -> Option<u16> {
        let area = *self.free.last()?;
        let at = AREAS + u64::from(area) * AREA_BYTES;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&ask.kind.to_le_bytes());
        header[8..].copy_from_slice(&ask.sector.to_le_bytes());
        self.write(at, &header);
        self.write(at + STATUS_OFF, &[0xee]);
        self.write(at + DATA_OFF, &ask.out);
        let mut parts = vec![(at, 16, 0)];
        parts.extend(pieces(at + DATA_OFF, ask.out.len() as u32, ask.cut, 0));
        parts.extend(pieces(at + DATA_OFF, ask.room, ask.cut, WRITE));
        parts.push((at + STATUS_OFF, 1, WRITE));
        self.write(
            at + DATA_OFF + ask.out.len() as u64,
            &vec![0xcc; ask.room as usize],
        );
        let needed = if ask.indirect { 1 } else { parts.len() };
        if self.free_desc.len() < needed {
            return None;
        }
        self.free.pop();
        let used = self.free_desc.split_off(self.free_desc.len() - needed);
        if ask.indirect {
            self.table(
                at + TABLE_OFF,
                &parts,
                &(0..parts.len() as u16).collect::<Vec<_>>(),
            );
            self.desc(
                DESC,
                used[0],
                at + TABLE_OFF,
                16 * parts.len() as u32,
                INDIRECT,
                0,
            );
        } else {
            self.table(DESC, &parts, &used);
        }
        let head = used[0];
        self.chains[usize::from(head)] = used;
        self.areas_push(head, area);
        self.write(
            AVAIL + 4 + 2 * u64::from(self.avail % SIZE),
            &head.to_le_bytes(),
        );
        self.avail = self.avail.wrapping_add(1);
        self.write(AVAIL + 2, &self.avail.to_le_bytes());
        Some(head)
    }

    /// Returns true if the device wants a kick for the latest request (virtio 1.3 §2.7.13.4).
    pub(crate) fn wants_kick(&self, event_idx: bool) -> bool {
        if event_idx {
            let event = u16::from_le_bytes(self.read(USED + 4 + 8 * u64::from(SIZE)));
            event == self.avail.wrapping_sub(1)
        } else {
            u16::from_le_bytes(self.read(USED)) & 1 == 0
        }
    }

    /// Used entries since the last call. `room` returns the size of each head's buffer.
    pub(crate) fn collect(&mut self, room: impl Fn(u16) -> u32) -> Vec<Answer> {
        let index = u16::from_le_bytes(self.read(USED + 2));
        let mut answers = Vec::new();
        while self.seen != index {
            let entry: [u8; 8] = self.read(USED + 4 + 8 * u64::from(self.seen % SIZE));
            self.seen = self.seen.wrapping_add(1);
            let head = u32::from_le_bytes(entry[..4].try_into().unwrap()) as u16;
            let used_bytes = u32::from_le_bytes(entry[4..].try_into().unwrap());
            let area = self.area_of(head);
            let at = AREAS + u64::from(area) * AREA_BYTES;
            let [status] = self.read(at + STATUS_OFF);
            let mut data = vec![0; room(head) as usize];
            self.file.read_exact_at(&mut data, at + DATA_OFF).unwrap();
            self.free.push(area);
            let chain = std::mem::take(&mut self.chains[usize::from(head)]);
            assert!(!chain.is_empty(), "head {head} was used twice");
            self.free_desc.extend(chain);
            answers.push(Answer {
                head,
                used_bytes,
                status,
                data,
            });
        }
        answers
    }

    /// Makes head `n` available for each of `heads`, all with the same indirect table of maximum length.
    pub(crate) fn submit_longest(&mut self, heads: u16) {
        let entry = (self.base + AREAS, 1, WRITE);
        self.submit_table(heads, &[entry; TABLE_ENTRIES]);
    }

    /// Submits a write of the first sector, whose table is long because most of its entries are empty.
    pub(crate) fn submit_longest_write(&mut self, heads: u16) {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&request_type::OUT.to_le_bytes());
        self.write(AREAS, &header);
        let at = self.base + AREAS;
        let mut entries = [(at, 0, 0); TABLE_ENTRIES];
        entries[..2].copy_from_slice(&[(at, 16, 0), (at + DATA_OFF, 512, 0)]);
        entries[TABLE_ENTRIES - 1] = (at + STATUS_OFF, 1, WRITE);
        self.submit_table(heads, &entries);
    }

    fn submit_table(&mut self, heads: u16, entries: &[(u64, u32, u16)]) {
        const TABLE: u64 = 0xc0_0000;
        let bytes = (1_u64..)
            .zip(entries)
            .flat_map(|(next, &(addr, len, flags))| {
                let flags = flags | if next < entries.len() as u64 { NEXT } else { 0 };
                let words = [addr, u64::from(len) | u64::from(flags) << 32 | next << 48];
                words.into_iter().flat_map(u64::to_le_bytes)
            });
        self.write(TABLE, &bytes.collect::<Vec<u8>>());
        for head in 0..heads {
            self.desc(DESC, head, TABLE, 16 * entries.len() as u32, INDIRECT, 0);
            self.submit_raw(head);
        }
    }

    /// Asks for a call with the next answer.
    pub(crate) fn want_call(&self) {
        self.write(AVAIL + 4 + 2 * u64::from(SIZE), &self.seen.to_le_bytes());
    }

    /// The used index up to which answers were collected.
    pub(crate) fn seen(&self) -> u16 {
        self.seen
    }

    /// The used index.
    pub(crate) fn used_index(&self) -> u16 {
        u16::from_le_bytes(self.read(USED + 2))
    }

    /// Makes a raw head available, valid or not.
    pub(crate) fn submit_raw(&mut self, head: u16) {
        self.write(
            AVAIL + 4 + 2 * u64::from(self.avail % SIZE),
            &head.to_le_bytes(),
        );
        self.avail = self.avail.wrapping_add(1);
        self.write(AVAIL + 2, &self.avail.to_le_bytes());
    }

    fn areas_push(&self, head: u16, area: u16) {
        self.write(0x8000 + 2 * u64::from(head), &area.to_le_bytes());
    }

    fn area_of(&self, head: u16) -> u16 {
        u16::from_le_bytes(self.read(0x8000 + 2 * u64::from(head)))
    }

    fn table(&self, at: u64, parts: &[(u64, u32, u16)], indices: &[u16]) {
        for (n, &(addr, len, flags)) in parts.iter().enumerate() {
            let next = indices.get(n + 1).copied();
            let flags = flags | if next.is_some() { NEXT } else { 0 };
            self.desc(at, indices[n], addr, len, flags, next.unwrap_or(0));
        }
    }

    fn desc(&self, table: u64, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(self.base + addr).to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.write(table + 16 * u64::from(index), &bytes);
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }
}

fn pieces(at: u64, len: u32, cut: u32, flags: u16) -> Vec<(u64, u32, u16)> {
    let mut pieces = Vec::new();
    let mut done = 0;
    while done < len {
        let piece = cut.min(len - done);
        pieces.push((at + u64::from(done), piece, flags));
        done += piece;
    }
    pieces
}

impl Ask {
    pub(crate) fn read(sector: u64, bytes: u32, cut: u32, indirect: bool) -> Ask {
        Ask {
            kind: request_type::IN,
            sector,
            out: Vec::new(),
            room: bytes,
            cut,
            indirect,
        }
    }

    pub(crate) fn write(sector: u64, out: Vec<u8>, cut: u32, indirect: bool) -> Ask {
        Ask {
            kind: request_type::OUT,
            sector,
            out,
            room: 0,
            cut,
            indirect,
        }
    }

    pub(crate) fn flush() -> Ask {
        Ask {
            kind: request_type::FLUSH,
            sector: 0,
            out: Vec::new(),
            room: 0,
            cut: 512,
            indirect: false,
        }
    }

    pub(crate) fn zero(sector: u64, sectors: u32, discard: bool) -> Ask {
        let kind = if discard {
            request_type::DISCARD
        } else {
            request_type::WRITE_ZEROES
        };
        let mut out = vec![0; 16];
        out[..8].copy_from_slice(&sector.to_le_bytes());
        out[8..12].copy_from_slice(&sectors.to_le_bytes());
        Ask {
            kind,
            sector: 0,
            out,
            room: 0,
            cut: 512,
            indirect: false,
        }
    }
}
