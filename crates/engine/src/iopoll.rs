//! Checks at start-up that a disk can be polled.

use std::io;
use std::sync::Arc;

use cleave_blk::{Op, OpKind, Segment};
use cleave_disk::Disk;
use cleave_guest::{Epoch, Memory, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::param::page_size;

use crate::{AnyStore, EngineError, Event, Reactor, Store, Wait};

/// Checks that every leg of a disk can be polled, by reading its first block. The queue limits are not
/// enough: a layer above the device may not support polling although it reports them.
pub fn probe_iopoll(disk: &Arc<Disk>) -> Result<(), EngineError> {
    let unit = u64::from(disk.limits().offset_align_bytes.max(512));
    let epoch = Epoch::from(memory(unit)?);
    let mut reactor = Reactor::new(&[disk], 1, 0, 0)?;
    let mut store = [AnyStore::open(&mut reactor, disk, 0, 1)?];
    let segments = [Segment {
        addr: 0,
        // At most 64 KiB.
        len: unit as u32,
    }];
    let mut outcome = Ok(());
    for (number, leg) in (0..).zip(disk.legs()) {
        let op = Op {
            kind: OpKind::Read,
            leg: number,
            offset_bytes: 0,
            len_bytes: unit,
            segments: &segments,
            skip_bytes: 0,
            stripe: None,
        };
        store[0].push(&mut reactor, &epoch, op, 0);
        let source = match only_result(&mut reactor, &mut store)? {
            Err(errno) => io::Error::from_raw_os_error(errno),
            Ok(()) if reactor.polled() > u64::from(number) => continue,
            Ok(()) => io::Error::from_raw_os_error(libc::EOPNOTSUPP),
        };
        let name = leg.name().to_owned();
        outcome = Err(EngineError::Iopoll { name, source });
        break;
    }
    reactor.close(&mut store);
    outcome
}

/// Waits for the result of the one op in flight.
fn only_result(reactor: &mut Reactor, store: &mut [AnyStore]) -> io::Result<Result<(), i32>> {
    loop {
        match reactor.reap(store) {
            Some(Event::Done { done, .. }) => return Ok(done.result),
            Some(Event::Woken { .. }) => {}
            None => reactor.enter(store, Wait::Until(None))?,
        }
    }
}

/// Memory of our own that stands in for a guest's.
fn memory(bytes: u64) -> io::Result<Arc<Memory>> {
    let file = memfd_create("cleave-probe", MemfdFlags::CLOEXEC)?;
    let bytes = bytes.next_multiple_of(page_size() as u64);
    ftruncate(&file, bytes)?;
    let region = RegionSpec {
        guest_addr: 0,
        user_addr: 0,
        len_bytes: bytes,
        file_offset: 0,
        file: file.into(),
    };
    Memory::new(vec![region]).map_err(io::Error::other)
}
