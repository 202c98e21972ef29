//! Shared parts of the integration tests: the real `cleave` program in a temporary folder, disks to serve, a table
//! runner, and a model to compare data with. This crate forbids access to the daemon's internals: the tests observe
//! its socket, exit code, output and `/proc`.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test that cannot go on must stop

mod cases;
pub mod ceph;
mod daemon;
mod frontend;
pub mod fuse;
pub mod http;
mod killed;
mod lateness;
mod load;
mod model;
pub mod nbd;
mod node;
pub mod schema;
mod scratch;
mod stream;
mod table;
mod timing;
mod unresponsive;

pub use cases::{Case, Requirement, case, ignored, run_cases};
pub use cleave_client::{header, range};
pub use cleave_states::Random;
pub use daemon::{Daemon, Exited, program_copy, program_path, run_to_exit};
pub use frontend::{BackendChannel, Messages, closes_within, has_listener};
pub use killed::{Killed, connect, outliving};
pub use lateness::{Lateness, unless_late};
pub use load::{pattern, writes_all};
pub use model::{Model, seeded};
pub use node::{Node, disk_socket};
pub use scratch::{LoopDevice, Mount, Scratch, go_first, is_root, run, run_on};
pub use stream::{Cut, stream};
pub use table::{Basis, Outcome, Row, ensure, policy, row, run_rows, scale, specified};
pub use timing::{Stopwatch, TIMEOUT, set_time_limit, time_limit, wait_until};
pub use unresponsive::UnresponsiveFs;

use timing::wait_until_within;

use cleave_blk::spec::request_type;
use cleave_client::{Buffer, Client, Options, Queue};

/// Small rings and data areas, which are enough for most tests.
pub fn small(queues: u16) -> Options {
    Options {
        queues,
        queue_size: 64,
        data_bytes: 4 << 20,
        timeout: time_limit(),
        ..Options::default()
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

/// Starts reads from the beginning of the disk without waiting, as many as the vring holds.
pub fn flood(queue: &mut Queue, count: u64, bytes: u32) {
    let (area, room) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(request_type::IN, 0);
    for round in 0..count {
        let addr = area + round * u64::from(bytes) % (room - u64::from(bytes));
        let chain = [
            Buffer::readable(head, 16),
            Buffer::writable(addr, bytes),
            Buffer::writable(status, 1),
        ];
        if queue.ring().add(&chain).is_none() {
            break;
        }
    }
    queue.ring().publish();
    queue.ring_kick();
}

/// Writes and reads back a block on each vring; on a read-only disk, only reads. Not for a null disk, which stores
/// nothing.
pub fn exercise(client: &mut Client) -> Outcome {
    let count = client.queues().len();
    (0..count).try_for_each(|index| exercise_queue(client, index))
}

/// As `exercise`, for one vring.
pub fn exercise_queue(client: &mut Client, index: usize) -> Outcome {
    use cleave_blk::spec::feature;
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
