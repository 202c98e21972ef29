//! A client that writes and reads a little, to see that a daemon serves.

use cleave_blk::spec::feature;
use cleave_client::{Client, DeviceOptions};

use crate::{Daemon, Outcome, ensure, time_limit};

/// Small rings and data areas, which are enough for most tests.
pub fn small(queues: u16) -> DeviceOptions {
    DeviceOptions {
        queues,
        queue_size: 64,
        data_bytes: 4 << 20,
        timeout: time_limit(),
        ..DeviceOptions::default()
    }
}

/// Opens a new client, and writes and reads a little on every vring. This must succeed after any other frontend's
/// misbehaviour.
pub fn assert_serves(daemon: &Daemon) -> Outcome {
    let mut client = daemon
        .try_open(&small(2))
        .map_err(|error| format!("no new client: {error}"))?;
    exercise(&mut client).map_err(|error| format!("new client: {error}"))
}

/// Writes and reads back a block on each vring; on a read-only disk, only reads. Not for a null disk, which stores
/// nothing.
pub fn exercise(client: &mut Client) -> Outcome {
    let count = client.queues().len();
    (0..count).try_for_each(|index| exercise_queue(client, index))
}

/// As `exercise`, for one vring.
pub fn exercise_queue(client: &mut Client, index: usize) -> Outcome {
    let capacity = client.config().capacity_bytes();
    let read_only = client.offered() & feature::RO != 0;
    // The last blocks of the disk are reserved for this check; the hostile tests do not write there.
    let block = 4096;
    let offset = capacity - block * (index as u64 + 1);
    let seed = std::time::SystemTime::now();
    let seed = seed
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    let bytes: Vec<u8> = (0..block)
        .map(|at| (seed.wrapping_mul(at | 1) >> 24) as u8)
        .collect();
    let mut back = vec![0; block as usize];
    let queue = client.queue(index);
    let context = |error| format!("vring {index}: {error}");
    if !read_only {
        queue.write(offset, &bytes).map_err(context)?;
    }
    queue.read(offset, &mut back).map_err(context)?;
    ensure(read_only || back == bytes, || {
        format!("vring {index} read back other data")
    })
}
