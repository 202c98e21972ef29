//! Loads, most of which check what they wrote.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cleave_blk::spec::request_type;
use cleave_client::{Buffer, Client, OffsetOrder, Queue, Stop, Verify, Workload};

use crate::TIMEOUT;

/// Ends a load when it is dropped, also if the test has failed: a scope waits for its threads before it tells of a failure.
#[derive(Debug)]
pub struct EndOf<'a>(pub &'a AtomicBool);

impl Drop for EndOf<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// So many writes of a pattern from the beginning of the disk on, over and over its first `span_bytes`.
pub fn pattern(block_bytes: u32, depth: u16, span_bytes: u64, writes: u64) -> Workload<'static> {
    Workload {
        read_percent: 0,
        order: OffsetOrder::Sequential,
        stop: Stop::Requests(writes),
        verify: Verify::Pattern(7),
        ..Workload::reads(block_bytes, depth, span_bytes, Duration::ZERO)
    }
}

/// Writes a pattern on every vring while `meanwhile` runs, then reads it back. No request may fail.
pub fn writes_all(client: &mut Client, fill: &Workload<'_>, meanwhile: impl FnOnce() + Send) {
    for queue in client.queues() {
        queue.set_timeout(TIMEOUT);
    }
    let check = Workload {
        read_percent: 100,
        ..fill.clone()
    };
    std::thread::scope(|scope| {
        let meanwhile = scope.spawn(meanwhile);
        let tallies = client.run(fill, |_| |_| {}).unwrap();
        assert!(tallies.iter().all(|tally| tally.failed == 0), "{tallies:?}");
        meanwhile.join().unwrap();
    });
    client.queue(0).flush().unwrap();
    let tallies = client.run(&check, |_| |_| {}).unwrap();
    assert!(tallies.iter().all(|tally| tally.failed == 0), "{tallies:?}");
}

/// Starts reads from the beginning of the disk without waiting, as many as the vring holds.
pub fn flood(queue: &mut Queue, count: u64, bytes: u32) {
    start(queue, request_type::IN, Buffer::writable, count, bytes);
}

/// Does with writes what [`flood`] does with reads.
pub fn flood_with_writes(queue: &mut Queue, count: u64, bytes: u32) {
    start(queue, request_type::OUT, Buffer::readable, count, bytes);
}

fn start(queue: &mut Queue, kind: u32, data: fn(u64, u32) -> Buffer, count: u64, bytes: u32) {
    let (area, room) = queue.data_area();
    let (head, status) = queue.control();
    queue.write_header(kind, 0);
    for round in 0..count {
        let addr = area + round * u64::from(bytes) % (room - u64::from(bytes));
        let chain = [
            Buffer::readable(head, 16),
            data(addr, bytes),
            Buffer::writable(status, 1),
        ];
        if queue.ring().add(&chain).is_none() {
            break;
        }
    }
    queue.ring().publish();
    queue.ring_kick();
}
