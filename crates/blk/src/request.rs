//! Parsing a request from bytes that were copied out of guest memory.

use crate::{Limits, Status};

/// One contiguous range of guest-physical memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Segment {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
}

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Make completed writes durable.
    Flush,
    /// The serial.
    GetId,
    /// Give space back; contents undefined (read as zero here) afterwards.
    Discard,
    /// Contents read as zero afterwards; with `unmap`, space may be given back.
    WriteZeroes {
        /// The guest lets us deallocate.
        unmap: bool,
    },
}

/// How many bytes a chain offers in each direction, summed over its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Device-readable bytes, header included.
    pub readable_bytes: u64,
    /// Device-writable bytes, status byte included.
    pub writable_bytes: u64,
}

/// What is allowed at this moment: the disk's limits and what the guest took.
#[derive(Debug, Clone, Copy)]
pub struct Gate<'a> {
    /// The disk.
    pub limits: &'a Limits,
    /// Capacity now (a disk may have grown since it was opened).
    pub capacity_bytes: u64,
    /// Feature bits that the guest acknowledged.
    pub features: u64,
}

/// A whole, checked request: range inside the disk, direction and lengths right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub verb: Verb,
    /// Where on the disk, in bytes; 0 for flush and get-id.
    pub offset_bytes: u64,
    /// How much, in bytes: of data for read and write, of disk for discard and write-zeroes, of the
    /// answer for get-id (at most 20), 0 for flush.
    pub len_bytes: u64,
}

impl Request {
    /// Parses the first readable bytes of a chain (`head`: up to 32 of them: header plus one range).
    /// `Err` is the status that ends the request without touching the disk.
    pub fn parse(head: &[u8], shape: Shape, gate: Gate<'_>) -> Result<Request, Status> {
        let _ = (head, shape, gate);
        todo!()
    }
}
