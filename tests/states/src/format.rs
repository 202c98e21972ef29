//! The recording as a file of dm-log-writes (linux: drivers/md/dm-log-writes.c), which `replay-log` of xfstests
//! reads.
//!
//! All numbers are little-endian, and everything is stored in sectors of 512 bytes. The first sector contains `{u64
//! magic, u64 version, u64 entries, u32 bytes of a sector}`. An entry is a sector `{u64 sector, u64 sectors, u64
//! flags, u64 bytes of data}`. The data of a write follows in sectors of its own; the text of a mark follows these
//! four fields in the entry's sector and ends with a zero byte.
//!
//! An I/O is entered when the disk has applied it. A flush is entered when it has completed and names the first
//! sector of its leg; it has no sectors of its own. Marks record everything that the format has no field for: `ask N
//! write 100+8` (a submission), `told N ok` (a completion), `begin N` of a flush (it covers everything completed so
//! far), `end N` of any I/O (N counts from 0 in order of starts), and `write-through on`.

use std::io::{self, Write};

use crate::log::{Event, IoKind, RequestKind};
use crate::{Log, SECTOR};

const MAGIC: u64 = 0x006a_7366_7773_6872;
const VERSION: u64 = 1;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
const HEAD_BYTES: usize = 32;

impl Log {
    /// Writes the file.
    pub fn save(&self, to: &mut dyn Write) -> io::Result<()> {
        let entries = self
            .events
            .iter()
            .filter(|event| !self.is_silent(event))
            .count() as u64;
        let sector_bytes = SECTOR as u64;
        to.write_all(&sector(&[MAGIC, VERSION, entries, sector_bytes], b""))?;
        for event in &self.events {
            self.save_event(to, *event)?;
        }
        Ok(())
    }

    /// The start of anything but a flush adds nothing to the record of its application.
    fn is_silent(&self, event: &Event) -> bool {
        matches!(event, Event::Began(io) if !matches!(self.ios[*io].kind, IoKind::Flush { .. }))
    }

    fn save_event(&self, to: &mut dyn Write, event: Event) -> io::Result<()> {
        match event {
            _ if self.is_silent(&event) => Ok(()),
            Event::Began(io) => mark(to, &format!("begin {io}")),
            Event::Applied(io) => self.save_io(to, io),
            Event::Ended(io) => match self.ios[io].kind {
                IoKind::Flush { .. } => {
                    to.write_all(&sector(&[self.ios[io].sector, 0, FLUSH, 0], b""))
                }
                _ => mark(to, &format!("end {io}")),
            },
            Event::Asked(request) => {
                let asked = &self.requests[request];
                let (at, count) = (asked.sector, asked.values.len());
                let word = match asked.kind {
                    RequestKind::Write => "write",
                    RequestKind::Zero => "zero",
                    RequestKind::Discard => "discard",
                    RequestKind::Flush => "flush",
                };
                mark(to, &format!("ask {request} {word} {at}+{count}"))
            }
            Event::Told { request, ok } => {
                let word = if ok { "ok" } else { "failed" };
                mark(to, &format!("told {request} {word}"))
            }
            Event::WriteThrough(on) => {
                let word = if on { "on" } else { "off" };
                mark(to, &format!("write-through {word}"))
            }
        }
    }

    fn save_io(&self, to: &mut dyn Write, io: usize) -> io::Result<()> {
        let io = &self.ios[io];
        let count = io.values.len() as u64;
        let (flags, bytes) = match io.kind {
            IoKind::Write { fua } => (if fua { FUA } else { 0 }, count * SECTOR as u64),
            IoKind::Discard => (DISCARD, 0),
            IoKind::Flush { .. } => unreachable!("a flush moves nothing"),
        };
        to.write_all(&sector(&[io.sector, count, flags, bytes], b""))?;
        if bytes > 0 {
            for value in &io.values {
                to.write_all(self.content(*value))?;
            }
        }
        Ok(())
    }
}

fn mark(to: &mut dyn Write, text: &str) -> io::Result<()> {
    to.write_all(&sector(&[0, 0, MARK, text.len() as u64], text.as_bytes()))
}

/// Four numbers and a text, which is far shorter than a sector.
fn sector(head: &[u64; 4], text: &[u8]) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    for (place, number) in bytes.chunks_exact_mut(8).zip(head) {
        place.copy_from_slice(&number.to_le_bytes());
    }
    bytes[HEAD_BYTES..][..text.len()].copy_from_slice(text);
    bytes
}
