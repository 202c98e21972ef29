//! Turning a request into ops.

use crate::{Request, Segment};

/// What an engine does with an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// Store to memory.
    Read,
    /// Memory to store; `durable`: on stable storage before it completes.
    Write {
        /// Write-through (RWF_DSYNC or equal).
        durable: bool,
    },
    /// Completed writes become durable.
    Sync,
    /// Give space back.
    Discard,
    /// Zero a range; `unmap`: space may be given back.
    Zero {
        /// Deallocation allowed.
        unmap: bool,
        /// Write-through.
        durable: bool,
    },
}

/// One I/O for an engine: a range of one leg and the stream of guest memory that goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Op<'a> {
    /// What to do.
    pub kind: OpKind,
    /// Offset on the store, in bytes.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Guest memory of reads and writes: `len_bytes` bytes starting `skip_bytes` into the first
    /// segment. The segments may reach beyond the op's end. Empty for the other kinds.
    pub segments: &'a [Segment],
    /// Bytes of `segments[0]` that belong to an earlier op; below `segments[0].len` unless that is 0.
    pub skip_bytes: u32,
}

/// The ops of one request, in order of disk offset; an iterator that owns nothing.
#[derive(Debug, Clone)]
pub struct Plan<'a> {
    _segments: &'a [Segment],
}

impl<'a> Plan<'a> {
    /// Plans `request` over `data`, the chain's data segments. `durable`: writes are write-through.
    /// A get-id has no plan.
    pub fn new(request: &Request, data: &'a [Segment], durable: bool) -> Plan<'a> {
        let _ = (request, durable);
        Plan { _segments: data }
    }
}

impl<'a> Iterator for Plan<'a> {
    type Item = Op<'a>;

    fn next(&mut self) -> Option<Op<'a>> {
        todo!()
    }
}
