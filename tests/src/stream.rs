//! Requests as two byte streams, cut into descriptors at any place: a driver may do that (virtio 1.3 §2.7.4.3), and
//! Linux does not.

use cleave_client::{Buffer, Error, Queue, all_are};

use crate::Random;

/// How the streams are cut.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    /// Most pieces of each stream.
    pub pieces: usize,
    /// Adds descriptors of length 0.
    pub empty: bool,
    /// Uses an indirect table.
    pub indirect: bool,
}

/// Sends one request: a readable stream, and room for `writable` bytes, each cut at random into pieces at odd
/// addresses with gaps between them. Returns the used length and the contents of the writable stream; asserts that
/// the gaps keep their bytes.
pub fn stream(
    queue: &mut Queue,
    cut: Cut,
    random: &mut Random,
    readable: &[u8],
    writable: usize,
) -> Result<(u32, Vec<u8>), Error> {
    const UNTOUCHED: u8 = 0xa5;
    let memory = queue.memory();
    let (table, _) = queue.data_area();
    let mut at = table + 32 * 1024;
    let mut buffers = Vec::new();
    let mut from = 0;
    for len in cuts(random, cut, readable.len()) {
        at += random.below(40);
        memory.write(at, &readable[from..from + len]);
        buffers.push(Buffer::readable(at, len as u32));
        (at, from) = (at + len as u64, from + len);
    }
    let first = at;
    let mut rooms = Vec::new();
    for len in cuts(random, cut, writable) {
        at += random.below(40);
        rooms.push((at, len));
        buffers.push(Buffer::writable(at, len as u32));
        at += len as u64;
    }
    let whole = (at - first) as usize + 64;
    memory.fill(first, whole, UNTOUCHED);
    let used = if cut.indirect {
        queue.chain_through(table, &buffers)?
    } else {
        queue.chain(&buffers)?
    };
    let mut out = Vec::new();
    let mut all = memory.bytes(first, whole);
    for (room, len) in rooms {
        let start = (room - first) as usize;
        out.extend_from_slice(&all[start..start + len]);
        all[start..start + len].fill(UNTOUCHED);
    }
    assert!(
        all_are(&all, UNTOUCHED),
        "bytes outside of the chain were written"
    );
    Ok((used.len, out))
}

/// Lengths of the pieces into which a stream is cut.
fn cuts(random: &mut Random, cut: Cut, len: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (1..cut.pieces.max(1))
        .map(|_| random.below(len as u64 + 1) as usize)
        .chain([0, len])
        .collect();
    ends.sort_unstable();
    if !cut.empty {
        ends.dedup();
    }
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}
